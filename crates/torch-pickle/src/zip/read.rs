//! Reads the directory of an archive, and locates the data of its zip records.
//!
//! An archive occupies a complete source, or a byte range of a source (an item of a DCP data file). The offsets stored
//! in an archive count from the start of the archive; all returned offsets count from the start of the source. Sizes
//! and offsets are untrusted until they are checked against the range.

use std::collections::HashMap;
use std::io;

use rawzip::{CompressionMethod, ReaderAt, ZipArchive, ZipLocator};

use super::error::ArchiveError;
use crate::ReadAt;

type Result<T, E = ArchiveError> = std::result::Result<T, E>;

/// An uncompressed entry of an archive, as listed in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The offset of the local header in the source, in bytes.
    pub header: u64,
    /// The length of the data in bytes.
    pub len: u64,
    /// The CRC-32 of the data; 0 if the writer computed no CRC-32s.
    pub crc: u32,
}

/// The directory of an archive, which lists the zip records.
#[derive(Debug)]
pub struct Archive {
    /// The folder with which the names of all entries start.
    prefix: String,
    /// The zip records by name. The names are without the folder `prefix`.
    records: HashMap<Box<str>, Record>,
    /// The offset of the directory in the source, in bytes.
    directory: u64,
    ends: Ends,
}

/// The minimum length of a directory entry in bytes. With this minimum, the length of the file bounds the number of
/// entries.
const MIN_ENTRY_BYTES: u64 = 46;

impl Archive {
    /// Reads the directory of an archive that fills the whole source.
    ///
    /// # Errors
    /// The errors of [`read_at`](Self::read_at).
    pub fn read<S: ReadAt + ?Sized>(source: &S) -> Result<Self> {
        Self::read_at(source, 0, source.len_bytes())
    }

    /// Reads the directory of the archive in the bytes `[base, base + len)` of a source.
    ///
    /// # Errors
    /// `Malformed` if the bytes are not an archive; `Compressed` if entries are compressed; `TorchScript` for an
    /// archive of torch.jit.save, which the reader recognises by its compressed entries; `Io` if reading the source
    /// fails.
    pub fn read_at<S: ReadAt + ?Sized>(source: &S, base: u64, len: u64) -> Result<Self> {
        let malformed =
            |found: String| ArchiveError::malformed(place(base, "zip directory"), "a torch.save archive", found);
        if base.checked_add(len).is_none_or(|end| end > source.len_bytes()) {
            let end = u128::from(base) + u128::from(len);
            let found = format!("a file of {} bytes", source.len_bytes());
            return Err(ArchiveError::malformed(place(base, "item"), format!("data up to byte {end}"), found));
        }
        let ends = Ends::read(source, base, len)?;
        let window = Window { source, ends: &ends };
        // A DCP file may have a thousand archives of a few hundred kB each, so small archives get small buffers.
        let mut buffer = vec![0; if len > 1 << 20 { rawzip::RECOMMENDED_BUFFER_SIZE } else { 4 << 10 }];
        let archive = ZipLocator::new()
            .locate_in_reader(&window, &mut buffer, len)
            .map_err(|(_, error)| Fault::from(error).within(&malformed))?;
        if archive.entries_hint() > len / MIN_ENTRY_BYTES {
            return Err(malformed(format!("{} entries in an archive of {len} bytes", archive.entries_hint())));
        }
        let directory = base.saturating_add(archive.directory_offset());
        let (prefix, records) = read_entries(&archive, base, len, &mut buffer).map_err(|fault| match fault {
            // Only archives of torch.jit.save contain code, and only the code in them is compressed.
            Fault::Compressed(name) if name.contains("/code/") => ArchiveError::TorchScript,
            Fault::Compressed(entry) => ArchiveError::Compressed { entry },
            fault => fault.within(&malformed),
        })?;
        Ok(Self { prefix, records, directory, ends })
    }

