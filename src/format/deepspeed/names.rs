//! The names of the files in the folder of a DeepSpeed checkpoint.
//!
//! Source: `_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name` in `deepspeed/runtime/engine.py`,
//! `ckpt_layer_path` in `deepspeed/runtime/pipe/module.py`.

/// The content of a file, as its name states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `mp_rank_00_model_states.pt`: the file of the model of ZeRO stages 0 to 2.
    Model,
    /// `zero_pp_rank_3_mp_rank_00_model_states.pt`: the file of the model that one rank of ZeRO stage 3 writes.
    PartitionedModel,
    /// `zero_pp_rank_3_mp_rank_00_optim_states.pt`: the masters and the optimizer state of one rank.
    Optimizer,
}

/// The name of a model file or of an optimizer file, divided into its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatesName {
    pub role: Role,
    /// The number of the partition: the data-parallel rank, which DeepSpeed calls `pp_rank`. 0 for [`Role::Model`].
    pub partition: u32,
    /// The model-parallel rank, which counts tensor-parallel ranks and stages of a pipeline.
    pub model_parallel: u32,
    /// True if the name begins with `bf16_`, as the names of optimizer files do if the job enabled bf16.
    pub is_bf16: bool,
}

impl StatesName {
    /// Parses the complete name of a file; returns `None` for all other files.
    pub fn parse(name: &str) -> Option<Self> {
        let (rest, is_model) = match name.strip_suffix("_model_states.pt") {
            Some(rest) => (rest, true),
            // Early releases write no underscore before `optim_states`.
            None => (name.strip_suffix("optim_states.pt").map(|rest| rest.strip_suffix('_').unwrap_or(rest))?, false),
        };
        let (rest, is_bf16) = match rest.strip_prefix("bf16_") {
            Some(rest) => (rest, true),
            None => (rest, false),
        };
        let (partition, rest) = match rest.strip_prefix("zero_pp_rank_") {
            Some(rest) => {
                let (digits, rest) = rest.split_once("_mp_rank_")?;
                (Some(number(digits)?), rest)
            }
            None => (None, rest.strip_prefix("mp_rank_")?),
        };
        let role = match (is_model, partition) {
            (true, None) => Role::Model,
            (true, Some(_)) => Role::PartitionedModel,
            (false, Some(_)) => Role::Optimizer,
            (false, None) => return None,
        };
        if is_bf16 && is_model {
            return None;
        }
        Some(Self { role, partition: partition.unwrap_or(0), model_parallel: number(rest)?, is_bf16 })
    }

    /// Returns the name of the file of another partition.
    pub fn of_partition(self, partition: u32) -> String {
        let prefix = if self.is_bf16 { "bf16_" } else { "" };
        let rank = self.model_parallel;
        match self.role {
            Role::Model => format!("mp_rank_{rank:02}_model_states.pt"),
            Role::PartitionedModel => format!("zero_pp_rank_{partition}_mp_rank_{rank:02}_model_states.pt"),
            Role::Optimizer => format!("{prefix}zero_pp_rank_{partition}_mp_rank_{rank:02}_optim_states.pt"),
        }
    }
}

/// Returns whether this is the name of a file that has the values of the module: at stage 3, the files of the model have
/// none.
pub fn has_module(name: &str) -> bool {
    StatesName::parse(name).is_some_and(|parsed| parsed.role == Role::Model)
}

fn number(digits: &str) -> Option<u32> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

/// The name of the file of a layer, which only jobs with pipeline parallelism write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerName {
    pub layer: u32,
    /// The tensor-parallel rank; `None` if the job has no tensor parallelism.
    pub tensor_parallel: Option<u32>,
}

impl LayerName {
    /// Parses the complete name of a file, `layer_00-model_states.pt` or `layer_00-model_01-model_states.pt`; returns
    /// `None` for all other files.
    pub fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_suffix("-model_states.pt")?.strip_prefix("layer_")?;
        match rest.split_once("-model_") {
            None => Some(Self { layer: number(rest)?, tensor_parallel: None }),
            Some((layer, rank)) => Some(Self { layer: number(layer)?, tensor_parallel: Some(number(rank)?) }),
        }
    }

    /// Returns the name of the file.
    pub fn file_name(self) -> String {
        let rank = self.tensor_parallel.map_or_else(String::new, |rank| format!("-model_{rank:02}"));
        format!("layer_{:02}{rank}-model_states.pt", self.layer)
    }
}

/// The name of the file of one expert, `layer_0_expert_3_mp_rank_00_model_states.pt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExpertName {
    /// The number of the layer of experts in the model.
    pub layer: u32,
    /// The number of the expert in the layer.
    pub expert: u32,
    pub model_parallel: u32,
}

impl ExpertName {
    /// Parses the complete name of a file; returns `None` for all other files.
    pub fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_suffix("_model_states.pt")?.strip_prefix("layer_")?;
        let (layer, rest) = rest.split_once("_expert_")?;
        let (expert, rank) = rest.split_once("_mp_rank_")?;
        Some(Self { layer: number(layer)?, expert: number(expert)?, model_parallel: number(rank)? })
    }

    /// Returns the name of the file.
    pub fn file_name(self) -> String {
        let Self { layer, expert, model_parallel } = self;
        format!("layer_{layer}_expert_{expert}_mp_rank_{model_parallel:02}_model_states.pt")
    }
}

