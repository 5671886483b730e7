//! Fingerprints, which show whether two processes would write the same bytes to the same positions from the same
//! source.
//!
//! A fingerprint is a BLAKE3 hash of the version, of the source files (path, length and time of the last change; not
//! device or inode, which differ from node to node), of the reduction method, and of the reservation (the header bytes
//! of the output files, and the position of each tensor) with everything that a copy takes from the source's tables.
//! Options are not hashed: if an option changes the result, it changes the reservation.
//!
//! The hash input consists of 64-bit little-endian numbers, and of bytes preceded by their length. A list is preceded
//! by its length, and an alternative by its number. A long list is divided into parts, and the digest of each part is
//! hashed instead of the part. So no field can be confused with the next. Invariant: a fingerprint does not depend on
//! threads, on the order of a hash map, or on memory addresses.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;

use foldhash::fast::RandomState;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::Input;
use super::reduce::ReductionMethod;
use super::sidecar_files::SidecarFile;
use crate::catalog::{Catalog, ComputedTensor, OutputFile, Reservation, Reserved, TensorEntry, TensorId};
use crate::error::Result;
use crate::storage::Files;

/// A hash that identifies the checkpoint that is being written. Its text form has 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fingerprint(pub(crate) [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

/// Writes only the first 12 hex digits.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Fingerprint({self:.12})")
    }
}

impl FromStr for Fingerprint {
    type Err = blake3::HexError;

