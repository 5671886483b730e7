//! The layout of parameters on tensor-parallel ranks, which `universal_checkpoint_info` of the model files describes.
//!
//! `affine_map` lists pieces: boxes that a shard and the parameter have in common. It is the layout of `AutoTP` from DeepSpeed
//! 0.19.8 on. Without it, lists of patterns say by the name of a parameter how the ranks have cut it; Megatron-DeepSpeed
//! writes them. Everything in the files is untrusted.
//!
//! ```text
//! cut along dim 0        cut along dim 1        two sub parameters, each cut along dim 0
//!     rank 0                 rank 0 | rank 1        a of rank 0
//!     ------                 rank 0 | rank 1        a of rank 1
//!     rank 1                                        b of rank 0
//!                                                   b of rank 1
//! ```
//!
//! Source: `deepspeed/checkpoint/affine.py`, and `merge_tp_slices` in `deepspeed/checkpoint/ds_to_universal.py` (0.19.8).

use std::collections::HashMap;

use regex::{Regex, RegexBuilder};

use super::fields::{Fields, numbers};
use super::folder::{GATHER, refused};
use crate::catalog::{Dict, Fqn, Value, contiguous_strides};
use crate::error::{Error, Result};
use crate::layout::{Cover, Dims, Region, Tile, numel, unravel};
use crate::name_list::{FEW, short_list};

/// The key of the description in a model file.
pub const INFO: &str = "universal_checkpoint_info";
const AFFINE_MAP: &str = "affine_map";

/// A box of a parameter, which one shard has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The index of the shard, which is the tensor-parallel rank.
    pub shard: usize,
    /// The box in the shard.
    pub from: Region,
    /// The position of the first element of the box in the parameter.
    pub to: Dims,
}

/// The parts of a parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Joined {
    pub shape: Dims,
    /// Boxes that have every element of the parameter exactly once.
    pub parts: Vec<Part>,
    /// Further copies of boxes: the box that is one of `parts`, and the copy.
    pub copies: Vec<[Part; 2]>,
    /// True if DeepSpeed's converter takes the mean of the copies, which need not be equal then.
    pub is_averaged: bool,
    /// True if no file describes the layout. Then `shape` is that of the first shard, and there are no parts.
    pub is_unknown: bool,
    /// True if the user has declared the layout.
    pub is_declared: bool,
}

impl Joined {
    /// Returns the parts of a parameter that one shard has as a whole.
    pub fn whole(shape: &Dims) -> Self {
        let part = Part { shard: 0, from: Region::whole(shape), to: Dims::from_elem(0, shape.len()) };
        Self { shape: shape.clone(), parts: vec![part], ..Self::default() }
    }

    /// Returns the layout of a parameter that no file describes. `shape` is the shape of its first shard.
    pub fn unknown(shape: &Dims) -> Self {
        Self { shape: shape.clone(), is_unknown: true, ..Self::default() }
    }

    /// Adds a box of a shard, which is the box `to` of the parameter. It is a copy if another shard has added the same box.
    /// `known` has the index of the part of each box that was added.
    pub fn add(&mut self, known: &mut HashMap<Region, usize>, shard: usize, from: Region, to: Region) {
        let part = Part { shard, from, to: to.offsets.clone() };
        match known.get(&to) {
            Some(first) => self.copies.push([self.parts[*first].clone(), part]),
            None => {
                known.insert(to, self.parts.len());
                self.parts.push(part);
            }
        }
    }

    /// Leaves out all rows from `rows` on, such as the padding of a vocabulary.
    pub fn keep_rows(&mut self, rows: u64) {
        let Some(first) = self.shape.first_mut() else { return };
        *first = rows.min(*first);
        let keep = |part: &mut Part| {
            part.from.sizes[0] = part.from.sizes[0].min(rows.saturating_sub(part.to[0]));
            part.from.sizes[0] > 0
        };
        self.parts.retain_mut(keep);
        self.copies.retain_mut(|copies| copies.iter_mut().all(keep));
    }
}

/// The patterns of names, each with a value.
struct Patterns<'a, T> {
    /// All patterns in their order.
    all: Vec<(&'a str, T)>,
    /// The index of each name without special characters. `AutoTP` writes a pattern for each parameter.
    literals: HashMap<String, usize>,
    /// The other patterns, with their indexes.
    others: Vec<(Regex, usize)>,
}

impl<T> Default for Patterns<'_, T> {
    fn default() -> Self {
        Self { all: Vec::new(), literals: HashMap::new(), others: Vec::new() }
    }
}

