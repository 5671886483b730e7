//! `flat_layout.json`: describes the units of an FSDP1 model (a unit is a module that FSDP1 wraps), in a form that
//! people can write and read.
//!
//! ```json
//! {"version": 1, "world_size": 2, "use_orig_params": false, "units": [
//!   {"module": "", "dtype": "f32", "params": [
//!     {"fqn": "embed.weight", "shape": [5, 3]},
//!     {"fqn": "head.weight", "shared_with": "embed.weight"}]}]}
//! ```
//!
//! Parameters are listed in the order in which the module registered them. These fields are optional:
//! `shard_group_size`, `optimizer`, `dtype` and `align_numel` of a unit, and `stride` of a parameter. `world_size` and
//! `shard_group_size` count ranks; shapes, strides and `align_numel` count elements. Every layout that is read has
//! passed [`FlatLayout::check`]. Equal layouts are always rendered as equal texts. A [layout file](crate::layout::file)
//! may contain such a document under the key `flat`.

use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value as Json, json};

use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, SharedName};
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dtype, Fqn};
use crate::error::{Error, Result};
use crate::format::error::FLAT_LAYOUT_HINT;
use crate::format::{json, layout_file};
use crate::json_text;
use crate::layout::Dims;
use crate::layout::file::LayoutFile;

/// The name of the document that is written next to the rank files.
pub const FILE_NAME: &str = "flat_layout.json";

/// The maximum size of a document in bytes. The document of a model with a million parameters takes a third of this
/// maximum.
const MAX_BYTES: u64 = 256 << 20;

/// The maximum number of dims of a parameter. No real model has a parameter with more dims.
const MAX_DIMS: usize = 64;

const VERSION: u64 = 1;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a flat layout")]
struct FlatDocument {
    version: u64,
    world_size: u32,
    shard_group_size: Option<u32>,
    use_orig_params: bool,
    units: Vec<UnitJson>,
    optimizer: Option<Vec<Vec<String>>>,
}

