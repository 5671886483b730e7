//! Restores output layers that are tied to the embedding. A model with tied embeddings uses one tensor for the
//! embedding and the output layer, so a checkpoint of the model may lack the name of the output layer.
//!
//! `save_pretrained` of transformers and some trainers store only the embedding of such a model (`_tied_weights_keys`).
//! A loader that asks for every key of the state dict, as DCP does, then misses the output layer.

use super::model_config::{self, CONFIG};
use crate::catalog::path::{key_text, tensors};
use crate::catalog::{Catalog, Dict, Path, TensorId, Value, state_dict};
use crate::error::{Error, Result};
use crate::format::Checkpoint;
use crate::name_list::{FEW, short_list};

/// Names of embeddings in known model classes, each with the name of the tied output layer. GPT-NeoX is missing,
/// because its output layer is `embed_out` in transformers 4 and `lm_head` in transformers 5.
const TIED: [(&str, &str); 7] = [
    // Llama, Mistral, Qwen, Gemma, Phi
    ("model.embed_tokens.weight", "lm_head.weight"),
    // multimodal models
    ("model.language_model.embed_tokens.weight", "lm_head.weight"),
    // GPT-2, GPT-J
    ("transformer.wte.weight", "lm_head.weight"),
    // OPT
    ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    // BLOOM, Falcon
    ("transformer.word_embeddings.weight", "lm_head.weight"),
    // Mamba
    ("backbone.embeddings.weight", "lm_head.weight"),
    // torchtitan, Llama as Meta publishes it
    ("tok_embeddings.weight", "output.weight"),
];

/// An embedding, and the output layer that is tied to it in known model classes.
#[derive(Debug, PartialEq, Eq)]
struct Tie {
    embedding: String,
    /// Length in bytes of the prefix that both names have. The rest of each name is listed in [`TIED`].
    prefix: usize,
    output: String,
    id: TensorId,
    /// True if the checkpoint has a tensor of the output layer: its weight, or any other tensor of its module.
    is_stored: bool,
}

/// Returns the embeddings that have a known name, each with the name of the output layer to which it may be tied.
fn find(state: &Value) -> Vec<Tie> {
    let model = state_dict::model(state);
    // A quantised or adapted output layer has tensors with other names below the same module, so any tensor of the
    // module counts as a stored output layer.
    let is_stored = |name: &str| {
        let module = name.strip_suffix("weight").unwrap_or(name);
        model.tensors.iter().any(|(fqn, _)| fqn.as_str().starts_with(module))
    };
    let mut found: Vec<Tie> = Vec::new();
    for (fqn, id) in &model.tensors {
        let name = fqn.as_str();
        let known = TIED.iter().find_map(|(embedding, output)| {
            let prefix = name.strip_suffix(embedding).filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))?;
            Some((prefix, format!("{prefix}{output}")))
        });
        if let Some((prefix, output)) = known {
            // The output layer of torchtitan 0.3 is `lm_head`, and that of earlier versions `output`.
            let is_stored = is_stored(&output) || is_stored(&format!("{prefix}lm_head.weight"));
            found.push(Tie { embedding: name.to_owned(), prefix: prefix.len(), output, id: *id, is_stored });
        }
    }
    found
}

/// Returns each output layer that the checkpoint stores, although the model class may tie it to the embedding, together
/// with the name of the embedding.
pub fn stored_outputs(state: &Value) -> Vec<(String, String)> {
    let stored = find(state).into_iter().filter(|tie| tie.is_stored);
    stored.map(|tie| (tie.output, tie.embedding)).collect()
}

/// Returns true if the configuration of a model states that its embeddings are tied.
///
/// # Errors
/// `Io` if the configuration cannot be read.
fn says_tied(checkpoint: &Checkpoint) -> Result<bool> {
    let says = |config: &serde_json::Value| config.get("tie_word_embeddings").and_then(serde_json::Value::as_bool);
    let config = model_config::read(checkpoint)?;
    Ok(config.is_some_and(|config| says(&config).or_else(|| says(config.get("text_config")?)) == Some(true)))
}

