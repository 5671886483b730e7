//! Row groups: write blocks that need the same source rows, which one worker fills one after the other. Sizes and
//! offsets are in bytes of the output, unless a name contains another unit.
//!
//! If a tensor is cut into columns, each row of the source goes to many files in short runs:
//!
//! ```text
//!   source rows          file 0    file 1    file 2
//!   +---+---+---+        +---+     +---+     +---+
//!   | a | b | c |        | a |     | b |     | c |   row group 0: three write blocks, one read
//!   | a | b | c |        | a |     | b |     | c |
//!   +---+---+---+        +---+     +---+     +---+
//!   | d | e | f |        | d |     | e |     | f |   row group 1
//!   +---+---+---+        +---+     +---+     +---+
//! ```
//!
//! Tiles of one tensor that hold the same rows form a **tile group**; a tile group is cut into **row groups**. A row
//! group contains the same range of rows from each tile of the tile group. One worker fills the write blocks of a row
//! group, one after the other, from a block of the source that is read once ([`super::source_block`]).
//!
//! Tiles with equal elements that are not such columns also form a tile group. Such tiles are called **copies**;
//! replicas on several ranks are copies, for example. The write blocks of copies are cut at the same positions, and the
//! data is gathered once and written to each file. All other tiles are written in file order.

use indexmap::IndexMap;

use crate::layout::partial::Share;
use crate::layout::{Intervals, Tile};
use crate::storage::direct::ALIGNMENT;

/// The maximum number of source bytes of one row group, unless a single row is longer. With this size, the write blocks
/// and the source block of a row group fit in the cache of a core.
const ROW_GROUP_BYTES: u64 = 1 << 20;

/// The largest gap, in bytes, between two output ranges of one row group.
const GAP_BYTES: u64 = 64 << 10;

/// The maximum number of tiles in one row group. With more tiles, write blocks would be too short to be worth a system
/// call.
const MAX_TILES: usize = 128;

/// The minimum total length, in bytes, of consecutive copies (tiles with equal elements in several files) that get
/// write blocks of their own. Shorter sequences of copies are written like tiles without a group. Two copies share a
/// write block only if each of them is shorter than this length.
const MIN_COPY_BYTES: u64 = 256 << 10;

/// The position of a tile in an output file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputRange {
    /// The number of the output file.
    pub file: u32,
    /// The offset of the tile in the file.
    pub offset: u64,
    /// The length of the tile in bytes.
    pub len: u64,
    /// The index of the tile in the list of planned tiles.
    pub tile_index: usize,
    /// The size of an element in bytes. A cut inside the tile is at a multiple of this size.
    pub itemsize: u64,
    /// The length of a row in bytes if the tile reads a transposed view. Each cut inside a row reads the source again.
    pub transposed_row: Option<u64>,
    /// The group of tiles to which this tile belongs, if it belongs to one.
    pub group: Option<TileGroup>,
}

/// A group of tiles of one tensor that need the same source rows, or that have equal elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileGroup {
    /// The number of the tile group. It is unique among the tensors that are planned together (a window).
    pub number: usize,
    /// The property that all tiles of the tile group share.
    pub kind: TileGroupKind,
}

/// The property that the tiles of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileGroupKind {
    /// The tiles read short runs of the same source rows.
    Rows {
        /// The number of source bytes that all tiles of the tile group read together.
        source_bytes: u64,
        /// The number of rows. A row is the elements at one index of the leading dims, along which all tiles of the
        /// group have equal ranges.
        rows: u64,
    },
    /// The tiles have the same elements.
    Copies {
        /// The offset of the first tile in its file. Write blocks of that file are cut at file block boundaries.
        first_offset: u64,
    },
}

/// The identity of a row group: the number of its tile group, and its number in the tile group.
pub type RowGroup = (usize, u64);

/// A tile that may join a tile group.
#[derive(Debug)]
pub struct GroupCandidate<'a> {
    /// The elements of the tensor that the tile holds.
    pub tile: Tile,
    /// The partial values of the source from which the tile is reduced; `None` if the tile gets the complete value.
    pub share: Option<&'a Share>,
    /// The number of source bytes that the tile reads.
    pub source_bytes: u64,
    /// True if the tile reads short runs of source rows. The field is false for a transposed view, whose rows are
    /// columns of the source, so that a row group of such tiles would read the complete source.
    pub has_short_row_runs: bool,
    /// The position of the tile in the output. [`assign_groups`] sets its group.
    pub output_range: &'a mut OutputRange,
}