/// Reads only the version, so that a document of a later version gives a clear error even if this version of dtshard
/// cannot read other fields of the document.
#[derive(Deserialize)]
struct VersionOnly {
    version: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a unit")]
struct UnitJson {
    module: String,
    dtype: Option<String>,
    align_numel: Option<u64>,
    params: Vec<ParamJson>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a parameter")]
struct ParamJson {
    fqn: String,
    shape: Option<Vec<u64>>,
    stride: Option<Vec<u64>>,
    shared_with: Option<String>,
}

/// Matches a layout file, which contains a flat layout under the key `flat`.
#[derive(Deserialize)]
struct EnclosingLayoutFile {
    #[serde(rename = "flat")]
    _flat: IgnoredAny,
}

/// Reads a flat layout from its own document or from a layout file.
///
/// # Errors
/// `Malformed` naming the position in the file, `Unsupported` for a later version, `Io`.
pub fn read(path: &Path) -> Result<FlatLayout> {
    read_document(path).map_err(with_hint)
}

/// Adds the hint about flat layouts to an error about the content of a flat layout. The function is needed for files
/// without the extension `.json`: errors about `.json` files have this hint already.
pub fn with_hint(mut error: Error) -> Error {
    if let Some((_, hint)) = error.damaged_mut() {
        hint.get_or_insert_with(|| FLAT_LAYOUT_HINT.into());
    }
    error
}

fn read_document(path: &Path) -> Result<FlatLayout> {
    let text = json::read_document(path, MAX_BYTES)?;
    let is_toml = path.extension().is_some_and(|suffix| suffix.eq_ignore_ascii_case("toml"));
    if is_toml || serde_json::from_slice::<EnclosingLayoutFile>(&text).is_ok() {
        return from_layout_file(path, &layout_file::parse(path, &text)?);
    }
    parse(path, &text)
}

/// Returns the flat layout in a layout file.
///
/// # Errors
/// `Usage` if the layout file has no flat layout, and the errors of [`read`].
pub fn from_layout_file(path: &Path, file: &LayoutFile) -> Result<FlatLayout> {
    let Some(flat) = &file.flat else {
        return Err(Error::usage(
            format!("{}: the layout file has no [flat] section, which describes the flat parameters", path.display()),
            "add the section: docs/reference/layout-file.md describes the layout file, and docs/how-to/fsdp1.md describes how to get a flat layout",
        ));
    };
    let mut document = flat.value.clone();
    if let Json::Object(table) = &mut document {
        table.entry("version").or_insert(json!(VERSION));
    }
    let document = FlatDocument::deserialize(document).map_err(|error| {
        let json_text::JsonMismatch { expected, found } = json_text::mismatch(&error, "a flat layout");
        flat.error(
            format!("expected {expected}, found {found}"),
            "correct the file; docs/how-to/fsdp1.md describes the fields of a flat layout",
        )
    })?;
    into_checked_layout(path, document)
}

/// Parses the text of a document; `path` is used in error messages only.
///
/// # Errors
/// The errors of [`read`].
pub fn parse(path: &Path, text: &[u8]) -> Result<FlatLayout> {
    let document: FlatDocument =
        serde_json::from_slice(text).map_err(|error| match serde_json::from_slice::<VersionOnly>(text) {
            Ok(VersionOnly { version }) if version != VERSION => unknown_version(path, version),
            _ => json_text::malformed(path, &error, "a flat layout"),
        })?;
    into_checked_layout(path, document)
}

fn into_checked_layout(path: &Path, document: FlatDocument) -> Result<FlatLayout> {
    if document.version != VERSION {
        return Err(unknown_version(path, document.version));
    }
    let layout = FlatLayout {
        world_size: document.world_size,
        shard_group_size: document.shard_group_size.unwrap_or(document.world_size),
        use_orig_params: document.use_orig_params,
        has_assumed_alignment: false,
        units: document.units.into_iter().map(|unit| read_unit(path, unit)).collect::<Result<_>>()?,
        optimizer: document
            .optimizer
            .map(|groups| groups.into_iter().map(|group| group.into_iter().map(fqn).collect()).collect()),
    };
    match layout.check() {
        Ok(()) => Ok(layout),
        Err(wrong) => Err(wrong.within(path).into()),
    }
}

fn unknown_version(path: &Path, version: u64) -> Error {
    Error::unsupported(
        format!(
            "{}: version {version} of the flat layout is not supported; this dtshard reads version {VERSION}",
            path.display()
        ),
        "regenerate the file with \"version\": 1, or use a newer dtshard",
    )
}

/// Returns a name as the reader of rank files has it.
fn fqn(name: String) -> Fqn {
    Fqn::from(clean_name(&name))
}

fn read_unit(path: &Path, unit: UnitJson) -> Result<FlatUnit> {
    let bad = |at: &str, expected: &str, found: String| Err(Error::malformed(path, at, expected, found));
    let mut known = FlatUnit::new(clean_name(&unit.module), None);
    known.align_numel = unit.align_numel;
    known.dtype = match &unit.dtype {
        None => None,
        Some(name) => match Dtype::from_name(name) {
            None => return bad(&known.describe(), "the dtype of a tensor", format!("`{name}`")),
            dtype => dtype,
        },
    };
    for param in unit.params {
        let fqn = fqn(param.fqn);
        match (param.shape, param.stride, param.shared_with) {
            (Some(shape), stride, None) => {
                if shape.len() > MAX_DIMS {
                    return bad(fqn.as_str(), &format!("at most {MAX_DIMS} dims"), shape.len().to_string());
                }
                known.params.push(FlatParam { fqn, shape: Dims::from(shape), stride: stride.map(Dims::from) });
            }
            (None, None, Some(with)) => known.shared.push(SharedName { fqn, with: self::fqn(with) }),
            (None, _, None) => return bad(fqn.as_str(), "a shape or shared_with", String::from("neither")),
            (..) => return bad(fqn.as_str(), "either a shape or shared_with", String::from("both")),
        }
    }
    Ok(known)
}

/// Renders a layout as a document, one parameter per line.
pub fn render(layout: &FlatLayout) -> String {
    let mut text = String::new();
    let FlatLayout { world_size, shard_group_size, use_orig_params, units, optimizer, .. } = layout;
    let _ = write!(
        text,
        "{{\n  \"version\": {VERSION},\n  \"world_size\": {world_size},\n  \"shard_group_size\": \
         {shard_group_size},\n  \
         \"use_orig_params\": {use_orig_params},\n  \"units\": ["
    );
    let rendered: Vec<String> = units.iter().map(render_unit).collect();
    text += &rendered.join(",");
    text += if units.is_empty() { "]" } else { "\n  ]" };
    if let Some(groups) = optimizer {
        let groups: Vec<String> = groups.iter().map(|group| bracketed_list(group.iter().map(quoted), 4)).collect();
        let _ = write!(text, ",\n  \"optimizer\": {}", bracketed_list(groups.into_iter(), 2));
    }
    text += "\n}\n";
    text
}

fn render_unit(unit: &FlatUnit) -> String {
    let mut text = format!("\n    {{\n      \"module\": {}", json!(*unit.module));
    if let Some(dtype) = unit.dtype {
        let _ = write!(text, ",\n      \"dtype\": {}", json!(dtype.name()));
    }
    if let Some(align) = unit.align_numel {
        let _ = write!(text, ",\n      \"align_numel\": {align}");
    }
    let params = unit.params.iter().map(|param| {
        let stride = param.stride.as_ref().map(|stride| format!(", \"stride\": {:?}", stride.as_slice()));
        let (fqn, stride) = (quoted(&param.fqn), stride.unwrap_or_default());
        format!("{{\"fqn\": {fqn}, \"shape\": {:?}{stride}}}", param.shape.as_slice())
    });
    let shared = unit
        .shared
        .iter()
        .map(|shared| format!("{{\"fqn\": {}, \"shared_with\": {}}}", quoted(&shared.fqn), quoted(&shared.with)));
    let _ = write!(text, ",\n      \"params\": {}\n    }}", bracketed_list(params.chain(shared), 6));
    text
}

fn quoted(fqn: &Fqn) -> String {
    json!(fqn.as_str()).to_string()
}

/// Renders a list with one item per line; the closing bracket is indented by `column`.
fn bracketed_list(items: impl Iterator<Item = String>, column: usize) -> String {
    let items: Vec<String> = items.map(|item| format!("\n{:column$}  {item}", "")).collect();
    if items.is_empty() { String::from("[]") } else { format!("[{}\n{:column$}]", items.join(","), "") }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn read_text(text: &str) -> Result<FlatLayout> {
        parse(Path::new("flat_layout.json"), text.as_bytes())
    }

    fn layout() -> FlatLayout {
        let param = |fqn: &str, shape: Dims, stride| FlatParam { fqn: fqn.into(), shape, stride };
        FlatLayout {
            world_size: 4,
            shard_group_size: 2,
            use_orig_params: true,
            has_assumed_alignment: false,
            units: vec![
                FlatUnit {
                    module: "".into(),
                    dtype: Some(Dtype::F32),
                    align_numel: Some(8),
                    params: vec![param("emb.\"weight\"", smallvec![5, 3], None), param("s", smallvec![], None)],
                    shared: vec![SharedName { fqn: "head.weight".into(), with: "s".into() }],
                },
                FlatUnit {
                    params: vec![param("conv.w", smallvec![2, 3, 2, 2], Some(smallvec![12, 1, 6, 3]))],
                    ..FlatUnit::new("conv", Some(Dtype::Bf16))
                },
                FlatUnit::new("e", Some(Dtype::F16)),
            ],
            optimizer: Some(vec![vec!["s".into(), "conv.w".into()], vec![]]),
        }
    }

    #[test]
    fn rendered_layout_is_read_back_equal() {
        let text = render(&layout());
        assert_eq!(read_text(&text).unwrap(), layout());
        assert!(text.contains(
            "\n        {\"fqn\": \"conv.w\", \"shape\": [2, 3, 2, 2], \"stride\": [12, 1, 6, 3]}\n      ]\n"
        ));
        let empty = FlatLayout { units: vec![], optimizer: None, ..layout() };
        assert_eq!(read_text(&render(&empty)).unwrap(), empty);
    }

    #[test]
    fn optional_fields_may_be_left_out() {
        let text = r#"{"version": 1, "world_size": 2, "use_orig_params": false,
            "units": [{"module": "", "params": [{"fqn": "w", "shape": [2]}]}]}"#;
        let layout = read_text(text).unwrap();
        assert_eq!((layout.shard_group_size, layout.units[0].dtype, layout.optimizer), (2, None, None));
    }

