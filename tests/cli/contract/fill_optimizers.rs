//! Tests of `--fill-from` with optimizers whose parameters have numbers.
//!
//! The state of each parameter has a value of its own, so a moment at the wrong parameter is found.

use std::path::PathBuf;

use torch_pickle::pickle::Writer;

use crate::common::corrupt::{View, torch_file};
use crate::common::env::TestEnv;
use crate::contract::assert_contains;

/// The parameters of the model, in its order, and their shapes.
const MODEL: [(&str, &[i64]); 4] = [("a", &[2, 2]), ("b", &[2, 2]), ("c", &[3]), ("d", &[2, 2])];

/// How an optimizer refers to its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    /// By number, without names.
    Missing,
    /// By number; the groups list the names.
    Listed,
    /// By name.
    Keys,
}

/// Writes a torch file with a model and an optimizer whose parameters are those of `groups`, one after another.
/// The first moment of parameter `i` of the model has the value `first + i`.
fn checkpoint(env: &TestEnv, name: &str, groups: &[&[&str]], names: Names, first: f32) -> PathBuf {
    let mut storages: Vec<(String, Vec<u8>)> = Vec::new();
    let mut tensor = |writer: &mut Writer, parameter: &str, value: f32| {
        let (_, sizes) = MODEL.into_iter().find(|(name, _)| *name == parameter).unwrap();
        let numel = sizes.iter().product::<i64>();
        let strides: &[i64] = if sizes.len() == 2 { &[2, 1] } else { &[1] };
        let key = storages.len().to_string();
        View { key: &key, numel, offset: 0, sizes, strides }.write(writer);
        storages.push((key, value.to_le_bytes().repeat(usize::try_from(numel).unwrap())));
    };
    let key = |writer: &mut Writer, number: usize, parameter: &str| match names {
        Names::Keys => drop(writer.string(parameter)),
        _ => drop(writer.int(i64::try_from(number).unwrap())),
    };
    let mut writer = Writer::new();
    writer.empty_dict().string("model").empty_dict();
    for (parameter, _) in MODEL {
        writer.string(parameter);
        tensor(&mut writer, parameter, 0.0);
        writer.setitem();
    }
    writer.setitem().string("optimizer").empty_dict().string("state").empty_dict();
    let numbered = || groups.iter().copied().flatten().enumerate();
    for (number, parameter) in numbered() {
        key(&mut writer, number, parameter);
        let position = MODEL.iter().zip(0u8..).find(|((name, _), _)| name == parameter).unwrap().1;
        writer.empty_dict().string("exp_avg");
        tensor(&mut writer, parameter, first + f32::from(position));
        writer.setitem().setitem();
    }
    writer.setitem().string("param_groups").empty_list();
    for group in groups {
        writer.empty_dict().string("params").empty_list();
        for (number, parameter) in numbered().filter(|(_, parameter)| group.contains(parameter)) {
            key(&mut writer, number, parameter);
            writer.append();
        }
        writer.setitem();
        if names == Names::Listed {
            writer.string("param_names").empty_list();
            for parameter in *group {
                writer.string(parameter).append();
            }
            writer.setitem();
        }
        writer.append();
    }
    writer.setitem().setitem();
    let storages: Vec<(&str, &[u8])> = storages.iter().map(|(key, bytes)| (key.as_str(), bytes.as_slice())).collect();
    env.write(name, torch_file(writer.finish(), &storages))
}

/// Fills the optimizer of SRC into FILLER, and asserts that each parameter of FILLER has its own moment of SRC. Returns the
/// messages.
fn assert_filled(env: &TestEnv, [source, filler]: [(&[&[&str]], Names); 2], options: &str) -> String {
    let own = checkpoint(env, "source.pt", source.0, source.1, 10.0);
    let other = checkpoint(env, "filler.pt", filler.0, filler.1, 20.0);
    let expected = checkpoint(env, "expected.pt", filler.0, filler.1, 10.0);
    let options = format!("--mesh dp=2 --to torch-ranks --overwrite --fill-from {} {options}", other.display());
    let made = env.make("reshard", &own, "made", &options);
    let (found, expected) = (made.tensors(), crate::common::read(&expected));
    crate::common::assert_same(&found, &expected, &format!("{source:?} {filler:?}"));
    made.run.stderr
}

