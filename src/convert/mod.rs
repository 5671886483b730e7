//! Conversions: open the source, select names, lay out the destination, plan and execute.
//!
//! Each conversion (`reshard`, `unshard`, `flatten`, `consolidate`) chooses the target layout in its own way. After the
//! destination is laid out, all conversions share the same steps, with [`Prepared`] as their input. This module gets
//! options as plain values ([`options`]) and does not depend on the command line or the terminal.

mod bucket;
mod byte_meter;
mod check_journals;
mod complete_plan;
mod consolidate;
pub(crate) mod declared_layout;
mod dequantize;
mod differing_values;
mod dry_run_destination;
pub(crate) mod error;
mod estimate;
mod execute;
mod fill;
mod fill_optimizers;
mod flatten;
mod join_shards;
mod matching_names;
pub mod model_config;
mod nesting;
mod optimizer_names;
pub mod options;
mod parallelize_plan;
mod partial_values;
mod peers;
mod placements;
mod prepared;
mod read_back;
mod replaceable;
mod report;
mod reshard;
mod run;
pub(crate) mod source;
pub(crate) mod source_checks;
pub(crate) mod source_options;
mod space;
mod target_format;
mod target_parts;
mod threads_and_blocks;
pub(crate) mod tied;
mod transfers;
mod unshard;
mod unused_exchange_options;
pub mod weight_map;
mod whole;
mod write;

pub use complete_plan::complete;
pub use differing_values::has_ranks;
pub use execute::{execute, preview};
pub use optimizer_names::{name_for_comparison, name_optimizers};
pub use options::InspectOptions;
pub use peers::Peers;
pub use prepared::Prepared;
pub use report::{Outcome, Preview, Report};
pub use reshard::{PlacementResolver, row_specs, shared_mesh};
pub use run::{Engine, Run, Setup};
pub use source::{ConversionSource, Defaults, ReadRequest, maybe_on_other_nodes, open, select_options};
pub use source_options::check_flat;
pub use source_options::input;

/// Functions that lay out the destination, one for each kind of conversion.
pub mod prepare {
    pub use super::consolidate::prepare as consolidate;
    pub use super::flatten::prepare as flatten;
    pub use super::reshard::prepare as reshard;
    pub use super::unshard::prepare as unshard;
}
