//! Built-in plans, one for each model family, for the module names of transformers, Meta's code and torchtitan.
//!
//! Patterns match modules anywhere in the model. Families share most of their modules, so a plan is built from tables.
//! A module in no table is sharded by FSDP only.
//!
//! Source: `base_model_tp_plan` of transformers' configurations, and `parallelize.py` of torchtitan's models.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;

use super::super::Pattern;
use super::candidate::{Candidate, Parameter, RuleOrigin};
use super::{ParallelStyle, StyleRule};

/// The built-in plan of a model family, such as `llama`.
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    /// The tables of attention and MLP modules, which differ between families.
    pub layers: &'static [&'static [FamilyRow]],
    /// The table of embeddings, norms and the head.
    pub outside_layers: &'static [FamilyRow],
}

/// A row of a built-in plan: a pattern for modules, and the style of these modules.
#[derive(Debug)]
pub struct FamilyRow {
    pub pattern: &'static str,
    pub style: ParallelStyle,
    pub note: Option<&'static str>,
}

const fn row(pattern: &'static str, style: ParallelStyle) -> FamilyRow {
    FamilyRow { pattern, style, note: None }
}

const fn row_with_note(pattern: &'static str, style: ParallelStyle, note: &'static str) -> FamilyRow {
    FamilyRow { pattern, style, note: Some(note) }
}

const COLWISE: ParallelStyle = ParallelStyle::Colwise { blocks: 1 };
const ROWWISE: ParallelStyle = ParallelStyle::Rowwise { blocks: 1 };
const GATE_AND_UP: ParallelStyle = ParallelStyle::Colwise { blocks: 2 };

const ATTENTION: &[FamilyRow] = &[
    row("layers.*.self_attn.{q_proj,k_proj,v_proj}", COLWISE),
    row("layers.*.self_attn.o_proj", ROWWISE),
    row_with_note(
        "layers.*.self_attn.qkv_proj",
        ParallelStyle::Replicate,
        "q, k and v are fused and their sizes are unknown, so the weight is replicated over tensor parallelism",
    ),
    row("layers.*.attention.{wq,wk,wv}", COLWISE),
    row("layers.*.attention.qkv_linear.{wq,wk,wv}", COLWISE),
    row("layers.*.attention.wo", ROWWISE),
];

const QK_NORMS: &[FamilyRow] = &[row("layers.*.self_attn.{q_norm,k_norm}", ParallelStyle::Sequence)];

const MLP: &[FamilyRow] = &[
    row("layers.*.mlp.{gate_proj,up_proj}", COLWISE),
    row("layers.*.mlp.gate_up_proj", GATE_AND_UP),
    row("layers.*.mlp.down_proj", ROWWISE),
    row("layers.*.feed_forward.{w1,w3}", COLWISE),
    row("layers.*.feed_forward.w2", ROWWISE),
];

const EXPERTS: &[FamilyRow] = &[
    row("layers.*.{mlp,block_sparse_moe}.gate", ParallelStyle::Replicate),
    row("layers.*.{mlp,block_sparse_moe}.experts.gate_up_proj", GATE_AND_UP),
    row("layers.*.{mlp,block_sparse_moe}.experts.down_proj", ROWWISE),
];

const EXPERTS_OF_MIXTRAL: &[FamilyRow] = &[
    row("layers.*.{mlp,block_sparse_moe}.experts.*.{w1,w3}", COLWISE),
    row("layers.*.{mlp,block_sparse_moe}.experts.*.w2", ROWWISE),
];

const EXPERTS_OF_QWEN: &[FamilyRow] =
    &[row("layers.*.mlp.experts.*.{gate_proj,up_proj}", COLWISE), row("layers.*.mlp.experts.*.down_proj", ROWWISE)];

const SHARED_EXPERT: &[FamilyRow] = &[
    row("layers.*.mlp.shared_expert.{gate_proj,up_proj}", COLWISE),
    row("layers.*.mlp.shared_expert.down_proj", ROWWISE),
    row("layers.*.mlp.shared_expert_gate", ParallelStyle::Replicate),
];

const AROUND_LLAMA: &[FamilyRow] = &[
    row("{embed_tokens,tok_embeddings}", ParallelStyle::RowwiseEmbedding),
    row("layers.*.{input_layernorm,post_attention_layernorm,attention_norm,ffn_norm}", ParallelStyle::Sequence),
    row("norm", ParallelStyle::Sequence),
    row("{lm_head,output}", COLWISE),
];

const LAYERS_OF_NEOX: &[FamilyRow] = &[
    row_with_note(
        "layers.*.attention.query_key_value",
        COLWISE,
        "q, k and v are interleaved by head; each rank gets complete heads only if the number of heads is a multiple of \
         the size of tensor parallelism",
    ),
    row("layers.*.attention.dense", ROWWISE),
    row("layers.*.mlp.dense_h_to_4h", COLWISE),
    row("layers.*.mlp.dense_4h_to_h", ROWWISE),
];

const AROUND_NEOX: &[FamilyRow] = &[
    row("embed_in", ParallelStyle::RowwiseEmbedding),
    row("layers.*.{input_layernorm,post_attention_layernorm}", ParallelStyle::Sequence),
    row("final_layer_norm", ParallelStyle::Sequence),
    row("{embed_out,lm_head}", COLWISE),
];

