//! Compares the bytes between tensors in an output file (headers, padding, directories) with the planned layout.
//!
//! All sizes and offsets are in bytes.

use std::iter::zip;
use std::os::unix::fs::FileExt;

use crate::catalog::{CRC_BYTES, OutputFile};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// The maximum number of bytes that are read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// Returns the offset of the first header byte that differs from the planned layout, or `None` if none differs.
/// Checksums are skipped, because [`first_mismatch`](super::checksums::first_mismatch) compares them with the tensor
/// data.
///
/// # Errors
/// `Io`, also if the file is too short.
pub fn first_difference(file: &OutputFile, path: &AnchoredPath) -> Result<Option<u64>> {
    let open = path.open().map_err(Error::io("open", path))?;
    let sites = file.crc_offsets_in(&(0..file.len));
    let is_checksum = |offset: u64| {
        let next = sites.partition_point(|site| *site <= offset);
        next.checked_sub(1).is_some_and(|before| offset < sites[before] + CRC_BYTES)
    };
    let mut block = Vec::new();
    for header in &file.header_bytes {
        let mut offset = header.offset;
        for expected in header.bytes.chunks(BLOCK_BYTES) {
            block.resize(expected.len(), 0);
            open.read_exact_at(&mut block, offset).map_err(Error::io("read", path))?;
            if block != expected {
                let differing = zip(offset.., zip(&block, expected)).filter(|(_, (found, expected))| found != expected);
                if let Some((at, _)) = differing.into_iter().find(|(at, _)| !is_checksum(*at)) {
                    return Ok(Some(at));
                }
            }
            offset += expected.len() as u64;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::ChecksumSpan;

    #[test]
    fn changed_byte_outside_checksums_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let mut file = OutputFile::new("f");
        file.push_header(vec![1; 10]);
        file.push_payload(100);
        file.push_header(vec![2; 20]);
        file.checksums.push(ChecksumSpan { range: 10..110, crc_offsets: smallvec::smallvec![112] });
        let mut content = [vec![1; 10], vec![9; 100], vec![2; 20]].concat();
        content[112..116].copy_from_slice(&[7; 4]);
        let found = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            first_difference(&file, &AnchoredPath::new(folder.path()).join("f"))
        };
        assert_eq!(found(&content).unwrap(), None);
        for at in [0, 9, 110, 111, 116, 129] {
            content[at] ^= 1;
            assert_eq!(found(&content).unwrap(), Some(at as u64));
            content[at] ^= 1;
        }
        assert!(found(&content[..129]).is_err());
    }
}
