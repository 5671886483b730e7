//! Lays out rank files with whole tensors. With `--all-ranks`, every file has all tensors as whole tensors. With
//! `--unit`, every file has the tensors of some units as whole tensors; all other tensors keep their layout.
//!
//! `--all-ranks` writes what FSDP saves as `FULL_STATE_DICT` without `rank0_only`. `--unit` writes the state that is in
//! memory within `FullyShardedDataParallel.summon_full_params(unit)`.

use std::path::PathBuf;

use super::super::reshard::{LoadingJob, own_mesh, rows};
use super::super::run::Run;
use super::super::source::ConversionSource;
use super::super::target_parts::parts;
use super::super::{flatten, partial_values};
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Class, Path, Reservation, TensorEntry, optimizer, state_dict};
use crate::convert::options::{ConvertOptions, UnshardOptions};
use crate::error::{Error, Result};
use crate::format::{Format, TensorStorage, torch};
use crate::layout::cut::SplitChoice;
use crate::layout::{DeviceMesh, Pattern};
use crate::nearest;
use crate::quantity::count;

/// Name of the root unit in `--unit`; its module path is empty.
const ROOT: &str = ".";

/// Returns the format of the rank files.
///
/// # Errors
/// `Usage` if `--unit` is given and the source does not record how its tensors are sharded.
pub fn default_format(args: &UnshardOptions, source: &ConversionSource) -> Result<Format> {
    let format = source.checkpoint.format;
    match format.tensors() {
        TensorStorage::Flat if !args.unit.is_empty() => Ok(format),
        TensorStorage::Ranks => Ok(Format::TorchRanks),
        _ if args.unit.is_empty() => Ok(Format::TorchRanks),
        TensorStorage::Whole | TensorStorage::Boxes | TensorStorage::Flat => Err(Error::usage(
            format!(
                "options::unit keeps all other tensors sharded as in SRC, but {format} does not record how they are \
                 sharded"
            ),
            "use options::unit only for rank files of DTensors or ShardedTensors, and for flat parameters",
        )),
    }
}

/// Lays out the rank files, and returns notes about them.
///
/// # Errors
/// `Usage` for a pattern that matches no unit, for another format than that of [`default_format`], and if the number of
/// ranks is not known.
pub fn reserve(
    args: &UnshardOptions,
    convert: &ConvertOptions,
    source: &ConversionSource,
    to: Format,
    run: &Run<'_>,
) -> Result<(Reservation, Vec<String>)> {
    let expected = default_format(args, source)?;
    if to != expected {
        return Err(Error::usage(
            format!(
                "options::all_ranks and options::unit write the format {expected} for this SRC, and cannot write {to}"
            ),
            "omit options::to; or omit options::all_ranks and options::unit to write one file of whole tensors",
        ));
    }
    if let Some(file) = convert.dst.as_deref().filter(|path| path.extension().is_some_and(|it| it == "pt")) {
        return Err(Error::usage(
            format!("{} has the name of a file, but rank files need a folder", file.display()),
            "name a folder; or omit options::all_ranks and options::unit to write one file",
        ));
    }
    let version = convert.destination.torch_version.as_deref();
    let patterns = UnitPatterns::parse(&args.unit)?;
    match &source.checkpoint.catalog.flat {
        _ if args.unit.is_empty() => Ok((everything(source, version)?, Vec::new())),
        Some(_) if optimizer::named_groups(&source.selection.catalog.state).is_some() => Err(Error::usage(
            "options::unit works only on a model without optimizer state: an optimizer cannot list the parameters \
             of some units by name and those of other units by flat parameter",
            "leave the optimizer out with options::series model, or with options::exclude if it is in the same \
             file; or omit options::unit to write all tensors whole",
        )),
        Some(layout) => {
            let (rest, whole) = patterns.without(layout)?;
            let flat = rest.units.len();
            let stay = if flat == 1 { "stays" } else { "stay" };
            let note = format!("every rank stores {} whole; {} {stay} flat", count(whole, "unit"), count(flat, "unit"));
            // The notes about tensors that are not parameters are dropped, because `--unit` asks for whole tensors.
            let reservation = Reservation { notes: Vec::new(), ..flatten::reserve(source, &rest, to, run)? };
            Ok((reservation, vec![note]))
        }
        None => some_modules(&patterns, source, version),
    }
}

/// Lays out rank files in which every file has every tensor as a whole tensor.
fn everything(source: &ConversionSource, version: Option<&str>) -> Result<Reservation> {
    let Some(world_size) = source.checkpoint.world_size() else {
        return Err(Error::usage(
            format!("options::all_ranks needs the number of ranks, which {} does not record", source.checkpoint.format),
            "omit options::all_ranks to write one file, which every rank can load",
        ));
    };
    let mesh = DeviceMesh::parse(&format!("ranks={world_size}"))?;
    in_ranks(source, &mesh, version, &mut |_, _| Ok(torch::RankLayout::Plain))
}

