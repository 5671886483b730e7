//! Groups of names that differ only in numbers: `layers.{0..79}.wq.weight` stands for 80 names.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::ops::Range;

use indexmap::IndexMap;

use super::{SHORTEST_RUN, numbers_in};

/// The parts of a name that may vary within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Varying {
    /// Components that are numbers, as in the names of tensors: `layers.7.w1` varies in `7`.
    Components,
    /// All numbers, as in the names of files: `__7_0.distcp`.
    Numbers,
}

/// Names that differ only in numbers, or a single name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameGroup {
    /// The components of the names. A component that varies has all its numbers: `{0..79}`.
    pub components: Vec<String>,
    /// The indices of the names.
    pub members: Vec<usize>,
}

impl NameGroup {
    /// Returns one text for all names: `layers.{0..2,5}.wq.weight`.
    pub fn name(&self) -> String {
        self.components.join(".")
    }
}

/// The maximum number of numbers of a name that may vary. Names come from files, so a name may have any length.
const MOST_VARYING: usize = 8;

/// The maximum number of digits of a number that may vary.
const MOST_DIGITS: usize = 18;

/// Groups names whose keys are equal and that differ only in numbers. A group has each combination of its numbers, so its
/// name describes exactly its members. Groups of fewer than three names are divided into single names. The groups are in
/// the order of their first members.
pub fn numbered_groups<K: Eq + Hash>(names: Vec<(&str, K)>, varying: Varying) -> Vec<NameGroup> {
    /// The parts of a name around its numbers, and for each number its minimum number of digits.
    type Frame<'a> = (Vec<&'a str>, Vec<usize>);
    let texts: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
    // Two values may have one name. They are in two groups, so that each group has a name once.
    let mut occurrences: HashMap<&str, usize> = HashMap::new();
    let mut alike: IndexMap<(Frame<'_>, usize, K), Vec<NumberedName>> = IndexMap::new();
    for (index, (name, key)) in names.into_iter().enumerate() {
        let occurrence = occurrences.entry(name).or_default();
        let places = varying_numbers(name, varying);
        let width = |place: &Range<usize>| if name[place.clone()].starts_with('0') { place.len() } else { 1 };
        let frame = (frame(name, &places), places.iter().map(width).collect());
        let numbers = places.iter().map(|place| name[place.clone()].parse().expect("at most 18 digits")).collect();
        alike.entry((frame, *occurrence, key)).or_default().push(NumberedName { numbers, index });
        *occurrence += 1;
    }
    let mut groups = Vec::new();
    for (((around, widths), ..), names) in alike {
        for (numbers, mut members) in combinations(&names, 0) {
            members.sort_unstable();
            if members.len() < SHORTEST_RUN {
                let single = |member: usize| NameGroup {
                    components: texts[member].split('.').map(str::to_owned).collect(),
                    members: vec![member],
                };
                groups.extend(members.into_iter().map(single));
            } else {
                let numbers = numbers.iter().zip(&widths).map(|(numbers, width)| set_text(numbers, *width));
                groups.push(NameGroup { components: components(&around, numbers), members });
            }
        }
    }
    groups.sort_by_key(|group| group.members[0]);
    groups
}

/// For each number of the names of a group, the values that occur, ascending.
type NumberSets = Vec<Vec<u64>>;

struct NumberedName {
    numbers: Vec<u64>,
    index: usize,
}

/// Returns the byte ranges of the numbers of a name that may vary.
fn varying_numbers(name: &str, varying: Varying) -> Vec<Range<usize>> {
    let bytes = name.as_bytes();
    let is_component = |place: &Range<usize>| {
        let (before, after) = (place.start.checked_sub(1), place.end);
        before.is_none_or(|at| bytes[at] == b'.') && bytes.get(after).is_none_or(|byte| *byte == b'.')
    };
    let mut places = numbers_in(name);
    places.retain(|place| place.len() <= MOST_DIGITS && (varying == Varying::Numbers || is_component(place)));
    places.truncate(MOST_VARYING);
    places
}

fn frame<'a>(name: &'a str, places: &[Range<usize>]) -> Vec<&'a str> {
    let starts = std::iter::once(0).chain(places.iter().map(|place| place.end));
    let ends = places.iter().map(|place| place.start).chain([name.len()]);
    starts.zip(ends).map(|(start, end)| &name[start..end]).collect()
}

/// Divides names into groups in which each combination of the numbers from `at` on occurs: the sets of numbers of each
/// group, and its members.
fn combinations<'a>(names: impl IntoIterator<Item = &'a NumberedName>, at: usize) -> IndexMap<NumberSets, Vec<usize>> {
    let mut by_number: BTreeMap<u64, Vec<&NumberedName>> = BTreeMap::new();
    let mut complete = Vec::new();
    for name in names {
        match name.numbers.get(at) {
            Some(number) => by_number.entry(*number).or_default().push(name),
            None => complete.push(name.index),
        }
    }
    if by_number.is_empty() {
        return IndexMap::from([(Vec::new(), complete)]);
    }
    let mut merged: IndexMap<NumberSets, (Vec<u64>, Vec<usize>)> = IndexMap::new();
    for (number, names) in by_number {
        for (rest, members) in combinations(names, at + 1) {
            let (numbers, all) = merged.entry(rest).or_default();
            numbers.push(number);
            all.extend(members);
        }
    }
    let with_first = |(rest, (numbers, members)): (NumberSets, _)| ([vec![numbers], rest].concat(), members);
    merged.into_iter().map(with_first).collect()
}