impl<'a, T> Patterns<'a, T> {
    /// The maximum number of patterns with special characters, which bounds the memory of compiled patterns.
    const MOST: usize = 1000;

    /// Adds a pattern, which matches the beginning of a name like `re.match` of Python.
    fn add(&mut self, info: &Fields<'_>, key: &str, pattern: &'a Value, value: T) -> Result<()> {
        let wrong = |found: &str| info.wrong(key, "regular expressions for names of parameters", found);
        let Some(pattern) = pattern.as_str() else { return Err(wrong(&pattern.type_name())) };
        let index = self.all.len();
        self.all.push((pattern, value));
        if let Some(name) = literal(pattern) {
            self.literals.entry(name).or_insert(index);
            return Ok(());
        }
        if self.others.len() == Self::MOST {
            return Err(wrong(&format!("more than {} patterns", Self::MOST)));
        }
        let regex = RegexBuilder::new(&format!("^(?:{pattern})")).size_limit(1 << 18).build();
        let regex = regex.map_err(|_| wrong(&format!("`{pattern:.60}`")))?;
        self.others.push((regex, index));
        Ok(())
    }

    /// Returns the first pattern that matches a name, and its value.
    fn find(&self, name: &str) -> Option<(&'a str, &T)> {
        let literal = self.literals.get(name).copied();
        let other = self.others.iter().find(|(regex, _)| regex.is_match(name)).map(|(_, index)| *index);
        let (pattern, value) = &self.all[literal.into_iter().chain(other).min()?];
        Some((pattern, value))
    }
}

/// Returns the only name that a pattern matches, if it has no special characters but `^`, `$` and escaped ones.
fn literal(pattern: &str) -> Option<String> {
    let mut chars = pattern.strip_prefix('^').unwrap_or(pattern).strip_suffix('$')?.chars();
    let mut name = String::new();
    while let Some(next) = chars.next() {
        match next {
            '\\' => name.push(chars.next().filter(char::is_ascii_punctuation)?),
            '.' | '^' | '$' | '*' | '+' | '?' | '{' | '}' | '[' | ']' | '|' | '(' | ')' => return None,
            _ => name.push(next),
        }
    }
    Some(name)
}

/// A parameter of several sub parameters, such as a fused query, key and value. Each rank has a part of each sub parameter.
struct SubParams<'a> {
    shape: &'a [Value],
    dim: usize,
}

/// The layout of the parameters of one stage on its tensor-parallel ranks.
pub struct ShardLayouts<'a> {
    info: Fields<'a>,
    maps: Patterns<'a, &'a Value>,
    replicated: Patterns<'a, ()>,
    averaged: Patterns<'a, ()>,
    two_sub_params: Patterns<'a, ()>,
    sub_params: Patterns<'a, SubParams<'a>>,
    row_parallel: Patterns<'a, ()>,
    vocabulary: Patterns<'a, ()>,
    unsupported: Patterns<'a, ()>,
}

