//! Heads of attention, which tensor parallelism cuts through where they do not divide over its ranks.
//!
//! The numbers are those of `config.json`, as transformers has them. Values are right all the same; modules that reckon
//! with whole heads are not.

use indexmap::IndexMap;
use serde_json::Value as Json;

use crate::convert::config;
use crate::error::Result;
use crate::format::Checkpoint;
use crate::format::parallelize::PlannedModel;
use crate::layout::parallelize::PlacementSource;
use crate::name_list::short_list;
use crate::quantity::count;

/// Numbers of heads, where they are known.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionHeads {
    query: Option<u64>,
    key_value: Option<u64>,
}

impl AttentionHeads {
    /// # Errors
    /// `Io` where the configuration cannot be read.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        Ok(config::read(checkpoint)?.map(|config| Self::of_config(&config)).unwrap_or_default())
    }

    fn of_config(config: &Json) -> Self {
        // Models of several modalities have a configuration for each.
        let number = |key: &str| config.get(key).or_else(|| config.get("text_config")?.get(key))?.as_u64();
        let query = number("num_attention_heads");
        Self { query, key_value: number("num_key_value_heads").or(query) }
    }

    /// What a plan cuts within heads.
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
            format!("{number} ({}): cut within heads: {what} is {heads}, {tp} is {parts}", short_list(&names, 2))
        };
        within.into_iter().map(note).collect()
    }

    /// Where the heads of a parameter do not divide into so many parts: how many there are, and of what.
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
    fn heads_are_cut_where_they_do_not_divide() {
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
