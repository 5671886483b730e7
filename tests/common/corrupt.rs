//! Damaged checkpoints: archives and pickles that no writer makes, for tests of error handling.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use torch_pickle::pickle::Writer;

use super::transcript::record;

pub use super::outcome::{Outcome, command, copy_all, files_of, fixture};

pub fn dtshard(args: &[&dyn AsRef<OsStr>]) -> Outcome {
    let outcome: Outcome = command(args).output().unwrap().into();
    record(args, outcome.code, &outcome.out, &outcome.err);
    outcome
}

/// Changes a file in place.
pub fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Replaces every occurrence of `from` by `to`, which may have another length. Fails if there is no occurrence.
pub fn replace(bytes: &mut Vec<u8>, from: &[u8], to: &[u8]) {
    let mut found = false;
    let mut at = 0;
    while let Some(next) = find(&bytes[at..], from) {
        bytes.splice(at + next..at + next + from.len(), to.iter().copied());
        at += next + to.len();
        found = true;
    }
    assert!(found, "{:?} does not occur", String::from_utf8_lossy(from));
}

pub fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

// ------------------------------------------------------------------------------------------------------------- zip

/// A zip entry of an archive that a test writes. Tests may change the values that are written into the directory.
#[derive(Clone, Debug)]
pub struct ZipEntry {
    pub name: String,
    pub data: Vec<u8>,
    pub method: u16,
    pub size: u32,
    pub crc: u32,
    /// The offset of the local header that is written into the directory; `None` for the correct offset.
    pub header: Option<u32>,
    /// The extra field of the entry in the directory.
    pub extra: Vec<u8>,
}

impl ZipEntry {
    pub fn new(name: &str, data: impl Into<Vec<u8>>) -> Self {
        let data = data.into();
        let (size, crc) = (u32::try_from(data.len()).unwrap(), crc32fast::hash(&data));
        Self { name: name.into(), data, method: 0, size, crc, header: None, extra: Vec::new() }
    }
}

/// Returns the zip entries of a torch.save archive that has this pickle and these storages.
pub fn torch_entries(pickle: impl Into<Vec<u8>>, storages: &[(&str, &[u8])]) -> Vec<ZipEntry> {
    let mut entries = vec![ZipEntry::new("archive/data.pkl", pickle), ZipEntry::new("archive/byteorder", "little")];
    entries.extend(storages.iter().map(|(key, data)| ZipEntry::new(&format!("archive/data/{key}"), *data)));
    entries
}

pub fn torch_file(pickle: impl Into<Vec<u8>>, storages: &[(&str, &[u8])]) -> Vec<u8> {
    zip(&torch_entries(pickle, storages))
}

pub fn zip(entries: &[ZipEntry]) -> Vec<u8> {
    zip_claiming(entries, u16::try_from(entries.len()).unwrap())
}

