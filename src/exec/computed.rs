//! Reads [computed tensors](crate::catalog::ComputedTensor): reads their source tensors, and computes the elements of a range.
//!
//! Elements are computed in f32 and rounded once to the dtype of the result, to nearest, ties to even. A result is equal bit for
//! bit to the PyTorch operation that [`Calculation`] describes; NaNs are those of `floats.rs`. Offsets count bytes of the
//! computed file, or elements if the name contains `element`. Memory: one block of source elements.
//!
//! Rules: `weight_dequant` of DeepSeek-V3 (8-bit floats with the scales of their blocks), and the OCP Microscaling specification
//! 1.0 (MXFP4), as `convert_moe_packed_tensors` of transformers applies it.

use std::iter::zip;

use smallvec::SmallVec;

use super::floats::{
    BF16, F16, load_f64, single_of_bf16, single_of_exponent, single_of_f8_e4m3fn, single_of_f8_e5m2,
    single_of_f8_e8m0fnu, single_of_f16, store_f32,
};
use super::{Input, Locations, PreparedTile, Scratch};
use crate::catalog::{Calculation, ComputedTensor, Dtype, MXFP4_GROUP, TensorId};
use crate::error::Result;
use crate::layout::{Region, Tile};
use crate::plan::SourceTensor;

/// The number of elements that are computed at once.
const BLOCK_ELEMENTS: usize = 32 << 10;

/// A computed tensor, with the plans of its source tensors.
#[derive(Debug)]
pub struct ComputedSource {
    computed: ComputedTensor,
    sources: SmallVec<[PreparedTile; 2]>,
    /// The dtypes of the source tensors.
    dtypes: SmallVec<[Dtype; 2]>,
    table: Table,
}

/// The values of all codes of an encoding, so that decoding an element is a lookup.
#[derive(Debug)]
enum Table {
    /// The encoding has no table.
    Empty,
    /// The values of the 8-bit floats.
    Floats(Box<[f32; 256]>),
    /// For each of the 256 exponents, the bytes of the 16 elements of MXFP4.
    Groups(Vec<u8>),
}

impl ComputedSource {
    /// Plans and locates the source tensors of a computed tensor.
    ///
    /// # Errors
    /// Errors of [`SourceTensor::new`] and [`PreparedTile::new`].
    pub fn new(input: Input<'_>, computed: &ComputedTensor) -> Result<Self> {
        let prepare = |id: &TensorId| {
            let source = SourceTensor::new(input.catalog.tensor(*id))?;
            let whole = Tile::from_region(&Region::whole(&source.entry.shape));
            PreparedTile::new(input, &source, &whole, &mut Locations::default())
        };
        let dtypes: SmallVec<[Dtype; 2]> = computed.sources.iter().map(|id| input.catalog.tensor(*id).dtype).collect();
        let table = match computed.calculation {
            Calculation::Zeros | Calculation::Add(_) => Table::Empty,
            Calculation::ScaledBlocks { .. } => Table::Floats(Box::new(std::array::from_fn(|bits| {
                let bits = u8::try_from(bits).expect("256 codes");
                f32::from_bits(match dtypes[0] {
                    Dtype::F8E5m2 => single_of_f8_e5m2(bits),
                    _ => single_of_f8_e4m3fn(bits),
                })
            }))),
            Calculation::Mxfp4 => Table::Groups(mxfp4_values(dtypes[1], computed.dtype)),
        };
        Ok(Self {
            sources: computed.sources.iter().map(prepare).collect::<Result<_>>()?,
            dtypes,
            table,
            computed: computed.clone(),
        })
    }

    /// Fills `buffer` with bytes of the computed file, starting at byte `offset`. The range consists of complete elements.
    ///
    /// # Errors
    /// Errors of [`PreparedTile::read`].
    pub fn read(&self, input: Input<'_>, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let itemsize = self.computed.dtype.itemsize();
        let first = offset / itemsize;
        let mut scratch = Scratch::default();
        match (self.computed.calculation, &self.table) {
            (Calculation::Zeros, _) => buffer.fill(0),
            (Calculation::Add(number), _) => {
                self.sources[0].read(input, first, buffer, &mut scratch)?;
                add(self.computed.dtype, number, buffer);
            }
            (Calculation::ScaledBlocks { block }, Table::Floats(values)) => {
                let mut scales = Scales { source: self, block, loaded: Vec::new(), row: 0, columns: 0..0 };
                self.in_blocks(first, buffer, |first, target| {
                    self.scaled(input, values, &mut scales, first, target, &mut scratch)
                })?;
            }
            (Calculation::Mxfp4, Table::Groups(values)) if self.computed.dtype == Dtype::Bf16 => {
                self.in_blocks(first, buffer, |first, target| {
                    self.mxfp4::<2>(input, values, first, target, &mut scratch)
                })?;
            }
            (Calculation::Mxfp4, Table::Groups(values)) => {
                self.in_blocks(first, buffer, |first, target| {
                    self.mxfp4::<4>(input, values, first, target, &mut scratch)
                })?;
            }
            (calculation, table) => unreachable!("{calculation:?} with the table {table:?}"),
        }
        Ok(())
    }

