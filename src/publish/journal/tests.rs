use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::super::completed_work::CompletedWork;
use super::*;
use crate::catalog::{ChecksumSpan, Dtype, OutputFile};
use crate::exec::CastLosses;
use crate::exec::cast::LossCounts;

/// Returns two files of 1000 bytes. The first file has two checksums, over the ranges 100..300 and 300..900; the second
/// file has none.
fn files() -> Vec<OutputFile> {
    let file = |name: &str| {
        let mut file = OutputFile::new(name);
        file.push_payload(1000);
        file
    };
    let mut files = vec![file("a"), file("sub/b")];
    let sum = |range, site| ChecksumSpan { range, crc_offsets: [site].into_iter().collect() };
    files[0].checksums = vec![sum(100..300, 20), sum(300..900, 24)];
    files
}

/// Returns the content of the first file.
fn content() -> Vec<u8> {
    (0..1000_u32).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect()
}

fn part(range: Range<usize>) -> ChecksumPart {
    let crc = crc32fast::hash(&content()[range.clone()]);
    ChecksumPart { offset: range.start as u64, len: range.len() as u64, crc }
}

/// Returns the checksum parts of the first file within a range.
fn parts(range: &Range<usize>) -> Vec<ChecksumPart> {
    let clipped = [100..300, 300..900].map(|span: Range<usize>| span.start.max(range.start)..span.end.min(range.end));
    clipped.into_iter().filter(|range| !range.is_empty()).map(part).collect()
}

/// Returns a finished range of a file, with the digest that the first file's content has in this range.
fn entry(file: u32, range: Range<u64>, sums: Vec<ChecksumPart>) -> FinishedRange {
    let at = |offset: u64| usize::try_from(offset).unwrap();
    let digest = content().get(at(range.start)..at(range.end)).map(crc32fast::hash).unwrap_or_default();
    FinishedRange { file, range, digest, checksum_parts: sums, cast_losses: CastLosses::new() }
}

fn record(entries: Vec<FinishedRange>) -> JournalRecord {
    JournalRecord { entries, ..JournalRecord::default() }
}

fn full_record() -> JournalRecord {
    let entry = FinishedRange { cast_losses: lost(3), ..entry(0, 50..400, parts(&(50..400))) };
    JournalRecord { entries: vec![entry], carried: vec![0, 2], ..JournalRecord::default() }
}

fn lost(overflows: u64) -> CastLosses {
    [((Dtype::F32, Dtype::Bf16), LossCounts { overflows, nans: u64::MAX })].into()
}

fn write(folder: &Path, name: &str, records: &[JournalRecord]) -> PathBuf {
    let mut journal = Journal::create(&in_folder(folder, name)).unwrap();
    records.iter().for_each(|record| journal.append(record, None).unwrap());
    folder.join(name)
}

fn in_folder(folder: &Path, name: &str) -> AnchoredPath {
    AnchoredPath::new(folder).join(name)
}

fn done(folder: &Path) -> Vec<(u32, Range<u64>)> {
    CompletedWork::read(&AnchoredPath::new(folder), &files(), 3, false).unwrap().done.iter().collect()
}

#[test]
fn records_of_any_process_give_the_same_completed_work() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 3, false).unwrap(),
        CompletedWork::default()
    );
    write(folder.path(), "b.journal", &[full_record(), record(vec![entry(1, 0..10, vec![])])]);
    let entries = vec![FinishedRange { cast_losses: lost(4), ..entry(0, 400..1000, parts(&(400..1000))) }];
    let more = JournalRecord { entries, carried: vec![1], ..JournalRecord::default() };
    write(folder.path(), "a.journal", &[more]);
    fs::write(folder.path().join("c.lease"), "{}").unwrap();
    let known = CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 3, false).unwrap();
    assert_eq!(known.done.iter().collect::<Vec<_>>(), [(0, 50..1000), (1, 0..10)]);
    assert_eq!(known.sums, [(0, vec![part(100..300), part(300..900)])].into());
    assert_eq!(known.lost, lost(7));
    assert_eq!(known.carried, [0, 1, 2].into());
    let error = Journal::create(&in_folder(folder.path(), "a.journal")).unwrap_err();
    assert!(error.to_string().contains("cannot create"), "{error}");
}

#[test]
fn full_record_has_the_compact_line_format() {
    let line = to_line(&full_record(), None);
    let crcs = (part(100..300).crc, part(300..400).crc);
    let json = format!(
        r#"{{"r":{{"e":[[0,50,400,{},[[100,200,{}],[300,100,{}]],[["f32","bf16",3,{}]]]],"c":[0,2]}}}}"#,
        crc32fast::hash(&content()[50..400]),
        crcs.0,
        crcs.1,
        u64::MAX,
    );
    assert_eq!(String::from_utf8(line).unwrap(), format!("{json} {:08x}\n", crc32fast::hash(json.as_bytes())));
}

