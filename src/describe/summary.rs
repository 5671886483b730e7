//! The summary that `inspect` prints: format, numbers of parameters, bytes, training step, meshes, dtypes and files,
//! one line for each.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexMap;

use super::Inspection;
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Catalog, Key, Path, TensorEntry, TensorId, Value, optimizer, path, state_dict};
use crate::error::{Error, Result};
use crate::exec::gather::{PreparedTile, Scratch};
use crate::layout::DeviceMesh;
use crate::name_list::{FEW, FEW_NUMBERS, short_list, short_list_of_counted};
use crate::quantity::{count, human_bytes};
use crate::storage::lookup;
use crate::text::escape_invisible;

/// Returns the summary.
///
/// # Errors
/// `Io` if the tensor with the training step cannot be read.
pub fn summary(view: &Inspection<'_>) -> Result<String> {
    let line = |(what, text): (&str, String)| format!("{what:<12}{}\n", escape_invisible(&text));
    Ok(lines(view)?.into_iter().map(line).collect())
}

/// Returns the lines of the summary, each with the name and the text of a fact.
///
/// # Errors
/// `Io` if the tensor with the training step cannot be read.
pub fn lines(view: &Inspection<'_>) -> Result<Vec<(&'static str, String)>> {
    let (checkpoint, catalog) = (view.checkpoint, &view.checkpoint.catalog);
    let mut lines = vec![("format", checkpoint.format.to_string())];
    if checkpoint.resolved_from.is_some() {
        lines.push(("found at", checkpoint.root.display().to_string()));
    }
    if !checkpoint.missing.is_empty() {
        // If the user named one file of a set, the other files are not missing; they were not read.
        let is_one_file = !lookup::is_folder(&checkpoint.place(&checkpoint.root))?;
        lines.push((if is_one_file { "not read" } else { "missing" }, short_list(&checkpoint.missing, FEW)));
    }
    let shares = TensorTotals::of(catalog);
    if shares.model.tensors > 0 {
        lines.push(("parameters", shares.parameters()));
        lines.push(("model", shares.model.to_string()));
    }
    if shares.optimizer.tensors > 0 {
        lines.push(("optimizer", shares.optimizer.to_string()));
    }
    if shares.other.tensors > 0 {
        lines.push(("other", shares.other.to_string()));
    }
    if let Some(step) = step(view)? {
        lines.push(("step", step.to_string()));
    }
    for mesh in &catalog.meshes {
        lines.push(("mesh", mesh_text(mesh)));
    }
    if let Some(flat) = &catalog.flat {
        lines.push(("units", units_text(flat)));
    }
    for (dtype, share) in &shares.dtypes {
        lines.push(("dtype", format!("{dtype} in {share}")));
    }
    if !checkpoint.series.is_empty() {
        let skipped = match checkpoint.skipped_series.as_slice() {
            [] => String::new(),
            skipped => format!(" (not read: {})", skipped.join(", ")),
        };
        lines.push(("series", checkpoint.series.join(", ") + &skipped));
    }
    let stored = checkpoint.files.ids().filter(|file| !checkpoint.files.is_computed(*file));
    let sizes: Vec<u64> = stored.map(|file| checkpoint.files.len_bytes(file)).collect();
    lines.push(("files", format!("{} ({} on disk)", sizes.len(), human_bytes(sizes.iter().sum()))));
    lines.push(("objects", (path::objects(&catalog.state).len() + view.unreadable_objects.len()).to_string()));
    lines.extend(view.digest().map(|digest| ("digest", digest)));
    if !catalog.dropped.is_empty() {
        lines.push(("dropped", short_list(&catalog.dropped, FEW)));
    }
    let unreadable: Vec<String> = (catalog.tensors.iter())
        .filter_map(|entry| Some(format!("{} ({})", entry.fqn, entry.unreadable.as_ref()?.kind)))
        .collect();
    if !unreadable.is_empty() {
        lines.push(("unreadable", short_list(&unreadable, FEW)));
    }
    let conflicts = catalog.conflicts();
    if !conflicts.is_empty() {
        let names: Vec<&str> = conflicts.iter().filter_map(Error::fqn).collect();
        lines.push(("conflicts", format!("ranks disagree about {}", short_list(&names, FEW))));
    }
    let tied = tied(view);
    if !tied.is_empty() {
        lines.push(("tied", short_list(&tied, FEW)));
    }
    Ok(lines)
}

/// Returns the text for flat parameters: `5 flat parameters over 4 ranks (groups of 2; use_orig_params)`. A group is a
/// shard group.
fn units_text(flat: &FlatLayout) -> String {
    let hybrid = (flat.shard_group_size < flat.world_size).then(|| match flat.shard_group_size {
        1 => String::from("not sharded"),
        size => format!("groups of {size}"),
    });
    let views = flat.use_orig_params.then(|| String::from("use_orig_params"));
    let notes: Vec<String> = hybrid.into_iter().chain(views).collect();
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
    let ranks = count(flat.world_size as usize, "rank");
    format!("{} over {ranks}{notes}", count(flat.units.len(), "flat parameter"))
}

/// The number of distinct tensors, and the sum of their bytes.
#[derive(Debug, Default)]
struct TensorTotal {
    tensors: usize,
    bytes: u64,
}

impl TensorTotal {
    fn add(&mut self, entry: &TensorEntry) {
        self.tensors += 1;
        self.bytes += entry.len_bytes();
    }
}

impl std::fmt::Display for TensorTotal {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} ({})", count(self.tensors, "tensor"), human_bytes(self.bytes))
    }
}

/// The totals of the model, of the optimizer and of other tensors, and the total of each dtype. Unreadable tensors are
/// not counted.
#[derive(Debug, Default)]
struct TensorTotals {
    model: TensorTotal,
    optimizer: TensorTotal,
    other: TensorTotal,
    elements: u64,
    dtypes: BTreeMap<&'static str, TensorTotal>,
}

