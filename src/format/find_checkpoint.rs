//! Finds the folders of a checkpoint below the folder that the user gives.
//!
//! Trainers save checkpoints a few folders down: `root/latest` names `global_step_10`, which contains `actor`. The
//! search knows the names that trainers give to such folders. If exactly one subfolder has such a name, the search
//! continues there; if several have, the error lists them. If none has, the search continues in a folder's only
//! subfolder, at most [`MAX_UNNAMED`] times: users choose names such as `out` or `run` themselves. The content of
//! `latest` is untrusted: it may only name a folder inside the folder of `latest`.
//!
//! Source of the names: verl (`global_step_N/actor`), torchtitan (`step-N`), Megatron-LM (`iter_NNNNNNN`), DeepSpeed
//! (`latest`, `latest_universal`), makani (`training_checkpoints`), Lightning (`epoch=0-step=3.ckpt/`), Hugging Face Trainer
//! (`checkpoint-N`), accelerate (`checkpoints/checkpoint_N`; `pytorch_model_fsdp_N` beside `optimizer_N`,
//! `utils/fsdp_utils.py`), OLMo-core (`stepN/model_and_optim`), Composer (`epE-baB`, and links `latest-rankR.pt`),
//! torchtune (`epoch_N`, `dist_epoch_N`).

use std::io::Read;
use std::path::{Path, PathBuf};

use super::detect::{detect, has_lone_files, lone_file, look};
use super::index::is_index as is_index_name;
use super::listing::DetectedFiles;
use super::rank_names::is_composer_step;
use super::{
    Format, RankName, ReadOptions, SeriesChoice, deepspeed, deepspeed_universal, folder_of, foreign, list, name_of,
    natural_order, relative_to_folder,
};
use crate::catalog::Weights;
use crate::error::{Error, FormatError, Result};
use crate::name_list::{FEW, short_list};
use crate::storage::lookup::{self, FileKind};

/// The components of a checkpoint folder that a verb needs: model, optimizer and other files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Want {
    /// The model, the optimizer, and all other files in the folder.
    #[default]
    All,
    /// The model and the optimizer. Other files are not examined.
    State,
    /// The model alone.
    Model,
}

/// The location of a checkpoint.
#[derive(Debug)]
pub struct CheckpointLocation {
    /// The file or folder of the checkpoint.
    pub root: PathBuf,
    /// The folders of the checkpoint, relative to the root, each with the files that were detected in the folder.
    pub folders: Vec<(PathBuf, DetectedFiles)>,
    /// The names of folders beside the root that also belong to the checkpoint, and are not read.
    pub skipped_folders: Vec<String>,
    /// The weights that the files have, if other files beside them have others; otherwise `None`.
    pub weights: Option<Weights>,
    /// A text about files that have the model a second time and are not read; `None` if there are none.
    pub note: Option<String>,
}

impl CheckpointLocation {
    /// Returns the location of a checkpoint that is in one file or folder.
    fn single(root: PathBuf, found: DetectedFiles) -> Self {
        Self { root, folders: vec![(PathBuf::new(), found)], skipped_folders: Vec::new(), weights: None, note: None }
    }
}

/// The maximum number of nested folders that the search visits, including SRC. The checkpoints of the known trainers
/// are at most five folders deep.
const MAX_DEPTH: usize = 8;

/// The maximum number of times that the search enters a folder only because it is the only subfolder of its parent
/// folder, and not because of its name.
const MAX_UNNAMED: usize = 2;

