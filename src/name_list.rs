//! Short lists of names for messages: a list shows a few names, consecutive numbers as ranges, and the number of names
//! that are left out.
//!
//! A large checkpoint has thousands of files, tensors and ranks, and a message is readable only if it names a few of
//! these. Errors keep all names for the JSON output: [`Error::naming`](crate::error::Error::naming).

mod groups;

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::{Range, RangeInclusive};

pub use groups::{NameGroup, Varying, numbered_groups};

/// The maximum number of entries that a list of files or tensors shows.
pub const FEW: usize = 4;

/// The maximum number of entries that a list of ranks, processes or parts shows. These entries are shorter than file
/// names, so a message has space for more of them.
pub const FEW_NUMBERS: usize = 8;

/// Formats at most `most` entries of a list: `a, b and 3 more`.
///
/// If the list is longer, names with consecutive numbers are first combined to ranges: `__0_0.distcp ..
/// __999_0.distcp`.
pub fn short_list(names: &[impl AsRef<str>], most: usize) -> String {
    let (shown, rest) = entries(names, most);
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    shown.join(", ") + &more
}

/// Formats a list like [`short_list`], with each name in backticks, because names such as `step` would read as words.
pub fn quoted_list(names: &[impl AsRef<str>], most: usize) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{}`", name.as_ref())).collect();
    short_list(&quoted, most)
}

/// Formats a list like [`short_list`], for a sentence that already gives the number of names: `a, b, ...`.
pub fn short_list_of_counted(names: &[impl AsRef<str>], most: usize) -> String {
    let (shown, rest) = entries(names, most);
    shown.join(", ") + if rest > 0 { ", ..." } else { "" }
}

/// Formats a noun and the first numbers: `rank 3`, `ranks 0 .. 63, 70`. At most [`FEW_NUMBERS`] numbers or ranges are
/// shown.
pub fn numbered(noun: &str, plural: &str, numbers: impl IntoIterator<Item = u32>) -> String {
    let numbers: Vec<String> = numbers.into_iter().map(|number| number.to_string()).collect();
    format!("{} {}", if numbers.len() == 1 { noun } else { plural }, short_list(&numbers, FEW_NUMBERS))
}

/// A set of numbers, stored as ascending ranges, because there may be billions of numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers(Vec<RangeInclusive<u32>>);

impl Numbers {
    /// Returns the numbers in `all` that are not in `present`, or `None` if all numbers in `all` are in `present`.
    /// `present` must ascend.
    pub fn missing(all: RangeInclusive<u32>, present: impl IntoIterator<Item = u32>) -> Option<Self> {
        let (mut next, last) = (u64::from(*all.start()), u64::from(*all.end()));
        let mut ranges = Vec::new();
        let mut gap = |from: u64, until: u64| {
            if let Some(Ok(to)) = until.checked_sub(1).filter(|to| from <= *to).map(u32::try_from) {
                ranges.push(u32::try_from(from).expect("not above another number")..=to);
            }
        };
        for number in present.into_iter().filter(|number| all.contains(number)) {
            gap(next, u64::from(number));
            next = u64::from(number) + 1;
        }
        gap(next, last + 1);
        (!ranges.is_empty()).then_some(Self(ranges))
    }

    /// Returns the numbers, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().cloned().flatten()
    }

    /// Returns how many numbers the set contains.
    pub fn count(&self) -> u64 {
        self.0.iter().map(Self::len_of).sum()
    }

    fn len_of(range: &RangeInclusive<u32>) -> u64 {
        u64::from(*range.end()) - u64::from(*range.start()) + 1
    }

    /// Formats a noun and the first numbers: `rank 3`, `ranks 1 .. 7, 9 and 4 more`.
    pub fn short(&self, noun: &str, plural: &str) -> String {
        let most = FEW_NUMBERS as u64;
        if self.count() <= most {
            return numbered(noun, plural, self.iter());
        }
        let shown = &self.0[..self.0.len().min(FEW_NUMBERS)];
        let rest = self.count() - shown.iter().map(Self::len_of).sum::<u64>();
        let shown: Vec<String> = shown.iter().map(Self::name).collect();
        let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
        format!("{plural} {}{more}", shown.join(", "))
    }

    /// Formats all numbers, each range with its noun: `rank 3`, `ranks 5 .. 9`.
    pub fn names(&self, noun: &str, plural: &str) -> Vec<String> {
        let name = |range| format!("{} {}", if Self::len_of(range) == 1 { noun } else { plural }, Self::name(range));
        self.0.iter().map(name).collect()
    }

    fn name(range: &RangeInclusive<u32>) -> String {
        let (first, last) = (range.start(), range.end());
        if first == last { first.to_string() } else { format!("{first} .. {last}") }
    }
}

/// Formats process numbers: `process 3`, or `processes 1, 2, 5`.
pub fn name_processes(processes: &[u32]) -> String {
    numbered("process", "processes", processes.iter().copied())
}

/// Returns the first entries of a list, and the number of names that are left out. If the list is longer than `most`,
/// names with consecutive numbers are combined to ranges.
fn entries(names: &[impl AsRef<str>], most: usize) -> (Vec<String>, usize) {
    if names.len() <= most {
        return (names.iter().map(|name| name.as_ref().to_owned()).collect(), 0);
    }
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let (mut shown, mut covered) = (Vec::new(), 0);
    for run in fold(&names).into_iter().take(most) {
        covered += run.len();
        shown.push(match run.as_slice() {
            [only] => names[*only].to_owned(),
            [first, .., last] => format!("{} .. {}", names[*first], names[*last]),
            [] => unreachable!("a run has a name"),
        });
    }
    (shown, names.len() - covered)
}

/// The minimum length of a run (names with consecutive numbers) that is shown as a range.
const SHORTEST_RUN: usize = 3;

/// Groups names into runs, given as indices of `names`. The names of a run differ in one number, which increases by one
/// from name to name. The result has the runs in the order of their smallest indices.
fn fold(names: &[&str]) -> Vec<Vec<usize>> {
    struct NumberRun {
        members: Vec<usize>,
        /// The index of the number that increases from name to name. `None` while the run has only one name.
        counting: Option<usize>,
    }
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by(|left, right| natural_order(names[*left], names[*right]));
    let mut runs: Vec<NumberRun> = Vec::new();
    // For each name that would continue a run: the index of the run, and the index of the number that increases.
    let mut expected_next: HashMap<String, (usize, usize)> = HashMap::new();
    for index in order {
        let name = names[index];
        let run =
            expected_next.remove(name).filter(|(run, number)| runs[*run].counting.is_none_or(|own| own == *number));
        let (run, numbers) = match run {
            Some((run, number)) => {
                runs[run].members.push(index);
                runs[run].counting = Some(number);
                (run, number..number + 1)
            }
            None => {
                runs.push(NumberRun { members: vec![index], counting: None });
                (runs.len() - 1, 0..usize::MAX)
            }
        };
        for (number, place) in numbers_in(name).into_iter().enumerate().filter(|(number, _)| numbers.contains(number)) {
            if let Some(next) = counted_up(name, place) {
                expected_next.entry(next).or_insert((run, number));
            }
        }
    }
    let mut folded: Vec<Vec<usize>> = Vec::new();
    for NumberRun { members, .. } in runs {
        if members.len() < SHORTEST_RUN {
            folded.extend(members.into_iter().map(|member| vec![member]));
        } else {
            folded.push(members);
        }
    }
    folded.sort_by_key(|members| members.iter().min().copied());
    folded
}

/// Returns the byte range of each number in a name.
fn numbers_in(name: &str) -> Vec<Range<usize>> {
    let mut numbers: Vec<Range<usize>> = Vec::new();
    for (at, _) in name.bytes().enumerate().filter(|(_, byte)| byte.is_ascii_digit()) {
        match numbers.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => numbers.push(at..at + 1),
        }
    }
    numbers
}

/// Returns the name with the number at `place` increased by one (`00009` becomes `00010`), or `None` if the increased
/// number would be too large.
fn counted_up(name: &str, place: Range<usize>) -> Option<String> {
    let number = name[place.clone()].parse::<u64>().ok()?.checked_add(1)?;
    let width = place.len();
    Some(format!("{}{number:0width$}{}", &name[..place.start], &name[place.end..]))
}

/// Compares texts, with the numbers in them compared as numbers: `layers.2` is before `layers.10`.
pub fn natural_order(left: &str, right: &str) -> Ordering {
    let (mut a, mut b) = (left.as_bytes(), right.as_bytes());
    loop {
        match (a.first(), b.first()) {
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let (number_a, rest_a) = split_number(a);
                let (number_b, rest_b) = split_number(b);
                let order = number_a.len().cmp(&number_b.len()).then_with(|| number_a.cmp(number_b));
                if order != Ordering::Equal {
                    return order;
                }
                (a, b) = (rest_a, rest_b);
            }
            (Some(x), Some(y)) if x == y => (a, b) = (&a[1..], &b[1..]),
            // Both texts are equal except for leading zeros. They are then compared as ordinary text, so that the order
            // is total.
            (None, None) => return left.cmp(right),
            (x, y) => return x.cmp(&y),
        }
    }
}

/// Returns the leading digits without leading zeros, and the remaining text.
fn split_number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    (&digits[zeros..], rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut names = ["layers.10.w", "layers.2.w", "layers.2.b", "embed", "layers.02.b", "layers"];
        names.sort_by(|left, right| natural_order(left, right));
        assert_eq!(names, ["embed", "layers", "layers.02.b", "layers.2.b", "layers.2.w", "layers.10.w"]);
    }

    #[test]
    fn list_that_is_short_is_shown_in_full() {
        assert_eq!(short_list(&["a"], 2), "a");
        assert_eq!(short_list(&["r0", "r1", "r2", "r3"], 4), "r0, r1, r2, r3");
        assert_eq!(short_list_of_counted(&["a", "b"], 2), "a, b");
        assert_eq!(short_list(&[""; 0], 2), "");
    }

    #[test]
    fn list_that_is_long_is_cut_and_counted() {
        assert_eq!(short_list(&["a", "b", "c", "d"], 2), "a, b and 2 more");
        assert_eq!(short_list_of_counted(&["a", "b", "c"], 2), "a, b, ...");
    }

    #[test]
    fn numbered_names_of_a_long_list_are_ranges() {
        let mut files: Vec<String> = (0..1000).map(|rank| format!("__{rank}_0.distcp")).collect();
        assert_eq!(short_list(&files, 4), "__0_0.distcp .. __999_0.distcp");
        files.sort();
        assert_eq!(short_list(&files, 4), "__0_0.distcp .. __999_0.distcp", "in the order of text");
        files.retain(|name| name != "__7_0.distcp");
        assert_eq!(short_list(&files, 4), "__0_0.distcp .. __6_0.distcp, __8_0.distcp .. __999_0.distcp");
        let several: Vec<String> =
            (0..4).flat_map(|rank| (0..3).map(move |part| format!("__{rank}_{part}.distcp"))).collect();
        assert_eq!(
            short_list(&several, 3),
            "__0_0.distcp .. __0_2.distcp, __1_0.distcp .. __1_2.distcp, __2_0.distcp .. __2_2.distcp and 3 more"
        );
        let padded: Vec<String> = (8..=12).map(|file| format!("model-{file:05}-of-00016.safetensors")).collect();
        assert_eq!(short_list(&padded, 2), "model-00008-of-00016.safetensors .. model-00012-of-00016.safetensors");
    }

    #[test]
    fn interleaved_runs_are_folded_where_their_first_name_was() {
        let names: Vec<String> =
            (0..12).flat_map(|layer| ["q", "k"].map(|part| format!("layers.{layer}.{part}"))).collect();
        assert_eq!(short_list(&names, 2), "layers.0.q .. layers.11.q, layers.0.k .. layers.11.k");
        assert_eq!(short_list(&names, 1), "layers.0.q .. layers.11.q and 12 more");
    }

    #[test]
    fn names_that_count_in_no_way_stay_as_they_are() {
        assert_eq!(short_list(&["x1", "x3", "x5"], 2), "x1, x3 and 1 more");
        assert_eq!(short_list(&["x1", "x2", "y1"], 2), "x1, x2 and 1 more", "two are no run");
        assert_eq!(short_list(&["a1", "a1", "a1"], 1), "a1 and 2 more");
        let large = ["n18446744073709551614", "n18446744073709551615", "n18446744073709551616"];
        assert_eq!(short_list(&large, 1), "n18446744073709551614 and 2 more");
    }

    #[test]
    fn numbers_are_given_with_their_noun() {
        assert_eq!(name_processes(&[3]), "process 3");
        assert_eq!(name_processes(&[1, 2, 5]), "processes 1, 2, 5");
        assert_eq!(numbered("rank", "ranks", 0..64), "ranks 0 .. 63");
    }

    #[test]
    fn missing_numbers_are_ranges() {
        let missing = |all, present: &[u32]| Numbers::missing(all, present.iter().copied());
        assert_eq!(missing(0..=3, &[0, 1, 2, 3]), None);
        assert_eq!(missing(0..=3, &[0, 2, 3, 9]).unwrap().short("rank", "ranks"), "rank 1");
        let huge = missing(0..=u32::MAX, &[0, 2]).unwrap();
        assert_eq!(huge.short("rank", "ranks"), "ranks 1, 3 .. 4294967295");
        assert_eq!(huge.names("rank", "ranks"), ["rank 1", "ranks 3 .. 4294967295"]);
        let even: Vec<u32> = (0..40).filter(|number| number % 2 == 0).collect();
        let odd = missing(0..=39, &even).unwrap();
        assert_eq!(odd.short("rank", "ranks"), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 12 more");
        assert_eq!(odd.names("rank", "ranks").len(), 20);
    }
}
