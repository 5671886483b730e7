//! Lays out an archive exactly like `PyTorchStreamWriter`: uncompressed entries, data at multiples of 64 bytes from
//! the start of the archive, a data descriptor after each non-empty entry, and always zip64 end records.
//!
//! All bytes except the tensor data are known at layout time. The CRC-32s of the data are computed later. Each CRC-32
//! is written to two positions, in the descriptor and in the directory.

use std::ops::Range;

/// The alignment of the data of zip records in bytes, as recorded in `.storage_alignment`.
const ALIGNMENT: u64 = 64;

/// The content of a 32-bit field whose real value is in a zip64 field. A value needs a zip64 field if it is at least
/// this number.
const ZIP64: u64 = 0xFFFF_FFFF;

/// The layout of an archive. All offsets count from the first byte of the archive.
#[derive(Debug, Default)]
pub struct ArchiveLayout {
    /// The length of the archive in bytes.
    pub len: u64,
    /// The bytes that are known at layout time, as blocks with their offsets, in ascending order and without empty
    /// blocks. All other bytes of the archive are data that the caller writes.
    pub known: Vec<(u64, Vec<u8>)>,
    /// The checksums to compute when all data is written. Their ranges are disjoint and in ascending order.
    pub checksums: Vec<Checksum>,
}

/// A range of the archive, and the two positions at which the CRC-32 of this range (IEEE, little-endian, 4 bytes) must
/// be written. In [`ArchiveLayout::known`], the bytes at these positions are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// The range of the data of a zip record.
    pub range: Range<u64>,
    /// The offsets of the two positions for the CRC-32: after the data, and in the directory.
    pub places: [u64; 2],
}

/// A contiguous piece of the data of a zip record: tensor data or known bytes.
#[derive(Clone, Copy, Debug)]
pub enum Span<'a> {
    /// Tensor data of this many bytes.
    Payload(u64),
    /// Bytes that are known at layout time.
    Known(&'a [u8]),
}

impl Span<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Payload(len) => *len,
            Self::Known(bytes) => bytes.len() as u64,
        }
    }
}

#[derive(Debug)]
struct ZipEntry {
    name: String,
    header: u64,
    len: u64,
    crc: u32,
    /// The range of the data, and the offset of its CRC-32 in the descriptor; `None` if the data is known at layout
    /// time.
    payload: Option<(Range<u64>, u64)>,
}

/// Lays out one archive, zip record by zip record.
///
/// ```
/// use torch_pickle::pickle::Writer;
/// use torch_pickle::zip::{Archive, ArchiveWriter};
///
/// let mut pickle = Writer::new();
/// pickle.empty_dict();
/// let mut archive = ArchiveWriter::new("model");
/// archive.start(&pickle.finish());
/// let data = archive.payload("data/0", 8) as usize;
/// let layout = archive.finish();
///
/// let mut file = vec![0; layout.len as usize];
/// for (at, bytes) in &layout.known {
///     file[*at as usize..][..bytes.len()].copy_from_slice(bytes);
/// }
/// file[data..][..8].copy_from_slice(b"8 bytes.");
/// for checksum in &layout.checksums {
///     let crc = crc32fast::hash(&file[checksum.range.start as usize..checksum.range.end as usize]);
///     checksum.places.map(|place| file[place as usize..][..4].copy_from_slice(&crc.to_le_bytes()));
/// }
///
/// let archive = Archive::read(file.as_slice())?;
/// assert_eq!(archive.content(file.as_slice(), "data/0", 8)?.as_deref(), Some(&b"8 bytes."[..]));
/// archive.check(file.as_slice(), &mut |_| Ok(()))?;
/// # Ok::<(), torch_pickle::zip::ArchiveError>(())
/// ```
#[derive(Debug)]
pub struct ArchiveWriter<'a> {
    layout: ArchiveLayout,
    prefix: &'a str,
    /// The last known bytes so far. They are not yet a block of the layout.
    pending: Vec<u8>,
    entries: Vec<ZipEntry>,
}

impl<'a> ArchiveWriter<'a> {
    /// Creates an archive without zip records. All names will start with the folder `prefix`.
    pub fn new(prefix: &'a str) -> Self {
        Self { layout: ArchiveLayout::default(), prefix, pending: Vec::new(), entries: Vec::new() }
    }