/// Returns an archive of these entries, whose end record states `count` entries.
pub fn zip_claiming(entries: &[ZipEntry], count: u16) -> Vec<u8> {
    let mut out = Vec::new();
    let mut directory = Vec::new();
    for entry in entries {
        let header = entry.header.unwrap_or(u32::try_from(out.len()).unwrap());
        let (name, extra) = (entry.name.as_bytes(), &entry.extra);
        let sizes = [entry.crc, entry.size, entry.size].map(u32::to_le_bytes).concat();
        let name_len = u16::try_from(name.len()).unwrap().to_le_bytes();
        let method = entry.method.to_le_bytes();
        out.extend(b"PK\x03\x04\x14\0\0\0");
        out.extend(method);
        out.extend([0; 4]);
        out.extend(&sizes);
        out.extend(name_len);
        out.extend([0; 2]);
        out.extend(name);
        out.extend(&entry.data);
        directory.extend(b"PK\x01\x02\x14\0\x14\0\0\0");
        directory.extend(method);
        directory.extend([0; 4]);
        directory.extend(&sizes);
        directory.extend(name_len);
        directory.extend(u16::try_from(extra.len()).unwrap().to_le_bytes());
        directory.extend([0; 10]);
        directory.extend(header.to_le_bytes());
        directory.extend(name);
        directory.extend(extra);
    }
    let at = u32::try_from(out.len()).unwrap();
    out.extend(&directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(u32::try_from(directory.len()).unwrap().to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend([0; 2]);
    out
}

/// Returns the entries of a small uncompressed archive, such as torch.save's.
pub fn unzip(bytes: &[u8]) -> Vec<ZipEntry> {
    let u16_at = |at: usize| usize::from(u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()));
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let end = bytes.len() - 22;
    let (count, mut at) = (u16_at(end + 10), u32_at(end + 16));
    let mut entries = Vec::new();
    for _ in 0..count {
        let (size, name_len, extra_len, header) = (u32_at(at + 24), u16_at(at + 28), u16_at(at + 30), u32_at(at + 42));
        let name = std::str::from_utf8(&bytes[at + 46..at + 46 + name_len]).unwrap();
        let data = header + 30 + u16_at(header + 26) + u16_at(header + 28);
        entries.push(ZipEntry::new(name, &bytes[data..data + size]));
        at += 46 + name_len + extra_len + u16_at(at + 32);
    }
    entries
}

/// Changes the pickle in a torch.save file, and corrects its checksum.
pub fn edit_pickle(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    edit_entries(path, |entries| {
        let pickle = entries.iter_mut().find(|entry| entry.name.ends_with("/data.pkl")).unwrap();
        change(&mut pickle.data);
        *pickle = ZipEntry::new(&pickle.name, std::mem::take(&mut pickle.data));
    });
}

/// Replaces one small number after another in a pickle by the largest or the smallest number of 8 bytes, in turn, and runs a
/// check of each such file. `skip` gives the number of bytes that are skipped after a round. The file is restored.
pub fn with_each_number_hostile(path: &Path, rounds: usize, skip: impl Fn(usize) -> usize, check: impl Fn()) {
    let original = fs::read(path).unwrap();
    let mut at = 0;
    for round in 0..rounds {
        let mut is_changed = false;
        edit_pickle(path, |pickle| {
            let next = pickle[at..].windows(2).position(|window| window[0] == b'K' && window[1] < 80);
            let Some(next) = next else { return };
            at += next;
            let hostile: &[u8] = if round.is_multiple_of(2) {
                b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"
            } else {
                b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"
            };
            pickle.splice(at..at + 2, hostile.iter().copied());
            at += 1;
            is_changed = true;
        });
        if is_changed {
            at += skip(round);
            check();
        }
        fs::write(path, &original).unwrap();
        if !is_changed {
            return;
        }
    }
}

pub fn edit_entries(path: &Path, change: impl FnOnce(&mut Vec<ZipEntry>)) {
    let mut entries = unzip(&fs::read(path).unwrap());
    change(&mut entries);
    fs::write(path, zip(&entries)).unwrap();
}

// --------------------------------------------------------------------------------------------------------- pickles

/// A plain f32 tensor in a pickle: its offset, sizes and strides in the storage `key`, which has `numel` elements.
#[derive(Clone, Debug)]
pub struct View<'a> {
    pub key: &'a str,
    pub numel: i64,
    pub offset: i64,
    pub sizes: &'a [i64],
    pub strides: &'a [i64],
}

pub fn ints(writer: &mut Writer, values: &[i64]) {
    if values.len() > 3 {
        writer.mark();
    }
    for &value in values {
        writer.int(value);
    }
    writer.tuple(values.len());
}

impl View<'_> {
    pub fn write(&self, writer: &mut Writer) {
        writer.global("torch._utils", "_rebuild_tensor_v2").mark().mark();
        writer.string("storage").global("torch", "FloatStorage").string(self.key).string("cpu").int(self.numel);
        writer.tuple(5).binpersid().int(self.offset);
        ints(writer, self.sizes);
        ints(writer, self.strides);
        writer.boolean(false).global("collections", "OrderedDict").empty_tuple().reduce().tuple(6).reduce();
    }
}

/// Returns a pickle of the dict `{name: value}`, in which `value` writes the value.
pub fn dict_of(name: &str, value: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.empty_dict().string(name);
    value(&mut writer);
    writer.setitem();
    writer.finish()
}
