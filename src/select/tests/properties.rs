//! Properties of selections for random trees and names.

use proptest::prelude::*;

use super::*;

/// Generates random trees of tensors. The names of the tensors use few words, so that keys repeat, and some keys
/// contain dots.
fn trees() -> impl Strategy<Value = Value> {
    let key = || proptest::sample::select(vec!["a", "b", "a.b", "layers", "layers.0", "w"]);
    let leaf = prop_oneof![4 => Just(t(0)), 1 => Just(Value::Int(1)), 1 => Just(dict(vec![]))];
    let tree = leaf.prop_recursive(4, 24, 4, move |inner| {
        let entries = proptest::collection::btree_map(key(), inner.clone(), 1..4);
        prop_oneof![
            3 => entries.prop_map(|entries| dict(entries.into_iter().collect())),
            1 => proptest::collection::vec(inner, 1..4).prop_map(list),
        ]
    });
    let entries = proptest::collection::btree_map(key(), tree, 1..5);
    entries.prop_map(|entries| {
        let mut state = dict(entries.into_iter().collect());
        let mut next = 0;
        state.map_tensors(&mut |_| {
            next += 1;
            TensorId(next - 1)
        });
        state
    })
}

proptest! {
    /// A one-to-one rename loses no tensor, swaps no names, and can be undone.
    #[test]
    fn one_to_one_rename_keeps_tensors_and_can_be_undone(
        source in trees(),
        steps in proptest::collection::vec(0..5_usize, 1..5),
    ) {
        let ways: [(&str, &str, &str, &str); 5] = [
            (r"\ba\b=x", r"\bx\b=a", "a", "x"),
            (r"\blayers\b=blocks", r"\bblocks\b=layers", "layers", "blocks"),
            (r"\b(w)\b=${1}eight", r"\bweight\b=w", "w", "weight"),
            (r"\bb\b=b_", r"\bb_\b=b", "b", "b_"),
            (r"^=top.", r"^top\.=", "", ""),
        ];
        let names = tensor_names(&source);
        let all: Vec<String> = path::leaves(&source).iter().map(|(path, _)| path.to_string()).collect();
        prop_assume!(all.iter().collect::<BTreeSet<_>>().len() == all.len());
        let mut expected = names.clone();
        let mut forth = Vec::new();
        let mut back = Vec::new();
        for step in steps {
            let (there, again, old, new) = ways[step];
            let word = |part: &str| if part == old { new.to_owned() } else { part.to_owned() };
            let next = |name: &String| match old {
                "" => format!("top.{name}"),
                _ => name.split('.').map(word).collect::<Vec<_>>().join("."),
            };
            let renamed: Vec<String> = expected.iter().map(next).collect();
            if renamed != expected {
                expected = renamed;
                forth.push(there);
                back.insert(0, again);
            }
        }
        let there = select(&catalog(source.clone()), &renaming(&forth)).unwrap().catalog;
        let found: BTreeMap<u32, String> =
            state_dict::all_tensors(&there.state).into_iter().map(|(fqn, id)| (id.0, fqn.to_string())).collect();
        prop_assert_eq!(found.into_values().collect::<Vec<_>>(), expected);
        let again = select(&catalog(there.state), &renaming(&back)).unwrap().catalog;
        let by_id = |state: &Value| {
            let all = state_dict::all_tensors(state).into_iter();
            all.map(|(fqn, id)| (id.0, fqn.to_string())).collect::<BTreeMap<u32, String>>()
        };
        prop_assert_eq!(by_id(&again.state), by_id(&source));
        if !forth.contains(&"^=top.") {
            prop_assert_eq!(again.state, source);
        }
    }

    #[test]
    fn state_is_unchanged_without_options(source in trees(), clean: bool) {
        let wrappers = if clean { Wrappers::Cut } else { Wrappers::Keep };
        let options = NameOptions { wrappers, ..NameOptions::default() };
        prop_assert_eq!(&select(&catalog(source.clone()), &options).unwrap().catalog.state, &source);
        // With a rename, the state dict is built again, even if no name changes.
        let options = NameOptions { wrappers, ..renaming(&[r"(.)=\1"]) };
        prop_assert_eq!(select(&catalog(source.clone()), &options).unwrap().catalog.state, source);
    }
}