    /// Calls `compute` with each block of a range of elements: the index of its first element, and its bytes.
    fn in_blocks(
        &self,
        first: u64,
        buffer: &mut [u8],
        mut compute: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let itemsize = usize::try_from(self.computed.dtype.itemsize()).expect("a few bytes");
        let blocks = buffer.chunks_mut(BLOCK_ELEMENTS * itemsize);
        (0_u64..).zip(blocks).try_for_each(|(index, target)| compute(first + index * BLOCK_ELEMENTS as u64, target))
    }

    /// Computes elements of [`Calculation::ScaledBlocks`].
    fn scaled(
        &self,
        input: Input<'_>,
        values: &[f32; 256],
        scales: &mut Scales<'_>,
        first: u64,
        target: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let itemsize = usize::try_from(self.computed.dtype.itemsize()).expect("a few bytes");
        let mut floats = vec![0; target.len() / itemsize];
        self.sources[0].read(input, first, &mut floats, scratch)?;
        let [rows, columns] = last_two(&self.computed.shape);
        let (mut at, end) = (first, first + floats.len() as u64);
        while at < end {
            // The elements up to the end of their row or of the range, and of these up to the end of their block.
            let (row, column) = (at / columns, at % columns);
            let row_end = end.min(at - column + columns);
            let scales = scales.of_row(input, (row / rows, row % rows), column..column + (row_end - at), scratch)?;
            let mut column = column;
            for scale in scales {
                let next = (column / scale.width + 1) * scale.width;
                let len = usize::try_from((next - column).min(row_end - at)).expect("a range in memory");
                let start = usize::try_from(at - first).expect("a range in memory");
                let floats = &floats[start..start + len];
                let target = &mut target[start * itemsize..(start + len) * itemsize];
                scale_all(self.computed.dtype, floats, values, scale.value, target);
                at += len as u64;
                column = next;
            }
        }
        Ok(())
    }

    /// Computes elements of [`Calculation::Mxfp4`], which have N bytes. The packed bytes and the exponents have the order of the
    /// elements.
    fn mxfp4<const N: usize>(
        &self,
        input: Input<'_>,
        values: &[u8],
        first: u64,
        target: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let mut elements = target.as_chunks_mut::<N>().0;
        let end = first + elements.len() as u64;
        let zeros = |len: u64| vec![0; usize::try_from(len).expect("a range in memory")];
        let (first_byte, first_group) = (first / 2, first / MXFP4_GROUP);
        let mut packed = zeros(end.div_ceil(2) - first_byte);
        self.sources[0].read(input, first_byte, &mut packed, scratch)?;
        let mut exponents = zeros(end.div_ceil(MXFP4_GROUP) - first_group);
        self.sources[1].read(input, first_group, &mut exponents, scratch)?;
        let mut packed = packed.as_slice();
        let mut at = first;
        for (group, exponent) in (first_group..).zip(exponents) {
            let group_end = end.min((group + 1) * MXFP4_GROUP);
            let values = &values.as_chunks::<N>().0.as_chunks::<16>().0[usize::from(exponent)];
            let len = usize::try_from(group_end - at).expect("a group");
            let (mut own, rest) = elements.split_at_mut(len);
            if !at.is_multiple_of(2) {
                let ([element], others) = own.split_at_mut(1) else { break };
                *element = values[usize::from(packed[0] >> 4)];
                (own, packed) = (others, &packed[1..]);
            }
            let (pairs, last) = own.as_chunks_mut::<2>();
            for ([low, high], byte) in zip(&mut *pairs, packed) {
                (*low, *high) = (values[usize::from(byte & 15)], values[usize::from(byte >> 4)]);
            }
            packed = &packed[pairs.len()..];
            if let [element] = last {
                *element = values[usize::from(packed[0] & 15)];
            }
            (elements, at) = (rest, group_end);
        }
        Ok(())
    }
}

/// Returns the bytes of the 16 elements of MXFP4 for each of the 256 exponents.
fn mxfp4_values(exponents: Dtype, dtype: Dtype) -> Vec<u8> {
    let mut bytes = Vec::new();
    for exponent in 0..=u8::MAX {
        // 2^128, which f32 does not have, times 0.5 is finite.
        let scale = match exponents {
            Dtype::F8E8m0fnu if exponent == u8::MAX => f64::NAN,
            _ => f64::from_bits((u64::from(exponent) + 1023 - 127) << 52),
        };
        for value in MXFP4 {
            let single = load_f64((f64::from(value) * scale).to_le_bytes()).single;
            match dtype {
                Dtype::Bf16 => bytes.extend(BF16.store_16(single).bytes),
                _ => bytes.extend(single.to_le_bytes()),
            }
        }
    }
    bytes
}

