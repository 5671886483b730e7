//! Whole tensors in rank files: all of them on every rank, or those of some units while the others stay as they are.
//!
//! The first is what `FULL_STATE_DICT` saves where it is not told `rank0_only`, the second what is in memory within
//! `FullyShardedDataParallel.summon_full_params(unit)`.

use std::path::PathBuf;

use super::super::parts::parts;
use super::super::reshard::{LoadingJob, own_mesh, rows};
use super::super::run::Run;
use super::super::source::ConversionSource;
use super::super::{flatten, partial};
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Class, Path, Reservation, TensorEntry, model, optimizer};
use crate::convert::options::UnshardOptions;
use crate::error::{Error, Result};
use crate::format::{Format, TensorStorage, torch};
use crate::layout::cut::SplitChoice;
use crate::layout::{DeviceMesh, Pattern};
use crate::nearest;
use crate::quantity::count;

/// The root unit, whose path is empty.
const ROOT: &str = ".";

/// # Errors
/// `Usage` where SRC has no shards that could stay.
pub fn default_format(args: &UnshardOptions, source: &ConversionSource) -> Result<Format> {
    let format = source.checkpoint.format;
    match format.tensors() {
        TensorStorage::Flat if !args.unit.is_empty() => Ok(format),
        TensorStorage::Ranks => Ok(Format::TorchRanks),
        _ if args.unit.is_empty() => Ok(Format::TorchRanks),
        TensorStorage::Whole | TensorStorage::Boxes | TensorStorage::Flat => Err(Error::usage(
            format!("options::unit: {format} does not say how the other tensors lie on ranks"),
            "it is for rank files of DTensors or ShardedTensors, and for flat parameters",
        )),
    }
}

/// Lay out rank files, and say what there is to say about them.
///
/// # Errors
/// `Usage` for a pattern that means nothing, for another format, and where ranks cannot be counted.
pub fn reserve(
    args: &UnshardOptions,
    source: &ConversionSource,
    to: Format,
    run: &Run<'_>,
) -> Result<(Reservation, Vec<String>)> {
    let expected = default_format(args, source)?;
    if to != expected {
        return Err(Error::usage(
            format!("options::all_ranks and options::unit write {expected} here, not {to}"),
            "leave options::to out, or leave them out for one whole file",
        ));
    }
    if let Some(file) = args.convert.dst.as_deref().filter(|path| path.extension().is_some_and(|it| it == "pt")) {
        return Err(Error::usage(
            format!("{} is called like a file, and rank files lie in a folder", file.display()),
            "name a folder; without options::all_ranks and options::unit there is one file",
        ));
    }
    let version = args.convert.destination.torch_version.as_deref();
    let patterns = UnitPatterns::parse(&args.unit)?;
    match &source.checkpoint.catalog.flat {
        _ if args.unit.is_empty() => Ok((everything(source, version)?, Vec::new())),
        Some(_) if optimizer::named_groups(&source.wanted.catalog.state).is_some() => Err(Error::usage(
            "options::unit takes the model alone: an optimizer does not know the parameters of some units by name, and those of \
             others by flat parameter",
            "options::series model leaves the optimizer out, options::exclude its part of one file; without options::unit all of it is whole",
        )),
        Some(layout) => {
            let (rest, whole) = patterns.without(layout)?;
            let note = format!("{} whole on every rank, {} flat", count(whole, "unit"), rest.units.len());
            // What it would say of tensors that are no parameters was asked for.
            let reservation = Reservation { notes: Vec::new(), ..flatten::reserve(source, &rest, to, run)? };
            Ok((reservation, vec![note]))
        }
        None => some_modules(&patterns, source, version),
    }
}

/// Every tensor whole in the file of every rank.
fn everything(source: &ConversionSource, version: Option<&str>) -> Result<Reservation> {
    let Some(world_size) = source.checkpoint.world_size() else {
        return Err(Error::usage(
            format!("options::all_ranks: {} does not say how many ranks there are", source.checkpoint.format),
            "leave it out for one file; every rank can load that",
        ));
    };
    let mesh = DeviceMesh::parse(&format!("ranks={world_size}"))?;
    in_ranks(source, &mesh, version, &mut |_, _| Ok(torch::RankLayout::Plain))
}

/// The modules of some patterns whole in the file of every rank.
fn some_modules(
    patterns: &UnitPatterns,
    source: &ConversionSource,
    version: Option<&str>,
) -> Result<(Reservation, Vec<String>)> {
    let mesh = own_mesh(source).map_err(|_| {
        Error::usage(
            format!("options::unit: the tensors of {} do not lie on one mesh", source.checkpoint.root.display()),
            "leave it out for whole tensors; reshard writes the rest for one mesh (options::mesh)",
        )
    })?;
    let root = model::model_root(&source.wanted.catalog.state);
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
    Ok((reservation, vec![format!("{} whole on every rank", count(whole, "tensor"))]))
}

/// How a tensor lies in the source.
///
/// # Errors
/// As [`torch::RankLayout::of_fsdp1`].
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

/// Rank files on a mesh, in which every tensor lies as `choose` says.
fn in_ranks(
    source: &ConversionSource,
    mesh: &DeviceMesh,
    version: Option<&str>,
    choose: &mut dyn FnMut(&Path, &TensorEntry) -> Result<torch::RankLayout>,
) -> Result<Reservation> {
    let wanted = &source.wanted.catalog;
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
        whole.append(&part.folder, torch::reserve_ranks(wanted, &part.state, target)?);
    }
    partial::share(&source.checkpoint.catalog, mesh, &mut whole)?;
    Ok(whole)
}

/// What `--unit` means.
struct UnitPatterns(Vec<Pattern>);

impl UnitPatterns {
    fn parse(texts: &[String]) -> Result<Self> {
        Ok(Self(Pattern::parse_all(texts)?))
    }

    /// A layout without the units that are meant, and how many those are.
    fn without(&self, layout: &FlatLayout) -> Result<(FlatLayout, usize)> {
        let is_meant = |pattern: &Pattern, module: &str| match module {
            "" => pattern.as_str() == ROOT,
            module => pattern.matches(module),
        };
        let unused = |pattern: &&Pattern| !layout.units.iter().any(|unit| is_meant(pattern, &unit.module));
        if let Some(pattern) = self.0.iter().find(unused) {
            let modules = layout.units.iter().map(|unit| match &*unit.module {
                "" => String::from(ROOT),
                module => module.to_owned(),
            });
            return Err(no_such_unit(pattern.as_str(), &modules.collect::<Vec<_>>()));
        }
        let mut rest = layout.clone();
        rest.units.retain(|unit| !self.0.iter().any(|pattern| is_meant(pattern, &unit.module)));
        // What is no flat parameter any more has its own names in an optimizer.
        rest.optimizer = None;
        let whole = layout.units.len() - rest.units.len();
        Ok((rest, whole))
    }
}

fn no_such_unit(pattern: &str, names: &[String]) -> Error {
    Error::usage(
        format!("options::unit {pattern}: no sharded module has a path like that"),
        nearest::pattern_hint(pattern, names),
    )
}
