//! `verify` checks that a checkpoint is sound, and compares the values of two checkpoints. A difference or damage is a
//! finding, not an error. This module opens the checkpoints; the modules `soundness` and `rounded_weights` check one
//! checkpoint, `comparison` compares two checkpoints, `findings` collects and prints the findings, and `report` shows them on
//! an HTML page.

mod comparison;
mod findings;
mod report;
mod rounded_weights;
mod saved_digests;
mod soundness;

use std::collections::HashSet;
use std::sync::Arc;

use self::comparison::{Comparison, suggest_dtype};
pub use self::findings::Verification;
use self::findings::{Findings, Subjects};
use self::saved_digests::DigestListing;
use self::soundness::sound;
use crate::catalog::{TensorEntry, path};
use crate::convert::declared_layout::declared_layout;
use crate::convert::options::VerifyOptions;
use crate::convert::source::{Defaults, announce, select_options};
use crate::convert::source_options::{check_flat, check_series, check_weights, read_options, refuse_without_tensors};
use crate::convert::{Engine, Run, Setup, name_for_comparison, weight_map};
use crate::error::Result;
use crate::format::{Checkpoint, DeclaredLayout, SeriesChoice, Want, fsdp_flat};
use crate::progress::Progress;
use crate::select::{self, Selected, Wrappers};

/// Verifies that a checkpoint is sound: every tensor is covered exactly once, replicas are equal, and stored checksums
/// hold. With [`VerifyOptions::other`], also compares the values with a second checkpoint, whose layout and format may
/// differ, or with saved output of `dtshard inspect --digest --json`.
///
/// ```no_run
/// use dtshard::{NoProgress, Setup, VerifyOptions, verify};
///
/// let options = VerifyOptions { src: "step-1000".into(), other: Some("out".into()), ..VerifyOptions::default() };
/// let verification = verify(&options, &Setup::default(), NoProgress)?;
/// assert!(verification.is_same(), "{}", verification.lines(true));
/// # Ok::<(), dtshard::Error>(())
/// ```
///
/// # Errors
/// `Usage` for options that do not fit the checkpoints; `Io` if a file cannot be read. Damage and differences are
/// findings, not errors.
pub fn verify(options: &VerifyOptions, setup: &Setup, progress: impl Progress + 'static) -> Result<Verification> {
    let progress: Arc<dyn Progress> = Arc::new(progress);
    let engine = Engine::reading(&options.source, setup)?;
    engine.work(&progress, |run| {
        let mut found = Findings::default();
        let source = find(options, run, &mut found)?;
        let subjects = Subjects { src: options.src.clone(), other: options.other.clone(), source };
        Ok(Verification::new(found, subjects))
    })
}

/// Verifies the checkpoints, and returns SRC if it could be opened.
fn find(args: &VerifyOptions, run: &Run<'_>, found: &mut Findings) -> Result<Option<Checkpoint>> {
    let listing = args.other.as_deref().map(DigestListing::read_if_any).transpose()?.flatten();
    let layout = declared_layout(&args.source.layout, args.select.keep_names)?;
    let Some(mut source) = open(args, &args.src, layout.clone(), run.progress, found)? else { return Ok(None) };
    let mut other = match &args.other {
        Some(path) if listing.is_none() => match open(args, path, None, run.progress, found)? {
            Some(other) => Some(other),
            None => return Ok(Some(source)),
        },
        _ => None,
    };
    if let Some(other) = &mut other {
        name_for_comparison(&mut source.catalog, &mut other.catalog);
    }
    let opened: Vec<&Checkpoint> = std::iter::once(&source).chain(&other).collect();
    check_series(&args.source, &opened)?;
    check_weights(&args.source, &opened)?;
    check_flat(&args.source, args.like.as_deref(), &opened)?;
    refuse_nothing(args, &source, run.progress)?;
    // Name errors are reported here, before hours of reading.
    let names = ComparedNames::new(args, &mut source, other.as_ref(), run, found)?;
    sound(&source, &names.source.catalog, run, found)?;
    match (&other, &listing) {
        (Some(other), _) => Comparison { source: &source, other, names: &names, args, run }.same(found)?,
        (None, Some(listing)) => names.same_digests(&source, listing, args, run, found)?,
        (None, None) => rounded_weights::same(args, (&source, layout), &names.source.catalog, run, found)?,
    }
    suggest_dtype(found, args);
    Ok(Some(source))
}