    #[test]
    fn error_names_the_place_of_the_fault() {
        let whole = |unit: &str| {
            format!("{{\"version\": 1, \"world_size\": 2, \"use_orig_params\": true, \"units\": [{unit}]}}")
        };
        let unit = |param: &str| whole(&format!("{{\"module\": \"a\", \"dtype\": \"f32\", \"params\": [{param}]}}"));
        let cases = [
            (String::new(), "line 1, column 0: expected a flat layout, found the end of the text"),
            (String::from("[1]"), "line 1, column 3: expected a flat layout, found a list of 1 value"),
            (String::from("{\"version\": 1}"), "expected the key `world_size`, found an object without"),
            (String::from("{\"version\": 2, \"world\": {}}"), "version 2 of the flat layout"),
            (
                whole("").replace('1', "1, \"version\": 1"),
                "column 24: expected a flat layout, found the key `version` twice",
            ),
            (whole("").replace("version", "Version"), "the unknown key `Version`"),
            (whole("").replace(": 2", ": -2"), "expected a whole number from 0 to 4294967295, found the number -2"),
            (whole("").replace(": 2", ": 0"), "shard_group_size: expected a divisor of world_size"),
            (
                whole("{\"module\": \"\", \"params\": [], \"dtype\": \"x\"}"),
                "the root unit: expected the dtype of a tensor, found `x`",
            ),
            (whole("{\"module\": \"\", \"params\": []}"), "a dtype or an align_numel"),
            (unit("{\"fqn\": \"a.w\"}"), "a.w: expected a shape or shared_with, found neither"),
            (unit("{\"fqn\": \"a.w\", \"shape\": [1], \"shared_with\": \"x\"}"), "found both"),
            (
                unit("{\"fqn\": \"a.w\", \"shape\": [1.5]}"),
                "expected a whole number from 0 to 2^64 - 1, found the number 1.5",
            ),
            (unit("{\"fqn\": \"a.w\", \"shape\": [18446744073709551615, 2]}"), "expected shapes that fit memory"),
            (
                unit("{\"fqn\": \"b\", \"shape\": [1]}"),
                "unit a: expected names of parameters in this module, found `b`",
            ),
            (
                unit(&format!("{{\"fqn\": \"a.w\", \"shape\": {:?}}}", [1; 65])),
                "a.w: expected at most 64 dims, found 65",
            ),
            ("[".repeat(100_000), "expected a whole number from 0 to 2^64 - 1, found a list"),
        ];
        for (text, expected) in cases {
            let found = read_text(&text).unwrap_err().to_string();
            assert!(found.contains(expected), "{found}");
        }
    }
}
