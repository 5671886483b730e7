//! Tests of checksums: the checksummed byte ranges (spans), and the positions at which checksums are stored (sites),
//! are at the borders of write blocks in every possible way.

use std::fs;

use smallvec::smallvec;

use crate::catalog::{Catalog, ChecksumSpan, Dtype, OutputFile, Reservation, Reserved, TensorEntry};
use crate::exec::{Input, Options, Silent, Stop};
use crate::format::resolve;
use crate::storage::{FileId, Files, IoMode};

/// The size in bytes of the smallest write block that `options::max_memory` leads to.
const BLOCK_BYTES: u64 = 64 << 10;

const TENSORS: u64 = 24;

/// Returns bytes whose period is not a power of two.
fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from(index * 7 % 251).unwrap()).collect()
}

/// Reserves pairs of tensors; each pair is about as long as a write block. One checksum covers a pair and the header
/// bytes between its two tensors. The checksum is stored directly after the pair, and again in a directory at the end
/// of the file. Its first position is at most 5 bytes before a multiple of [`BLOCK_BYTES`], so that block borders cut
/// checksums at every byte.
fn reservation(catalog: &mut Catalog, source: FileId, shift: u64) -> Reservation {
    let mut reservation = Reservation::default();
    let mut file = OutputFile::new("summed");
    file.push_header(vec![1; 30]);
    let mut place = |catalog: &mut Catalog, file: &mut OutputFile, len: u64| {
        let name = format!("t{}", catalog.tensors.len());
        let at = catalog.tensors.len() as u64 * 13;
        let source = TensorEntry::whole(name.as_str().into(), Dtype::U8, smallvec![len], source, at);
        let id = catalog.push_tensor(source);
        let offset = file.push_payload(len);
        let entry = TensorEntry::whole(name.into(), Dtype::U8, smallvec![len], FileId(0), offset);
        reservation.tensors.push(Reserved::new(id, entry));
    };
    for index in 0..TENSORS {
        let start = file.len;
        place(catalog, &mut file, 100 + index);
        file.push_header(vec![2; 9]);
        let site = (file.len + 10).next_multiple_of(BLOCK_BYTES) - (index + shift) % 6;
        let rest = site - file.len;
        place(catalog, &mut file, rest);
        file.checksums.push(ChecksumSpan { range: start..file.len, crc_offsets: smallvec![site] });
        file.push_header(vec![0; 4 + 17]);
    }
    for index in 0..file.checksums.len() {
        // The sites are at varying distances from block borders, and for each directory entry one site is on a border.
        let before = (file.len + 8).next_multiple_of(BLOCK_BYTES / 16) - (index as u64 + shift) % 6 - file.len;
        file.push_header(vec![3; usize::try_from(before).unwrap()]);
        file.checksums[index].crc_offsets.push(file.len);
        file.push_header(vec![0; 4]);
    }
    reservation.files.push(file);
    reservation
}

#[test]
fn checksums_are_correct_for_any_block_border() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("source"), noise(80 << 10)).unwrap();
    let mut files = Files::new(IoMode::Read);
    let source = files.add(folder.path().join("source")).unwrap();
    for shift in 0..6 {
        let mut catalog = Catalog::empty();
        let reservation = reservation(&mut catalog, source, shift);
        let input = Input { files: &files, catalog: &catalog, resolve: &resolve };
        let [whole, blocks] = [4 * TENSORS * BLOCK_BYTES, BLOCK_BYTES].map(|block_bytes| {
            let out = folder.path().join(format!("{shift} {block_bytes}"));
            fs::create_dir(&out).unwrap();
            let options = Options {
                threads: 2,
                write_block_bytes: block_bytes,
                transposed_block_bytes: block_bytes,
                sync: false,
            };
            super::copy(input, &reservation, &out, &options, &Silent, &Stop::default()).unwrap();
            fs::read(out.join("summed")).unwrap()
        });
        let file = &reservation.files[0];
        for sum in &file.checksums {
            let range = |start: u64, end: u64| usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
            let expected = crc32fast::hash(&blocks[range(sum.range.start, sum.range.end)]);
            for &site in &sum.crc_offsets {
                assert_eq!(blocks[range(site, site + 4)], expected.to_le_bytes(), "shift {shift}, {sum:?} at {site}");
            }
        }
        let ends_in_site = |end: u64| {
            let mut sites = file.checksums.iter().flat_map(|sum| &sum.crc_offsets);
            sites.any(|&site| site < end && end < site + 4)
        };
        assert!((1..file.len / BLOCK_BYTES).any(|number| ends_in_site(number * BLOCK_BYTES)));
        assert!(whole == blocks);
    }
}