/// Returns the components of a name with other numbers.
fn components(around: &[&str], numbers: impl Iterator<Item = String>) -> Vec<String> {
    let mut components = vec![String::new()];
    let mut numbers = numbers.fuse();
    for text in around {
        for (nth, component) in text.split('.').enumerate() {
            if nth > 0 {
                components.push(String::new());
            }
            components.last_mut().expect("it has a component").push_str(component);
        }
        components.last_mut().expect("it has a component").extend(numbers.next());
    }
    components
}

/// Formats ascending numbers: `7`, `{0..79}`, `{0..2,5}`. Of more than four ranges, only the first three and the last
/// are shown.
fn set_text(numbers: &[u64], width: usize) -> String {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |&(first, last): &(u64, u64)| match last - first {
        0 => format!("{first:0width$}"),
        1 => format!("{first:0width$},{last:0width$}"),
        _ => format!("{first:0width$}..{last:0width$}"),
    };
    match ranges.as_slice() {
        [(first, last)] if first == last => range(&ranges[0]),
        [a, b, c, _, .., last] => format!("{{{},{},{},...,{}}}", range(a), range(b), range(c), range(last)),
        all => format!("{{{}}}", all.iter().map(range).collect::<Vec<_>>().join(",")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str], varying: Varying) -> Vec<String> {
        let keyed = names.iter().map(|name| (*name, ())).collect();
        numbered_groups(keyed, varying).iter().map(NameGroup::name).collect()
    }

    #[test]
    fn names_that_differ_in_a_number_are_one_group() {
        let layers: Vec<String> = (0..12).flat_map(|at| ["q", "k"].map(|part| format!("layers.{at}.{part}"))).collect();
        let mut layers: Vec<&str> = layers.iter().map(String::as_str).collect();
        layers.push("norm");
        assert_eq!(names(&layers, Varying::Components), ["layers.{0..11}.q", "layers.{0..11}.k", "norm"]);
    }

    #[test]
    fn group_has_every_combination_of_its_numbers() {
        let experts: Vec<String> = (0..4)
            .flat_map(|layer| (0..if layer == 0 { 3 } else { 8 }).map(move |at| format!("l.{layer}.e.{at}.w")))
            .collect();
        let experts: Vec<&str> = experts.iter().map(String::as_str).collect();
        assert_eq!(names(&experts, Varying::Components), ["l.0.e.{0..2}.w", "l.{1..3}.e.{0..7}.w"]);
        assert_eq!(names(&["a.1", "a.2", "a.3", "a.7"], Varying::Components), ["a.{1..3,7}"]);
        let odd: Vec<String> = (0..20).map(|at| format!("a.{}", 3 * at)).collect();
        let odd: Vec<&str> = odd.iter().map(String::as_str).collect();
        assert_eq!(names(&odd, Varying::Components), ["a.{0,3,6,...,57}"]);
    }

    #[test]
    fn two_names_are_no_group() {
        assert_eq!(names(&["a.0.w", "a.1.w"], Varying::Components), ["a.0.w", "a.1.w"]);
        assert_eq!(names(&["w1", "w2", "w3"], Varying::Components), ["w1", "w2", "w3"]);
    }

    #[test]
    fn equal_names_and_unequal_keys_are_in_different_groups() {
        assert_eq!(names(&["a.1", "a.2", "a.3", "a.3"], Varying::Components), ["a.{1..3}", "a.3"]);
        let keyed = (0..6).map(|at| (["a.0", "a.1", "a.2", "a.3", "a.4", "a.5"][at], at < 3)).collect();
        let groups = numbered_groups(keyed, Varying::Components);
        assert_eq!(groups.iter().map(NameGroup::name).collect::<Vec<_>>(), ["a.{0..2}", "a.{3..5}"]);
        assert_eq!(groups[1].members, [3, 4, 5]);
    }

    #[test]
    fn leading_zeros_are_kept() {
        let files: Vec<String> = (1..=12).map(|at| format!("model-{at:05}-of-00012.safetensors")).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        assert_eq!(names(&files, Varying::Numbers), ["model-{00001..00012}-of-00012.safetensors"]);
    }

    #[test]
    fn names_of_any_length_are_grouped() {
        let long = "1.".repeat(100_000);
        let others: Vec<String> = (0..3).map(|at| format!("{at}.{long}")).collect();
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        assert!(names(&others, Varying::Components)[0].starts_with("{0..2}.1.1"));
        let digits = "9".repeat(30);
        assert_eq!(names(&[&digits, "1", "2", "3"], Varying::Components), [digits.as_str(), "{1..3}"]);
    }
}
