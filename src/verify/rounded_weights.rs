//! Compares the two values that a checkpoint of mixed-precision training has of each parameter: the parameters of the module
//! are the master weights, rounded to nearest. Damage that no other check sees, such as the file of another save, shows here.

use std::collections::{HashMap, HashSet};

use super::findings::Findings;
use crate::catalog::{Catalog, TensorId, Weights, state_dict};
use crate::convert::Run;
use crate::convert::options::VerifyOptions;
use crate::convert::source_options::{input, read_options};
use crate::error::{Error, Result};
use crate::exec::compare;
use crate::format::{Checkpoint, DeclaredLayout, SeriesChoice, Want};
use crate::progress::Task;

/// Checks that the parameters of the module are the rounded master weights. Compares the parameters that `selected` and the
/// module have, and adds each difference to `found`. Does nothing if the checkpoint has no master weights, or if its files do
/// not have the module. `layout` is the declared layout of the checkpoint, which the module has, too.
///
/// # Errors
/// `Io`, `Stopped`.
pub fn same(
    args: &VerifyOptions,
    (source, layout): (&Checkpoint, Option<DeclaredLayout>),
    selected: &Catalog,
    run: &Run<'_>,
    found: &mut Findings,
) -> Result<()> {
    if args.source.weights.is_some() || source.catalog.weights != Some(Weights::Master) {
        return Ok(());
    }
    let mut options = read_options(&args.source, None, SeriesChoice::All, Want::State);
    options.weights = Some(Weights::Module);
    options.declared_layout = layout;
    let module = match Checkpoint::open(&args.src, &options) {
        Ok(module) => module,
        // ZeRO stage 3 saves no module.
        Err(Error::Usage(_)) => return Ok(()),
        Err(error) => return found.absorb(&args.src.display().to_string(), error),
    };
    let masters = parameters(selected);
    // A tied parameter has several names, and is compared once.
    let mut seen = HashSet::new();
    let mut pairs = Vec::new();
    for (name, id) in parameters(&module.catalog) {
        let Some(master) = masters.get(&name).copied().filter(|master| seen.insert(*master)) else { continue };
        let (master, rounded) = (source.catalog.tensor(master), module.catalog.tensor(id));
        if master.unreadable.is_none() && rounded.unreadable.is_none() {
            pairs.push((master, rounded));
        }
    }
    pairs.sort_by(|(left, _), (right, _)| left.fqn.cmp(&right.fqn));
    let total = pairs.iter().map(|(_, rounded)| rounded.len_bytes()).sum();
    let progress = Task::start(run.progress, "comparing the master weights with the module", total);
    for (master, rounded) in pairs {
        let name = master.fqn.as_str();
        if master.shape != rounded.shape {
            let detail = format!("shape {:?}, in the module {:?}", master.shape.as_slice(), rounded.shape.as_slice());
            found.add(name, KIND, detail);
            continue;
        }
        let (left, right) = ((input(source), master), (input(&module), rounded));
        match compare::measured_difference(left, right, rounded.dtype, &run.options, &progress, &run.stop) {
            Ok(None) => {}
            Ok(Some(difference)) => {
                let detail = format!(
                    "the master weights, as {}, are not the parameters of the module: {}",
                    rounded.dtype,
                    difference.difference.detail(&rounded.shape)
                );
                found.add_at(&difference.difference.index(&rounded.shape), name, KIND, detail);
            }
            Err(error) => found.absorb(name, error)?,
        }
    }
    Ok(())
}

/// The kind of the findings.
const KIND: &str = "rounded";

/// Returns the tensors of the model, by their names in the model.
fn parameters(catalog: &Catalog) -> HashMap<String, TensorId> {
    let root = state_dict::model_root(&catalog.state);
    let Some(model) = root.find(&catalog.state) else { return HashMap::new() };
    state_dict::all_tensors(model).into_iter().map(|(name, id)| (name.as_str().to_owned(), id)).collect()
}
