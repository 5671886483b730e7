//! Matches the optimizer state of SRC to the optimizer state of FILLER, the checkpoint of `--fill-from`.
//!
//! An optimizer has the state of each parameter under a key, which is the name of the parameter or its parameter id
//! (the number of the parameter in `optimizer.state_dict()`). One parameter id may belong to different parameters in
//! SRC and in FILLER. Therefore parameter ids are matched by the names of their parameters ([`Numbering`]).
//!
//! If the names are not recorded, parameter ids are matched by position, and a note reports this. Invariant: dtshard
//! matches by position only if nothing contradicts the order of the model. Each of these facts contradicts it:
//! parameter names are listed in another order than in the model; the shapes of the state do not fit the order of the
//! model.

use std::collections::HashMap;

use super::optimizer_names::{new_names, rename_entries, renamed, stored_path};
use super::source::ConversionSource;
use crate::catalog::optimizer::{PARAM_NAMES, STATE};
use crate::catalog::parameter_names::{
    Numbering, groups_of_names, has_equal_groups, has_numbers, named_optimizers, numbered_optimizers, numbering,
    out_of_order, parameter_names_like, set_parameter_names, set_parameter_numbers,
};
use crate::catalog::{Catalog, Fqn, Key, Path, Value, path};
use crate::error::{Error, Result};
use crate::format::Checkpoint;

/// The text about a checkpoint whose optimizer state has parameter ids without names.
const WITHOUT_NAMES: &str = "stores its optimizer state by parameter index (0, 1, 2, ...) without parameter names";

/// Gives the selected optimizers of SRC the keys of the optimizers in FILLER (the checkpoint of `--fill-from`). The key
/// of a parameter is then its name, if FILLER has names as keys, or the parameter id that it has in FILLER. Adds a note
/// to the selection if state is matched by position.
///
/// # Errors
/// `Usage` if it is not certain which state of SRC and which state of FILLER belong to the same parameter.
pub fn match_filler(source: &mut ConversionSource, filler: &Checkpoint) -> Result<()> {
    let theirs = &filler.catalog;
    let numbered = numbered_optimizers(&theirs.state).into_iter().map(|path| (path, true));
    let named = named_optimizers(&theirs.state).into_iter().map(|path| (path, false));
    let new_names = new_names(&source.checkpoint.catalog, &source.selection.catalog);
    for (path, has_numbers) in numbered.chain(named) {
        let Some(own) = SelectedKeys::read(&source.selection.catalog.state, &path) else { continue };
        let stored = stored_optimizer(&source.checkpoint.catalog, &source.selection.catalog, &path);
        let pair = Pair { source, filler, path: &path, stored: stored.as_ref(), new_names: &new_names };
        let matched = match (own.kind, has_numbers) {
            (KeyKind::Names, false) => continue,
            (KeyKind::Names, true) => pair.names_with_numbers(),
            (KeyKind::Numbers, true) => pair.numbers_with_numbers(),
            (KeyKind::Numbers, false) => pair.numbers_with_names(),
            (KeyKind::NumbersInNames, true) => pair.numbers_in_names(),
            (KeyKind::NumbersInNames, false) => continue,
        };
        let matched = match matched {
            // Parameter groups without state have no values that could be mixed up.
            Err(_) if !own.has_state => continue,
            matched => matched?,
        };
        let selection = &mut source.selection;
        selection.notes.extend(matched.note.filter(|_| own.has_state));
        if let Some(names) = &matched.own {
            set_parameter_names(&mut selection.catalog.state, &path, names);
        }
        // A parameter that FILLER lacks keeps its name as its key, so it is later reported as an unknown name.
        if let Some(names) = &matched.theirs {
            set_parameter_numbers(&mut selection.catalog.state, &path, names);
        }
    }
    rename_entries(&mut source.selection.catalog);
    Ok(())
}

/// The kind of keys under which an optimizer of SRC has the state of its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyKind {
    Names,
    Numbers,
    /// The keys are parameter ids inside tensor names such as `optimizer.state.0.exp_avg`, because the file of SRC has
    /// no nested dicts.
    NumbersInNames,
}

/// The kind of keys of a selected optimizer of SRC, and whether the optimizer has any state.
struct SelectedKeys {
    kind: KeyKind,
    has_state: bool,
}

impl SelectedKeys {
    fn read(state: &Value, optimizer: &Path) -> Option<Self> {
        if let Some(dict) = optimizer.find(state).and_then(Value::as_dict) {
            let states = dict.get(STATE).and_then(Value::as_dict).map(|states| states.entries.as_slice());
            let kind = if has_numbers(optimizer.find(state)?) { KeyKind::Numbers } else { KeyKind::Names };
            return Some(Self { kind, has_state: states.is_some_and(|states| !states.is_empty()) });
        }
        let prefix = format!("{}.", optimizer.child(Key::Name(STATE.into())));
        let mut found = false;
        path::tensors(state, &Path::default(), &mut |path, _| {
            let name = path.to_string();
            let key = name.strip_prefix(&prefix).and_then(|rest| rest.split('.').next());
            found |= key.is_some_and(|key| key.parse::<usize>().is_ok());
        });
        found.then_some(Self { kind: KeyKind::NumbersInNames, has_state: true })
    }
}