/// Finds the checkpoint at or below `path`.
///
/// # Errors
/// `Usage` with the candidates if there are several, otherwise the errors of [`detect`].
pub fn find(path: &Path, options: &ReadOptions) -> Result<CheckpointLocation> {
    foreign::refuse_address(path)?;
    let from = options.from;
    let mut at = path.to_path_buf();
    let mut with_only_subfolder: Vec<PathBuf> = Vec::new();
    for _ in 0..MAX_DEPTH {
        if let Some(below) = deepspeed_below(&at, from)? {
            let second = match look(&at, None) {
                // Several formats, or damaged files, do not matter if none of these files is read.
                Err(error) if !matches!(error, Error::Storage(_)) && options.weights != Some(Weights::Module) => None,
                second => second?,
            };
            return with_second_model(at, &below, second, options);
        }
        if let Some(found) = look(&at, from)? {
            return Ok(CheckpointLocation::single(at, found));
        }
        let names = subfolders(&at)?;
        if let Some(place) = accelerate(&at, &names, options)? {
            return Ok(place);
        }
        match next(&at, &names)? {
            Some(next) => at.push(next),
            None if has_lone_files(&at)? => {
                let found = lone_file(&at, from)?;
                return Ok(CheckpointLocation::single(at, found));
            }
            None => {
                let next = if with_only_subfolder.len() < MAX_UNNAMED { only_subfolder(&at)? } else { None };
                let Some(next) = next else {
                    // The error names the folder that the user knows, because the search below it found nothing.
                    let known = with_only_subfolder.first().unwrap_or(&at);
                    let found = lone_file(known, from)?;
                    return Ok(CheckpointLocation::single(known.clone(), found));
                };
                let below = at.join(next);
                with_only_subfolder.push(std::mem::replace(&mut at, below));
            }
        }
    }
    Err(Error::usage(
        format!(
            "{}: folders are nested too deeply, and no checkpoint was found down to {}",
            path.display(),
            at.display()
        ),
        "give the folder that contains the files",
    ))
}

/// Returns the name of the subfolder with a DeepSpeed checkpoint that the text file `latest` names, or otherwise
/// `latest_universal`. Beside it, accelerate and the Hugging Face Trainer save the model a second time, in the dtype of
/// training (`model.safetensors`). Returns `None` if there is no such subfolder, or if the user requires another format.
///
/// # Errors
/// `Io`.
fn deepspeed_below(folder: &Path, from: Option<Format>) -> Result<Option<String>> {
    let pointers = [("latest", Format::Deepspeed), (deepspeed_universal::LATEST, Format::DeepspeedUniversal)];
    if !lookup::is_folder(folder)? {
        return Ok(None);
    }
    for (name, format) in pointers {
        let path = folder.join(name);
        if from.is_some_and(|from| from != format) || !lookup::is_file(&path)? {
            continue;
        }
        let pointer = match read_pointer(folder, path) {
            // The search reports a damaged file if it needs it.
            Err(Error::Format(FormatError::Malformed { .. })) => continue,
            pointer => pointer?,
        };
        let Some(below) = pointer.target(folder)? else { continue };
        if list(&folder.join(&below))?.iter().any(|name| deepspeed::is_states(name)) {
            return Ok(Some(below));
        }
    }
    Ok(None)
}

/// Returns the location of the DeepSpeed checkpoint in the subfolder `below` of `folder`. `second` are files in `folder` that
/// have the same model. ZeRO stage 3 saves no parameters of the module, so `second` has them.
fn with_second_model(
    folder: PathBuf,
    below: &str,
    second: Option<DetectedFiles>,
    options: &ReadOptions,
) -> Result<CheckpointLocation> {
    let checkpoint = folder.join(below);
    let Some(second) = second else {
        let found = detect(&checkpoint, options.from)?;
        return Ok(CheckpointLocation::single(checkpoint, found));
    };
    let names: Vec<String> = second.index.iter().chain(&second.paths).map(|path| name_of(path)).collect();
    let names = short_list(&names, 1);
    if options.weights == Some(Weights::Module) && !list(&checkpoint)?.iter().any(|name| deepspeed::has_module(name)) {
        let note = format!(
            "{}: the model comes from {names}, which has the parameters of the module; {below} has the optimizer, and is \
             not read",
            folder.display()
        );
        let single = CheckpointLocation::single(folder, second);
        return Ok(CheckpointLocation { weights: options.weights, note: Some(note), ..single });
    }
    let note = format!(
        "{}: the model comes from {below}, which has the optimizer, too; {names} beside it is not read (options::from {} \
         reads it instead)",
        folder.display(),
        second.format
    );
    let found = detect(&checkpoint, options.from)?;
    Ok(CheckpointLocation { note: Some(note), ..CheckpointLocation::single(checkpoint, found) })
}

