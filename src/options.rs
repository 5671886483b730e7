//! The options of all operations, as plain structs. Every struct implements `Default`; a conversion with default
//! options changes nothing.
//!
//! Messages of the library name an option by `options::` and its field, such as `options::max_memory`;
//! [`spell_options`](crate::text::spell_options) replaces these names.
//!
//! [`OpenOptions`](crate::OpenOptions) has the options for opening a source, [`Target`] has the options for the result
//! of a [`Conversion`](crate::Conversion), and [`ExecuteOptions`](crate::ExecuteOptions) has the options for executing
//! the plan of the conversion.

pub use crate::catalog::Weights;
pub use crate::checkpoint::{Contents, Writes};
pub use crate::conversion::Target;
pub use crate::convert::options::{
    Assets, Backend, CheckOptions, ConsolidateOptions, ExchangeOptions, FlatOptions, FlattenOptions, InspectOptions,
    MapOptions, OnConflict, ReshardOptions, SelectOptions, ShardOptions, SourceLayoutOptions, SourceOptions,
    SourceVisibility, Strategy, TensorClass, TensorOrder, Tied, UnshardOptions,
};
pub use crate::launch::{Launch, Launcher, Part, launch, process_environment};
pub use crate::layout::Split;
pub use crate::quantity::Quantity;
pub use crate::storage::IoMode;