impl<'a> ShardLayouts<'a> {
    /// Reads the description in a model file; `None` if the file has none.
    ///
    /// # Errors
    /// `Malformed` for a damaged description, `Unsupported` for a newer version.
    pub fn read(model: &Fields<'a>) -> Result<Option<Self>> {
        let Some(info) = model.dict(INFO)? else { return Ok(None) };
        let mut maps = Patterns::default();
        if let Some(map) = info.get(AFFINE_MAP) {
            let wrong = || info.wrong(AFFINE_MAP, "a dict {version, params}", map.type_name());
            let map = map.as_dict().ok_or_else(wrong)?;
            let version = map.get("version").map_or(Some(1), Value::as_i64).ok_or_else(wrong)?;
            if version > 1 {
                let kind = format!("with {AFFINE_MAP} of version {version} in {INFO}");
                return Err(refused(model.path(), &kind, GATHER));
            }
            let params = map.get("params").and_then(Value::as_dict).ok_or_else(wrong)?;
            for (pattern, entry) in &params.entries {
                maps.add(&info, AFFINE_MAP, pattern, entry)?;
            }
        }
        let list = |key: &str| -> Result<Patterns<'a, ()>> {
            let mut patterns = Patterns::default();
            match info.get(key) {
                None => {}
                Some(Value::List(items) | Value::Tuple(items)) => {
                    items.iter().try_for_each(|pattern| patterns.add(&info, key, pattern, ()))?;
                }
                Some(Value::Dict(dict)) => {
                    dict.entries.iter().try_for_each(|(pattern, _)| patterns.add(&info, key, pattern, ()))?;
                }
                Some(other) => return Err(info.wrong(key, "a list of patterns", other.type_name())),
            }
            Ok(patterns)
        };
        Ok(Some(Self {
            maps,
            replicated: list("tp_replicated_parameter_patterns")?,
            averaged: list("parameter_to_average_patterns")?,
            two_sub_params: list("parameter_with_2_sub_params_cat_dim_0")?,
            sub_params: read_sub_params(&info)?,
            row_parallel: list("parameter_with_row_parallelism_patterns")?,
            vocabulary: list("vocabulary_parameter_patterns")?,
            unsupported: list("autotp_unsupported_parameter_patterns")?,
            info,
        }))
    }

    /// Returns the parts of a parameter whose shards have these shapes, one for each tensor-parallel rank.
    ///
    /// # Errors
    /// `Malformed` for shapes that contradict the description, `Unsupported` for layouts that dtshard does not read.
    pub fn join(&self, fqn: &Fqn, shapes: &[&Dims]) -> Result<Joined> {
        let name = fqn.as_str();
        if let Some((_, map)) = self.maps.find(name) {
            return self.without_padding(name, self.by_pieces(name, map, shapes)?);
        }
        if self.unsupported.find(name).is_some() {
            let kind = format!("with a layout of `{name}` that DeepSpeed does not describe either");
            return Err(refused(self.info.path(), &kind, GATHER));
        }
        let wrong = |expected: &str| self.wrong_shapes(name, expected, shapes);
        let sizes_of = |dim: usize| -> Result<Vec<u64>> {
            let sizes = shapes.iter().map(|shape| shape.get(dim).copied());
            sizes.collect::<Option<_>>().ok_or_else(|| wrong(&format!("at least {} dims", dim + 1)))
        };
        let is_averaged = self.averaged.find(name).is_some();
        let joined = if self.replicated.find(name).is_some() || is_averaged {
            if shapes.iter().any(|shape| *shape != shapes[0]) {
                return Err(wrong("equal shapes on all tensor-parallel ranks"));
            }
            let mut joined = Joined { is_averaged, ..Joined::whole(shapes[0]) };
            for shard in 1..shapes.len() {
                let first = joined.parts[0].clone();
                joined.copies.push([first.clone(), Part { shard, ..first }]);
            }
            joined
        } else if self.two_sub_params.find(name).is_some() {
            let sizes = sizes_of(0)?;
            let halves = sizes.iter().map(|size| size.div_ceil(2)).collect::<Vec<u64>>();
            let rest = sizes.iter().zip(&halves).map(|(size, half)| size - half).collect();
            self.cut(name, 0, &[halves, rest], shapes)?
        } else if let Some((pattern, sub_params)) = self.sub_params.find(name) {
            let widths = self.sub_param_widths(name, pattern, sub_params, &sizes_of(sub_params.dim)?)?;
            self.check_view(name, sub_params, shapes)?;
            self.cut(name, sub_params.dim, &widths, shapes)?
        } else {
            let dim = usize::from(self.row_parallel.find(name).is_some());
            self.cut(name, dim, &[sizes_of(dim)?], shapes)?
        };
        self.without_padding(name, joined)
    }

    /// Leaves out the padding of a vocabulary.
    fn without_padding(&self, name: &str, mut joined: Joined) -> Result<Joined> {
        const KEY: &str = "original_vocab_size";
        if self.vocabulary.find(name).is_some() {
            let Some(rows) = self.info.number(KEY)?.filter(|rows| *rows > 0) else {
                return Err(self.info.wrong(KEY, format!("the number of rows of `{name}`"), "none"));
            };
            joined.keep_rows(rows);
        }
        Ok(joined)
    }

    fn wrong_shapes(&self, name: &str, expected: &str, shapes: &[&Dims]) -> Error {
        let found: Vec<String> = shapes.iter().map(|shape| format!("{:?}", shape.as_slice())).collect();
        let found = short_list(&found, FEW);
        let expected = format!("{expected}, as {INFO} says");
        Error::malformed(self.info.path(), format!("the shapes of `{name}` in param_shapes"), expected, found)
    }

    /// Returns the parts of a parameter that is cut along a dim. `widths` has, for each sub parameter, the sizes on all ranks.
    fn cut(&self, name: &str, dim: usize, widths: &[Vec<u64>], shapes: &[&Dims]) -> Result<Joined> {
        let wrong = |expected: &str| self.wrong_shapes(name, expected, shapes);
        let first = shapes[0];
        let others =
            |shape: &Dims| shape.iter().enumerate().filter(|(own, _)| *own != dim).map(|(_, size)| *size).collect();
        let expected: Dims = others(first);
        if shapes.iter().any(|shape| shape.len() != first.len() || others(shape) != expected) {
            return Err(wrong(&format!("shapes that differ only in dim {dim}")));
        }
        let mut starts = vec![0_u64; shapes.len()];
        let mut end = 0_u64;
        let mut parts = Vec::new();
        for sub_param in widths {
            for (shard, width) in sub_param.iter().enumerate() {
                let mut from = Region::whole(shapes[shard]);
                (from.offsets[dim], from.sizes[dim]) = (starts[shard], *width);
                let mut to = Dims::from_elem(0, first.len());
                to[dim] = end;
                let ends = starts[shard].checked_add(*width).zip(end.checked_add(*width));
                (starts[shard], end) = ends.ok_or_else(|| wrong("fewer than 2^64 elements"))?;
                parts.push(Part { shard, from, to });
            }
        }
        if starts.iter().zip(shapes).any(|(size, shape)| *size != shape[dim]) {
            return Err(wrong(&format!("sizes {starts:?} in dim {dim}")));
        }
        let mut shape = first.clone();
        shape[dim] = end;
        Ok(Joined { shape, parts, ..Joined::default() })
    }

    /// Returns the sizes of each sub parameter on all ranks. `sizes` has the size of the dim on each rank.
    fn sub_param_widths(
        &self,
        name: &str,
        pattern: &str,
        sub_params: &SubParams<'_>,
        sizes: &[u64],
    ) -> Result<Vec<Vec<u64>>> {
        const WIDTHS: &str = "sub_param_shard_widths";
        let wrong = |expected: &str| {
            let found = format!("others for `{name}`, whose shards have the sizes {sizes:?}");
            self.info.wrong("parameter_with_sub_params", expected, found)
        };
        let ranks = sizes.len();
        if let Some(all) = self.info.get(WIDTHS).and_then(Value::as_dict)
            && let Some(Value::List(own) | Value::Tuple(own)) = all.get(pattern)
        {
            let widths: Option<Vec<Vec<u64>>> = own.iter().map(|one| Some(numbers(one)?.to_vec())).collect();
            let widths = widths.filter(|widths| widths.iter().all(|one| one.len() == ranks));
            let sums = |widths: &Vec<Vec<u64>>| {
                let sum = |one: &Vec<u64>| one.iter().try_fold(0_u64, |sum, width| sum.checked_add(*width));
                widths.iter().map(sum).collect::<Option<Vec<u64>>>()
            };
            // The sizes of the sub parameters, if the description has them.
            let expected = numbers(&sub_params.shape[sub_params.dim]).map(|sizes| sizes.to_vec());
            let widths = widths.filter(|widths| expected.is_none() || sums(widths) == expected);
            return widths
                .ok_or_else(|| self.info.wrong(WIDTHS, format!("{ranks} sizes for each sub parameter"), "others"));
        }
        let spec = &sub_params.shape[sub_params.dim];
        let whole: Vec<u64> = match numbers(spec) {
            Some(whole) => whole.to_vec(),
            None => {
                let count = spec.as_i64().and_then(|count| u16::try_from(count).ok()).filter(|count| *count > 0);
                let count = u64::from(count.ok_or_else(|| wrong("the sizes or the number of the sub parameters"))?);
                let total = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size));
                let total = total.filter(|total| total.is_multiple_of(count) && *total > 0);
                let total = total.ok_or_else(|| wrong("a number of sub parameters that divides the size"))?;
                (0..count).map(|_| total / count).collect()
            }
        };
        let ranks = ranks as u64;
        if whole.iter().any(|size| !size.is_multiple_of(ranks)) {
            return Err(wrong(&format!("sizes of sub parameters that are multiples of {ranks}")));
        }
        Ok(whole.iter().map(|size| vec![size / ranks; sizes.len()]).collect())
    }

    /// Checks that sub parameters are described in the dims of the parameter, and not in another view of it.
    fn check_view(&self, name: &str, sub_params: &SubParams<'_>, shapes: &[&Dims]) -> Result<()> {
        let own = shapes[0];
        let is_same = |(dim, (spec, size)): (usize, (&Value, &u64))| {
            dim == sub_params.dim
                || spec.as_i64().is_some_and(|spec| spec < 0 || u64::try_from(spec).ok() == Some(*size))
        };
        if sub_params.shape.len() == own.len() && sub_params.shape.iter().zip(own).enumerate().all(is_same) {
            return Ok(());
        }
        let kind = format!("with sub parameters of `{name}` in another view than its shape {:?}", own.as_slice());
        Err(refused(self.info.path(), &kind, GATHER))
    }

    /// Returns the parts of a parameter that the pieces of `affine_map` describe.
    fn by_pieces(&self, name: &str, map: &Value, shapes: &[&Dims]) -> Result<Joined> {
        let at = format!("{AFFINE_MAP} of `{name}`");
        let wrong = |expected: &str, found: String| self.info.wrong(&at, expected, found);
        let damaged = || wrong("{logical_shape, ranks: {rank: {shard_shape, pieces}}}", String::from("others"));
        let shape = get(map, "logical_shape").and_then(numbers).ok_or_else(damaged)?;
        if numel(&shape).is_none() || shape.len() != shapes[0].len() {
            let expected = format!("a logical shape of {} dims and fewer than 2^64 elements", shapes[0].len());
            return Err(wrong(&expected, format!("{:.60}", format!("{:?}", shape.as_slice()))));
        }
        let ranks = get(map, "ranks").and_then(Value::as_dict).ok_or_else(damaged)?;
        if ranks.entries.len() != shapes.len() {
            return Err(wrong(&format!("{} tensor-parallel ranks", shapes.len()), ranks.entries.len().to_string()));
        }
        let mut joined = Joined { shape, ..Joined::default() };
        let mut known: HashMap<Region, usize> = HashMap::new();
        for (shard, own) in shapes.iter().enumerate() {
            let rank = rank_of(ranks, shard).ok_or_else(|| wrong(&format!("rank {shard}"), String::from("none")))?;
            let shard_shape = get(rank, "shard_shape").and_then(numbers).ok_or_else(damaged)?;
            if shard_shape != **own {
                let expected = format!("the shape {:?} of rank {shard} as in param_shapes", own.as_slice());
                return Err(wrong(&expected, format!("{:?}", shard_shape.as_slice())));
            }
            let Some(Value::List(pieces)) = get(rank, "pieces") else { return Err(damaged()) };
            let mut tiles = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let sizes = get(piece, "shape").and_then(numbers).ok_or_else(damaged)?;
                let view = |key: &str, shape: &[u64]| {
                    let Some(Value::List(view) | Value::Tuple(view)) = get(piece, key) else { return Err(damaged()) };
                    let [offset, strides] = view.as_slice() else { return Err(damaged()) };
                    let offset = offset.as_i64().and_then(|offset| u64::try_from(offset).ok()).ok_or_else(damaged)?;
                    let strides = numbers(strides).ok_or_else(damaged)?;
                    let found = format!("offset {offset}, strides {:?}", strides.as_slice());
                    let expected = format!("a box of {:?} elements of {shape:?} (`{key}`)", sizes.as_slice());
                    box_of(shape, &sizes, offset, &strides).ok_or_else(|| wrong(&expected, found))
                };
                if sizes.contains(&0) {
                    continue;
                }
                let (to, from) = (view("source", &joined.shape)?, view("dest", own)?);
                if get(piece, "scale").is_some_and(|scale| scale.to_string().parse() != Ok(1.0_f64)) {
                    let kind = format!("with a scaled piece of `{name}` in {AFFINE_MAP}");
                    return Err(refused(self.info.path(), &kind, GATHER));
                }
                tiles.push(Tile::from_region(&from));
                joined.add(&mut known, shard, from, to);
            }
            Cover::prove(own, &tiles)
                .map_err(|error| wrong(&format!("each element of shard {shard} once"), error.to_string()))?;
        }
        let tile =
            |part: &Part| Tile::from_region(&Region { offsets: part.to.clone(), sizes: part.from.sizes.clone() });
        let tiles: Vec<Tile> = joined.parts.iter().map(tile).collect();
        Cover::prove(&joined.shape, &tiles)
            .map_err(|error| wrong("each element of the parameter once", error.to_string()))?;
        Ok(joined)
    }
}