const LAYERS_OF_GPT2: &[FamilyRow] = &[
    row("h.*.attn.c_attn", ParallelStyle::ColwiseConv1d { blocks: 3 }),
    row("h.*.attn.c_proj", ParallelStyle::RowwiseConv1d { blocks: 1 }),
    row("h.*.mlp.c_fc", ParallelStyle::ColwiseConv1d { blocks: 1 }),
    row("h.*.mlp.c_proj", ParallelStyle::RowwiseConv1d { blocks: 1 }),
];

const AROUND_GPT2: &[FamilyRow] = &[
    row("wte", ParallelStyle::RowwiseEmbedding),
    row("wpe", ParallelStyle::Replicate),
    row("h.*.{ln_1,ln_2}", ParallelStyle::Sequence),
    row("ln_f", ParallelStyle::Sequence),
    row("lm_head", COLWISE),
];

static FAMILIES: [Family; 9] = [
    Family { name: "llama", layers: &[ATTENTION, MLP], outside_layers: AROUND_LLAMA },
    Family { name: "mistral", layers: &[ATTENTION, MLP], outside_layers: AROUND_LLAMA },
    Family { name: "qwen2", layers: &[ATTENTION, MLP], outside_layers: AROUND_LLAMA },
    Family { name: "qwen3", layers: &[ATTENTION, QK_NORMS, MLP], outside_layers: AROUND_LLAMA },
    Family { name: "mixtral", layers: &[ATTENTION, EXPERTS, EXPERTS_OF_MIXTRAL], outside_layers: AROUND_LLAMA },
    Family {
        name: "qwen2-moe",
        layers: &[ATTENTION, MLP, EXPERTS, EXPERTS_OF_QWEN, SHARED_EXPERT],
        outside_layers: AROUND_LLAMA,
    },
    Family {
        name: "qwen3-moe",
        layers: &[ATTENTION, QK_NORMS, MLP, EXPERTS, EXPERTS_OF_QWEN],
        outside_layers: AROUND_LLAMA,
    },
    Family { name: "gpt-neox", layers: &[LAYERS_OF_NEOX], outside_layers: AROUND_NEOX },
    Family { name: "gpt2", layers: &[LAYERS_OF_GPT2], outside_layers: AROUND_GPT2 },
];

/// Patterns for the buffers that older checkpoints of the model families have: causal masks and rotary frequencies. A
/// name such as `attn.bias` does not show that the tensor is a buffer.
const BUFFERS: [&str; 2] = ["**.{attn,attention}.{bias,masked_bias}", "**.{inv_freq,freqs_cis}"];

impl Family {
    /// Returns every built-in plan.
    pub fn all() -> &'static [Self] {
        &FAMILIES
    }

    /// Returns the plan of this name. In the name, `_` and `-` are equivalent.
    pub fn named(name: &str) -> Option<&'static Self> {
        let name = name.to_ascii_lowercase().replace('_', "-");
        FAMILIES.iter().find(|family| family.name == name)
    }

    /// Returns the rules of the plan.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let layers = self.layers.iter().flat_map(|rows| rows.iter()).map(|row| (row, RuleOrigin::Layers));
        let rows = layers.chain(self.outside_layers.iter().map(|row| (row, RuleOrigin::OutsideLayers)));
        let candidate = |(row, origin): (&FamilyRow, RuleOrigin)| {
            let pattern = parse(&format!("**.{}", row.pattern));
            let from = format!("plan {}: {}", self.name, row.pattern);
            Candidate { rule: StyleRule { pattern, style: row.style.into(), origin: from }, origin, note: row.note }
        };
        rows.map(candidate).collect()
    }

    /// Returns patterns for the buffers of older checkpoints whose names, such as `attn.bias`, do not show that the
    /// tensors are buffers.
    pub(super) fn buffers() -> Vec<Pattern> {
        BUFFERS.iter().map(|text| parse(text)).collect()
    }
}

fn parse(pattern: &str) -> Pattern {
    Pattern::parse(pattern).expect("built-in patterns are globs")
}

/// Returns the families whose plans match the most attention and MLP parameters; empty if no plan matches any. Among
/// plans that match equally many parameters, only the plans with the fewest rows that match nothing are returned.
/// Parameters whose names differ only in numbers count once.
pub fn similar_families(parameters: &[Parameter<'_>]) -> Vec<&'static str> {
    // Layers and experts have equal names except for numbers, so each name is counted once.
    let names: BTreeSet<String> = parameters.iter().map(|parameter| with_zeros_for_numbers(&parameter.name)).collect();
    let mut best = ((1, Reverse(usize::MAX)), Vec::new());
    for family in Family::all() {
        let mut layers = family.candidates();
        layers.retain(|candidate| candidate.origin == RuleOrigin::Layers);
        let named = names.iter().filter(|name| layers.iter().any(|candidate| candidate.matches(name))).count();
        let is_unmatched = |candidate: &&Candidate| !names.iter().any(|name| candidate.matches(name));
        let similarity = (named, Reverse(layers.iter().filter(is_unmatched).count()));
        match similarity.cmp(&best.0) {
            Ordering::Greater => best = (similarity, vec![family.name]),
            Ordering::Equal => best.1.push(family.name),
            Ordering::Less => {}
        }
    }
    best.1
}

/// Returns the name with every component that is a number replaced by 0: `layers.0.mlp` for `layers.11.mlp`.
fn with_zeros_for_numbers(name: &str) -> String {
    let parts = name.split('.').map(|part| if part.parse::<u64>().is_ok() { "0" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