/// Asserts that an optimizer of SRC is not filled into FILLER. Returns the messages.
fn assert_refused(env: &TestEnv, [source, filler]: [(&[&[&str]], Names); 2]) -> String {
    let own = checkpoint(env, "source.pt", source.0, source.1, 10.0);
    let other = checkpoint(env, "filler.pt", filler.0, filler.1, 20.0);
    let options = format!("--mesh dp=2 --to torch-ranks --fill-from {}", other.display());
    let refused = env.refuse("reshard", &own, "x", &options);
    // The option of the hint helps.
    env.make("reshard", &own, "made", &format!("{options} --overwrite --exclude optimizer"));
    refused.stderr
}

const ORDERED: &[&[&str]] = &[&["a", "b", "c", "d"]];
const REVERSED: &[&[&str]] = &[&["d", "b", "c", "a"]];
const TWO: &[&[&str]] = &[&["a", "b"], &["c", "d"]];
const TWO_REVERSED: &[&[&str]] = &[&["b", "a"], &["c", "d"]];

#[test]
fn numbers_are_matched_by_listed_names() {
    let env = TestEnv::new();
    for pair in [
        [(ORDERED, Names::Listed), (REVERSED, Names::Listed)],
        [(TWO, Names::Listed), (TWO_REVERSED, Names::Listed)],
        [(REVERSED, Names::Listed), (ORDERED, Names::Keys)],
        [(TWO_REVERSED, Names::Listed), (TWO, Names::Keys)],
        [(ORDERED, Names::Keys), (REVERSED, Names::Listed)],
    ] {
        let messages = assert_filled(&env, pair, "");
        assert!(!messages.contains("by position"), "{messages}");
    }
    // The names are known, although the groups are left out.
    for filler in [(REVERSED, Names::Listed), (ORDERED, Names::Keys), (TWO, Names::Keys)] {
        assert_filled(&env, [(TWO_REVERSED, Names::Listed), filler], "--exclude **.param_groups.**");
    }
}

#[test]
fn numbers_without_names_are_matched_by_position_with_a_note() {
    let env = TestEnv::new();
    for pair in [
        [(ORDERED, Names::Missing), (ORDERED, Names::Missing)],
        [(ORDERED, Names::Missing), (ORDERED, Names::Listed)],
        [(ORDERED, Names::Listed), (ORDERED, Names::Missing)],
        [(ORDERED, Names::Missing), (REVERSED, Names::Keys)],
        [(ORDERED, Names::Keys), (ORDERED, Names::Missing)],
        [(TWO, Names::Missing), (TWO, Names::Missing)],
        [(TWO, Names::Missing), (TWO, Names::Listed)],
        [(TWO, Names::Listed), (TWO, Names::Missing)],
        [(TWO, Names::Missing), (TWO, Names::Keys)],
    ] {
        let messages = assert_filled(&env, pair, "");
        assert_eq!(messages.matches("matched by position").count(), 1, "{pair:?}: {messages}");
    }
}

#[test]
fn order_that_cannot_be_known_is_refused() {
    let env = TestEnv::new();
    let not_its_order = "which is not the order of the model";
    for (pair, reason) in [
        ([(ORDERED, Names::Missing), (REVERSED, Names::Listed)], not_its_order),
        ([(REVERSED, Names::Listed), (ORDERED, Names::Missing)], not_its_order),
        ([(TWO, Names::Missing), (TWO_REVERSED, Names::Listed)], not_its_order),
        ([(TWO_REVERSED, Names::Listed), (TWO, Names::Missing)], not_its_order),
        ([(TWO, Names::Missing), (TWO_REVERSED, Names::Keys)], not_its_order),
        ([(TWO, Names::Missing), (ORDERED, Names::Missing)], "different parameter groups"),
        ([(TWO, Names::Missing), (ORDERED, Names::Keys)], "different parameter groups"),
        ([(TWO, Names::Keys), (TWO, Names::Missing)], "without parameter names"),
    ] {
        assert_contains(&assert_refused(&env, pair), &["cannot be matched", reason, "--exclude 'optimizer'"]);
    }
    // The shapes contradict the order of the model: number 0 of the group is `c`.
    let shapes: &[&[&str]] = &[&["c", "a", "b", "d"]];
    let pair = [(shapes, Names::Missing), (shapes, Names::Missing)];
    assert_contains(&assert_refused(&env, pair), &["the shapes of the state contradict the order of the parameters"]);
}