/// Returns the names of the subfolders that may contain a checkpoint, in natural order. Links to folders are included.
fn subfolders(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in lookup::list(folder)? {
        if let Some(name) = entry.name.to_str()
            && may_lead_on(name)
            && entry.is_folder()?
        {
            names.push(name.to_owned());
        }
    }
    names.sort_by(|left, right| natural_order(left, right));
    Ok(names)
}

/// Returns the name of the only subfolder, if the folder has exactly one. Links and hidden folders do not count.
fn only_subfolder(folder: &Path) -> Result<Option<String>> {
    let mut only = None;
    for entry in lookup::list(folder)? {
        let Some(name) = entry.name.to_str().filter(|name| !name.starts_with('.')) else { continue };
        if !entry.is_link()? && entry.is_folder()? && only.replace(name.to_owned()).is_some() {
            return Ok(None);
        }
    }
    Ok(only)
}

fn is_candidate(name: &str) -> bool {
    let is_step = STEPS.iter().any(|(base, separator)| is_numbered(name, base, separator, false));
    is_step || is_composer_step(name) || ROLES.contains(&name) || [MAKANI_FOLDER, OLMO_FOLDER].contains(&name)
}

/// Returns whether a folder of this name may contain a checkpoint, or a subfolder with a checkpoint.
pub fn may_lead_on(name: &str) -> bool {
    LATEST.contains(&name) || is_candidate(name) || is_model(name) || is_optimizer(name) || is_lightning(name)
}

/// Returns the files beside the file `path` (SRC) that a reader may also read, or whose number a message may state:
/// rank files of the same series, and index files. If SRC is an index (or another `.json` file), returns all other
/// files of the folder.
///
/// # Errors
/// `Io` if the folder of the file cannot be listed.
pub fn companions(path: &Path) -> Result<Vec<PathBuf>> {
    let series = |path: &Path| RankName::parse(path).map(|name| name.series);
    let names_files = |path: &Path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_index_name);
    let (own, is_index) = (series(path), path.extension().is_some_and(|suffix| suffix == "json"));
    let mut found = Vec::new();
    for entry in lookup::list(folder_of(path))? {
        let is_other = Some(&*entry.name) != path.file_name();
        let is_of_series = own.is_some() && series(&entry.path) == own;
        let may_be_read = is_other && (is_index || is_of_series || names_files(&entry.path));
        if may_be_read && entry.kind()? == FileKind::File {
            found.push(entry.path);
        }
    }
    Ok(found)
}

/// Returns whether a folder of this name is a model folder of accelerate.
fn is_model(name: &str) -> bool {
    is_numbered(name, "pytorch_model_fsdp", "_", true)
}

/// Returns whether a folder of this name is an optimizer folder of accelerate.
fn is_optimizer(name: &str) -> bool {
    is_numbered(name, "optimizer", "_", true)
}

/// Returns the model folder of accelerate in `folder`, with the optimizer folders beside it; `None` if there is no
/// model folder. If the options select only the model, the optimizer folders are not read.
fn accelerate(folder: &Path, names: &[String], options: &ReadOptions) -> Result<Option<CheckpointLocation>> {
    let models: Vec<&String> = names.iter().filter(|name| is_model(name)).collect();
    let model = match models.as_slice() {
        [] => return Ok(None),
        [only] => *only,
        several => return Err(ambiguous(folder, several.iter().map(|name| name.as_str()))),
    };
    let read = |name: &String| Ok((PathBuf::from(name), detect(&folder.join(name), options.from)?));
    let optimizers = names.iter().filter(|name| is_optimizer(name));
    if options.want == Want::Model && options.series != SeriesChoice::All {
        let (_, found) = read(model)?;
        let skipped_folders = optimizers.cloned().collect();
        return Ok(Some(CheckpointLocation {
            skipped_folders,
            ..CheckpointLocation::single(folder.join(model), found)
        }));
    }
    let folders: Vec<_> = std::iter::once(model).chain(optimizers).map(read).collect::<Result<_>>()?;
    Ok(Some(CheckpointLocation {
        root: folder.to_path_buf(),
        folders,
        skipped_folders: Vec::new(),
        weights: None,
        note: None,
    }))
}

