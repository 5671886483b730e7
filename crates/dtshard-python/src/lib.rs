//! The native part of the Python package `dtshard`: opens checkpoints, reads parts of tensors into buffers of Python objects,
//! and runs conversions. The package in `python/dtshard` wraps it, and is what users import.
//!
//! Options are keyword arguments with the names that they have on the command line, because they are parsed by the command line
//! of the program. While the library works, the interpreter is free for other threads, and the calling thread delivers progress
//! and signals to Python.

mod call;
mod checkpoint;
mod error;
mod keywords;

use std::path::Path;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use call::Call;
use checkpoint::Checkpoint;
use dtshard::cli::Command;
use dtshard::options::launch;
use dtshard::{Conversion, Setup};
use keywords::{Arguments, document};

/// Opens a checkpoint, and selects and renames its tensors.
#[pyfunction]
fn open(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    options: &Bound<'_, PyDict>,
    rank: u32,
    names_optimizers: bool,
) -> PyResult<Checkpoint> {
    for of_verify_alone in ["html", "common"] {
        if options.contains(of_verify_alone)? {
            return Err(PyTypeError::new_err(format!("unexpected keyword argument '{of_verify_alone}'")));
        }
    }
    let arguments = Arguments::parse("verify", std::slice::from_ref(path), options)?;
    let Command::Verify(verify) = arguments.command else { unreachable!("the verb is verify") };
    Checkpoint::open(py, &verify, rank, names_optimizers)
}

/// Converts a checkpoint. Returns the JSON document that the command prints with `--json`.
#[pyfunction]
fn convert(
    py: Python<'_>,
    verb: &str,
    paths: &Bound<'_, PyTuple>,
    options: &Bound<'_, PyDict>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let Arguments { command, labels } = Arguments::parse(verb, &paths.iter().collect::<Vec<_>>(), options)?;
    let Some((target, args)) = command.conversion() else {
        return Err(error::usage(
            &format!("{verb}: not a verb that converts"),
            "use reshard, unshard, flatten or consolidate",
        ));
    };
    let call = Call::new(progress);
    let report = call.run(py, || {
        let share = &args.share;
        // A process of torchrun that calls this function converts the whole checkpoint, unless `part` says otherwise.
        let launch = launch(share.part, share.parts, share.no_wait, &|_| None)?;
        let setup = Setup { launch, stop: call.stop(), labels };
        let source = dtshard::Checkpoint::open_with(&args.src, &args.open_options(&target, setup), call.progress())?;
        let mut plan = args.apply(Conversion::from(source)).target(target).plan()?;
        match &args.dst {
            Some(dst) if !args.destination.dry_run => {
                let report = plan.execute(dst, &args.execute_options(), call.progress())?;
                report.warnings.iter().for_each(|warning| call.warn(warning));
                Ok(report.to_json())
            }
            _ => {
                let preview = plan.preview()?;
                preview.warnings().iter().for_each(|warning| call.warn(warning));
                write_report(args.destination.html.as_deref(), || preview.to_html())?;
                Ok(preview.to_json())
            }
        }
    })?;
    document(py, &report)
}

/// Verifies one checkpoint, or compares two. Returns the JSON document that the command prints with `--json`.
#[pyfunction]
fn verify(
    py: Python<'_>,
    paths: &Bound<'_, PyTuple>,
    options: &Bound<'_, PyDict>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let arguments = Arguments::parse("verify", &paths.iter().collect::<Vec<_>>(), options)?;
    let Command::Verify(args) = arguments.command else { unreachable!("the verb is verify") };
    let call = Call::new(progress);
    let setup = Setup { stop: call.stop(), ..Setup::default() };
    let found = call.run(py, || {
        let verification = dtshard::verify(&args.options(), &setup, call.progress())?;
        write_report(args.report.html.as_deref(), || verification.to_html())?;
        Ok(verification.to_json())
    })?;
    document(py, &found)
}

/// Describes a checkpoint. Returns the JSON document that the command prints with `--json`.
#[pyfunction]
fn inspect(py: Python<'_>, path: &Bound<'_, PyAny>, options: &Bound<'_, PyDict>) -> PyResult<Py<PyAny>> {
    let arguments = Arguments::parse("inspect", std::slice::from_ref(path), options)?;
    let Command::Inspect(args) = arguments.command else { unreachable!("the verb is inspect") };
    let call = Call::new(None);
    let described = call.run(py, || {
        let setup = Setup { stop: call.stop(), ..Setup::default() };
        let mut checkpoint = dtshard::Checkpoint::open_with(&args.src, &args.open_options(setup), call.progress())?;
        checkpoint.map(&args.map.options())?;
        if args.layout {
            return Ok(checkpoint.layout()?.0);
        }
        let options = args.options();
        let inspection = checkpoint.inspect(&options)?;
        write_report(args.report.html.as_deref(), || inspection.to_html())?;
        Ok(inspection.to_json())
    })?;
    document(py, &described)
}

/// Writes the report that `html=` asks for.
fn write_report(file: Option<&Path>, page: impl FnOnce() -> dtshard::Result<String>) -> dtshard::Result<()> {
    let Some(file) = file else { return Ok(()) };
    dtshard::write_html(file, &error::spell(&page()?))
}

#[pymodule]
fn _dtshard(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Checkpoint>()?;
    module.add_function(wrap_pyfunction!(open, module)?)?;
    module.add_function(wrap_pyfunction!(convert, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    module.add_function(wrap_pyfunction!(inspect, module)?)
}