/// Adds the name of the output layer to the tensor of its tied embedding if the checkpoint does not store the output
/// layer. Returns a note that says which name was added, or that none was missing.
///
/// # Errors
/// `Usage` if no configuration says that embeddings are tied and no tensor has two names, if not exactly one embedding
/// has a known name, or if the nesting of the state dict has no place for the name.
pub fn restore(checkpoint: &mut Checkpoint) -> Result<String> {
    if !says_tied(checkpoint)? {
        if has_ties(&checkpoint.catalog) {
            return Ok(String::from(NOTHING));
        }
        return Err(Error::usage(
            format!(
                "options::tied write: no {CONFIG} of {} has \"tie_word_embeddings\": true, and no tensor has two names",
                checkpoint.root.display()
            ),
            format!("put the {CONFIG} of the model into the folder of SRC, or leave options::tied out"),
        ));
    }
    let found = find(&checkpoint.catalog.state);
    let tie = match found.as_slice() {
        [tie] => tie,
        [] => {
            let known: Vec<&str> = TIED.iter().map(|(embedding, _)| *embedding).collect();
            return Err(Error::usage(
                format!("options::tied write: {} has no embedding with a known name", checkpoint.root.display()),
                format!("rename the embedding with options::rename; known names end in {}", short_list(&known, FEW)),
            )
            .naming(&known));
        }
        several => {
            let names: Vec<&str> = several.iter().map(|tie| tie.embedding.as_str()).collect();
            return Err(Error::usage(
                format!(
                    "options::tied write: several tensors are named like an embedding: {}",
                    short_list(&names, FEW)
                ),
                "write each model to a checkpoint of its own with options::include or options::root, and then run dtshard \
                 on that checkpoint with options::tied write",
            )
            .naming(&names));
        }
    };
    if tie.is_stored {
        return Ok(String::from(NOTHING));
    }
    if !insert(&mut checkpoint.catalog.state, tie) {
        return Err(Error::usage(
            format!(
                "options::tied write: the nesting of the state dict does not allow adding `{}` beside `{}`",
                tie.output, tie.embedding
            ),
            "convert SRC to safetensors first, because its names are not nested",
        ));
    }
    Ok(format!("`{}` is also written, because it is tied to `{}` and SRC does not store it", tie.output, tie.embedding))
}

const NOTHING: &str = "options::tied write adds no name, because SRC already has all names";

/// Returns true if any tensor of the checkpoint has more than one name.
fn has_ties(catalog: &Catalog) -> bool {
    let mut seen = std::collections::HashSet::new();
    let mut is_tied = false;
    tensors(&catalog.state, &Path::default(), &mut |_, id| is_tied |= !seen.insert(id));
    is_tied
}

/// Returns a note on how to load a DCP checkpoint that lacks the tied output layer. Returns `None` if no output layer
/// is missing in `written`, the state dict of the result.
///
/// # Errors
/// `Io` if the configuration of the model cannot be read.
pub fn note_for_dcp(checkpoint: &Checkpoint, written: &Value) -> Result<Option<String>> {
    let Some(missing) = find(written).into_iter().find(|tie| !tie.is_stored) else { return Ok(None) };
    Ok(says_tied(checkpoint)?.then(|| {
        format!(
            "`{}` is not stored because it is tied to `{}`, but dcp.load asks for both names: load with \
             planner=DefaultLoadPlanner(allow_partial_load=True), or write it with options::tied write",
            missing.output, missing.embedding
        )
    }))
}