/// The tensors to compare: those of SRC, with the selected names and dtypes, and, if OTHER is a checkpoint, those of
/// OTHER that the filters keep.
struct ComparedNames {
    source: Selected,
    other: Option<Selected>,
    /// The names of SRC that the filters leave out, which are also ignored in a listing of digests. Empty if OTHER is a
    /// checkpoint, because the filters are then applied to OTHER itself.
    left_out: HashSet<String>,
}

impl ComparedNames {
    fn new(
        args: &VerifyOptions,
        source: &mut Checkpoint,
        other: Option<&Checkpoint>,
        run: &Run<'_>,
        found: &mut Findings,
    ) -> Result<Self> {
        let defaults = Defaults { wrappers: Wrappers::Cut, ..Defaults::everything() };
        let options = select_options(&args.select, defaults)?;
        let map = weight_map::apply(source, &args.select.map, &options)?;
        let options = match map {
            Some(map) => {
                map.notes.iter().for_each(|note| run.progress.note(note));
                map.details.iter().for_each(|line| run.progress.detail(line));
                weight_map::check_joined(source, &map, run)?;
                found.map = map.document;
                map.options
            }
            None => options,
        };
        let options = select::NameOptions { allow_unknown_layouts: other.is_none(), ..options };
        Ok(match other {
            Some(other) => {
                let (source, other) = select::select_both(&source.catalog, &other.catalog, &options)?;
                Self { source, other: Some(other), left_out: HashSet::new() }
            }
            None => {
                let (source, left_out) = select::select_and_list_left_out(&source.catalog, &options)?;
                Self { source, other: None, left_out }
            }
        })
    }
}

/// Opens a checkpoint. If the checkpoint is too damaged to be opened, returns `None` and adds a finding.
fn open(
    args: &VerifyOptions,
    path: &std::path::Path,
    layout: Option<DeclaredLayout>,
    progress: &dyn Progress,
    found: &mut Findings,
) -> Result<Option<Checkpoint>> {
    let mut options = read_options(&args.source, args.like.as_deref(), SeriesChoice::All, Want::State);
    options.declared_layout = layout;
    // A damaged layout file is an error, not a finding, because it is not part of the checkpoint.
    if let Some(path) = &options.flat.layout {
        fsdp_flat::document::read(path)?;
    }
    // Only a comparison needs the shapes that flat parameters lack.
    options.flat.raw = args.other.is_none();
    options.flat.is_strict = true;
    match Checkpoint::open(path, &options) {
        Ok(checkpoint) => {
            announce(&checkpoint, progress);
            Ok(Some(checkpoint))
        }
        Err(error) => {
            found.absorb(&path.display().to_string(), error)?;
            Ok(None)
        }
    }
}

/// Refuses a checkpoint that is empty, and files of ranks whose layout is unknown. A checkpoint that has objects but no tensors is
/// verified with a warning, because the user may have meant another path.
fn refuse_nothing(args: &VerifyOptions, source: &Checkpoint, progress: &dyn Progress) -> Result<()> {
    let catalog = &source.catalog;
    if (source.has_undeclared_shards() || catalog.is_layout_unknown()) && args.select.map.map.is_none() {
        // Without the layout, neither the coverage nor the values of a tensor can be checked.
        let undeclared = |entry: &TensorEntry| {
            let why = entry.unreadable.as_ref().filter(|why| why.is_of_unknown_layout())?;
            Some(why.error(entry.fqn.as_str()))
        };
        return catalog.tensors.iter().find_map(undeclared).map_or(Ok(()), Err);
    }
    if !catalog.tensors.is_empty() || !catalog.dropped.is_empty() {
        return Ok(());
    }
    if path::objects(&catalog.state).is_empty() {
        return refuse_without_tensors(&args.src, source, &args.source, &args.select);
    }
    progress.warning(&format!("{} has no tensors: only its objects are verified", args.src.display()));
    Ok(())
}