#[test]
fn damaged_byte_drops_its_record_and_all_later_ones() {
    let folder = tempfile::tempdir().unwrap();
    let records = [0, 1, 2].map(|nth| record(vec![entry(1, nth * 20..nth * 20 + 10, vec![])]));
    let path = write(folder.path(), "a.journal", &records);
    write(folder.path(), "b.journal", &[record(vec![entry(0, 0..10, vec![])])]);
    let whole = fs::read(&path).unwrap();
    let ends: Vec<usize> = (1..=whole.len()).filter(|end| whole[end - 1] == b'\n').collect();
    for at in 0..whole.len() {
        let complete = ends.iter().filter(|end| **end <= at).count();
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        for bytes in [&whole[..at], &flipped] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(done(folder.path()).len(), 1 + complete, "byte {at}");
        }
    }
}

#[test]
fn impossible_record_is_dropped_as_damaged() {
    let at = |offset, len| ChecksumPart { offset, len, crc: 7 };
    let wrong = [
        record(vec![entry(2, 0..10, vec![])]),
        record(vec![entry(1, 0..1001, vec![])]),
        record(vec![entry(1, 10..10, vec![])]),
        #[expect(clippy::reversed_empty_ranges)]
        record(vec![entry(1, 20..10, vec![])]),
        // The next records are invalid because of a checksum part. The part is outside the entry, outside the range of
        // any checksum, across the end of such a range, empty, a duplicate, or has numbers that overflow.
        record(vec![entry(0, 0..200, vec![at(150, 60)])]),
        record(vec![entry(0, 200..300, vec![at(150, 60)])]),
        record(vec![entry(0, 0..200, vec![at(90, 20)])]),
        record(vec![entry(0, 0..1000, vec![at(250, 100)])]),
        record(vec![entry(0, 0..1000, vec![at(250, 0)])]),
        record(vec![entry(0, 0..1000, vec![at(250, 20), at(260, 20)])]),
        record(vec![entry(0, 0..1000, vec![at(250, u64::MAX)])]),
        JournalRecord { carried: vec![3], ..JournalRecord::default() },
    ];
    for wrong in wrong {
        let folder = tempfile::tempdir().unwrap();
        let good = |at: u64| record(vec![entry(1, at..at + 5, vec![])]);
        write(folder.path(), "a.journal", &[good(500), wrong.clone(), good(600)]);
        assert_eq!(done(folder.path()), [(1, 500..505)], "{wrong:?}");
    }
}

#[test]
fn overlapping_entries_count_once_and_completely() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.journal", &[record(vec![entry(0, 100..200, parts(&(100..200)))])]);
    // Values that casts lost are not counted twice either.
    let again = FinishedRange { cast_losses: lost(5), ..entry(0, 150..400, parts(&(150..400))) };
    write(
        folder.path(),
        "b.journal",
        &[record(vec![again, FinishedRange { cast_losses: lost(2), ..entry(1, 5..6, vec![]) }])],
    );
    let known = CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 3, false).unwrap();
    assert_eq!(known.done.iter().collect::<Vec<_>>(), [(0, 100..200), (1, 5..6)]);
    assert_eq!(known.sums[&0], [part(100..200)]);
    assert_eq!(known.lost, lost(2));
}

#[test]
fn invalidated_entry_counts_only_after_repeated_work() {
    let folder = tempfile::tempdir().unwrap();
    let entries =
        vec![FinishedRange { cast_losses: lost(1), ..entry(0, 0..400, parts(&(0..400))) }, entry(1, 5..6, vec![])];
    write(folder.path(), "a.journal", &[record(entries)]);
    let known = || CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 3, false).unwrap();
    let mut at = in_folder(folder.path(), "b.journal");
    for round in 0..3 {
        let first = known().taken.iter().find(|taken| taken.file == 0).unwrap().clone();
        invalidate(&at, known().invalidated_entries(&[&first]), true).unwrap();
        invalidate(&at, Vec::new(), true).unwrap();
        assert_eq!(known().done.iter().collect::<Vec<_>>(), [(1, 5..6)], "{round}");
        assert_eq!((known().sums, known().lost), Default::default());
        // The journal entry of the repeated work may be invalidated, too.
        let again = FinishedRange { cast_losses: lost(1), ..entry(0, 0..400, parts(&(0..400))) };
        let name = format!("c{round}.journal");
        write(folder.path(), &name, &[record(vec![again])]);
        at = in_folder(folder.path(), &name);
        assert_eq!(known().done.iter().collect::<Vec<_>>(), [(0, 0..400), (1, 5..6)]);
        assert_eq!(known().lost, lost(1));
    }
    let wrong = InvalidatedEntry { journal: "a.journal".into(), file: 2, start: 0 };
    invalidate(&at, vec![wrong], true).unwrap();
    assert_eq!(known().done.len_bytes(), 401);
}