/// Returns a warning for each model folder and each optimizer folder of accelerate inside the checkpoint folder `root`.
/// Each of these folders is a separate checkpoint and is not read. Such a folder can be beside the files of another
/// checkpoint: accelerate writes optimizer folders beside rank files of flat parameters (`LOCAL_STATE_DICT`), and the
/// files of a model folder may have been merged into a file `model.safetensors` beside the model folder.
///
/// # Errors
/// `Io` if the folder cannot be listed.
pub fn warn_of_accelerate_folders(root: &Path) -> Result<Vec<String>> {
    if !lookup::is_folder(root)? {
        return Ok(Vec::new());
    }
    let mut names = subfolders(root)?;
    names.retain(|name| is_model(name) || is_optimizer(name));
    let warning = |name: &String| {
        format!(
            "{} is a checkpoint of its own and is not read: convert it with another command, with this folder as SRC",
            root.join(name).display()
        )
    };
    Ok(names.iter().map(warning).collect())
}

/// Returns whether a name consists of `base`, `separator` and a number. If `alone` is true, also returns true if the
/// name is `base`.
fn is_numbered(name: &str, base: &str, separator: &str, alone: bool) -> bool {
    let Some(rest) = name.strip_prefix(base) else { return false };
    if rest.is_empty() {
        return alone;
    }
    let number = rest.strip_prefix(separator).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// The names of folders for one training step or epoch. Each pair has the text at the start of the name, and the
/// separator before the number.
const STEPS: [(&str, &str); 10] = [
    ("global_step", "_"),
    ("global_step", ""),
    ("iter", "_"),
    ("step", "-"),
    ("step", "_"),
    ("step", ""),
    ("checkpoint", "-"),
    ("checkpoint", "_"),
    ("epoch", "_"),
    ("dist_epoch", "_"),
];

/// The names of folders, or of links to folders, that contain the newest checkpoint. Composer makes a link for each
/// rank.
const LATEST: [&str; 2] = ["latest", "latest-rank0.pt"];

/// The folder in which makani saves the checkpoints of a run.
const MAKANI_FOLDER: &str = "training_checkpoints";

/// The folder in which OLMo-core saves the model and the optimizer of one step.
const OLMO_FOLDER: &str = "model_and_optim";

/// The names of the folders that verl makes for its models.
const ROLES: [&str; 2] = ["actor", "critic"];

/// Returns the name of the subfolder of `folder` in which the search continues. `names` lists the subfolders whose
/// names trainers use (see [`may_lead_on`]). Returns `None` if there is no such subfolder, and if no file (such as
/// `latest`) names a subfolder.
fn next(folder: &Path, names: &[String]) -> Result<Option<String>> {
    // In `names`, `latest` is a link to a folder: a text file of this name is not a subfolder.
    if let Some(latest) = LATEST.iter().find(|latest| names.iter().any(|name| name == **latest)) {
        return Ok(Some(String::from(*latest)));
    }
    let pointer = pointer(folder)?;
    if let Some(pointer) = &pointer
        && let Some(found) = pointer.target(folder)?
    {
        return Ok(Some(found));
    }
    let candidates: Vec<&str> = names.iter().map(String::as_str).filter(|name| is_candidate(name)).collect();
    match (candidates.as_slice(), pointer) {
        ([], Some(pointer)) if pointer.file.ends_with(MEGATRON_POINTER) => Err(foreign::megatron_error(folder)),
        ([], Some(pointer)) => {
            Err(Error::missing(&pointer.file, "content", "the folder that the file names", pointer.text))
        }
        ([], None) => lightning(folder, names),
        ([only], None) => Ok(Some((*only).to_owned())),
        (several, Some(pointer)) => {
            let name = pointer.file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            Err(Error::usage(
                format!(
                    "{}: the file `{name}` names the folder `{}`, which does not exist",
                    folder.display(),
                    pointer.text
                ),
                format!("give an existing folder: {}", short_list(several, FEW)),
            )
            .naming(several))
        }
        (several, None) => Err(ambiguous(folder, several.iter().copied())),
    }
}

/// Returns the next folder on the path to a checkpoint of Lightning:
/// `lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt`. A folder or a file with the suffix `.ckpt` is a
/// checkpoint. If `last.ckpt` is a link to another checkpoint in the folder, `last.ckpt` is ignored. Returns `None` in
/// two cases: no subfolder has a name of this path; no subfolder has the suffix `.ckpt`, and `folder` itself contains a
/// torch file that may be the intended checkpoint.
fn lightning(folder: &Path, names: &[String]) -> Result<Option<String>> {
    let is_checkpoint = |name: &String| is_checkpoint_name(name);
    let mut found: Vec<String> = if names.iter().any(is_checkpoint) {
        let mut found: Vec<String> = list(folder)?.into_iter().filter(is_checkpoint).collect();
        let target = |name: &String| lookup::resolve(&folder.join(name));
        if let Some(last) = found.iter().position(|name| name == "last.ckpt") {
            let last = found.remove(last);
            let is_second_name = found.iter().map(target).collect::<Result<Vec<_>>>()?.contains(&target(&last)?);
            found.extend((!is_second_name).then_some(last));
        }
        found
    } else if has_lone_files(folder)? {
        Vec::new()
    } else {
        let tests: [&dyn Fn(&str) -> bool; 3] =
            [&|name| name == "checkpoints", &is_version, &|name| name == "lightning_logs"];
        let with = |test: &&dyn Fn(&str) -> bool| names.iter().filter(|name| test(name)).cloned().collect::<Vec<_>>();
        tests.iter().map(with).find(|level| !level.is_empty()).unwrap_or_default()
    };
    found.sort_by(|left, right| natural_order(left, right));
    match found.as_slice() {
        [] => Ok(None),
        [only] => Ok(Some(only.clone())),
        several => Err(ambiguous(folder, several.iter().map(String::as_str))),
    }
}

fn is_checkpoint_name(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|suffix| suffix == "ckpt")
}

