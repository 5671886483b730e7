//! Finds the scales of quantised tensors, which are not cast: rounding a scale changes every weight that it scales.
//!
//! A tensor is a scale if its name contains a word for scales and it belongs to a quantised tensor: in the same module
//! (`q_proj.weight` and `q_proj.weight_scale_inv`), or with the name of the quantised tensor as a prefix
//! (`q_proj.weight.absmax`). A scale of a key-value cache (`attn.k_scale`) may also be in a module that contains the
//! modules of quantised tensors. The scale of a norm, without a quantised tensor in its module, is an ordinary
//! parameter.
//!
//! Sources of the names: `FP8Linear` and `Mxfp4GptOssExperts` of transformers, compressed-tensors, ModelOpt, GPTQ, AWQ,
//! bitsandbytes, HQQ, quanto, and `KVCacheMethod` of vLLM.

use std::collections::{BTreeMap, HashMap};

use crate::catalog::Dtype;

/// Words that names of scales, zero points and code books contain, separated by underscores.
const WORDS: [&str; 14] = [
    "scale", "scales", "scaling", "zero", "zeros", "zp", "qzeros", "scb", "absmax", "amax", "map", "qmap", "offset",
    "codebook",
];

/// Words that names of packed integer weights contain. Integer tensors with other names, such as masks and positions,
/// are not quantised weights.
const PACKED: [&str; 5] = ["weight", "packed", "blocks", "data", "w_q"];

/// Names of key-value cache scales, which are in the attention module that contains the quantised projections.
const OF_ATTENTION: [&str; 5] = ["k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"];

/// The tensors of a checkpoint that may be quantised weights, because their dtype is an 8-bit float or an integer of at
/// most 32 bits.
#[derive(Debug, Default)]
pub(super) struct Quantised {
    /// For each module, its tensors that may be quantised: the last component of the name, and the dtype.
    modules: HashMap<String, Vec<(String, Dtype)>>,
    names: BTreeMap<String, Dtype>,
}

impl Quantised {
    /// Adds a tensor if its dtype may be that of a quantised weight; otherwise does nothing.
    pub fn add(&mut self, name: &str, dtype: Dtype) {
        if dtype.itemsize() > 4 || !(is_small_float(dtype) || is_integer(dtype)) {
            return;
        }
        let (module, last) = split(name);
        self.modules.entry(module.to_owned()).or_default().push((last.to_owned(), dtype));
        self.names.insert(name.to_owned(), dtype);
    }

    /// Returns whether the tensor of this name is a scale of a quantised tensor.
    pub fn is_scale(&self, name: &str) -> bool {
        let (module, last) = split(name);
        let lower = last.to_lowercase();
        if !lower.split('_').any(|word| WORDS.contains(&word)) {
            return false;
        }
        let is_packed = |name: &str| PACKED.iter().any(|word| name.to_lowercase().contains(word));
        let quantised = |name: &str, dtype: Dtype| {
            is_small_float(dtype) || is_packed(name) || last.starts_with(&format!("{name}_"))
        };
        let in_module = self.modules.get(module).into_iter().flatten().any(|(name, dtype)| quantised(name, *dtype));
        let above = || self.names.get(module).is_some_and(|dtype| quantised(split(module).1, *dtype));
        let below = || {
            let prefix = format!("{module}.");
            let mut below = self.names.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
            OF_ATTENTION.contains(&last) && below.any(|(name, dtype)| quantised(split(name).1, *dtype))
        };
        in_module || above() || below()
    }
}

/// Splits a name into its module and its last component.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

fn is_integer(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::I8 | Dtype::I16 | Dtype::I32)
}

/// Returns whether a dtype is a float of one byte.
pub(super) fn is_small_float(dtype: Dtype) -> bool {
    dtype.is_float() && dtype.itemsize() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scales(tensors: &[(&str, Dtype)]) -> Vec<String> {
        let mut quantised = Quantised::default();
        tensors.iter().for_each(|(name, dtype)| quantised.add(name, *dtype));
        let floats = tensors.iter().filter(|(_, dtype)| dtype.is_float() && !is_small_float(*dtype));
        floats.map(|(name, _)| (*name).to_owned()).filter(|name| quantised.is_scale(name)).collect()
    }

    #[test]
    fn scale_beside_quantised_weight_is_found() {
        for (weight, dtype, scale, scale_dtype) in [
            ("l.q_proj.weight", Dtype::F8E4m3fn, "l.q_proj.weight_scale_inv", Dtype::F32),
            ("l.q_proj.weight", Dtype::F8E4m3fn, "l.q_proj.weight_scale", Dtype::Bf16),
            ("l.q_proj.weight", Dtype::F8E4m3fn, "l.q_proj.input_scale", Dtype::F32),
            ("l.wq_b.weight", Dtype::F8E4m3fn, "l.wq_b.scale", Dtype::F32),
            ("l.experts.gate_up_proj", Dtype::F8E4m3fn, "l.experts.gate_up_proj_scale_inv", Dtype::F32),
            ("l.q_proj.weight", Dtype::F8E4m3fn, "l.q_proj.k_scale", Dtype::F32),
            ("l.attn.q_proj.weight", Dtype::F8E4m3fn, "l.attn.k_scale", Dtype::F32),
            ("l.experts.down_proj_blocks", Dtype::U8, "l.experts.down_proj_scales", Dtype::Bf16),
            ("l.experts.down_proj", Dtype::I8, "l.experts.down_proj_scale", Dtype::F32),
            ("l.q_proj.weight_packed", Dtype::I32, "l.q_proj.weight_scale", Dtype::Bf16),
            ("l.q_proj.weight_packed", Dtype::U8, "l.q_proj.weight_global_scale", Dtype::F32),
            ("l.q_proj.weight", Dtype::U8, "l.q_proj.weight_scale_2", Dtype::F32),
            ("l.q_proj.qweight", Dtype::I32, "l.q_proj.scales", Dtype::F16),
            ("l.q_proj.weight", Dtype::U8, "l.q_proj.weight.absmax", Dtype::F32),
            ("l.q_proj.weight", Dtype::U8, "l.q_proj.weight.nested_quant_map", Dtype::F32),
            ("l.q_proj.weight", Dtype::I8, "l.q_proj.SCB", Dtype::F32),
            ("l.q_proj.W_q", Dtype::U8, "l.q_proj.zero", Dtype::F16),
            ("l.q_proj.weight._data", Dtype::I8, "l.q_proj.weight._scale", Dtype::F32),
            ("weight", Dtype::F8E4m3fn, "weight_scale_inv", Dtype::F32),
        ] {
            assert_eq!(scales(&[(weight, dtype), (scale, scale_dtype)]), [scale], "{weight} {scale}");
        }
    }

    #[test]
    fn scale_without_quantised_tensor_is_a_parameter() {
        for other in [
            ("l.q_proj.weight", Dtype::F8E4m3fn),
            ("l.mask", Dtype::U8),
            ("l.norm.position_ids", Dtype::I64),
            ("l.norm.mask", Dtype::U8),
        ] {
            for name in ["l.norm.scale", "l.scale", "l.layer_scale", "l.norm.weight", "l.q_proj.bias", "k_scale.weight"]
            {
                assert_eq!(scales(&[other, (name, Dtype::F32)]), [""; 0], "{other:?} {name}");
            }
        }
        assert_eq!(scales(&[("l.weight", Dtype::Bf16), ("l.weight_scale", Dtype::F32)]), [""; 0]);
    }
}