#[test]
fn invalidation_covers_overlapping_entries_of_all_journals() {
    let folder = tempfile::tempdir().unwrap();
    let known = || CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 3, false).unwrap();
    // A process that seemed dead, and the process that took over its part, have recorded some of the same bytes.
    write(folder.path(), "a.journal", &[record(vec![entry(1, 0..40, vec![]), entry(1, 40..60, vec![])])]);
    write(folder.path(), "b.journal", &[record(vec![entry(1, 30..50, vec![]), entry(1, 50..55, vec![])])]);
    let at = write(folder.path(), "c.journal", &[record(vec![entry(1, 10..20, vec![]), entry(1, 80..90, vec![])])]);
    let all = known();
    let first = all.taken.iter().find(|taken| taken.range == (0..40)).unwrap();
    invalidate(
        &in_folder(folder.path(), at.file_name().unwrap().to_str().unwrap()),
        all.invalidated_entries(&[first]),
        true,
    )
    .unwrap();
    assert_eq!(known().done.iter().collect::<Vec<_>>(), [(1, 40..60), (1, 80..90)]);
}

#[test]
fn unsynced_record_is_valid_only_on_its_boot() {
    let boots = [("other", "another boot".to_owned()), ("unknown", String::new()), ("ours", this_boot().unwrap())];
    let folder = tempfile::tempdir().unwrap();
    for (at, (name, boot)) in (0_u64..).zip(boots) {
        let mut journal = Journal::create(&in_folder(folder.path(), &format!("{name}.{EXTENSION}"))).unwrap();
        let record = record(vec![entry(1, at * 10..at * 10 + 5, vec![])]);
        journal.append(&record, Some(boot)).unwrap();
    }
    assert_eq!((boot_of(false), boot_of(true)), (this_boot(), None));
    assert_eq!(done(folder.path()), [(1, 20..25)]);
    // A process that seals and needs synced data cannot use these entries.
    assert_eq!(
        CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 3, true).unwrap(),
        CompletedWork::default()
    );
}

/// Generates ranges that divide 0..1000 without gaps, in any order.
fn pieces() -> impl Strategy<Value = Vec<Range<usize>>> {
    let cuts = proptest::collection::btree_set(1_usize..1000, 0..20);
    let pieces = cuts.prop_map(|cuts| {
        let ends = cuts.iter().copied().chain([1000]);
        std::iter::once(0).chain(cuts.iter().copied()).zip(ends).map(|(start, end)| start..end).collect::<Vec<_>>()
    });
    pieces.prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn shuffled_ranges_in_any_batches_cover_the_file(pieces in pieces(), records in 1_usize..5) {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(&in_folder(folder.path(), "a.journal")).unwrap();
        let mut batch = JournalRecord::default();
        for of_record in pieces.chunks(pieces.len().div_ceil(records)) {
            for piece in of_record {
                batch.entries.push(entry(0, piece.start as u64..piece.end as u64, parts(piece)));
            }
            let mut record = std::mem::take(&mut batch);
            record.compact(&files());
            prop_assert!(record.entries.is_sorted_by(|one, next| one.range.end < next.range.start));
            for entry in &record.entries {
                let range = usize::try_from(entry.range.start).unwrap()..usize::try_from(entry.range.end).unwrap();
                prop_assert_eq!(&entry.checksum_parts, &parts(&range));
                prop_assert_eq!(entry.digest, crc32fast::hash(&content()[range]));
            }
            journal.append(&record, None).unwrap();
        }
        let known = CompletedWork::read(&AnchoredPath::new(folder.path()), &files(), 0, false).unwrap();
        prop_assert_eq!(known.done.iter().collect::<Vec<_>>(), [(0, 0..1000)]);
        prop_assert_eq!(known.sums, [(0, vec![part(100..300), part(300..900)])].into());
    }

    #[test]
    fn arbitrary_lines_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), json in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let mut line = if json { br#"{"r":{"e":[[0,"#.iter().chain(&bytes).copied().collect() } else { bytes };
        line.extend(format!(" {:08x}\n", crc32fast::hash(&line)).bytes());
        fs::write(folder.path().join("a.journal"), line).unwrap();
        prop_assert_eq!(done(folder.path()), []);
    }
}
