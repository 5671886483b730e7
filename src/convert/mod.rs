//! Conversions: open the source, select names, lay out the destination, plan and execute.
//!
//! Each conversion (`reshard`, `unshard`, `flatten`, `consolidate`) chooses the target layout in its own way. After the
//! destination is laid out, all conversions share the same steps, with [`Prepared`] as their input. This module gets
//! options as plain values ([`options`]) and does not depend on the command line or the terminal.

mod bucket;
mod byte_meter;
pub(crate) mod checks;
mod config;
mod conflicts;
mod consolidate;
pub(crate) mod declared_layout;
pub(crate) mod error;
mod estimate;
mod execute;
mod fill;
mod flatten;
mod journals;
mod link;
mod memory;
mod names;
mod nesting;
mod option_consistency;
pub mod options;
mod partial;
mod parts;
mod peers;
mod placements;
mod plans;
mod preflight;
mod prepared;
mod process_table;
mod read_back;
pub(crate) mod reading;
mod replaceable;
mod report;
mod reshard;
mod run;
pub(crate) mod source;
mod space;
mod target_format;
pub(crate) mod tied;
mod unshard;
mod unused_options;
mod waiting;
mod whole;
mod work_folder;
mod write;

pub use execute::{complete, execute, preview};
pub use options::InspectOptions;
pub use peers::Peers;
pub use prepared::Prepared;
pub use reading::check_flat;
pub use reading::input;
pub use report::{Outcome, Preview, Report};
pub use reshard::{PlacementResolver, row_specs, shared_mesh};
pub use run::{Engine, Run, Setup};
pub use source::{ConversionSource, Defaults, ReadRequest, maybe_on_other_nodes, open};

/// Functions that lay out the destination, one per conversion.
pub mod prepare {
    pub use super::consolidate::prepare as consolidate;
    pub use super::flatten::prepare as flatten;
    pub use super::reshard::prepare as reshard;
    pub use super::unshard::prepare as unshard;
}
