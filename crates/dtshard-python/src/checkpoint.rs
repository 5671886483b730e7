//! An open checkpoint for Python: its list of tensors, and reads into buffers of Python objects.

use std::os::fd::{IntoRawFd, RawFd};
use std::path::PathBuf;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call::{Call, Seen};
use crate::error;
use dtshard::cli::Verify;
use dtshard::options::{Contents, InspectOptions};
use dtshard::{OpenOptions, Setup, Stop, TensorPart, TensorRead};

/// Which part of a tensor is read: `None`, `(offsets, sizes)` or `(mesh, coordinate, placements)`.
#[derive(Clone, FromPyObject)]
enum Part {
    Shard(Vec<u64>, Vec<u64>, String),
    Box(Vec<u64>, Vec<u64>),
}

/// The name, dtype, torch's name of the dtype, shape, placements, mesh and number of chunks of a tensor.
type TensorRow = (String, &'static str, &'static str, Vec<u64>, Option<String>, Option<String>, usize);

/// A run of bytes of a file: a file descriptor that the caller closes, and the offset in bytes.
type Run = (RawFd, u64);

/// An open checkpoint.
#[pyclass(frozen, module = "dtshard._dtshard")]
pub struct Checkpoint {
    inner: dtshard::Checkpoint,
    stop: Stop,
    /// The process that opened the checkpoint. A process that it forks has no worker threads.
    process: u32,
}

impl Checkpoint {
    /// Opens a checkpoint with the options of `verify`. `rank` is the rank whose own values are read. With `names_optimizers`, the
    /// state of optimizers has parameter names as keys, where they are known.
    ///
    /// # Errors
    /// `dtshard.Error`.
    pub fn open(py: Python<'_>, args: &Verify, rank: u32, names_optimizers: bool) -> PyResult<Self> {
        let call = Call::new(None);
        let inner = call.run(py, || {
            let options = args.options();
            let opening = OpenOptions {
                source: options.source,
                contents: Contents::State,
                like: options.like,
                raw_flat: true,
                keep_names: options.select.keep_names,
                rank,
                setup: Setup { stop: call.stop(), ..Setup::default() },
                ..OpenOptions::default()
            };
            let mut checkpoint = dtshard::Checkpoint::open_with(&options.src, &opening, call.progress())?;
            if names_optimizers {
                checkpoint.name_optimizer_state();
            }
            checkpoint.select(&options.select)?;
            Ok(checkpoint)
        })?;
        Ok(Self { inner, stop: call.stop(), process: std::process::id() })
    }

    /// Runs `work` on another thread; `progress` receives counts of bytes. It is an error in a process that was forked, because
    /// its copy of the checkpoint has no worker threads.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        work: impl FnOnce(&Seen) -> dtshard::Result<T> + Send,
    ) -> PyResult<T> {
        if self.process != std::process::id() {
            let path = self.inner.path().display();
            let message = format!("{path}: the checkpoint was opened before this process was forked");
            return Err(error::usage(&message, "open the checkpoint in the process that reads it"));
        }
        let call = Call::with_stop(progress, self.stop.clone());
        call.run(py, || work(&call.progress()))
    }
}

#[pymethods]
impl Checkpoint {
    #[getter]
    fn format(&self) -> String {
        self.inner.format().to_string()
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.inner.path().to_path_buf()
    }

    #[getter]
    fn series(&self) -> Vec<String> {
        self.inner.series().to_vec()
    }