/// Returns the path that a selected optimizer has in SRC, before its names are changed.
fn stored_optimizer(stored: &Catalog, selected: &Catalog, optimizer: &Path) -> Option<Path> {
    let paths = [numbered_optimizers(&stored.state), named_optimizers(&stored.state)].concat();
    stored_path(stored, &paths, selected, optimizer).cloned()
}

/// The parameter names with which the keys of an optimizer of SRC become keys of FILLER (the checkpoint of
/// `--fill-from`).
#[derive(Default)]
struct Matched {
    /// First step: item `i` of this list becomes the key of the parameter with parameter id `i` in SRC. `None` if this
    /// step is not needed.
    own: Option<Vec<Fqn>>,
    /// Second step: the key that equals item `i` of this list becomes `i`, which is the parameter id in FILLER. `None`
    /// if this step is not needed.
    theirs: Option<Vec<Fqn>>,
    /// The note that state is matched by position; `None` if it is matched by recorded names.
    note: Option<String>,
}

/// An optimizer of SRC, and the optimizer at the same path of FILLER (the checkpoint of `--fill-from`).
struct Pair<'a> {
    source: &'a ConversionSource,
    filler: &'a Checkpoint,
    path: &'a Path,
    /// The path that the optimizer has in SRC before names are changed; `None` if the path is unknown.
    stored: Option<&'a Path>,
    new_names: &'a HashMap<Fqn, Fqn>,
}