    /// Returns the zip record with this name. `name` is without the folder with which the names of all entries start.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Record> {
        self.records.get(name).copied()
    }

    /// Returns the offset of the directory in the source, in bytes.
    #[must_use]
    pub fn directory(&self) -> u64 {
        self.directory
    }

    /// Returns all zip records with their names, in the order of the archive.
    #[must_use]
    pub fn records(&self) -> Vec<(&str, Record)> {
        let mut records: Vec<_> = self.records.iter().map(|(name, record)| (name.as_ref(), *record)).collect();
        records.sort_by_key(|(_, record)| record.header);
        records
    }

    /// Returns the offset of the data of the zip record `name` in the source, and the zip record. Returns `None` if the
    /// archive has no such zip record.
    ///
    /// # Errors
    /// `Malformed` if the local header differs from the directory.
    pub fn locate<S: ReadAt + ?Sized>(&self, source: &S, name: &str) -> Result<Option<(u64, Record)>> {
        let Some(record) = self.get(name) else { return Ok(None) };
        let window = self.window(source);
        let read = |buffer: &mut [u8], offset: u64| window.read_exact_at(buffer, offset - self.ends.base);
        let data = data_start(record.header, self.ends.end(), read)
            .map_err(unwrapped)?
            .filter(|data| data.checked_add(record.len).is_some_and(|end| end <= self.ends.end()))
            .ok_or_else(|| bad_header(&format!("{}/{name}", self.prefix), record.header))?;
        Ok(Some((data, record)))
    }

    /// Reads the content of the zip record `name`. Returns `None` if the archive has no such zip record. This function
    /// is not meant for tensor data. A zip record longer than `max_len` is an error, because a sparse file can have any
    /// length.
    ///
    /// # Errors
    /// `Malformed`, `Io`.
    pub fn content<S: ReadAt + ?Sized>(&self, source: &S, name: &str, max_len: u64) -> Result<Option<Vec<u8>>> {
        let Some((data, record)) = self.locate(source, name)? else { return Ok(None) };
        if record.len > max_len {
            let (expected, found) = (format!("at most {max_len} bytes"), format!("{} bytes", record.len));
            return Err(ArchiveError::malformed(place(self.ends.base, name), expected, found));
        }
        let mut content = zeroed(record.len)?;
        self.window(source).read_exact_at(&mut content, data - self.ends.base).map_err(unwrapped)?;
        let crc = crc32fast::hash(&content);
        if record.crc != 0 && record.crc != crc {
            return Err(ArchiveError::malformed(
                place(self.ends.base, name),
                format!("content with CRC-32 {:08x}", record.crc),
                format!("{crc:08x}"),
            ));
        }
        Ok(Some(content))
    }

    fn window<'a, S: ReadAt + ?Sized>(&'a self, source: &'a S) -> Window<'a, S> {
        Window { source, ends: &self.ends }
    }
}

impl Archive {
    /// Checks the CRC-32 of each zip record, and calls `each_block` with the length in bytes of every block that was
    /// read. If all CRC-32s are 0, the writer did not compute them, and nothing is checked.
    ///
    /// # Errors
    /// `Malformed` with the changed zip record, `Io`, which includes the errors of `each_block`.
    pub fn check<S: ReadAt + ?Sized>(
        &self,
        source: &S,
        each_block: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> Result<()> {
        // If all CRC-32s are 0, the writer did not compute them. The CRC-32 of an empty zip record is always 0.
        if self.records.values().all(|record| record.crc == 0) {
            return Ok(());
        }
        self.records().into_iter().try_for_each(|(name, _)| self.check_record(source, name, each_block))
    }

    /// Checks the CRC-32 of the zip record `name`. Calls `each_block` with the length in bytes of every block that was
    /// read.
    ///
    /// # Errors
    /// `Malformed` if the CRC-32 differs, `Io`, which includes the errors of `each_block`.
    pub fn check_record<S: ReadAt + ?Sized>(
        &self,
        source: &S,
        name: &str,
        each_block: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> Result<()> {
        const BLOCK: u64 = 1 << 20;
        let Some((data, record)) = self.locate(source, name)? else { return Ok(()) };
        let mut hasher = crc32fast::Hasher::new();
        let mut buffer = Vec::new();
        let mut done = 0;
        while done < record.len {
            let len = BLOCK.min(record.len - done);
            buffer.resize(usize::try_from(len).expect("a block fits memory"), 0);
            self.window(source).read_exact_at(&mut buffer, data + done - self.ends.base).map_err(unwrapped)?;
            hasher.update(&buffer);
            done += len;
            each_block(len)?;
        }
        let crc = hasher.finalize();
        if crc == record.crc {
            return Ok(());
        }
        Err(ArchiveError::malformed(
            place(self.ends.base, name),
            format!("content with CRC-32 {:08x}", record.crc),
            format!("{crc:08x}, so the data has changed since it was written"),
        ))
    }
}

/// The maximum length, in bytes, of a zip record whose local header is read from a mapped source. If a zip record is
/// longer, its local header is read with [`ReadAt::read_exact_at`].
const SHORT_BYTES: u64 = 64 << 10;

/// Returns the offset of the data of a zip record in the source, in bytes.
///
/// # Errors
/// `Malformed` if there is no local header, `Io`.
pub fn data_offset<S: ReadAt + ?Sized>(source: &S, Record { header, len, .. }: Record) -> Result<u64> {
    // For a short zip record, the caller is likely to read the data from memory as well.
    let is_mapped = len < SHORT_BYTES;
    let read = |buffer: &mut [u8], offset: u64| {
        let len = buffer.len() as u64;
        if is_mapped && source.mapped(offset, len, |bytes| buffer.copy_from_slice(bytes))?.is_some() {
            return Ok(());
        }
        source.read_exact_at(buffer, offset)
    };
    data_start(header, source.len_bytes(), read)?.ok_or_else(|| bad_header("record", header))
}

const LOCAL_HEADER: usize = 30;

/// Returns the offset of the data of a zip record, which follows the local header with its name and extra field.
/// `header` is the offset of the local header. Returns `None` if there is no complete and valid local header between
/// `header` and `end`.
fn data_start<E>(header: u64, end: u64, read: impl Fn(&mut [u8], u64) -> Result<(), E>) -> Result<Option<u64>, E> {
    let fits = |offset: u64, len: u64| offset.checked_add(len).filter(|after| *after <= end);
    let Some(name) = fits(header, LOCAL_HEADER as u64) else { return Ok(None) };
    let mut bytes = [0; LOCAL_HEADER];
    read(&mut bytes, header)?;
    let [b'P', b'K', 3, 4, .., n0, n1, e0, e1] = bytes else { return Ok(None) };
    let extra_len = u16::from_le_bytes([e0, e1]);
    let Some(at) = fits(name, u64::from(u16::from_le_bytes([n0, n1]))) else { return Ok(None) };
    let Some(data) = fits(at, u64::from(extra_len)) else { return Ok(None) };
    // The extra field is checked, because a wrong length of it would shift the data, and no other check detects that.
    let mut extra = vec![0; usize::from(extra_len)];
    read(&mut extra, at)?;
    Ok(is_extra_field(&extra).then_some(data))
}

/// Returns whether the bytes of an extra field are complete pairs of an id and a value.
fn is_extra_field(mut extra: &[u8]) -> bool {
    while let [_, _, low, high, rest @ ..] = extra {
        match rest.get(usize::from(u16::from_le_bytes([*low, *high]))..) {
            Some(after) => extra = after,
            None => return false,
        }
    }
    extra.is_empty()
}

fn bad_header(name: &str, header: u64) -> ArchiveError {
    ArchiveError::malformed(format!("byte {header}"), format!("the local header of `{name}`"), "other bytes")
}

/// Returns a buffer of `len` zero bytes, or an error if there is not enough memory.
fn zeroed(len: u64) -> io::Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len)?;
    buffer.resize(len, 0);
    Ok(buffer)
}