/// Puts tiles of one tensor into tile groups, if at least two tiles need the same source rows or have equal elements.
/// The numbers of the tile groups start at `number`, and there are at most as many tile groups as tiles.
pub fn assign_groups<'a>(members: impl IntoIterator<Item = GroupCandidate<'a>>, mut number: usize) {
    let mut by_rows: IndexMap<(Option<Intervals>, Option<&Share>), Vec<GroupCandidate<'_>>> = IndexMap::new();
    let mut by_tile: IndexMap<(Tile, Option<&Share>), Vec<GroupCandidate<'_>>> = IndexMap::new();
    for member in members {
        if member.has_short_row_runs {
            by_rows.entry((member.tile.dims().first().cloned(), member.share)).or_default().push(member);
        } else {
            by_tile.entry((member.tile.clone(), member.share)).or_default().push(member);
        }
    }
    let mut groups: Vec<_> = by_rows.into_values().collect();
    let groups = groups.iter_mut().flat_map(|members| members.chunks_mut(MAX_TILES));
    for members in groups.filter(|members| members.len() > 1) {
        let source_bytes = members.iter().map(|member| member.source_bytes).sum();
        let (first, others) = members.split_first().expect("more than one");
        let (sizes, dims) = (first.tile.sizes(), first.tile.dims());
        let is_common = |dim: &usize| others.iter().all(|other| other.tile.dims()[*dim] == dims[*dim]);
        let rows = (0..dims.len()).take_while(is_common).map(|dim| sizes[dim]).product();
        let group = TileGroup { number, kind: TileGroupKind::Rows { source_bytes, rows } };
        members.iter_mut().for_each(|member| member.output_range.group = Some(group));
        number += 1;
    }
    for members in by_tile.values_mut().filter(|members| members.len() > 1) {
        let group = TileGroup { number, kind: TileGroupKind::Copies { first_offset: members[0].output_range.offset } };
        members.iter_mut().for_each(|member| member.output_range.group = Some(group));
        number += 1;
    }
}

/// A position in an output file at which a write block has to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// The number of the output file.
    pub file: u32,
    /// The offset in the file.
    pub offset: u64,
    /// The row group of the write blocks between this boundary and the next boundary.
    pub row_group: Option<RowGroup>,
    /// True if the write blocks up to the next boundary are those of a transposed view.
    pub is_transposed: bool,
}

/// Returns the boundaries of write blocks that row groups and transposed views need. The output ranges must be in file order.
/// `block_bytes` is the maximum size of a write block, and `transposed_bytes` that of a block of a transposed view.
pub fn boundaries(output_ranges: &[OutputRange], block_bytes: u64, transposed_bytes: u64) -> Vec<Boundary> {
    let mut boundaries: Vec<Boundary> = Vec::new();
    // The number of source bytes of the current row group, summed over all of its output ranges.
    let mut begun = None;
    let is_copy = |output_range: &OutputRange| {
        matches!(output_range.group, Some(TileGroup { kind: TileGroupKind::Copies { .. }, .. }))
    };
    let follows = |one: &OutputRange, next: &OutputRange| {
        one.file == next.file && next.offset <= one.offset + one.len + GAP_BYTES && is_copy(one) == is_copy(next)
    };
    for output_ranges in output_ranges.chunk_by(follows) {
        if !is_copy(&output_ranges[0]) {
            for output_range in output_ranges {
                cut_rows(output_range, &mut begun, &mut boundaries);
                cut_transposed(output_range, transposed_bytes, &mut begun, &mut boundaries);
            }
        } else if output_ranges.iter().map(|output_range| output_range.len).sum::<u64>() >= MIN_COPY_BYTES {
            cut_copies(output_ranges, block_bytes, &mut boundaries);
            begun = None;
        }
    }
    boundaries
}

