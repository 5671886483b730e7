//! Tests that several runs, each writing an arbitrary part of a checkpoint, together write the bytes of a single run.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;
use crate::catalog::{ChecksumSpan, OutputFile, Reserved, TensorId};
use crate::exec::Silent;
use crate::exec::checksums::first_mismatch;
use crate::publish::completed_work::CompletedWork;
use crate::publish::{completed_work, seal};
use crate::storage::{AnchoredPath, FileId};

const LEN: u64 = 60_000;

/// Reserves two files with tensors at odd offsets, some of them cast. Each tensor has a checksum directly after it and
/// again far away, and header bytes are between the tensors.
fn reservation(entries: &[TensorEntry]) -> Reservation {
    let mut reservation = Reservation::default();
    for number in 0..2_u32 {
        let mut file = OutputFile::new(format!("sub{number}/file"));
        file.push_header(vec![1; 13 + number as usize]);
        for (index, entry) in entries.iter().enumerate().filter(|(index, _)| index % 2 == number as usize) {
            let dtype = if index % 3 == 0 { Dtype::F16 } else { Dtype::F32 };
            let start = file.len;
            let offset = file.push_payload(entry.numel() * dtype.itemsize());
            let range = start..file.len;
            file.push_header(vec![2; 5 + index]);
            file.checksums.push(ChecksumSpan { range, crc_offsets: smallvec::smallvec![file.len] });
            file.push_header(vec![0; 4]);
            let target = TensorEntry::whole(entry.fqn.clone(), dtype, entry.shape.clone(), FileId(number), offset);
            reservation.tensors.push(Reserved::new(TensorId(u32::try_from(index).unwrap()), target));
        }
        for sum in 0..file.checksums.len() {
            file.push_header(vec![3; 7]);
            let site = file.len;
            file.checksums[sum].crc_offsets.push(site);
            file.push_header(vec![0; 4]);
        }
        reservation.files.push(file);
    }
    reservation.files.push(OutputFile::new("empty"));
    reservation
}