    fn tensors(&self, py: Python<'_>) -> Vec<TensorRow> {
        py.detach(|| {
            let row = |tensor: dtshard::TensorInfo<'_>| {
                let (name, dtype) = (tensor.name().to_owned(), tensor.dtype());
                (
                    name,
                    dtype.name(),
                    dtype.torch_name(),
                    tensor.shape().to_vec(),
                    tensor.placements(),
                    tensor.mesh(),
                    tensor.chunks(),
                )
            };
            self.inner.tensors().filter(|tensor| !tensor.is_unreadable_object()).map(row).collect()
        })
    }

    /// Returns the names of objects that cannot be read, because their classes are not known to be plain data.
    fn unreadable_objects(&self) -> Vec<String> {
        let unreadable = self.inner.tensors().filter(dtshard::TensorInfo::is_unreadable_object);
        unreadable.map(|object| object.name().to_owned()).collect()
    }

    fn boxes(&self, name: &str) -> Vec<(Vec<u64>, Vec<u64>)> {
        self.inner.tensor(name).map(|tensor| tensor.boxes()).unwrap_or_default()
    }

    fn objects<'py>(&self, py: Python<'py>) -> PyResult<Vec<(String, Bound<'py, PyBytes>)>> {
        let objects = self.inner.pickled_objects().map_err(|failed| error::exception(py, &failed))?;
        Ok(objects.into_iter().map(|(path, pickle)| (path, PyBytes::new(py, &pickle))).collect())
    }

    fn stored_run(&self, py: Python<'_>, name: &str, part: Option<Part>) -> PyResult<Option<Run>> {
        let run = self.call(py, None, |_| self.inner.stored_run(name, &tensor_part(part.as_ref())))?;
        Ok(run.map(|(file, offset)| (file.into_raw_fd(), offset)))
    }

    /// Returns the sizes of a part of a tensor.
    fn part_sizes(&self, py: Python<'_>, name: &str, part: Option<Part>) -> PyResult<Vec<u64>> {
        self.inner.part_sizes(name, &tensor_part(part.as_ref())).map_err(|failed| error::exception(py, &failed))
    }

    /// Returns the names that a selection has left out, as the files have them.
    fn left_out(&self) -> Vec<String> {
        self.inner.left_out().to_vec()
    }

    /// Reads parts of tensors, each into a contiguous, writable buffer of bytes.
    fn read(
        &self,
        py: Python<'_>,
        parts: Vec<(String, Option<Part>, u64, PyBuffer<u8>)>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let mut waves: Vec<Vec<TensorRead<'_>>> = Vec::new();
        let mut ends: Vec<usize> = Vec::new();
        let mut parts = parts;
        parts.sort_by_key(|(.., buffer)| buffer.buf_ptr() as usize);
        for (name, part, first, buffer) in &mut parts {
            if buffer.readonly() || !buffer.is_c_contiguous() {
                return Err(PyValueError::new_err(format!("{name}: the buffer must be writable and contiguous")));
            }
            let (start, len) = (buffer.buf_ptr() as usize, buffer.len_bytes());
            // Two names of one tied parameter have the same memory, which must not be written by two threads at once.
            let wave = ends.iter().position(|end| *end <= start).unwrap_or(ends.len());
            if wave == ends.len() {
                ends.push(0);
                waves.push(Vec::new());
            }
            ends[wave] = start + len;
            waves[wave].push(TensorRead {
                name,
                part: tensor_part(part.as_ref()),
                first: *first,
                buffer: memory(buffer),
            });
        }
        self.call(py, progress, |seen| waves.iter_mut().try_for_each(|reads| self.inner.read_all(reads, seen)))
    }

    /// Returns the report of `dtshard inspect --html` as a frame for another page.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        let page = |_: &Seen| Ok(dtshard::html_frame(&self.inner.inspect(&InspectOptions::default())?.to_html()?));
        self.call(py, None, page)
    }

    /// Prints the summary that `dtshard inspect --brief` prints.
    fn summary(&self, py: Python<'_>) -> PyResult<String> {
        let options = InspectOptions { brief: true, ..InspectOptions::default() };
        self.call(py, None, |_| self.inner.inspect(&options)?.summary())
    }
}

fn tensor_part(part: Option<&Part>) -> TensorPart {
    match part.cloned() {
        None => TensorPart::Whole,
        Some(Part::Box(offsets, sizes)) => TensorPart::Box { offsets, sizes },
        Some(Part::Shard(mesh, coordinate, placements)) => TensorPart::Shard { mesh, coordinate, placements },
    }
}

/// Returns the memory of a buffer that is writable and contiguous.
#[allow(unsafe_code, reason = "the buffer is exported by a Python object, which `PyBuffer` keeps alive")]
fn memory(buffer: &mut PyBuffer<u8>) -> &mut [u8] {
    if buffer.len_bytes() == 0 {
        return &mut [];
    }
    // SAFETY: the exporter keeps the memory valid, and writable, while the buffer exists. `Checkpoint::read` never makes two
    // slices of the same memory that are used at the same time. Another thread of Python that writes the memory meanwhile gets
    // unspecified values, as with any function that releases the interpreter.
    unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) }
}