/// Adds the name of the output layer to the state dict: at the end of the dict that contains the embedding, or of a
/// dict above it. Returns false if the state dict is nested in another way than the names in [`TIED`].
fn insert(state: &mut Value, tie: &Tie) -> bool {
    let root = state_dict::model(state).root;
    let mut path = None;
    let Some(model) = root.find(state) else { return false };
    tensors(model, &Path::default(), &mut |found, id| {
        if id == tie.id && found.fqn().as_str() == tie.embedding {
            path = Some(found.clone());
        }
    });
    let Some(Path(keys)) = path else { return false };
    let prefix = &tie.embedding[..tie.prefix];
    for split in 0..keys.len() {
        let above = Path(keys[..split].to_vec());
        let before = if split == 0 { String::new() } else { format!("{}.", above.fqn()) };
        let Some(rest) = prefix.strip_prefix(&before) else { return false };
        let is_flat = split + 1 == keys.len();
        if !is_flat && !rest.is_empty() {
            continue;
        }
        let name = &tie.output[before.len()..];
        let steps: Vec<&str> = if is_flat { vec![name] } else { name.split('.').collect() };
        let Some(Value::Dict(dict)) = Path([root.0.as_slice(), &above.0].concat()).find_mut(state) else {
            return false;
        };
        return put(dict, &steps, tie.id);
    }
    false
}

/// Inserts a tensor at a nested path and creates missing dicts. Returns false if the path is already used.
fn put(dict: &mut Dict, steps: &[&str], id: TensorId) -> bool {
    let [name, rest @ ..] = steps else { return false };
    let found = dict.entries.iter().position(|(key, _)| *key_text(key) == **name);
    match (found, rest) {
        (None, []) => dict.entries.push((Value::Str((*name).into()), Value::Tensor(id))),
        (None, rest) => {
            let mut inner = Dict { kind: dict.kind, ..Dict::default() };
            let is_put = put(&mut inner, rest, id);
            dict.entries.push((Value::Str((*name).into()), Value::Dict(inner)));
            return is_put;
        }
        (Some(at), rest) => match &mut dict.entries[at].1 {
            Value::Dict(inner) => return put(inner, rest, id),
            _ => return false,
        },
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dict(entries: Vec<(&str, Value)>) -> Value {
        let entries = entries.into_iter().map(|(key, value)| (Value::Str(key.into()), value)).collect();
        Value::Dict(Dict { entries, ..Dict::default() })
    }

    fn tensor(id: u32) -> Value {
        Value::Tensor(TensorId(id))
    }

    /// Adds the missing name of the output layer, and returns all names of tensor 0. Panics unless `state` has exactly
    /// one embedding with a known name, and lacks its output layer.
    #[track_caller]
    fn names(mut state: Value) -> Vec<String> {
        let found = find(&state);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(!found[0].is_stored && insert(&mut state, &found[0]));
        let mut names = Vec::new();
        tensors(&state, &Path::default(), &mut |path, id| names.extend((id.0 == 0).then(|| path.to_string())));
        names
    }

    #[test]
    fn output_layer_is_inserted_at_the_path_of_the_model_class() {
        let flat = dict(vec![("model.embed_tokens.weight", tensor(0)), ("model.norm.weight", tensor(1))]);
        assert_eq!(names(flat.clone()), ["model.embed_tokens.weight", "lm_head.weight"]);
        let below = dict(vec![("model", flat), ("optimizer", dict(vec![("x", tensor(2))]))]);
        assert_eq!(names(below), ["model.model.embed_tokens.weight", "model.lm_head.weight"]);
        let embedding = dict(vec![("wte", dict(vec![("weight", tensor(0))]))]);
        let nested = dict(vec![("model", dict(vec![("transformer", embedding)])), ("optimizer", dict(vec![]))]);
        assert_eq!(names(nested), ["model.transformer.wte.weight", "model.lm_head.weight"]);
        let several = dict(vec![("language_model.model.embed_tokens.weight", tensor(0)), ("vision.w", tensor(1))]);
        assert_eq!(names(several), ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"]);
        let titan = dict(vec![("tok_embeddings.weight", tensor(0)), ("norm.weight", tensor(1))]);
        assert_eq!(names(titan), ["tok_embeddings.weight", "output.weight"]);
    }

    #[test]
    fn stored_output_layer_is_detected() {
        let state = dict(vec![("transformer.wte.weight", tensor(0)), ("lm_head.weight", tensor(1))]);
        assert!(find(&state)[0].is_stored);
        assert!(find(&dict(vec![("my_embed_tokens.weight", tensor(0))])).is_empty());
    }
}
