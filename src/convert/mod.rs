//! Conversions: open the source, select names, lay out the destination, plan, execute and verify.
//!
//! Each conversion (`reshard`, `unshard`, `flatten`, `consolidate`) chooses the target layout in its own way. After the
//! destination is laid out, all conversions share the same steps, with [`Prepared`] as their input. This module gets
//! options as plain values ([`options`]) and does not depend on the command line or the terminal.

mod bucket;
mod byte_meter;
mod checks;
mod config;
mod conflicts;
mod consolidate;
mod declared_layout;
mod digests;
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
mod reading;
mod replaceable;
mod report;
mod reshard;
mod run;
mod source;
mod space;
mod target_format;
mod tied;
mod unshard;
mod unused_options;
mod verify;
mod waiting;
mod whole;
mod work_folder;
mod write;

pub use execute::{execute, preview, complete};
pub use options::InspectOptions;
pub use peers::Peers;
pub use prepared::Prepared;
pub use reading::check_flat;
pub use reading::input;
pub use report::{Outcome, Preview, Report};
pub use reshard::{PlacementResolver, row_specs, shared_mesh};
pub use run::{Engine, Run, Setup};
pub use source::{ConversionSource, Defaults, ReadRequest, maybe_on_other_nodes, open};
pub use verify::{Verification, has_no_value, verify};

/// Functions that lay out the destination, one per conversion.
pub mod prepare {
    pub use super::consolidate::prepare as consolidate;
    pub use super::flatten::prepare as flatten;
    pub use super::reshard::prepare as reshard;
    pub use super::unshard::prepare as unshard;
}