fn is_version(name: &str) -> bool {
    is_numbered(name, "version", "_", false)
}

/// Returns whether Lightning gives this name to a checkpoint, or to a folder that contains checkpoints.
fn is_lightning(name: &str) -> bool {
    is_checkpoint_name(name) || ["checkpoints", "lightning_logs"].contains(&name) || is_version(name)
}

fn ambiguous<'a>(folder: &Path, names: impl Iterator<Item = &'a str>) -> Error {
    const SHOWN: usize = 16;
    let names: Vec<&str> = names.collect();
    // The hint suggests the newest step, or the first model of the trainer.
    let likely = names.iter().rfind(|name| !ROLES.contains(name)).or(names.first());
    let likely = likely.map(|name| folder.join(name).display().to_string()).unwrap_or_default();
    Error::usage(
        format!("{} contains several checkpoints: {}", folder.display(), short_list(&names, SHOWN)),
        format!("give one of these checkpoints as SRC, such as {likely}"),
    )
    .naming(&names)
}

const MEGATRON_POINTER: &str = "latest_checkpointed_iteration.txt";

/// A text file that names the folder of the newest checkpoint.
#[derive(Debug)]
struct Pointer {
    file: PathBuf,
    text: String,
}

fn pointer_file(folder: &Path) -> Result<Option<PathBuf>> {
    for path in ["latest", MEGATRON_POINTER, deepspeed_universal::LATEST].map(|name| folder.join(name)) {
        if lookup::is_file(&path)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Reads the text file that names the newest checkpoint of a folder, if this text file exists.
fn pointer(folder: &Path) -> Result<Option<Pointer>> {
    pointer_file(folder)?.map(|file| read_pointer(folder, file)).transpose()
}

fn read_pointer(folder: &Path, file: PathBuf) -> Result<Pointer> {
    const LIMIT: u64 = 256;
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(&file).map_err(lookup::refused("open", &file))?;
    opened.take(LIMIT).read_to_end(&mut bytes).map_err(Error::io("read", &file))?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    // The text is shown in messages and used as a path, so only ordinary names are accepted.
    if text.chars().any(char::is_control) || relative_to_folder(folder, &text, &file).is_err() {
        let found = format!("{:?}", text.chars().take(60).collect::<String>());
        let expected = String::from("the path of a folder below the folder of this file");
        let hint = Some("correct this file, or give the folder of one checkpoint as SRC".into());
        return Err(FormatError::Malformed { path: file, at: String::from("content"), expected, found, hint }.into());
    }
    Ok(Pointer { file, text })
}

/// The maximum length of a file name in bytes: `NAME_MAX` of Linux.
const MAX_NAME_BYTES: usize = 255;

impl Pointer {
    /// Returns the name of the folder to which the content of this text file refers; `None` if this folder does not
    /// exist. The content is the complete name of the folder, or only the step number in the name of the folder.
    fn target(&self, folder: &Path) -> Result<Option<String>> {
        let text = &self.text;
        let mut names = vec![text.clone()];
        if let Ok(number) = text.parse::<u64>() {
            names.push(format!("iter_{number:07}"));
        }
        names.extend(STEPS.iter().map(|(base, separator)| format!("{base}{separator}{text}")));
        // A name that is too long cannot exist, and looking it up would be a file system error.
        for name in names.into_iter().filter(|name| name.len() <= MAX_NAME_BYTES) {
            if lookup::is_folder(&folder.join(&name))? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }
}

/// Checks that all folders have the same format.
///
/// # Errors
/// `Unsupported` naming two folders with different formats.
pub fn same_format(root: &Path, formats: &[(PathBuf, Format)]) -> Result<()> {
    let differing = formats.array_windows().find(|[first, second]| first.1 != second.1);
    let Some([first, second]) = differing else { return Ok(()) };
    Err(Error::unsupported(
        format!(
            "{}: expected folders of one format, found {} in {} and {} in {}",
            root.display(),
            first.1,
            first.0.display(),
            second.1,
            second.0.display()
        ),
        "give one of these folders as SRC",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_names_need_digits_after_the_separator() {
        for (name, base, separator, alone, expected) in [
            ("global_step_10", "global_step", "_", false, true),
            ("global_step10", "global_step", "", false, true),
            ("global_step_", "global_step", "_", false, false),
            ("step-100", "step", "-", false, true),
            ("steps", "step", "-", false, false),
            ("pytorch_model_fsdp", "pytorch_model_fsdp", "_", true, true),
            ("pytorch_model_fsdp_0", "pytorch_model_fsdp", "_", true, true),
            ("pytorch_model_fsdp_x", "pytorch_model_fsdp", "_", true, false),
            ("optimizer", "optimizer", "_", false, false),
        ] {
            assert_eq!(is_numbered(name, base, separator, alone), expected, "{name}");
        }
    }

    #[test]
    fn pointer_text_that_leaves_the_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let point = |text: &[u8]| {
            std::fs::write(root.join("latest"), text).unwrap();
            pointer(root).map(|pointer| pointer.unwrap().target(root).unwrap())
        };
        for name in ["global_step_7", "iter_0000100", "step-3", "my run"] {
            std::fs::create_dir(root.join(name)).unwrap();
        }
        for (text, found) in [
            ("7\n", "global_step_7"),
            ("global_step_7", "global_step_7"),
            ("100", "iter_0000100"),
            ("3", "step-3"),
            ("my run\r\n", "my run"),
        ] {
            assert_eq!(point(text.as_bytes()).unwrap().as_deref(), Some(found), "{text}");
        }
        assert_eq!(point(b"8").unwrap(), None);
        for text in [&b"../x"[..], b"/etc", b"", b"a\nb", b"a\0b", b".", b"a/../../x"] {
            assert!(point(text).is_err(), "{text:?}");
        }
        assert_eq!(point(b"\xff\xfe").unwrap(), None);
        assert!(point(&[b'.'; 10_000]).is_ok());
    }
}