impl TensorTotals {
    fn of(catalog: &Catalog) -> Self {
        let model = state_dict::model(&catalog.state);
        let model: BTreeSet<TensorId> = if is_optimizer(&catalog.state) {
            BTreeSet::new()
        } else {
            model.tensors.iter().map(|(_, id)| *id).collect()
        };
        let mut shares = Self::default();
        let mut seen = BTreeSet::new();
        path::tensors(&catalog.state, &Path::default(), &mut |path, id| {
            if !seen.insert(id) {
                return;
            }
            let entry = catalog.tensor(id);
            if entry.unreadable.is_some() {
                return;
            }
            shares.dtypes.entry(entry.dtype.name()).or_default().add(entry);
            if model.contains(&id) {
                shares.model.add(entry);
                shares.elements += entry.numel();
            } else if is_optimizer(&catalog.state) || is_in_optimizer(path) {
                shares.optimizer.add(entry);
            } else {
                shares.other.add(entry);
            }
        });
        shares
    }

    /// Returns the number of elements of all tensors of the model: `1.24 B (1235814400)`.
    fn parameters(&self) -> String {
        let number = self.elements;
        let Some((unit, name)) = [(1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")]
            .into_iter()
            .find(|(unit, _)| number >= *unit)
        else {
            return number.to_string();
        };
        // The number is cut off after two decimals, not rounded: 999.999 M is not shown as 1.00 B.
        let hundredths = u128::from(number) * 100 / u128::from(unit);
        format!("{}.{:02} {name} ({number})", hundredths / 100, hundredths % 100)
    }
}

/// Returns true if `state` is itself the state dict of an optimizer, as in a series of optimizer rank files.
fn is_optimizer(state: &Value) -> bool {
    state.as_dict().is_some_and(|dict| dict.get("state").is_some() && dict.get("param_groups").is_some())
}

fn is_in_optimizer(path: &Path) -> bool {
    path.0.iter().any(|key| matches!(key, Key::Name(name) if optimizer::is_optimizer_key(name)))
}

/// Returns the text for a mesh: `dp=2,tp=2 (4 ranks)`. Lists the ranks if they are not 0, 1, 2, ... in order.
fn mesh_text(mesh: &DeviceMesh) -> String {
    if mesh.ranks_are_row_major() {
        return format!("{mesh} ({})", count(mesh.world_size(), "rank"));
    }
    let ranks: Vec<String> = mesh.ranks().iter().map(ToString::to_string).collect();
    format!("{mesh} ({}: {})", count(mesh.world_size(), "rank"), short_list_of_counted(&ranks, FEW_NUMBERS))
}

/// Returns the names of each tensor that has several names, as one text: `head.weight = embed.weight`.
fn tied(view: &Inspection<'_>) -> Vec<String> {
    let mut count = vec![0_u32; view.checkpoint.catalog.tensors.len()];
    view.names.iter().for_each(|(_, id)| count[id.0 as usize] += 1);
    // Counting first saves memory: there may be a million tensors, but only a few have several names.
    let mut names: IndexMap<TensorId, Vec<&str>> = IndexMap::new();
    for (name, id) in view.names.iter().filter(|(_, id)| count[id.0 as usize] > 1) {
        names.entry(*id).or_default().push(name.as_str());
    }
    names.into_values().map(|names| names.join(" = ")).collect()
}

/// The names under which trainers store the training step.
const STEP: [&str; 4] = ["step", "global_step", "global_steps", "iteration"];

/// The keys of dicts in which the training step is looked up, after the top level of the state dict. The optimizer is
/// not in the list, because the step counters of an optimizer may differ from the training step.
const PLACES: [&str; 5] = ["train_state", "extra_state", "trainer_state", "trainer", "app"];

/// Returns the training step, which is an integer or, as in torchtitan, a 0-d integer tensor. Returns `None` if there
/// is no step, or if its tensor is damaged, because `verify` reports the damage.
fn step(view: &Inspection<'_>) -> Result<Option<i64>> {
    let state = &view.checkpoint.catalog.state;
    let Some(top) = state.as_dict().filter(|_| !is_optimizer(state)) else { return Ok(None) };
    let places = std::iter::once(top).chain(PLACES.iter().filter_map(|key| top.get(key)?.as_dict()));
    let values = places.flat_map(|dict| STEP.iter().filter_map(|key| dict.get(key)));
    for value in values {
        let step = match value {
            Value::Int(step) => Some(*step),
            Value::Tensor(id) => match integer(view, view.checkpoint.catalog.tensor(*id)) {
                Err(error) if error.is_about_content() => None,
                step => step?,
            },
            _ => None,
        };
        if step.is_some() {
            return Ok(step);
        }
    }
    Ok(None)
}

/// Returns the value of a 0-d tensor of the dtype i32 or i64, or `None` for any other tensor.
fn integer(view: &Inspection<'_>, entry: &TensorEntry) -> Result<Option<i64>> {
    if !entry.shape.is_empty() || entry.chunks.is_empty() || !["i32", "i64"].contains(&entry.dtype.name()) {
        return Ok(None);
    }
    let input = crate::convert::input(view.checkpoint);
    let mut bytes = vec![0; usize::try_from(entry.dtype.itemsize()).expect("4 or 8")];
    PreparedTile::chunk(input, entry, 0)?.read(input, 0, &mut bytes, &mut Scratch::default())?;
    let narrow = || bytes.as_slice().try_into().map(i32::from_le_bytes).map(i64::from);
    Ok(bytes.as_slice().try_into().map(i64::from_le_bytes).or_else(|_| narrow()).ok())
}