    /// Adds the zip record of the pickle, and the small zip records that PyTorch writes before the first storage.
    pub fn start(&mut self, pickle: &[u8]) {
        self.start_in_parts(pickle, &[]);
    }

    /// Adds the same zip records as [`start`](Self::start), but divides the pickle into several blocks of
    /// [`ArchiveLayout::known`]. The blocks end at the ascending offsets `cuts`. So if several archives have an equal
    /// block, the caller can store this block once.
    pub fn start_in_parts(&mut self, pickle: &[u8], cuts: &[usize]) {
        let header = self.header("data.pkl", pickle.len() as u64);
        let mut start = 0;
        for &cut in cuts {
            self.flush();
            self.pending.extend_from_slice(&pickle[start..cut]);
            start = cut;
        }
        self.flush();
        self.pending.extend_from_slice(&pickle[start..]);
        self.known("data.pkl", header, pickle);
        self.literal(".format_version", b"1");
        self.literal(".storage_alignment", b"64");
        self.literal("byteorder", b"little");
    }

    /// Adds a zip record whose content is known.
    pub fn literal(&mut self, name: &str, content: &[u8]) {
        let header = self.header(name, content.len() as u64);
        self.pending.extend_from_slice(content);
        self.known(name, header, content);
    }

    /// Adds the descriptor and the directory entry of the zip record `name`, whose content was just added.
    fn known(&mut self, name: &str, header: u64, content: &[u8]) {
        let crc = crc32fast::hash(content);
        self.descriptor(header, content.len() as u64, crc);
        self.entries.push(ZipEntry { name: self.full(name), header, len: content.len() as u64, crc, payload: None });
    }

    /// Adds a zip record of `len` bytes of tensor data, and returns the offset of the data in the archive.
    pub fn payload(&mut self, name: &str, len: u64) -> u64 {
        self.mixed(name, &[Span::Payload(len)])[0]
    }

    /// Adds a zip record that consists of tensor data and known bytes. Returns the offset of each item of `spans` in
    /// the archive.
    pub fn mixed(&mut self, name: &str, spans: &[Span<'_>]) -> Vec<u64> {
        let len = spans.iter().map(Span::len).sum();
        let header = self.header(name, len);
        self.flush();
        let data = self.layout.len;
        let mut known = crc32fast::Hasher::new();
        let mut offsets = Vec::with_capacity(spans.len());
        for span in spans {
            offsets.push(self.layout.len);
            match span {
                Span::Payload(len) => self.layout.len += len,
                Span::Known(bytes) => {
                    known.update(bytes);
                    self.pending.extend_from_slice(bytes);
                    self.flush();
                }
            }
        }
        let waits = spans.iter().any(|span| matches!(span, Span::Payload(1..)));
        let crc = if waits { 0 } else { known.finalize() };
        self.descriptor(header, len, crc);
        // In the descriptor, the CRC-32 follows the signature of 4 bytes.
        let payload = waits.then(|| (data..data + len, data + len + 4));
        self.entries.push(ZipEntry { name: self.full(name), header, len, crc, payload });
        offsets
    }

    /// Adds the last zip records, the directory and the end records.
    #[must_use]
    pub fn finish(mut self) -> ArchiveLayout {
        self.literal("version", b"3\n");
        // PyTorch writes a hash of the names and a hash of the contents here, and readers accept any value. The tensor
        // data is not known yet, and the id must not depend on anything else, so it is a hash of the names and the
        // known contents.
        let names =
            self.entries.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, entry| fnv1a(hash, entry.name.as_bytes()));
        let contents = self.entries.iter().fold(names, |hash, entry| fnv1a(hash, &entry.crc.to_le_bytes()));
        self.literal(".data/serialization_id", format!("{names:020}{contents:020}").as_bytes());

        let directory = self.position();
        let entries = std::mem::take(&mut self.entries);
        for entry in &entries {
            let at = self.position();
            self.directory_entry(entry);
            if let Some((range, descriptor_site)) = &entry.payload {
                let places = [*descriptor_site, at + DIRECTORY_CRC_OFFSET];
                self.layout.checksums.push(Checksum { range: range.clone(), places });
            }
        }
        self.end_records(directory, entries.len() as u64);
        self.flush();
        self.layout
    }

