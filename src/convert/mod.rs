//! The story of a conversion: open the source, select names, lay out the destination, plan, execute, verify.
//!
//! Each conversion (`reshard`, `unshard`, `flatten`, `consolidate`) is one way to choose a target layout; from the laid-out
//! destination on they share one path, [`Prepared`]. Knows options as values ([`options`]), no command line and no terminal.

mod alike;
mod bucket;
mod checks;
mod config;
mod conflicts;
mod consolidate;
mod digests;
pub(crate) mod error;
mod estimate;
mod execute;
mod fill;
mod flatten;
mod foresee;
mod idle;
mod link;
mod memory;
mod meter;
mod names;
mod nesting;
pub mod options;
mod partial;
mod parts;
mod peers;
mod placements;
mod plans;
mod prepared;
mod produce;
mod read_back;
mod reading;
mod records;
mod replaceable;
mod report;
mod reshard;
mod roster;
mod run;
mod source;
mod space;
mod target_format;
mod tied;
mod told;
mod unshard;
mod verify;
mod waiting;
mod whole;
mod work_folder;

pub use execute::{execute, preview, settle};
pub use options::InspectOptions;
pub use peers::Peers;
pub use prepared::Prepared;
pub use reading::check_flat;
pub use reading::input;
pub use report::{Outcome, Preview, Report};
pub use reshard::{Chooser, row_specs, shared_mesh};
pub use run::{Engine, Run, Setup};
pub use source::{Defaults, Reading, Source, maybe_on_other_nodes, open};
pub use verify::{Verification, has_no_value, verify};

/// Steps of each conversion that lay out its destination.
pub mod prepare {
    pub use super::consolidate::prepare as consolidate;
    pub use super::flatten::prepare as flatten;
    pub use super::reshard::prepare as reshard;
    pub use super::unshard::prepare as unshard;
}