/// Lays out rank files in which every file has the tensors of the modules that `patterns` match as whole tensors. All
/// other tensors keep their layout.
fn some_modules(
    patterns: &UnitPatterns,
    source: &ConversionSource,
    version: Option<&str>,
) -> Result<(Reservation, Vec<String>)> {
    let mesh = own_mesh(source).map_err(|_| {
        Error::usage(
            format!("options::unit: the tensors of {} are not all on one mesh", source.checkpoint.root.display()),
            "omit options::unit to write whole tensors; or use `dtshard reshard` with options::mesh to write \
             sharded ones",
        )
    })?;
    let root = state_dict::model_root(&source.selection.catalog.state);
    let mut whole = 0;
    let mut used = vec![false; patterns.0.len()];
    let mut names = Vec::new();
    let reservation = in_ranks(source, &mesh, version, &mut |path, entry| {
        let name = Path(path.0.strip_prefix(root.0.as_slice()).unwrap_or(&path.0).to_vec()).to_string();
        let covering = patterns.0.iter().zip(&mut used).filter(|(pattern, _)| pattern.covers(&name));
        let is_covered = covering.map(|(_, used)| *used = true).count() > 0;
        names.push(name);
        if is_covered {
            whole += 1;
            return Ok(torch::RankLayout::Plain);
        }
        as_it_is(path, entry, &mesh)
    })?;
    if let Some(unused) = used.iter().position(|used| !used) {
        return Err(no_such_unit(patterns.0[unused].as_str(), &names));
    }
    Ok((reservation, vec![format!("every rank stores {} whole", count(whole, "tensor"))]))
}

/// Returns the layout that a tensor has in the source.
///
/// # Errors
/// The errors of [`torch::RankLayout::dtensor`] and [`torch::RankLayout::fsdp1`].
fn as_it_is(path: &Path, entry: &TensorEntry, mesh: &DeviceMesh) -> Result<torch::RankLayout> {
    match &entry.sharding {
        Some(sharding) if entry.class == Class::Tensor => Ok(torch::RankLayout::Local(sharding.shared.clone())),
        Some(sharding) => {
            torch::RankLayout::dtensor(&path.fqn(), entry, mesh, sharding.shared.clone(), SplitChoice::Source)
        }
        None if entry.class == Class::ShardedTensor => {
            torch::RankLayout::fsdp1(&path.fqn(), entry, mesh, &rows(mesh).into(), SplitChoice::Source)
        }
        None => Ok(torch::RankLayout::Plain),
    }
}

/// Lays out rank files on a mesh, with the layout that `choose` returns for each tensor.
fn in_ranks(
    source: &ConversionSource,
    mesh: &DeviceMesh,
    version: Option<&str>,
    choose: &mut dyn FnMut(&Path, &TensorEntry) -> Result<torch::RankLayout>,
) -> Result<Reservation> {
    let selected = &source.selection.catalog;
    let LoadingJob { world_size, style } = LoadingJob::new(mesh, Some(&source.checkpoint), source, version)?;
    let mut whole = Reservation::default();
    for part in parts(source, Format::TorchRanks) {
        let names = part.names.as_ref().expect("rank files have names");
        let target = torch::RankTarget {
            mesh,
            world_size,
            style: &style,
            name: &|rank| PathBuf::from(names.render(rank.0, world_size)),
            layout: &mut |_, path, entry| choose(&part.whole_path(path), entry),
        };
        whole.append(&part.folder, torch::reserve_ranks(selected, &part.state, target)?);
    }
    partial_values::share(&source.checkpoint.catalog, mesh, &mut whole)?;
    Ok(whole)
}

/// The patterns of the option `--unit`, which match units by their module names.
struct UnitPatterns(Vec<Pattern>);

impl UnitPatterns {
    fn parse(texts: &[String]) -> Result<Self> {
        Ok(Self(Pattern::parse_all(texts)?))
    }

    /// Returns the flat layout without the units that the patterns match, and the number of removed units. The new flat
    /// layout has no parameter ids of the optimizer, because the ids would change.
    fn without(&self, layout: &FlatLayout) -> Result<(FlatLayout, usize)> {
        let is_matched = |pattern: &Pattern, module: &str| match module {
            "" => pattern.as_str() == ROOT,
            module => pattern.matches(module),
        };
        let unused = |pattern: &&Pattern| !layout.units.iter().any(|unit| is_matched(pattern, &unit.module));
        if let Some(pattern) = self.0.iter().find(unused) {
            let modules = layout.units.iter().map(|unit| match &*unit.module {
                "" => String::from(ROOT),
                module => module.to_owned(),
            });
            return Err(no_such_unit(pattern.as_str(), &modules.collect::<Vec<_>>()));
        }
        let mut rest = layout.clone();
        rest.units.retain(|unit| !self.0.iter().any(|pattern| is_matched(pattern, &unit.module)));
        // The optimizer numbers parameters outside flat parameters individually, so the old numbers would be wrong.
        rest.optimizer = None;
        let whole = layout.units.len() - rest.units.len();
        Ok((rest, whole))
    }
}

fn no_such_unit(pattern: &str, names: &[String]) -> Error {
    Error::usage(
        format!("options::unit {pattern}: no sharded module has a matching path"),
        nearest::pattern_hint(pattern, names),
    )
}