    /// Returns the offset of the next byte from the start of the archive.
    fn position(&self) -> u64 {
        self.layout.len + self.pending.len() as u64
    }

    fn full(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    fn flush(&mut self) {
        let bytes = std::mem::take(&mut self.pending);
        if !bytes.is_empty() {
            let at = self.layout.len;
            self.layout.len += bytes.len() as u64;
            self.layout.known.push((at, bytes));
        }
    }

    /// Adds the local header of a zip record, with padding so that the data of the zip record starts at a multiple of
    /// the alignment. Returns the offset of the header in the archive.
    fn header(&mut self, name: &str, len: u64) -> u64 {
        let header = self.position();
        let name = self.full(name);
        let mut zip64 = Vec::new();
        if len >= ZIP64 {
            // The first value is the uncompressed size. The second is the compressed size, which is only in the
            // descriptor.
            zip64.extend_from_slice(&len.to_le_bytes());
            zip64.extend_from_slice(&0_u64.to_le_bytes());
        }
        if header >= ZIP64 {
            zip64.extend_from_slice(&header.to_le_bytes());
        }
        let zip64_len = if zip64.is_empty() { 0 } else { 4 + zip64.len() };
        let start = header + 30 + (name.len() + zip64_len + 4) as u64;
        let padding = usize::try_from(start.next_multiple_of(ALIGNMENT) - start).expect("below the alignment");

        let out = &mut self.pending;
        put(out, &[0x0403_4B50]);
        // The fields are: version needed, flags, method, time, date.
        put16(out, &[0, flags(len), 0, 0, 0]);
        // The CRC and the sizes are in the descriptor.
        put(out, &[0, 0, 0]);
        put16(out, &[short(name.len()), short(zip64_len + 4 + padding)]);
        out.extend_from_slice(name.as_bytes());
        if !zip64.is_empty() {
            put16(out, &[1, short(zip64.len())]);
            out.extend_from_slice(&zip64);
        }
        out.extend_from_slice(b"FB");
        put16(out, &[short(padding)]);
        out.extend(std::iter::repeat_n(b'Z', padding));
        header
    }

    /// Adds the data descriptor of a zip record. An empty zip record has no data descriptor.
    fn descriptor(&mut self, header: u64, len: u64, crc: u32) {
        if len == 0 {
            return;
        }
        put(&mut self.pending, &[0x0807_4B50, crc]);
        if len >= ZIP64 || header >= ZIP64 {
            self.pending.extend_from_slice(&len.to_le_bytes());
            self.pending.extend_from_slice(&len.to_le_bytes());
        } else {
            put(&mut self.pending, &[saturate(len), saturate(len)]);
        }
    }

    fn directory_entry(&mut self, entry: &ZipEntry) {
        let mut zip64 = Vec::new();
        if entry.len >= ZIP64 {
            zip64.extend_from_slice(&entry.len.to_le_bytes());
            zip64.extend_from_slice(&entry.len.to_le_bytes());
        }
        if entry.header >= ZIP64 {
            zip64.extend_from_slice(&entry.header.to_le_bytes());
        }
        let extra_len = if zip64.is_empty() { 0 } else { 4 + zip64.len() };
        let out = &mut self.pending;
        put(out, &[0x0201_4B50]);
        // The fields are: versions made by and needed, flags, method, time, date.
        put16(out, &[0, 0, flags(entry.len), 0, 0, 0]);
        put(out, &[entry.crc, saturate(entry.len), saturate(entry.len)]);
        // The fields are: lengths of name, extra and comment; disk, internal attributes.
        put16(out, &[short(entry.name.len()), short(extra_len), 0, 0, 0]);
        put(out, &[0, saturate(entry.header)]);
        out.extend_from_slice(entry.name.as_bytes());
        if !zip64.is_empty() {
            put16(out, &[1, short(zip64.len())]);
            out.extend_from_slice(&zip64);
        }
    }

    /// Adds the zip64 end record, its locator and the classic end record. PyTorch always writes all three.
    fn end_records(&mut self, directory: u64, count: u64) {
        let end = self.position();
        let size = end - directory;
        let out = &mut self.pending;
        put(out, &[0x0606_4B50]);
        out.extend_from_slice(&44_u64.to_le_bytes());
        put16(out, &[0x031E, 0x2D]);
        put(out, &[0, 0]);
        for value in [count, count, size, directory] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        put(out, &[0x0706_4B50, 0]);
        out.extend_from_slice(&end.to_le_bytes());
        put(out, &[1]);
        put(out, &[0x0605_4B50]);
        let classic_count = u16::try_from(count).unwrap_or(u16::MAX);
        put16(out, &[0, 0, classic_count, classic_count]);
        put(out, &[saturate(size), saturate(directory)]);
        put16(out, &[0]);
    }
}

/// The offset of the CRC-32 in a directory entry, in bytes.
const DIRECTORY_CRC_OFFSET: u64 = 16;

/// Returns the flags of a zip entry with `len` bytes of data. The flags say that the name is UTF-8 and, if there is
/// data, that a data descriptor follows.
fn flags(len: u64) -> u16 {
    if len == 0 { 0x0800 } else { 0x0808 }
}

fn put(out: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

fn put16(out: &mut Vec<u8>, values: &[u16]) {
    values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

fn short(len: usize) -> u16 {
    u16::try_from(len).expect("names and paddings are short")
}

fn saturate(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are the offsets that PyTorch 2.15 gives the zip records of `tiny.pt`: `{w: f32[2,3], wt:
    /// w.t()[1:], b: bf16 scalar}`.
    #[test]
    fn record_offsets_equal_those_of_pytorch() {
        let mut writer = ArchiveWriter::new("tiny");
        writer.start(&[b'.'; 298]);
        assert_eq!(writer.payload("data/0", 24), 832);
        assert_eq!(writer.payload("data/1", 2), 960);
        let headers: Vec<u64> = writer.entries.iter().map(|entry| entry.header).collect();
        assert_eq!(headers, [0, 378, 465, 594, 726, 872]);
        let layout = writer.finish();
        assert_eq!(layout.len, 1805);
        assert_eq!(layout.checksums.len(), 2);
        assert_eq!(layout.checksums[0].places[0], 832 + 24 + 4);
    }

    #[test]
    fn empty_record_has_no_descriptor_and_no_checksum() {
        let mut writer = ArchiveWriter::new("e");
        let first = writer.payload("data/0", 0);
        assert_eq!(first % ALIGNMENT, 0);
        assert_eq!(writer.position(), first);
        assert!(writer.finish().checksums.is_empty());
    }

    /// In a zip record of data and known bytes, the range of the checksum includes the known bytes. If all bytes of the
    /// zip record are known, the checksum is known at layout time.
    #[test]
    fn mixed_record_has_data_and_known_bytes() {
        let mut writer = ArchiveWriter::new("m");
        let spans = [Span::Payload(10), Span::Known(&[42; 3]), Span::Payload(0), Span::Payload(7), Span::Known(&[0])];
        let offsets = writer.mixed("data/0", &spans);
        let start = offsets[0];
        assert_eq!(offsets, [0, 10, 13, 13, 20].map(|offset| start + offset));
        let known = writer.mixed("data/1", &[Span::Known(b"ab"), Span::Known(b"c")])[0];
        assert_eq!(writer.entries[1].crc, crc32fast::hash(b"abc"));
        let ArchiveLayout { known: literals, checksums, .. } = writer.finish();
        let [Checksum { range, places }] = checksums.as_slice() else { panic!("{checksums:?}") };
        assert_eq!((range.clone(), places[0]), (start..start + 21, start + 21 + 4));
        let within: Vec<u64> = literals.iter().map(|(at, _)| *at).filter(|at| range.contains(at)).collect();
        assert_eq!(within, [start + 10, start + 20]);
        assert!(!range.contains(&known));
    }

    #[test]
    fn sizes_beyond_32_bits_take_zip64_fields() {
        let mut writer = ArchiveWriter::new("big");
        let first = writer.payload("data/0", 5 << 30);
        let second = writer.payload("data/1", 8);
        assert_eq!((first % ALIGNMENT, second % ALIGNMENT), (0, 0));
        // The descriptor of 24 bytes is followed by a header whose own offset is in a zip64 field.
        assert_eq!(writer.entries[1].header, first + (5 << 30) + 24);
        // If the header of an entry is beyond 4 GiB, its descriptor also has the long form.
        assert_eq!(writer.finish().checksums[1].places[0], second + 8 + 4);
    }
}
