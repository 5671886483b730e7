//! Borrows several disjoint ranges of one memory at the same time.

use std::ops::Range;

/// Splits `whole` into one view for each range, in the order of `ranges`. The ranges may be in any order; an empty
/// range gets `None`.
///
/// # Errors
/// The first range that is not inside `whole`, or that overlaps another range.
pub(crate) fn carved<V>(
    whole: V,
    split_at: fn(V, usize) -> Option<(V, V)>,
    ranges: &[Range<usize>],
) -> Result<Vec<Option<V>>, Range<usize>> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|at| !ranges[*at].is_empty()).collect();
    order.sort_unstable_by_key(|at| ranges[*at].start);
    let mut carved: Vec<Option<V>> = ranges.iter().map(|_| None).collect();
    let (mut rest, mut begin) = (whole, 0);
    for at in order {
        let Range { start, end } = ranges[at];
        let parts = start.checked_sub(begin).and_then(|gap| split_at(rest, gap));
        let parts = parts.and_then(|(_, behind)| split_at(behind, end - start));
        let (part, behind) = parts.ok_or(start..end)?;
        carved[at] = Some(part);
        (rest, begin) = (behind, end);
    }
    Ok(carved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_carved_in_any_order() {
        let mut memory: Vec<u8> = (0..20).collect();
        let mut carve = |ranges: &[Range<usize>]| {
            let views = carved(memory.as_mut_slice(), <[u8]>::split_at_mut_checked, ranges)?;
            Ok(views.into_iter().map(|view| view.map(|view| view.to_vec())).collect::<Vec<_>>())
        };
        let some = |range: Range<u8>| Some(range.collect::<Vec<_>>());
        assert_eq!(carve(&[12..20, 3..3, 2..7]).unwrap(), [some(12..20), None, some(2..7)]);
        let refused: Result<_, Range<usize>> = carve(&[0..2, 12..21]);
        assert_eq!(refused.unwrap_err(), 12..21);
        assert_eq!(carve(&[2..7, 6..8]).unwrap_err(), 6..8);
    }
}
