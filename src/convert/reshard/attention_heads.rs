//! Finds parameters in which tensor parallelism would cut attention heads apart, because the number of heads is not a
//! multiple of the tensor-parallel size. The numbers of heads come from `config.json`, with the keys of Hugging Face
//! transformers. A cut head does not change any written value, but modules that expect complete heads on each rank
//! would fail.

use indexmap::IndexMap;
use serde_json::Value as Json;

use crate::convert::model_config;
use crate::error::Result;
use crate::format::Checkpoint;
use crate::format::parallelize::PlannedModel;
use crate::layout::parallelize::PlacementSource;
use crate::name_list::quoted_list;
use crate::quantity::count;

/// The numbers of attention heads of a model, for queries and for keys and values. A number is `None` if it is unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionHeads {
    query: Option<u64>,
    key_value: Option<u64>,
}

impl AttentionHeads {
    /// Reads the numbers of heads from the `config.json` of a checkpoint.
    ///
    /// # Errors
    /// `Io` if `config.json` cannot be read.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        Ok(model_config::read(checkpoint)?.map(|config| Self::of_config(&config)).unwrap_or_default())
    }

    fn of_config(config: &Json) -> Self {
        // Multimodal models have one configuration per modality.
        let number = |key: &str| config.get(key).or_else(|| config.get("text_config")?.get(key))?.as_u64();
        let query = number("num_attention_heads");
        Self { query, key_value: number("num_key_value_heads").or(query) }
    }

    /// Returns notes about the parameters in which the plan cuts attention heads: one note for each number of heads.
    pub fn notes(self, planned: &PlannedModel) -> Vec<String> {
        let Some((tp, parts)) = planned.tensor_dim() else { return Vec::new() };
        let mut within: IndexMap<(&str, u64), Vec<&str>> = IndexMap::new();
        for (name, _) in
            planned.planned().filter(|(_, laid)| matches!(laid.by, PlacementSource::Style(style) if style.cuts()))
        {
            if let Some(heads) = self.cut_within(name, parts) {
                within.entry(heads).or_default().push(name);
            }
        }
        let note = |((what, heads), names): ((&str, u64), Vec<&str>)| {
            let number = count(names.len(), "tensor");
            let is = if names.len() == 1 { "is" } else { "are" };
            format!(
                "{number} ({}) {is} cut within attention heads, because {what} is {heads} and {tp} is {parts}",
                quoted_list(&names, 2)
            )
        };
        within.into_iter().map(note).collect()
    }

    /// Returns the number of attention heads of a parameter, and its key in `config.json`, if the number is not a
    /// multiple of `parts` (the tensor-parallel size), so that heads are cut. Returns `None` for other parameters.
    fn cut_within(self, parameter: &str, parts: u64) -> Option<(&'static str, u64)> {
        let module = parameter.rsplit('.').nth(1)?;
        let (what, heads) = match module {
            "q_proj" | "o_proj" | "wq" | "wo" => ("num_attention_heads", self.query?),
            "k_proj" | "v_proj" | "wk" | "wv" => ("num_key_value_heads", self.key_value?),
            _ => return None,
        };
        (!heads.is_multiple_of(parts)).then_some((what, heads))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn heads_are_cut_if_their_number_is_not_a_multiple_of_the_parts() {
        let heads = AttentionHeads::of_config(&json!({ "num_attention_heads": 8, "num_key_value_heads": 2 }));
        assert_eq!(heads.cut_within("layers.0.self_attn.k_proj.weight", 4), Some(("num_key_value_heads", 2)));
        assert_eq!(heads.cut_within("layers.0.self_attn.k_proj.weight", 2), None);
        assert_eq!(heads.cut_within("layers.0.attention.wo.weight", 4), None);
        assert_eq!(heads.cut_within("layers.0.mlp.up_proj.weight", 3), None);
        let inner = AttentionHeads::of_config(&json!({ "text_config": { "num_attention_heads": 6 } }));
        assert_eq!(inner.cut_within("wv.bias", 4), Some(("num_key_value_heads", 6)));
        assert_eq!(AttentionHeads::default().cut_within("wv.bias", 4), None);
    }
}