/// The values of MXFP4 (E2M1) by their bits.
const MXFP4: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The scales of one row of blocks, which are read once for all rows of these blocks.
struct Scales<'a> {
    source: &'a ComputedSource,
    block: [u64; 2],
    loaded: Vec<f32>,
    /// The row of blocks, counted over all matrices.
    row: u64,
    /// The columns of blocks that are loaded.
    columns: std::ops::Range<u64>,
}

/// The scale of consecutive elements of a row.
struct Scale {
    value: f32,
    /// The number of columns of a block.
    width: u64,
}

impl Scales<'_> {
    /// Returns the scales of some columns of a row, each for one block. `at` is the index of the matrix and of the row in the matrix.
    fn of_row(
        &mut self,
        input: Input<'_>,
        at: (u64, u64),
        columns: std::ops::Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<impl Iterator<Item = Scale> + use<'_>> {
        let [height, width] = self.block;
        let [rows, all_columns] = last_two(&self.source.computed.shape);
        let in_row = all_columns.div_ceil(width);
        let row = at.0 * rows.div_ceil(height) + at.1 / height;
        let blocks = columns.start / width..columns.end.div_ceil(width);
        let is_loaded = self.row == row && self.columns.start <= blocks.start && blocks.end <= self.columns.end;
        if !is_loaded {
            let dtype = self.source.dtypes[1];
            let count = usize::try_from(blocks.end - blocks.start).expect("at most the elements of a block");
            let mut bytes = vec![0; count * usize::try_from(dtype.itemsize()).expect("a few bytes")];
            self.source.sources[1].read(input, row * in_row + blocks.start, &mut bytes, scratch)?;
            (self.loaded, self.row, self.columns) = (singles(dtype, &bytes), row, blocks.clone());
        }
        let from = usize::try_from(blocks.start - self.columns.start).expect("loaded");
        let count = usize::try_from(blocks.end - blocks.start).expect("loaded");
        Ok(self.loaded[from..from + count].iter().map(move |value| Scale { value: *value, width }))
    }
}

/// Returns the sizes of the last two dims of a shape that has two.
fn last_two(shape: &[u64]) -> [u64; 2] {
    *shape.last_chunk().expect("a matrix")
}

/// Returns elements as f32. Unsigned bytes are exponents.
fn singles(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    fn of<const N: usize>(bytes: &[u8], single: impl Fn([u8; N]) -> u32) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|element| f32::from_bits(single(*element))).collect()
    }
    match dtype {
        Dtype::F32 => of(bytes, u32::from_le_bytes),
        Dtype::Bf16 => of(bytes, single_of_bf16),
        Dtype::F16 => of(bytes, single_of_f16),
        Dtype::F8E8m0fnu => of(bytes, |[bits]| single_of_f8_e8m0fnu(bits)),
        _ => of(bytes, |[exponent]| single_of_exponent(exponent)),
    }
}

/// Multiplies 8-bit floats, whose values are in a table, by a scale. Rounds each product to the dtype, which is bf16 or f32.
// As a part of a larger function, the loop is not vectorised, and takes twice as long.
#[inline(never)]
fn scale_all(dtype: Dtype, floats: &[u8], values: &[f32; 256], scale: f32, target: &mut [u8]) {
    let products = floats.iter().map(|bits| (values[usize::from(*bits)] * scale).to_bits());
    if dtype == Dtype::Bf16 {
        zip(products, target.as_chunks_mut().0).for_each(|(product, to)| *to = BF16.store_16(product).bytes);
    } else {
        zip(products, target.as_chunks_mut().0).for_each(|(product, to)| *to = store_f32(product).bytes);
    }
}

/// Adds a number to each element, as PyTorch adds a Python number on CPU: the number is rounded to the dtype first, and f16 and
/// bf16 are added in f32.
fn add(dtype: Dtype, number: f64, elements: &mut [u8]) {
    fn each<const N: usize>(elements: &mut [u8], sum: impl Fn([u8; N]) -> [u8; N]) {
        elements.as_chunks_mut().0.iter_mut().for_each(|element| *element = sum(*element));
    }
    let single = load_f64(number.to_le_bytes()).single;
    let rounded = match dtype {
        Dtype::Bf16 => single_of_bf16(BF16.store_16(single).bytes),
        Dtype::F16 => single_of_f16(F16.store_16(single).bytes),
        _ => single,
    };
    let sum = |bits: u32| (f32::from_bits(bits) + f32::from_bits(rounded)).to_bits();
    match dtype {
        Dtype::Bf16 => each(elements, |element| BF16.store_16(sum(single_of_bf16(element))).bytes),
        Dtype::F16 => each(elements, |element| F16.store_16(sum(single_of_f16(element))).bytes),
        Dtype::F64 => each(elements, |element| (f64::from_le_bytes(element) + number).to_le_bytes()),
        _ => each(elements, |element| sum(u32::from_le_bytes(element)).to_le_bytes()),
    }
}