fn place(base: u64, what: &str) -> String {
    if base == 0 { what.to_owned() } else { format!("{what} of the item at byte {base}") }
}

enum Fault {
    Malformed(String),
    Compressed(String),
    /// The source could not be read, so it is unknown whether the archive is valid.
    Unread(io::Error),
}

impl Fault {
    fn within(self, malformed: &dyn Fn(String) -> ArchiveError) -> ArchiveError {
        match self {
            Self::Malformed(found) | Self::Compressed(found) => malformed(found),
            Self::Unread(error) => error.into(),
        }
    }
}

/// A wrapper that marks an I/O error as an error of the source. The ZIP reader also returns I/O errors for damaged
/// archives; the wrapper distinguishes these two kinds of errors.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Unread(io::Error);

impl Unread {
    fn wrap(error: io::Error) -> io::Error {
        io::Error::other(Self(error))
    }
}

/// Converts an I/O error of the ZIP reader to the archive error `Io`. Removes the wrapper that marks an error of the
/// source.
fn unwrapped(error: io::Error) -> ArchiveError {
    error.downcast::<Unread>().map_or_else(ArchiveError::Io, |Unread(error)| error.into())
}

fn describe(error: &rawzip::Error) -> String {
    match error.kind() {
        rawzip::ErrorKind::MissingEndOfCentralDirectory => {
            String::from("no end record, so the file is truncated or is not an archive")
        }
        rawzip::ErrorKind::Eof => String::from("data that ends too early"),
        rawzip::ErrorKind::InvalidEndOfCentralDirectory => String::from("an end record that does not fit the file"),
        rawzip::ErrorKind::InvalidSignature { actual, .. } => format!("the wrong signature 0x{actual:08x}"),
        _ => error.to_string(),
    }
}

impl From<rawzip::Error> for Fault {
    fn from(error: rawzip::Error) -> Self {
        let words = describe(&error);
        match error.into_kind() {
            rawzip::ErrorKind::IO(error) => {
                error.downcast().map_or(Self::Malformed(words), |Unread(error)| Self::Unread(error))
            }
            _ => Self::Malformed(words),
        }
    }
}