/// The name of the optimizer file of one expert-parallel rank at stage 0, `expp_rank_1_mp_rank_00_optim_states.pt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRankName {
    /// The expert-parallel rank.
    pub rank: u32,
    pub model_parallel: u32,
}

impl ExpertRankName {
    /// Parses the complete name of a file; returns `None` for all other files.
    pub fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_suffix("_optim_states.pt")?.strip_prefix("expp_rank_")?;
        let (rank, model_parallel) = rest.split_once("_mp_rank_")?;
        Some(Self { rank: number(rank)?, model_parallel: number(model_parallel)? })
    }

    /// Returns the name of the file.
    pub fn file_name(self) -> String {
        format!("expp_rank_{}_mp_rank_{:02}_optim_states.pt", self.rank, self.model_parallel)
    }
}

/// Returns whether DeepSpeed gives this name to a file of experts: `layer_0_expert_3_mp_rank_00_model_states.pt`,
/// `expert_3_mp_rank_00_model_states.pt`, `expp_rank_0_mp_rank_00_optim_states.pt`.
pub fn is_expert(name: &str) -> bool {
    let is_model = name.ends_with("_model_states.pt")
        && (name.starts_with("expert_") || name.starts_with("layer_") && name.contains("_expert_"));
    is_model || name.starts_with("expp_rank_") && name.ends_with("optim_states.pt")
}

/// Returns whether DeepSpeed gives this name to one of several files of a checkpoint.
pub fn is_states(name: &str) -> bool {
    StatesName::parse(name).is_some() || LayerName::parse(name).is_some() || is_expert(name)
}

/// Returns whether the names in a folder show a Universal checkpoint: it has the folder `zero`, and no optimizer files.
pub fn is_universal(names: &[String]) -> bool {
    let is_optimizer = |name: &String| StatesName::parse(name).is_some_and(|name| name.role == Role::Optimizer);
    names.iter().any(|name| name == "zero") && !names.iter().any(is_optimizer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_each_kind_is_parsed_and_rendered() {
        for (name, role, partition, model_parallel, is_bf16) in [
            ("mp_rank_00_model_states.pt", Role::Model, 0, 0, false),
            ("mp_rank_12_model_states.pt", Role::Model, 0, 12, false),
            ("zero_pp_rank_10_mp_rank_00_model_states.pt", Role::PartitionedModel, 10, 0, false),
            ("zero_pp_rank_3_mp_rank_01_optim_states.pt", Role::Optimizer, 3, 1, false),
            ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", Role::Optimizer, 3, 0, true),
        ] {
            let parsed = StatesName::parse(name).unwrap();
            assert_eq!(parsed, StatesName { role, partition, model_parallel, is_bf16 }, "{name}");
            assert_eq!(parsed.of_partition(partition), name);
        }
        let early = StatesName::parse("zero_pp_rank_3_mp_rank_00optim_states.pt").unwrap();
        assert_eq!((early.role, early.partition), (Role::Optimizer, 3));
    }

    #[test]
    fn other_names_are_not_parsed() {
        for name in [
            "best_model_states.pt",
            "expp_rank_0_mp_rank_00_optim_states.pt",
            "layer_00-model_states.pt",
            "layer_0_expert_1_mp_rank_00_model_states.pt",
            "zero_pp_rank_x_mp_rank_00_optim_states.pt",
            "zero_pp_rank_4294967296_mp_rank_00_optim_states.pt",
            "zero_pp_rank_0_mp_rank__optim_states.pt",
            "bf16_mp_rank_00_model_states.pt",
            "mp_rank_00_optim_states.pt",
            "_model_states.pt",
            "optim_states.pt",
        ] {
            assert_eq!(StatesName::parse(name), None, "{name}");
        }
        for (name, layer, tensor_parallel) in
            [("layer_00-model_states.pt", 0, None), ("layer_123-model_07-model_states.pt", 123, Some(7))]
        {
            let parsed = LayerName::parse(name).unwrap();
            assert_eq!(parsed, LayerName { layer, tensor_parallel });
            assert_eq!(parsed.file_name(), name);
        }
        for name in ["my_layer-model_states.pt", "layer_-model_states.pt", "layer_1-x_0-model_states.pt"] {
            assert_eq!(LayerName::parse(name), None, "{name}");
        }
        let name = "layer_2_expert_13_mp_rank_00_model_states.pt";
        let parsed = ExpertName::parse(name).unwrap();
        assert_eq!(parsed, ExpertName { layer: 2, expert: 13, model_parallel: 0 });
        assert_eq!(parsed.file_name(), name);
        assert_eq!(ExpertName::parse("expert_3_mp_rank_00_model_states.pt"), None);
        let name = "expp_rank_12_mp_rank_00_optim_states.pt";
        let parsed = ExpertRankName::parse(name).unwrap();
        assert_eq!(parsed, ExpertRankName { rank: 12, model_parallel: 0 });
        assert_eq!(parsed.file_name(), name);
        assert_eq!(ExpertRankName::parse("expp_rank_0_mp_rank_00optim_states.pt"), None);
        assert!(is_expert("expert_3_mp_rank_00_model_states.pt"));
        assert!(
            is_expert("expp_rank_0_mp_rank_00_optim_states.pt")
                && is_states("layer_0_expert_1_mp_rank_00_model_states.pt")
        );
        assert!(!is_states("best_model_states.pt"));
    }
}
