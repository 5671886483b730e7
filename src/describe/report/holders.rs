//! The bytes of each rank, or of each file if the format does not record ranks.

use std::collections::BTreeMap;

use super::super::{Inspection, file_name};
use crate::html::{Bar, Bars, Section};
use crate::layout::Rank;
use crate::name_list::{FEW_NUMBERS, natural_order};
use crate::quantity::{count, human_bytes};
use crate::storage::FileId;

/// The maximum number of bars. If there are more ranks, a bar shows several ranks.
const MOST_BARS: usize = 64;

#[derive(Clone, Copy, Default, PartialEq)]
struct Stored {
    bytes: u64,
    empty: usize,
}

/// Returns the section, or `None` if fewer than two ranks or files hold tensors.
pub fn section(view: &Inspection<'_>) -> Option<Section> {
    let catalog = &view.checkpoint.catalog;
    let mut by_rank: BTreeMap<Rank, Stored> = BTreeMap::new();
    let mut by_file: BTreeMap<FileId, Stored> = BTreeMap::new();
    for entry in catalog.tensors.iter().filter(|entry| entry.unreadable.as_ref().is_none_or(|why| why.has_parts())) {
        for chunk in 0..entry.chunks.len() {
            let bytes = entry.chunks.numel(chunk).saturating_mul(entry.dtype.itemsize());
            let stored = match (entry.chunks.rank(chunk), entry.chunks.location(chunk).file()) {
                (Some(rank), _) => by_rank.entry(rank).or_default(),
                (None, Some(file)) => by_file.entry(file).or_default(),
                (None, None) => continue,
            };
            stored.bytes = stored.bytes.saturating_add(bytes);
            // A tensor without elements is empty on every rank.
            stored.empty += usize::from(bytes == 0 && entry.numel() > 0);
        }
    }
    let has_ranks = !by_rank.is_empty();
    let (noun, holders): (&str, Vec<(String, Stored)>) = if has_ranks {
        ("rank", by_rank.into_iter().map(|(rank, stored)| (rank.to_string(), stored)).collect())
    } else {
        let name = |file: FileId| {
            let any = crate::catalog::FileLocation::Bytes { file, offset: 0 };
            file_name(view, any).unwrap_or_default()
        };
        let mut files: Vec<(String, Stored)> = by_file.into_iter().map(|(file, stored)| (name(file), stored)).collect();
        files.sort_by(|left, right| natural_order(&left.0, &right.0));
        ("file", files)
    };
    if holders.len() < 2 {
        return None;
    }
    let total = holders.iter().map(|(_, stored)| stored.bytes).fold(0, u64::saturating_add);
    let most = holders.iter().map(|(_, stored)| stored.bytes).max().unwrap_or(0);
    let mean = total / holders.len() as u64;
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    let ratio = if total == 0 { 1.0 } else { most as f64 * holders.len() as f64 / total as f64 };
    let are_equal = holders.iter().all(|(_, stored)| *stored == holders[0].1);
    let per_bar =
        if are_equal && holders.len() > FEW_NUMBERS { holders.len() } else { holders.len().div_ceil(MOST_BARS) };
    let bars = holders.chunks(per_bar).map(bar).collect();
    let mut caption = format!(
        "{} hold {} of tensors, replicas included. The largest holds {ratio:.2} times the mean.",
        count(holders.len(), noun),
        human_bytes(total)
    );
    if are_equal {
        caption.push_str(&format!(" All {noun}s hold equally much."));
    } else if per_bar > 1 {
        caption.push_str(&format!(
            " Each bar shows {per_bar} {noun}s: the dark part is the smallest, the light part the largest of them."
        ));
    }
    let empty: usize = holders.iter().map(|(_, stored)| stored.empty).sum();
    if empty > 0 {
        let number = holders.iter().filter(|(_, stored)| stored.empty > 0).count();
        caption.push_str(&format!(
            " {} on {}: a tensor has fewer rows than ranks.",
            count(empty, "empty shard"),
            count(number, noun)
        ));
    }
    if !has_ranks {
        caption.push_str(" The format does not record ranks.");
    }
    Some(Section::new(format!("Bytes per {noun}"), caption, Bars { heading: noun.to_owned(), rows: bars, mean }))
}

fn bar(holders: &[(String, Stored)]) -> Bar {
    let sizes = || holders.iter().map(|(_, stored)| stored.bytes);
    let empty: usize = holders.iter().map(|(_, stored)| stored.empty).sum();
    let label = match holders {
        [(only, _)] => only.clone(),
        [(first, _), .., (last, _)] => format!("{first} .. {last}"),
        [] => String::new(),
    };
    let remark = if empty > 0 { count(empty, "empty shard") } else { String::new() };
    Bar { label, least: sizes().min().unwrap_or(0), most: sizes().max().unwrap_or(0), remark }
}