fn read_entries<S: ReadAt + ?Sized>(
    archive: &ZipArchive<&Window<'_, S>>,
    base: u64,
    len: u64,
    buffer: &mut [u8],
) -> Result<(String, HashMap<Box<str>, Record>), Fault> {
    let mut prefix: Option<String> = None;
    let mut records: HashMap<Box<str>, Record> = HashMap::new();
    let mut entries = archive.entries(buffer);
    while let Some(entry) = entries.next_entry()? {
        let raw = entry.file_path();
        let full = std::str::from_utf8(raw.as_bytes())
            .map_err(|_| Fault::Malformed(String::from("an entry whose name is not UTF-8")))?;
        if entry.compression_method() != CompressionMethod::STORE {
            return Err(Fault::Compressed(full.to_owned()));
        }
        // PyTorch takes the folder of the first entry as the prefix, and looks up all other names below it.
        let Some((own, name)) = full.split_once('/') else {
            return Err(Fault::Malformed(format!("the entry `{full}` outside of a folder")));
        };
        if prefix.get_or_insert_with(|| own.to_owned()) != own {
            return Err(Fault::Malformed(format!(
                "the entry `{full}` outside of the folder `{}`",
                prefix.unwrap_or_default()
            )));
        }
        let (stored, size) = (entry.compressed_size_hint(), entry.uncompressed_size_hint());
        let header = entry.local_header_offset();
        let end = header.checked_add(size).and_then(|end| end.checked_add(LOCAL_HEADER as u64));
        if stored != size || end.is_none_or(|end| end > len) {
            return Err(Fault::Malformed(format!(
                "the entry `{full}` of {size} bytes at byte {header} of an archive of {len} bytes"
            )));
        }
        let record = Record { header: base + header, len: size, crc: entry.crc32() };
        if records.insert(Box::from(name), record).is_some() {
            return Err(Fault::Malformed(format!("two entries `{full}`")));
        }
    }
    // Zip records that overlap are an error: a damaged offset or size would give the bytes of another zip record.
    let mut spans: Vec<(u64, u64)> = Vec::with_capacity(records.len());
    for (name, record) in &records {
        spans.push((record.header, name.len() as u64 + record.len));
    }
    spans.sort_unstable();
    let overlap = spans.array_windows().find(|[first, second]| second.0 - first.0 < first.1 + LOCAL_HEADER as u64);
    if let Some([first, second]) = overlap {
        return Err(Fault::Malformed(format!("overlapping entries at bytes {} and {}", first.0, second.0)));
    }
    let prefix = prefix.ok_or_else(|| Fault::Malformed(String::from("no entries")))?;
    Ok((prefix, records))
}

/// The first and the last bytes of an archive, kept in memory. The tail contains the directory, and the head contains
/// the pickle and the first local headers. So locating a tensor in an item of a DCP data file takes only two reads.
#[derive(Debug)]
struct Ends {
    base: u64,
    len: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

const HEAD_BYTES: u64 = 2 << 10;
const TAIL_BYTES: u64 = 1 << 10;

impl Ends {
    /// Reads the first and the last bytes of the archive at `[base, base + len)`. This range must be within the source.
    fn read<S: ReadAt + ?Sized>(source: &S, base: u64, len: u64) -> io::Result<Self> {
        let head_len = if len <= HEAD_BYTES + TAIL_BYTES { len } else { HEAD_BYTES };
        let tail_len = TAIL_BYTES.min(len - head_len);
        let (mut head, mut tail) = (zeroed(head_len)?, zeroed(tail_len)?);
        source.read_exact_at(&mut head, base)?;
        source.read_exact_at(&mut tail, base + len - tail_len)?;
        Ok(Self { base, len, head, tail })
    }

    fn end(&self) -> u64 {
        self.base + self.len
    }
}

/// An archive as input of the ZIP reader. The first and the last bytes of the archive are in memory, and all other
/// bytes are read from the source.
struct Window<'a, S: ?Sized> {
    source: &'a S,
    ends: &'a Ends,
}

impl<S: ReadAt + ?Sized> ReaderAt for Window<'_, S> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let Ends { base, len, head, tail } = self.ends;
        if offset >= *len {
            return Ok(0);
        }
        let tail_at = len - tail.len() as u64;
        let (cached, at) = if offset < head.len() as u64 {
            (head, offset)
        } else if offset >= tail_at {
            (tail, offset - tail_at)
        } else {
            let want = buffer.len().min(usize::try_from(tail_at - offset).unwrap_or(usize::MAX));
            self.source.read_exact_at(&mut buffer[..want], base + offset).map_err(Unread::wrap)?;
            return Ok(want);
        };
        let cached = &cached[usize::try_from(at).expect("within the cached end")..];
        let count = cached.len().min(buffer.len());
        buffer[..count].copy_from_slice(&cached[..count]);
        Ok(count)
    }
}