impl Pair<'_> {
    fn numbers_with_numbers(&self) -> Result<Matched> {
        let (own, theirs) = (self.own_numbering(), numbering(&self.filler.catalog, self.path));
        match (own, theirs) {
            (Numbering::Listed(own), Numbering::Listed(theirs)) => Ok(by_name(own, theirs, None)),
            (Numbering::InModelOrder(own), Numbering::InModelOrder(theirs)) => {
                Ok(by_name(own, theirs, Some(self.order_note(&[self.own_root(), self.filler_root()]))))
            }
            (Numbering::InModelOrder(own), Numbering::Listed(theirs)) => {
                self.check_order_of_filler(&self.own_root())?;
                Ok(by_name(own, theirs, Some(self.order_note(&[self.own_root()]))))
            }
            (Numbering::Listed(own), Numbering::InModelOrder(theirs)) => {
                self.check_order_of_source(&self.filler_root())?;
                Ok(by_name(own, theirs, Some(self.order_note(&[self.filler_root()]))))
            }
            (own, theirs) => {
                self.check_contradiction(&own, &self.own_root())?;
                self.check_contradiction(&theirs, &self.filler_root())?;
                self.by_position()
            }
        }
    }

    fn numbers_with_names(&self) -> Result<Matched> {
        let own = self.own_numbering();
        self.check_contradiction(&own, &self.own_root())?;
        let like = || parameter_names_like(&self.source.checkpoint.catalog, self.stored?, &self.filler.catalog);
        let (names, note) = match own {
            Numbering::Listed(names) => (names, None),
            // FSDP1 lists names in the order of its flat parameters, so the order of names used as keys does not contradict
            // an order of numbers.
            Numbering::InModelOrder(names) => (names, Some(self.order_note(&[self.own_root()]))),
            _ => {
                let names = like().ok_or_else(|| self.other_groups(&self.own_root()))?;
                self.check_order_of_filler(&self.own_root())?;
                (names, Some(self.position_note()))
            }
        };
        Ok(Matched { own: Some(names), theirs: None, note })
    }

    fn names_with_numbers(&self) -> Result<Matched> {
        let theirs = numbering(&self.filler.catalog, self.path);
        self.check_contradiction(&theirs, &self.filler_root())?;
        match theirs {
            Numbering::Listed(theirs) => Ok(Matched { theirs: Some(theirs), ..Matched::default() }),
            Numbering::InModelOrder(theirs) => {
                let note = Some(self.order_note(&[self.filler_root()]));
                Ok(Matched { theirs: Some(theirs), note, own: None })
            }
            _ => Err(self.unknown(&format!("{} {WITHOUT_NAMES}", self.filler_root()), &self.filler_root())),
        }
    }

    /// Matches an optimizer of SRC whose tensor names contain parameter ids, such as `optimizer.state.0.exp_avg`, to an
    /// optimizer with the same parameter ids as keys.
    fn numbers_in_names(&self) -> Result<Matched> {
        self.check_contradiction(&numbering(&self.filler.catalog, self.path), &self.filler_root())?;
        self.check_order_of_filler(&self.own_root())?;
        Ok(Matched { note: Some(self.position_note()), ..Matched::default() })
    }

    /// Matches parameter ids by position: id `i` of SRC is id `i` of FILLER (the checkpoint of `--fill-from`). Used if
    /// the name of at least one parameter is unknown.
    fn by_position(&self) -> Result<Matched> {
        let own = self.stored.and_then(|path| path.find(&self.source.checkpoint.catalog.state));
        let are_equal =
            own.zip(self.path.find(&self.filler.catalog.state)).map(|(own, other)| has_equal_groups(own, other));
        if are_equal != Some(true) {
            let is_named = matches!(self.own_numbering(), Numbering::Listed(_) | Numbering::InModelOrder(_));
            return Err(self.other_groups(&if is_named { self.filler_root() } else { self.own_root() }));
        }
        self.check_order_of_filler(&self.own_root())?;
        self.check_order_of_source(&self.filler_root())?;
        Ok(Matched { note: Some(self.position_note()), ..Matched::default() })
    }

    fn own_numbering(&self) -> Numbering {
        let Some(path) = self.stored else { return Numbering::Unknown };
        match numbering(&self.source.checkpoint.catalog, path) {
            Numbering::Listed(names) => Numbering::Listed(renamed(names, self.new_names)),
            Numbering::InModelOrder(names) => Numbering::InModelOrder(renamed(names, self.new_names)),
            other => other,
        }
    }

    /// Checks that the names in the optimizer of FILLER follow the order of its model. Only then can they be matched by
    /// position to the parameter ids of the checkpoint `other`, which records no names.
    fn check_order_of_filler(&self, other: &str) -> Result<()> {
        self.check_order(&self.filler.catalog, self.path, &self.filler_root(), other)
    }

    /// Checks that the names in the optimizer of SRC follow the order of its model. Only then can they be matched by
    /// position to the parameter ids of the checkpoint `other`, which records no names.
    fn check_order_of_source(&self, other: &str) -> Result<()> {
        let Some(path) = self.stored else { return Ok(()) };
        self.check_order(&self.source.checkpoint.catalog, path, &self.own_root(), other)
    }

    fn check_order(&self, catalog: &Catalog, path: &Path, root: &str, other: &str) -> Result<()> {
        match groups_of_names(catalog, path).and_then(|groups| out_of_order(catalog, &groups)) {
            None => Ok(()),
            Some((first, second)) => Err(self.unknown(
                &format!(
                    "{other} {WITHOUT_NAMES}, and the optimizer of {root} lists `{first}` before `{second}`, which is \
                     not the order of the model"
                ),
                other,
            )),
        }
    }

    fn check_contradiction(&self, numbering: &Numbering, root: &str) -> Result<()> {
        match numbering {
            Numbering::ContradictsNames => Err(self
                .unknown(&format!("in {root}, the shapes of the state contradict the names in `{PARAM_NAMES}`"), root)),
            Numbering::ContradictsOrder => Err(self.unknown(
                &format!(
                    "{root} {WITHOUT_NAMES}, and the shapes of the state contradict the order of the parameters in \
                     the model"
                ),
                root,
            )),
            _ => Ok(()),
        }
    }

    fn other_groups(&self, unnamed: &str) -> Error {
        self.unknown(
            &format!(
                "{unnamed} {WITHOUT_NAMES}, and {} and {} have different parameter groups",
                self.own_root(),
                self.filler_root()
            ),
            unnamed,
        )
    }

    /// Returns the error for an optimizer whose state cannot be matched. `why` is the reason, and `save_again` the checkpoint to
    /// save again.
    fn unknown(&self, why: &str, save_again: &str) -> Error {
        let path = self.stored.unwrap_or(self.path);
        let pattern = if path.0.is_empty() { STATE.to_owned() } else { path.to_string() };
        Error::usage(
            format!("options::fill_from: the parameters of the optimizer `{}` cannot be matched: {why}", self.path),
            format!(
                "leave the optimizer of SRC out with options::exclude '{pattern}', or save {save_again} again with \
                 get_optimizer_state_dict, which records the names of parameters"
            ),
        )
    }

    /// Returns the note that parameter ids are assumed to follow the order of the model, because the checkpoints in
    /// `without_names` record no names for them.
    fn order_note(&self, without_names: &[String]) -> String {
        format!(
            "the optimizer `{}` has parameter indices (0, 1, 2, ...) without parameter names in {}, so its state is \
             matched by position: dtshard assumes that the indices follow the order of the parameters in the model",
            self.path,
            without_names.join(" and ")
        )
    }

    /// Returns the note that parameter id `i` of SRC is assumed to be parameter id `i` of FILLER.
    fn position_note(&self) -> String {
        format!(
            "the optimizer `{}` has parameter indices (0, 1, 2, ...) without parameter names, so its state is matched \
             by position: dtshard assumes that {} and {} have the same parameters in the same order",
            self.path,
            self.own_root(),
            self.filler_root()
        )
    }

    fn own_root(&self) -> String {
        self.source.checkpoint.root.display().to_string()
    }

    fn filler_root(&self) -> String {
        self.filler.root.display().to_string()
    }
}

fn by_name(own: Vec<Fqn>, theirs: Vec<Fqn>, note: Option<String>) -> Matched {
    if own == theirs {
        Matched { note, ..Matched::default() }
    } else {
        Matched { own: Some(own), theirs: Some(theirs), note }
    }
}