fn contents(folder: &Path, reservation: &Reservation) -> Vec<Vec<u8>> {
    reservation.files.iter().map(|file| fs::read(folder.join(&file.path)).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn partial_runs_together_write_the_bytes_of_one_run(
        cuts in proptest::collection::btree_set(0..2 * LEN, 0..12),
        order in any::<u64>(),
        block_bytes in prop_oneof![Just(64_u64 << 10), Just(4096), 100_u64..9000],
        sync in any::<bool>(),
    ) {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let source = folder.path().join("source");
        let values: Vec<u8> = (0_u16..15_000).flat_map(|index| f32::from(index).to_le_bytes()).collect();
        fs::write(&source, values).unwrap();
        let mut files = Files::new(IoMode::Read);
        let id = files.add(source).unwrap();
        let lens = [1, 700, 3, 5000, 2, 4000, 37];
        let entries: Vec<TensorEntry> = lens.iter().enumerate().map(|(index, len)| {
            TensorEntry::whole(format!("t{index}").into(), Dtype::F32, smallvec::smallvec![*len], id, index as u64 * 4)
        }).collect();
        let reservation = reservation(&entries);
        let catalog = Catalog { tensors: entries, ..Catalog::empty() };
        let input = Input { files: &files, catalog: &catalog, resolve: &resolve };
        let options = Options { threads: 2, write_block_bytes: block_bytes, transposed_block_bytes: block_bytes, sync };

        let whole = folder.path().join("whole");
        fs::create_dir(&whole).unwrap();
        copy(input, &reservation, &whole, &options, &Silent, &Stop::default()).unwrap();

        let (parts, data) = (folder.path().join("parts"), folder.path().join("parts/data"));
        fs::create_dir_all(&data).unwrap();
        let mut runs = [Extents::new(), Extents::new(), Extents::new()];
        let mut at = 0;
        for (nth, cut) in cuts.into_iter().chain([u64::MAX]).enumerate() {
            let run = &mut runs[usize::try_from(order >> (2 * nth) & 3).unwrap() % 3];
            // Byte positions in this test count over both files, as if they were one file.
            let mut start = 0;
            for (number, file) in (0..).zip(&reservation.files) {
                let within = |offset: u64| offset.clamp(start, start + file.len) - start;
                run.insert(number, within(at)..within(cut));
                start += file.len;
            }
            at = cut;
        }
        let run = |number: usize, name: &str| {
            let journal = AnchoredPath::new(&parts).join(name);
            let log = Log::new(&reservation.files, &runs[number], journal, sync, AtEnd::Record);
            let (reservation, folder, options) = (&reservation, &AnchoredPath::new(&data), &options);
            let stop = Stop::default();
            let context = WriteContext { reservation, folder, log: &log, options, reporter: &Silent, stop: &stop };
            crate::exec::copy::copy(input, context).unwrap();
        };
        ["0.journal", "1.journal", "2.journal"].iter().enumerate().for_each(|(number, name)| run(number, name));
        let place = AnchoredPath::new(&data);
        let known = CompletedWork::read(&AnchoredPath::new(&parts), &reservation.files, 0, false).unwrap();
        prop_assert_eq!(&known.done, &Extents::of_files(&reservation.files));
        let changed = || {
            let all = Extents::of_files(&reservation.files);
            completed_work::changed(&known, &all, &place, &reservation.files, &Silent, &Stop::default()).unwrap()
        };
        prop_assert!(changed().is_empty());
        for _again in 0..2 {
            seal::seal(&place, &reservation.files, &[], &known, &AnchoredPath::new(&parts), sync).unwrap();
            prop_assert!(contents(&data, &reservation) == contents(&whole, &reservation));
            prop_assert!(changed().is_empty(), "checksum sites do not count");
        }
        for file in &reservation.files {
            prop_assert_eq!(first_mismatch(file, &place.join(&file.path), &Stop::default()).unwrap(), None);
        }
        // A process that was believed dead continues to write.
        run(0, "late");
        prop_assert!(contents(&data, &reservation) == contents(&whole, &reservation));
    }
}

/// A progress receiver that stops the run when all data is written but not yet synced to disk.
struct StopsAfterLastByte {
    stop: Stop,
    left: AtomicU64,
}

impl Reporter for StopsAfterLastByte {
    fn advance(&self, bytes: u64) {
        if self.left.fetch_sub(bytes, Ordering::Relaxed) == bytes {
            self.stop.cancel((String::from("stopped"), String::new()));
        }
    }
}

#[test]
fn stop_in_the_last_fsync_keeps_checked_work() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    fs::write(&source, vec![1; 60_000]).unwrap();
    let mut files = Files::new(IoMode::Read);
    let id = files.add(source).unwrap();
    let tensor = |name: &str| TensorEntry::whole(name.into(), Dtype::F32, smallvec::smallvec![15_000], id, 0);
    let entries = vec![tensor("a"), tensor("b")];
    let reservation = reservation(&entries);
    let catalog = Catalog { tensors: entries, ..Catalog::empty() };
    let input = Input { files: &files, catalog: &catalog, resolve: &resolve };
    let stop = Stop::default();
    let reporter = StopsAfterLastByte { stop: stop.clone(), left: reservation.len_bytes().into() };
    let todo = Extents::of_files(&reservation.files);
    let log =
        Log::new(&reservation.files, &todo, AnchoredPath::new(folder.path()).join("0.journal"), true, AtEnd::Record);
    let options = Options { threads: 2, write_block_bytes: 4096, transposed_block_bytes: 4096, sync: true };
    let (reservation, log, options, reporter) = (&reservation, &log, &options, &reporter);
    let place = AnchoredPath::new(folder.path());
    let writing = WriteContext { reservation, folder: &place, log, options, reporter, stop: &stop };
    let stopped = crate::exec::copy::copy(input, writing);
    assert_eq!(stopped.unwrap_err().to_string(), "stopped");
    let known = CompletedWork::read(&place, &reservation.files, 0, false).unwrap();
    assert!(known.done.len_bytes() > 80_000, "{}", known.done.len_bytes());
}
