//! The bytes that a conversion copies from each rank or file of SRC to each rank or file of DST, for the report of a dry
//! run.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;

use super::prepared::Prepared;
use crate::catalog::{Reserved, TensorEntry};
use crate::error::Result;
use crate::html::{Heat, HeatCell, Section};
use crate::layout::Rank;
use crate::name_list::natural_order;
use crate::plan::SourceTensor;
use crate::plan::intersect::TilePlan;
use crate::quantity::human_bytes;
use crate::storage::FileId;

/// The maximum number of rows, and of columns, of the table.
const MOST: usize = 16;

/// The rank that stores bytes, or the file if the format does not record ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum End {
    Rank(Rank),
    File(FileId),
}

/// Returns the table of the bytes from each rank or file of SRC to each rank or file of DST, in the dtypes of SRC.
///
/// # Errors
/// `Coverage` if the chunks of a tensor do not cover it exactly once.
pub fn section(prepared: &Prepared) -> Result<Option<Section>> {
    let (catalog, files) = (&prepared.source.checkpoint.catalog, &prepared.reservation.files);
    let target = |file: FileId| files[file.0 as usize].rank.map_or(End::File(file), End::Rank);
    let tensors = prepared.reservation.tensors.par_iter();
    let sums = tensors.try_fold(HashMap::new, |mut sums: HashMap<(End, End), u64>, tensor| -> Result<_> {
        let source = SourceTensor::new(catalog.tensor(tensor.source))?;
        for chunk in 0..tensor.entry.chunks.len() {
            let Some(file) = tensor.entry.chunks.location(chunk).file() else { continue };
            for plan in plans(&source, tensor, chunk) {
                for overlap in &plan.overlaps {
                    let lens = overlap.segments.iter().map(|dim| dim.iter().map(|range| range.len).sum::<u64>());
                    let bytes = lens.fold(source.entry.dtype.itemsize(), u64::saturating_mul);
                    let from = origin(source.entry, overlap.chunk as usize);
                    let sum = sums.entry((from, target(file))).or_default();
                    *sum = sum.saturating_add(bytes);
                }
            }
        }
        Ok(sums)
    });
    let sums = sums.try_reduce(HashMap::new, |mut left, right| {
        for (ends, bytes) in right {
            let sum = left.entry(ends).or_default();
            *sum = sum.saturating_add(bytes);
        }
        Ok(left)
    })?;
    if sums.is_empty() {
        return Ok(None);
    }
    let source_files = &prepared.source.checkpoint.files;
    let from = Ends::new(sums.keys().map(|ends| ends.0), |file| {
        source_files.path(file).file_name().unwrap_or_default().to_string_lossy().into_owned()
    });
    let to = Ends::new(sums.keys().map(|ends| ends.1), |file| files[file.0 as usize].path.display().to_string());
    Ok(Some(table(&sums, &from, &to)))
}

/// Returns the plans of a chunk of DST: one, or one for each partial value that is read.
fn plans<'a>(source: &'a SourceTensor<'_>, tensor: &'a Reserved, chunk: usize) -> impl Iterator<Item = TilePlan> + 'a {
    let tile = tensor.entry.chunks.tile(chunk);
    let share = tensor.shares.get(chunk);
    let number = source.entry.partial_values.as_ref().map_or(1, |partial| partial.reduction.count());
    let values: Vec<u64> = match share {
        Some(share) => share.partial_values.clone(),
        None => (0..number).collect(),
    };
    let within = share.and_then(|share| share.within.as_ref());
    values.into_iter().map(move |value| source.plan(&tile, value, within))
}

fn origin(entry: &TensorEntry, chunk: usize) -> End {
    match (entry.chunks.rank(chunk), entry.chunks.location(chunk).file()) {
        (Some(rank), _) => End::Rank(rank),
        (None, file) => End::File(file.expect("a chunk with elements is in a file")),
    }
}

/// The ranks or files of one side, divided into at most [`MOST`] groups.
struct Ends {
    /// The index of the group of each rank or file.
    groups: HashMap<End, usize>,
    names: Vec<String>,
    /// The number of ranks or files in a group.
    per_group: usize,
}

impl Ends {
    fn new(ends: impl Iterator<Item = End>, file_name: impl Fn(FileId) -> String) -> Self {
        let name = |end: End| match end {
            End::Rank(rank) => format!("rank {rank}"),
            End::File(file) => file_name(file),
        };
        let mut named: Vec<(String, End)> = ends.map(|end| (name(end), end)).collect();
        named.sort_by(|left, right| natural_order(&left.0, &right.0).then(Ordering::Equal));
        named.dedup();
        let per_group = named.len().div_ceil(MOST).max(1);
        let groups = named.iter().enumerate().map(|(index, (_, end))| (*end, index / per_group)).collect();
        let label = |group: &[(String, End)]| match group {
            [(only, _)] => only.clone(),
            [(first, End::Rank(_)), .., (_, End::Rank(last))] => {
                format!("{} .. {last}", first.replace("rank", "ranks"))
            }
            [(first, _), .., (last, _)] => format!("{first} .. {last}"),
            [] => String::new(),
        };
        Self { groups, names: named.chunks(per_group).map(label).collect(), per_group }
    }
}

fn table(sums: &HashMap<(End, End), u64>, from: &Ends, to: &Ends) -> Section {
    let mut cells: BTreeMap<(usize, usize), u64> = BTreeMap::new();
    for ((source, target), bytes) in sums {
        let sum = cells.entry((from.groups[source], to.groups[target])).or_default();
        *sum = sum.saturating_add(*bytes);
    }
    let most = cells.values().copied().max().unwrap_or(0);
    let cell = |bytes: Option<&u64>| match bytes {
        None => HeatCell { text: String::from("-"), intensity: 0 },
        Some(bytes) => {
            let intensity = u8::try_from(u128::from(*bytes) * 7 / u128::from(most.max(1))).unwrap_or(7) + 1;
            HeatCell { text: human_bytes(*bytes), intensity }
        }
    };
    let row = |(index, name): (usize, &String)| {
        let row = (0..to.names.len()).map(|column| cell(cells.get(&(index, column))));
        (name.clone(), row.collect())
    };
    let rows = from.names.iter().enumerate().map(row).collect();
    let mut caption = String::from(
        "Rows are the ranks (or files) of SRC, columns those of DST. A cell has the bytes of tensors that are copied from the row \
         to the column, in the dtype of SRC; stronger colours are more bytes. Bytes that several files of DST need count \
         several times, and of several replicas in SRC the first is read.",
    );
    for (side, ends) in [("row", from), ("column", to)] {
        if ends.per_group > 1 {
            caption.push_str(&format!(" Each {side} is the sum of up to {}.", ends.per_group));
        }
    }
    let heat = Heat { corner: String::from("from / to"), columns: to.names.clone(), rows };
    Section::new("Bytes from SRC to DST", caption, heat)
}