    fn from_str(digits: &str) -> Result<Self, Self::Err> {
        Ok(Self(*blake3::Hash::from_hex(digits)?.as_bytes()))
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = blake3::HexError;

    fn try_from(digits: String) -> Result<Self, Self::Error> {
        digits.parse()
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> Self {
        fingerprint.to_string()
    }
}

/// Returns the fingerprint of the checkpoint that this `version` of the program makes from `input`. `roots` are the
/// checkpoints that are read; each is a folder, or a file beside the other files of its checkpoint. Source files are
/// hashed with their paths relative to these roots, so that a root may be mounted under any path.
pub fn fingerprint(
    version: &str,
    input: Input<'_>,
    reservation: &Reservation,
    sidecar_files: &[SidecarFile],
    roots: &[&Path],
    reducing: ReductionMethod,
) -> Fingerprint {
    let mut digest = Digest::default();
    digest.bytes(b"dtshard plan 3");
    digest.bytes(version.as_bytes());
    digest.number(u64::from(reducing == ReductionMethod::Nccl));
    digest.sources(input.files, roots);
    digest.list(&reservation.files, Digest::file);
    digest.parts(&reservation.tensors, Digest::reserved);
    // Many target tensors may have the same source tensor.
    let mut taken: Vec<TensorId> = reservation.tensors.iter().map(|tensor| tensor.source).collect();
    taken.sort_unstable();
    taken.dedup();
    digest.parts(&taken, |digest, id| digest.source(*id, input.catalog.tensor(*id)));
    // Without computed tensors, a plan keeps the fingerprint that it had before they existed.
    for computed in &input.catalog.computed {
        digest.computed(computed, input.catalog);
    }
    digest.number(sidecar_files.len() as u64);
    for file in sidecar_files {
        digest.path(&file.from, roots);
        digest.bytes(file.to.as_os_str().as_bytes());
        digest.number(file.len);
        digest.modified(file.modified);
    }
    digest.finish()
}

/// Returns the index of the root that contains the path, and the path relative to that root. A root that is a file
/// contains all files in the folder of this file. If no root contains the path, returns the number of roots and the
/// file name.
pub(crate) fn relative_to_root<'p>(path: &'p Path, roots: &[&Path]) -> (u64, &'p OsStr) {
    let below = |root: &Path| path.strip_prefix(root).ok().filter(|rest| !rest.as_os_str().is_empty());
    let found = (0_u64..).zip(roots).find_map(|(index, root)| {
        let rest = below(root).or_else(|| root.parent().and_then(below))?;
        Some((index, rest.as_os_str()))
    });
    found.unwrap_or_else(|| (roots.len() as u64, path.file_name().unwrap_or_default()))
}

/// The number of bytes that are collected before the hash function is called.
const BUFFER_BYTES: usize = 64 << 10;

/// The maximum number of header bytes that the fingerprint hashes directly. For more header bytes, it hashes a digest
/// of them, which is computed only once for all files that share the header bytes.
const SHORT_BYTES: usize = 128;

/// The maximum number of list elements in one part of a list. This number does not depend on the number of threads.
const PART_LEN: usize = 1 << 12;

#[derive(Default)]
struct Digest {
    hasher: blake3::Hasher,
    buffer: Vec<u8>,
    /// Digests of header bytes, by memory address. Many files may share header bytes, which are then hashed once.
    header_digests: HashMap<*const u8, [u8; 32], RandomState>,
}

impl Digest {
    fn number(&mut self, number: u64) {
        self.raw(&number.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.raw(bytes);
    }

    fn raw(&mut self, bytes: &[u8]) {
        if self.buffer.len() + bytes.len() > BUFFER_BYTES {
            self.hasher.update(&self.buffer);
            self.buffer.clear();
        }
        if bytes.len() > BUFFER_BYTES {
            self.hasher.update(bytes);
        } else {
            self.buffer.extend_from_slice(bytes);
        }
    }

    fn list<T>(&mut self, list: &[T], each: impl Fn(&mut Self, &T)) {
        self.number(list.len() as u64);
        list.iter().for_each(|item| each(self, item));
    }

    /// Hashes a list that may be very long, in parts that are hashed in parallel.
    fn parts<T: Sync>(&mut self, list: &[T], each: impl Fn(&mut Self, &T) + Sync) {
        self.number(list.len() as u64);
        let part_digest = |part: &[T]| {
            let mut digest = Self::default();
            part.iter().for_each(|item| each(&mut digest, item));
            digest.finish().0
        };
        let digests: Vec<[u8; 32]> = list.par_chunks(PART_LEN).map(part_digest).collect();
        digests.iter().for_each(|digest| self.raw(digest));
    }

    fn numbers(&mut self, numbers: &[u64]) {
        self.list(numbers, |digest, number| digest.number(*number));
    }

    fn modified(&mut self, (seconds, nanoseconds): (i64, i64)) {
        self.number(seconds.cast_unsigned());
        self.number(nanoseconds.cast_unsigned());
    }

    fn path(&mut self, path: &Path, roots: &[&Path]) {
        let (root, rest) = relative_to_root(path, roots);
        self.number(root);
        self.bytes(rest.as_bytes());
    }

    fn sources(&mut self, files: &Files, roots: &[&Path]) {
        self.number(files.ids().count() as u64);
        for id in files.ids() {
            self.path(files.path(id), roots);
            self.number(files.len_bytes(id));
            self.modified(files.modified(id));
        }
    }

    fn file(&mut self, file: &OutputFile) {
        self.bytes(file.path.as_os_str().as_bytes());
        self.number(file.len);
        self.list(&file.header_bytes, |digest, header| {
            digest.number(header.offset);
            digest.header_bytes(&header.bytes);
        });
        self.list(&file.checksums, |digest, sum| {
            digest.number(sum.range.start);
            digest.number(sum.range.end);
            digest.numbers(&sum.crc_offsets);
        });
    }

    fn header_bytes(&mut self, bytes: &[u8]) {
        if bytes.len() <= SHORT_BYTES {
            return self.bytes(bytes);
        }
        self.number(bytes.len() as u64);
        let digest = *self.header_digests.entry(bytes.as_ptr()).or_insert_with(|| *blake3::hash(bytes).as_bytes());
        self.raw(&digest);
    }

    fn reserved(&mut self, reserved: &Reserved) {
        self.tensor(&reserved.entry);
        self.list(&reserved.shares, |digest, share| share.encode(&mut |number| digest.number(number)));
        self.number(reserved.source.0.into());
    }

    fn source(&mut self, id: TensorId, source: &TensorEntry) {
        self.number(id.0.into());
        self.tensor(source);
        self.number(source.partial_values.is_some().into());
        if let Some(partial_values) = &source.partial_values {
            self.bytes(partial_values.reduction.op.as_str().as_bytes());
            self.numbers(&partial_values.reduction.dims);
            self.number(partial_values.reduction.full_reduction().divisor);
            self.numbers(&partial_values.by_chunk);
        }
    }

    fn computed(&mut self, computed: &ComputedTensor, catalog: &Catalog) {
        self.number(computed.file.0.into());
        self.bytes(computed.dtype.name().as_bytes());
        computed.calculation.encode(&mut |number| self.number(number));
        self.list(&computed.sources, |digest, id| digest.source(*id, catalog.tensor(*id)));
    }

    fn tensor(&mut self, entry: &TensorEntry) {
        self.bytes(entry.fqn.as_str().as_bytes());
        self.bytes(entry.dtype.name().as_bytes());
        self.numbers(&entry.shape);
        entry.chunks.encode(&mut |number| self.number(number));
    }

    fn finish(mut self) -> Fingerprint {
        self.hasher.update(&self.buffer);
        Fingerprint(*self.hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::catalog::{Catalog, ChecksumSpan, Chunk, ChunkTable, Dtype, FileLocation, PartialValues, Record};
    use crate::exec::Resolve;
    use crate::layout::partial::{PartialReduction, Share};
    use crate::layout::{Dims, Intervals, Placement, Rank, ReduceOp, Tile};
    use crate::storage::{FileId, FileRange, IoMode};

    /// The input of a fingerprint. It contains every kind of content that is hashed, so that a test can change each of
    /// them.
    struct Work {
        version: &'static str,
        root: PathBuf,
        sources: Vec<&'static str>,
        catalog: Catalog,
        reservation: Reservation,
        sidecar_files: Vec<SidecarFile>,
    }

    fn tile(start: u64) -> Tile {
        Tile::new([Intervals::single(start, 2), Intervals::full(4)])
    }

    fn interleaved() -> Tile {
        let mut intervals = Intervals::single(0, 1);
        intervals.push(2..3);
        Tile::new([intervals, Intervals::full(4)])
    }

    fn chunk(tile: Tile, location: FileLocation) -> Chunk {
        Chunk { tile, location, strides: None, rank: Some(Rank(0)), view: None }
    }

    fn tensor(chunks: Vec<Chunk>) -> TensorEntry {
        let mut table = ChunkTable::new(2);
        chunks.into_iter().for_each(|chunk| table.push(chunk));
        TensorEntry { chunks: table, ..TensorEntry::new("w".into(), Dtype::F32, Dims::from_slice(&[4, 4])) }
    }

    fn at(offset: u64) -> FileLocation {
        FileLocation::Bytes { file: FileId(0), offset }
    }

    /// Returns the target tensor, whose chunks are in the only target file.
    fn target() -> TensorEntry {
        tensor(vec![chunk(tile(0), at(200)), chunk(tile(2), at(232))])
    }

    fn work(root: &Path) -> Work {
        fs::create_dir_all(root.join("src/sub")).unwrap();
        for name in ["a", "sub/b", "config.json"] {
            let path = root.join("src").join(name);
            fs::write(&path, b"0123456789").unwrap();
            File::open(path).unwrap().set_modified(SystemTime::UNIX_EPOCH + Duration::new(1_000_000, 7)).unwrap();
        }
        let mut catalog = Catalog::empty();
        let record = FileLocation::Record { file: FileId(1), record: Record { header: 3, len: 4, crc: 5 }, within: 6 };
        let mut source = tensor(vec![chunk(tile(0), at(0)), chunk(tile(2), record)]);
        let reduction = PartialReduction::new(&[2], &[Placement::Partial(ReduceOp::Sum)]).unwrap().unwrap();
        source.partial_values = Some(Box::new(PartialValues { reduction, by_chunk: vec![0, 1] }));
        let source = catalog.push_tensor(source);
        catalog.push_tensor(tensor(vec![chunk(tile(0), at(0))]));
        let share = Share { partial_values: vec![0, 1], divisor: 2, within: None };
        let mut file = OutputFile::new("model");
        file.push_header(vec![7; 150]);
        file.push_header(vec![8; 50]);
        file.push_payload(64);
        file.checksums.push(ChecksumSpan { range: 200..264, crc_offsets: [4, 8].into_iter().collect() });
        let shares = vec![Arc::new(share.clone()), Arc::new(share)];
        let reservation = Reservation {
            files: vec![file],
            tensors: vec![Reserved { shares, ..Reserved::new(source, target()) }],
            ..Reservation::default()
        };
        let config = root.join("src/config.json");
        let sidecar_files = vec![SidecarFile::new(config, "config.json".into()).unwrap()];
        Work {
            version: "1.0.0",
            root: root.join("src"),
            sources: vec!["a", "sub/b"],
            catalog,
            reservation,
            sidecar_files,
        }
    }

    impl Work {
        fn fingerprint(&self) -> Fingerprint {
            self.below(&self.root)
        }

        fn below(&self, root: &Path) -> Fingerprint {
            let mut files = Files::new(IoMode::Read);
            for name in &self.sources {
                files.add(self.root.join(name)).unwrap();
            }
            let resolve: &Resolve = &|_, _, _| unreachable!("nothing is read");
            let input = Input { files: &files, catalog: &self.catalog, resolve };
            fingerprint(
                self.version,
                input,
                &self.reservation,
                &self.sidecar_files,
                &[root],
                ReductionMethod::InRankOrder,
            )
        }

        fn file(&mut self) -> &mut OutputFile {
            &mut self.reservation.files[0]
        }

        fn target(&mut self) -> &mut TensorEntry {
            &mut self.reservation.tensors[0].entry
        }

        fn source(&mut self) -> &mut TensorEntry {
            &mut self.catalog.tensors[0]
        }

        fn share(&mut self) -> &mut Share {
            Arc::make_mut(&mut self.reservation.tensors[0].shares[1])
        }

        /// Writes a file of the source, and sets the time of its last change.
        fn touch(&self, name: &str, content: &str, nanoseconds: u32) {
            let path = self.root.join(name);
            fs::write(&path, content).unwrap();
            let modified = SystemTime::UNIX_EPOCH + Duration::new(1_000_000, nanoseconds);
            File::open(path).unwrap().set_modified(modified).unwrap();
        }
    }

    #[test]
    fn fingerprint_does_not_depend_on_the_mount_point() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [one, other] = [0, 1].map(|index| work(folders[index].path()));
        assert_eq!(one.fingerprint(), one.fingerprint());
        assert_eq!(one.fingerprint(), other.fingerprint());
        // A root that is an index file stands for the files beside it.
        assert_eq!(one.fingerprint(), one.below(&one.root.join("index.json")));
    }

    #[test]
    fn swapped_items_of_a_long_list_change_the_fingerprint() {
        let of = |list: &[u64]| {
            let mut digest = Digest::default();
            digest.parts(list, |digest, number| digest.number(*number));
            digest.finish()
        };
        let list: Vec<u64> = (0..2 * PART_LEN as u64 + 7).collect();
        let mut seen = BTreeSet::from([of(&list), of(&list[..list.len() - 1])]);
        for at in [0, PART_LEN - 1, PART_LEN, 2 * PART_LEN, list.len() - 2] {
            let mut other = list.clone();
            other.swap(at, at + 1);
            assert!(seen.insert(of(&other)), "{at}");
        }
        assert_eq!(of(&list), of(&list.clone()));
    }

    #[test]
    fn shared_and_equal_header_bytes_have_one_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        let mut works = [true, false].map(|is_shared| {
            let mut work = work(folder.path());
            let bytes = Arc::new(vec![1; 5000]);
            work.file().push_header(Arc::clone(&bytes));
            work.file().push_header(if is_shared { bytes } else { vec![1; 5000].into() });
            work
        });
        assert_eq!(works[0].fingerprint(), works[1].fingerprint());
        works[1].file().header_bytes.pop();
        works[1].file().len -= 5000;
        assert_ne!(works[0].fingerprint(), works[1].fingerprint());
    }

    #[test]
    fn every_change_changes_the_fingerprint() {
        type Change = fn(&mut Work);
        let changes: &[Change] = &[
            |_| {},
            |work| work.version = "1.0.1",
            // Changes of the source's files.
            |work| work.touch("a", "0123456789", 8),
            |work| work.touch("sub/b", "01234567890", 7),
            |work| work.sources.reverse(),
            |work| work.sources.push("config.json"),
            |work| work.sources[1] = "config.json",
            // Changes of the sidecar files.
            |work| work.sidecar_files[0].modified.1 = 9,
            |work| work.sidecar_files[0].to = "sub/config.json".into(),
            |work| work.sidecar_files[0].len = 11,
            |work| work.sidecar_files.clear(),
            // Changes of the target's files.
            |work| work.file().path = "models".into(),
            |work| work.file().len += 1,
            |work| work.file().header_bytes[0].bytes = vec![9; 150].into(),
            |work| work.file().header_bytes[1].bytes = vec![9; 50].into(),
            |work| drop(work.file().header_bytes.pop()),
            |work| work.file().header_bytes[1].offset = 151,
            |work| work.file().checksums[0].range.end = 263,
            |work| work.file().checksums[0].crc_offsets.truncate(1),
            |work| work.file().checksums[0].crc_offsets[1] = 12,
            |work| work.file().checksums.clear(),
            |work| work.reservation.files.push(OutputFile::new("more")),
            // Changes of the target's tensors.
            |work| work.target().dtype = Dtype::I32,
            |work| work.target().fqn = "v".into(),
            |work| work.target().shape = Dims::from_slice(&[2, 8]),
            |work| work.target().chunks.shift_files(1),
            |work| work.target().chunks = tensor(vec![chunk(tile(0), at(232)), chunk(tile(2), at(200))]).chunks,
            |work| work.target().chunks = tensor(vec![chunk(tile(0), at(200))]).chunks,
            |work| work.target().chunks.push(chunk(tile(0), at(264))),
            |work| work.reservation.tensors[0].source.0 = 1,
            |work| work.reservation.tensors[0].shares.clear(),
            |work| work.share().divisor = 1,
            |work| work.share().partial_values.truncate(1),
            |work| work.share().within = Some(tile(0)),
            |work| work.share().within = Some(interleaved()),
            // Changes of the source's tables.
            |work| work.source().dtype = Dtype::U32,
            |work| work.source().chunks = target().chunks,
            |work| work.source().chunks.push(chunk(tile(0), FileLocation::Empty)),
            |work| work.source().chunks.push(Chunk { rank: None, ..chunk(tile(0), FileLocation::Empty) }),
            |work| work.source().chunks.push(chunk(interleaved(), FileLocation::Empty)),
            |work| {
                let strides = Some(Dims::from_slice(&[1, 2]));
                work.source().chunks.push(Chunk { strides, ..chunk(tile(0), FileLocation::Empty) });
            },
            |work| {
                let item = FileLocation::Item(FileRange { file: FileId(0), offset: 1, len: 2 });
                work.source().chunks.push(chunk(tile(0), item));
            },
            |work| work.source().partial_values = None,
            |work| work.source().partial_values.as_mut().unwrap().by_chunk.reverse(),
            |work| work.source().partial_values.as_mut().unwrap().reduction.op = ReduceOp::Max,
            |work| {
                let average = PartialReduction::new(&[2], &[Placement::Partial(ReduceOp::Avg)]).unwrap().unwrap();
                work.source().partial_values.as_mut().unwrap().reduction = average;
            },
        ];
        let folder = tempfile::tempdir().unwrap();
        let mut found = HashMap::new();
        for (index, change) in changes.iter().enumerate() {
            let mut work = work(folder.path());
            change(&mut work);
            let before = found.insert(work.fingerprint(), index);
            assert_eq!(before, None, "change {index}");
        }
    }

    #[test]
    fn unused_tensors_and_notes_do_not_change_the_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        let mut work = work(folder.path());
        let before = work.fingerprint();
        work.catalog.tensors[1].dtype = Dtype::I64;
        work.reservation.notes.push("so".into());
        assert_eq!(work.fingerprint(), before);
    }

    #[test]
    fn digits_are_parsed_to_the_same_fingerprint() {
        let fingerprint = Fingerprint(*blake3::hash(b"").as_bytes());
        let digits = fingerprint.to_string();
        assert_eq!(digits.len(), 64);
        assert_eq!(digits.parse::<Fingerprint>().unwrap(), fingerprint);
        assert_eq!(format!("{fingerprint:?}"), "Fingerprint(af1349b9f5f9)");
        assert!(digits[1..].parse::<Fingerprint>().is_err());
        assert_eq!(serde_json::to_string(&fingerprint).unwrap(), format!("{digits:?}"));
        assert_eq!(serde_json::from_str::<Fingerprint>(&format!("{digits:?}")).unwrap(), fingerprint);
        assert!(serde_json::from_str::<Fingerprint>("\"af\"").is_err());
    }
}