fn get<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.as_dict()?.get(key)
}

fn rank_of(ranks: &Dict, rank: usize) -> Option<&Value> {
    ranks.entries.iter().find_map(|(key, value)| (key.as_i64() == i64::try_from(rank).ok()).then_some(value))
}

/// Returns the box of a row-major tensor that a view has, if the view is a box. `sizes` are not 0.
fn box_of(shape: &[u64], sizes: &[u64], offset: u64, strides: &[u64]) -> Option<Region> {
    let own = contiguous_strides(shape);
    let is_same = |dim: usize| sizes[dim] == 1 || strides[dim] == own[dim];
    if sizes.len() != shape.len() || strides.len() != shape.len() || !(0..shape.len()).all(is_same) {
        return None;
    }
    if numel(shape).is_none_or(|numel| offset >= numel) {
        return None;
    }
    let region = Region { offsets: unravel(offset, shape), sizes: Dims::from_slice(sizes) };
    region.fits(shape).then_some(region)
}

fn read_sub_params<'a>(info: &Fields<'a>) -> Result<Patterns<'a, SubParams<'a>>> {
    const KEY: &str = "parameter_with_sub_params";
    let mut patterns = Patterns::default();
    let items = match info.get(KEY) {
        None => return Ok(patterns),
        Some(Value::List(items) | Value::Tuple(items)) => items,
        Some(other) => return Err(info.wrong(KEY, "a list of dicts", other.type_name())),
    };
    for item in items {
        let wrong = || info.wrong(KEY, "dicts {patterns, shape, partition_dim}", "others");
        let Some(Value::List(own) | Value::Tuple(own)) = get(item, "patterns") else { return Err(wrong()) };
        let Some(Value::List(shape) | Value::Tuple(shape)) = get(item, "shape") else { return Err(wrong()) };
        let dim = get(item, "partition_dim").and_then(Value::as_i64).and_then(|dim| usize::try_from(dim).ok());
        let dim = dim.filter(|dim| *dim < shape.len()).ok_or_else(wrong)?;
        for pattern in own {
            patterns.add(info, KEY, pattern, SubParams { shape, dim })?;
        }
    }
    Ok(patterns)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use torch_pickle::pickle::Unknown;

    use super::*;
    use crate::format::torch::{RankFile, load};
    use crate::storage::{Files, IoMode};

    /// Loads the first model file of a fixture.
    fn model_file(case: &str) -> RankFile {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trainers/deepspeed").join(case);
        let path: PathBuf = folder.join("global_step2/mp_rank_00_model_states.pt");
        let mut files = Files::new(IoMode::Read);
        load::load(&mut files, &BTreeMap::from([(0, path)]), Unknown::Refuse).unwrap().remove(0)
    }

    /// Joins a parameter of a fixture, and returns the shape and the parts.
    fn join(file: &RankFile, name: &str, shapes: &[&[u64]]) -> Result<Joined> {
        let layouts = ShardLayouts::read(&Fields::of_file(file)?)?.expect("a description");
        let shapes: Vec<Dims> = shapes.iter().map(|shape| Dims::from_slice(shape)).collect();
        layouts.join(&name.into(), &shapes.iter().collect::<Vec<_>>())
    }

    fn show(joined: &Joined) -> Vec<String> {
        let of = |part: &Part| format!("{} {} at {:?}", part.shard, part.from, part.to.as_slice());
        let parts = joined.parts.iter().map(of);
        let copies = joined.copies.iter().map(|[part, copy]| format!("{} = {}", of(part), of(copy)));
        std::iter::once(format!("{:?}", joined.shape.as_slice())).chain(parts).chain(copies).collect()
    }

    /// Returns the value of a key in nested dicts, to be changed.
    fn at<'a>(value: &'a mut Value, keys: &[&str]) -> &'a mut Value {
        keys.iter().fold(value, |value, key| match value {
            Value::Dict(dict) => {
                let found = dict.entries.iter_mut().find(|(own, _)| own.as_str() == Some(key));
                &mut found.unwrap_or_else(|| panic!("a key {key}")).1
            }
            Value::List(items) => &mut items[key.parse::<usize>().unwrap()],
            other => panic!("{}", other.type_name()),
        })
    }

    #[test]
    fn patterns_without_special_characters_are_names() {
        assert_eq!(literal(r"^layers\.0\.up\-1\.weight$").as_deref(), Some("layers.0.up-1.weight"));
        assert_eq!(literal("a_b$").as_deref(), Some("a_b"));
        for pattern in ["a", "^a", "a.b$", r"\d$", r"a\$", "a|b$", "[a]$", "$"] {
            assert!(literal(pattern).is_none_or(|name| name.is_empty()), "{pattern}");
        }
    }

    #[test]
    fn pieces_are_boxes_of_the_parameter() {
        let file = model_file("autotp_zero1");
        let found = join(&file, "layers.0.down.weight", &[&[6, 4], &[6, 3]]).unwrap();
        assert_eq!(show(&found), ["[6, 7]", "0 [0:6, 0:4] at [0, 0]", "1 [0:6, 0:3] at [0, 4]"]);
        let found = join(&file, "layers.0.norm.bias", &[&[6], &[6]]).unwrap();
        assert_eq!(show(&found), ["[6]", "0 [0:6] at [0]", "0 [0:6] at [0] = 1 [0:6] at [0]"]);
        let error = join(&file, "layers.0.down.weight", &[&[6, 3], &[6, 4]]).unwrap_err().to_string();
        assert!(error.contains("the shape [6, 3] of rank 0 as in param_shapes, found [6, 4]"), "{error}");
        assert!(join(&file, "layers.0.down.weight", &[&[6, 4], &[6, 2], &[6, 1]]).is_err());
    }

    #[test]
    fn lists_of_patterns_are_read_without_pieces() {
        let mut file = model_file("autotp_zero1");
        *at(&mut file.contents.value, &[INFO, AFFINE_MAP]) = Value::None;
        let found = join(&file, "layers.0.qkv.weight", &[&[6, 6], &[6, 6]]).unwrap();
        let with_pieces = join(&model_file("autotp_zero1"), "layers.0.qkv.weight", &[&[6, 6], &[6, 6]]).unwrap();
        let sorted = |joined: &Joined| {
            let mut all = show(joined);
            all.sort();
            all
        };
        assert_eq!(sorted(&found), sorted(&with_pieces));
        assert_eq!(show(&join(&file, "layers.0.up.bias", &[&[4], &[3]]).unwrap())[0], "[7]");
        for shapes in [[&[6, 6][..], &[5, 6]], [&[6, 6], &[6, 5]], [&[6, 6], &[6]]] {
            assert!(join(&file, "layers.0.qkv.weight", &shapes).is_err(), "{shapes:?}");
        }
        // Before version 0.4, the number of sub parameters stands for their sizes, which are equal.
        *at(&mut file.contents.value, &[INFO, "sub_param_shard_widths"]) = Value::None;
        *at(&mut file.contents.value, &[INFO, "parameter_with_sub_params", "0", "shape", "0"]) = Value::Int(3);
        let found = join(&file, "layers.0.qkv.weight", &[&[6, 6], &[6, 6]]).unwrap();
        assert_eq!(sorted(&found), sorted(&with_pieces));
        assert!(join(&file, "layers.0.qkv.weight", &[&[5, 6], &[5, 6]]).is_err());
        *at(&mut file.contents.value, &[INFO, "parameter_with_sub_params", "0", "shape", "1"]) = Value::Int(3);
        let error = join(&file, "layers.0.qkv.weight", &[&[6, 6], &[6, 6]]).unwrap_err().to_string();
        assert!(error.contains("another view"), "{error}");
    }

    #[test]
    fn vocabulary_loses_its_padding() {
        let file = model_file("tp_zero2");
        let found = join(&file, "words.weight", &[&[5, 6], &[5, 6]]).unwrap();
        assert_eq!(show(&found), ["[9, 6]", "0 [0:5, 0:6] at [0, 0]", "1 [0:4, 0:6] at [5, 0]"]);
        let found = join(&file, "layer.glu.weight", &[&[8, 6], &[8, 6]]).unwrap();
        assert_eq!(show(&found)[1..3], ["0 [0:4, 0:6] at [0, 0]", "1 [0:4, 0:6] at [4, 0]"]);
        assert!(join(&file, "layer.norm2.weight", &[&[6], &[6]]).unwrap().is_averaged);
    }

    #[test]
    fn first_pattern_that_matches_counts() {
        let file = model_file("tp_zero2");
        let info = Fields::of_file(&file).unwrap();
        let mut patterns = Patterns::default();
        let texts = [r"^a\.\d+$", r"^a\.0$", r"^b$", r"^b$", "^c"].map(|text| Value::Str(text.into()));
        for (index, text) in texts.iter().enumerate() {
            patterns.add(&info, "key", text, index).unwrap();
        }
        let found = |name| patterns.find(name).map(|(_, index)| *index);
        assert_eq!(["a.0", "a.1", "b", "cd", "d"].map(found), [Some(0), Some(0), Some(2), Some(4), None]);
    }

    #[test]
    fn damaged_pieces_are_errors() {
        let name = "layers.0.qkv.weight";
        let shapes: [&[u64]; 2] = [&[6, 6], &[6, 6]];
        let pattern = r"^layers\.0\.qkv\.weight$";
        let refuse = |words: &str, change: &dyn Fn(&mut Value)| {
            let mut file = model_file("autotp_zero1");
            change(at(&mut file.contents.value, &[INFO, AFFINE_MAP]));
            let error = join(&file, name, &shapes).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        };
        refuse("of version 2", &|map| *at(map, &["version"]) = Value::Int(2));
        fn pieces<'a>(map: &'a mut Value, pattern: &str) -> &'a mut Vec<Value> {
            let Value::Dict(ranks) = at(map, &["params", pattern, "ranks"]) else { panic!("a dict") };
            let Value::List(pieces) = at(&mut ranks.entries[0].1, &["pieces"]) else { panic!("a list") };
            pieces
        }
        refuse("each element of shard 0 once", &|map| _ = pieces(map, pattern).pop());
        refuse("each element of shard 0 once", &|map| {
            let first = pieces(map, pattern)[0].clone();
            pieces(map, pattern)[1] = first;
        });
        // Another rank has the same elements.
        refuse("each element of the parameter once", &|map| {
            *at(&mut pieces(map, pattern)[0], &["source", "0"]) = Value::Int(6);
        });
        refuse("a scaled piece", &|map| {
            let Value::Dict(piece) = &mut pieces(map, pattern)[0] else { panic!("a dict") };
            piece.entries.push((Value::Str("scale".into()), Value::Float(0.5)));
        });
        refuse("a box of [2, 6] elements", &|map| {
            *at(&mut pieces(map, pattern)[0], &["dest", "1", "0"]) = Value::Int(7);
        });
        refuse("2 tensor-parallel ranks, found 1", &|map| {
            let Value::Dict(ranks) = at(map, &["params", pattern, "ranks"]) else { panic!("a dict") };
            ranks.entries.pop();
        });
    }

    /// Replaces each number in the description by hostile ones: no result may be a panic or use much memory.
    #[test]
    fn hostile_numbers_do_not_panic() {
        fn replace(value: &mut Value, index: &mut usize, by: i64) {
            let mut each = |value: &mut Value| replace(value, index, by);
            match value {
                Value::List(items) | Value::Tuple(items) => items.iter_mut().for_each(each),
                Value::Dict(dict) => dict.entries.iter_mut().for_each(|(_, value)| each(value)),
                Value::Int(number) => {
                    if *index == 0 {
                        *number = by;
                    }
                    *index = index.wrapping_sub(1);
                }
                _ => {}
            }
        }
        for (case, with_map) in [("autotp_zero1", true), ("autotp_zero1", false), ("tp_zero2", true)] {
            let mut file = model_file(case);
            if !with_map {
                *at(&mut file.contents.value, &[INFO, AFFINE_MAP]) = Value::None;
            }
            let original = at(&mut file.contents.value, &[INFO]).clone();
            for by in [i64::MAX, i64::MIN, -1, 0, 1 << 62, 7] {
                for changed in 0..1000 {
                    let mut index = changed;
                    let mut info = original.clone();
                    replace(&mut info, &mut index, by);
                    if index < 1000 {
                        break;
                    }
                    *at(&mut file.contents.value, &[INFO]) = info;
                    let huge = 1 << 62;
                    for (name, shapes) in [
                        ("layers.0.qkv.weight", [&[6, 6][..], &[6, 6]]),
                        ("layers.0.down.weight", [&[6, 4], &[6, 3]]),
                        ("layers.0.norm.bias", [&[6], &[6]]),
                        ("layer.qkv.weight", [&[12, 6], &[12, 6]]),
                        ("words.weight", [&[5, 6], &[5, 6]]),
                        ("words.weight", [&[huge, 0], &[huge, 0]]),
                        ("layer.qkv.weight", [&[huge, 0], &[huge, 0]]),
                        ("layer.glu.weight", [&[huge, 0], &[u64::MAX, 0]]),
                        ("layers.0.norm.bias", [&[], &[]]),
                        ("other", [&[], &[]]),
                    ] {
                        let _ = join(&file, name, &shapes);
                    }
                }
            }
        }
    }
}
