//! What lies between tensors in an output file, compared with what was laid out.
//!
//! Counts bytes.

use std::iter::zip;
use std::os::unix::fs::FileExt;

use crate::catalog::{OutputFile, SITE_BYTES};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// Read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// Where the first byte is that is not as it was laid out. Sums are of tensor data, which others
/// [check](super::sums::first_wrong).
///
/// # Errors
/// `Io`, also where the file ends before.
pub fn first_difference(file: &OutputFile, path: &AnchoredPath) -> Result<Option<u64>> {
    let open = path.open().map_err(Error::io("open", path))?;
    let sites = file.sites(&(0..file.len));
    let is_sum = |offset: u64| {
        let next = sites.partition_point(|site| *site <= offset);
        next.checked_sub(1).is_some_and(|before| offset < sites[before] + SITE_BYTES)
    };
    let mut block = Vec::new();
    for literal in &file.literals {
        let mut offset = literal.offset;
        for wanted in literal.bytes.chunks(BLOCK_BYTES) {
            block.resize(wanted.len(), 0);
            open.read_exact_at(&mut block, offset).map_err(Error::io("read", path))?;
            if block != wanted {
                let differing = zip(offset.., zip(&block, wanted)).filter(|(_, (found, wanted))| found != wanted);
                if let Some((at, _)) = differing.into_iter().find(|(at, _)| !is_sum(*at)) {
                    return Ok(Some(at));
                }
            }
            offset += wanted.len() as u64;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::ChecksumSpan;

    #[test]
    fn a_byte_that_is_no_sum_has_to_be_as_laid_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let mut file = OutputFile::new("f");
        file.push_literal(vec![1; 10]);
        file.push_payload(100);
        file.push_literal(vec![2; 20]);
        file.sums.push(ChecksumSpan { range: 10..110, sites: smallvec::smallvec![112] });
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