/// Cuts an output range into row groups of complete rows. If row groups are long, each cut moves to a file block
/// boundary (a multiple of [`ALIGNMENT`]). File block boundaries are at other rows in each file, so a few rows are then
/// read for two row groups. Short output ranges that follow each other share a row group.
fn cut_rows(output_range: &OutputRange, begun: &mut Option<u64>, boundaries: &mut Vec<Boundary>) {
    let OutputRange { file, offset, len, group, .. } = *output_range;
    let Some(TileGroup { number, kind: TileGroupKind::Rows { source_bytes, rows } }) = group else { return };
    let row_groups = source_bytes.div_ceil(ROW_GROUP_BYTES).clamp(1, rows);
    let is_long = len / row_groups >= 16 * ALIGNMENT && rows / row_groups >= 16;
    let grid = if is_long { ALIGNMENT } else { 1 };
    let at = |row_group: u64| {
        let row = u128::from(rows) * u128::from(row_group) / u128::from(row_groups);
        let within = u128::from(len) * row / u128::from(rows);
        offset + u64::try_from(within).expect("no more than the length")
    };
    // The end of the previous row group, if this output range is close behind it.
    let last = boundaries.pop_if(|last| last.file == file && offset <= last.offset + GAP_BYTES);
    let before = begun.filter(|_| last.is_some());
    let total = before.unwrap_or(0) + source_bytes;
    if before.is_some() && total <= ROW_GROUP_BYTES {
        *begun = Some(total);
    } else {
        *begun = Some(source_bytes.min(ROW_GROUP_BYTES));
        // The end of a range of copies is never moved.
        let earliest = last.filter(|_| before.is_none()).map_or(0, |last| last.offset);
        for row_group in 0..row_groups {
            let offset = (at(row_group) / grid * grid).max(earliest);
            if boundaries.last().is_none_or(|last| (last.file, last.offset) < (file, offset)) {
                boundaries.push(Boundary { file, offset, row_group: Some((number, row_group)), is_transposed: false });
            }
        }
    }
    boundaries.push(Boundary {
        file,
        offset: (offset + len).next_multiple_of(grid),
        row_group: None,
        is_transposed: false,
    });
}

/// Cuts an output range of a transposed view into write blocks of complete rows, as long as fit into a write block. The cuts are
/// not at file block boundaries: a row that two write blocks share would be read twice, and each time nearly as much of the
/// source as for a complete block.
fn cut_transposed(
    output_range: &OutputRange,
    block_bytes: u64,
    begun: &mut Option<u64>,
    boundaries: &mut Vec<Boundary>,
) {
    let OutputRange { file, offset, len, group, .. } = *output_range;
    let row_bytes = output_range.transposed_row.filter(|row| *row <= block_bytes && len >= MIN_COPY_BYTES);
    let (None, Some(row_bytes)) = (group, row_bytes) else { return };
    *begun = None;
    let blocks = len.div_ceil(block_bytes / row_bytes * row_bytes);
    let step = (len / row_bytes).div_ceil(blocks) * row_bytes;
    let end = offset + len;
    for offset in (0..blocks).map(|block| offset + (block * step).min(len)).chain([end]) {
        let boundary = Boundary { file, offset, row_group: None, is_transposed: offset < end };
        match boundaries.last_mut() {
            Some(last) if (last.file, last.offset) == (file, offset) => *last = boundary,
            Some(last) if (last.file, last.offset) > (file, offset) => {}
            _ => boundaries.push(boundary),
        }
    }
}

/// Cuts consecutive copies (tiles with equal elements in several files) at the same positions of their tensors in every
/// file. The positions are file block boundaries of the first file, and usually of the other files as well. Only short
/// copies share a write block, because the header bytes between tensors may differ in length from file to file.
fn cut_copies(output_ranges: &[OutputRange], block_bytes: u64, boundaries: &mut Vec<Boundary>) {
    // The start of the write block that the next short output range may join.
    let mut begun = None;
    let mut end = 0;
    for &OutputRange { file, offset, len, group, .. } in output_ranges {
        let Some(TileGroup { number, kind: TileGroupKind::Copies { first_offset } }) = group else { continue };
        end = offset + len;
        let is_short = len < MIN_COPY_BYTES;
        if begun.is_some_and(|begun| is_short && end - begun + GAP_BYTES <= block_bytes) {
            continue;
        }
        begun = is_short.then_some(offset);
        // The end of the previous row group may have moved to a boundary inside this output range.
        let _ = boundaries.pop_if(|last| last.file == file && last.offset >= offset);
        let ragged = first_offset % ALIGNMENT;
        // The header bytes behind a tensor are in its last write block.
        let count = (ragged + len + GAP_BYTES).div_ceil(block_bytes.max(ALIGNMENT));
        let step = (ragged + len).div_ceil(count).next_multiple_of(ALIGNMENT);
        let starts = (0..count).map(|index| (index, (index * step).saturating_sub(ragged)));
        for (index, within) in starts.take_while(|(index, within)| *index == 0 || *within < len) {
            boundaries.push(Boundary {
                file,
                offset: offset + within,
                row_group: Some((number, index)),
                is_transposed: false,
            });
        }
    }
    boundaries.push(Boundary { file: output_ranges[0].file, offset: end, row_group: None, is_transposed: false });
}
