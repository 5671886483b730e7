//! Reports of a conversion: the notes before the work begins, the preview, the closing line and the JSON document.
//!
//! All four are computed from one [`Prepared`] conversion, so they agree. All sizes and offsets are in bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};

use super::estimate::{beyond, peak_bytes};
use super::options::ConvertOptions;
use super::partial_values;
use super::prepared::Prepared;
use super::run::Run;
use super::threads_and_blocks::Workers;
use super::transfers;
use crate::catalog::OutputFile;
use crate::error::Result;
use crate::exchange::Load;
use crate::exec::Options;
use crate::exec::copy::Stats;
use crate::html::{Cell, Page, Problem, Section, Table};
use crate::name_list::{NameGroup, Varying, numbered_groups};
use crate::quantity::{count, human_bytes, human_rate};
use crate::storage::memory::{AnonymousMemory, anonymous_memory};
use crate::text::escape_invisible;

/// Preview of a conversion, made before anything is written. `Display` prints the text of `--dry-run`.
#[derive(Clone)]
pub struct Preview<'a> {
    conversion: &'a Prepared,
    workers: &'a Workers,
    forecast: Forecast,
}

/// The texts of a preview.
#[derive(Clone)]
pub struct Forecast {
    text: String,
    document: Json,
    warnings: Vec<String>,
    /// The HTML page without the section of the copied bytes, which takes longer to compute than the rest.
    page: Page,
}

impl<'a> Preview<'a> {
    /// Makes the preview of `conversion`. `workers` are the threads that compute the HTML page.
    pub(super) fn new(conversion: &'a Prepared, workers: &'a Workers, forecast: Forecast) -> Self {
        Self { conversion, workers, forecast }
    }

    /// Returns the JSON document of the conversion.
    #[must_use]
    pub fn to_json(&self) -> Json {
        self.forecast.document.clone()
    }

    /// Returns a report to look at: an HTML page in one file, which loads nothing from a network and runs no scripts. It
    /// shows the bytes that are copied from each rank of the source to each rank of the result, and the files of the
    /// result. [`html_frame`](crate::html_frame) makes the page a part of another page.
    ///
    /// # Errors
    /// `Coverage` if the chunks of a tensor do not cover it exactly once.
    pub fn to_html(&self) -> Result<String> {
        let mut page = self.forecast.page.clone();
        let transfers = self.workers.install(|| transfers::section(self.conversion))?;
        page.sections.splice(..0, transfers);
        Ok(page.document())
    }

    /// Returns warnings about the run that this preview describes: it may use more memory than the limit, it would be
    /// refused, it would resume earlier work, or DST is already complete.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.forecast.warnings
    }
}

impl fmt::Display for Preview<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.forecast.text)
    }
}

/// Outcome of executing a plan, for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This process published the destination.
    Published,
    /// Another process of the run published the destination.
    PublishedByOther,
    /// This process has written its share of the output. The process that finishes last publishes the destination.
    PartDone,
    /// The destination is complete without the work of this process: it already existed and was made from the same
    /// source and options, or another process published it while this process failed.
    UpToDate,
}

/// Report of an execution. `Display` prints the closing line of the command-line program.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Outcome of the execution.
    pub outcome: Outcome,
    /// Number of files of the destination, including sidecar files.
    pub files: usize,
    /// Number of tensors of the destination.
    pub tensors: usize,
    /// Bytes of all files of the destination, including the bytes that earlier runs and other processes wrote.
    pub bytes_written: u64,
    /// Bytes of tensor data that this process read.
    pub bytes_read: u64,
    /// Time since the source was opened.
    pub time: Duration,
    /// Warnings about values in casts: values that overflowed, and values that are NaN. If several processes share the
    /// run, only the process that published the destination has the warnings about all values; if another process
    /// published it, the list is empty.
    pub warnings: Vec<String>,
    /// Hint that names the options with which values are included that were left out by default. `None` if no option
    /// includes more values, and for [`Outcome::UpToDate`].
    pub hint: Option<String>,
    line: String,
    document: Json,
}

impl Report {
    /// Returns the JSON document of the conversion.
    #[must_use]
    pub fn to_json(&self) -> Json {
        self.document.clone()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

/// Data from which the counts and texts of previews and reports are computed.
pub struct ReportSource<'a> {
    conversion: &'a Prepared,
    destination: Option<&'a Path>,
    options: &'a Options,
    /// Anonymous memory of this process after planning, before any tensor data is copied.
    before: Option<AnonymousMemory>,
    /// Limit of anonymous memory in bytes (`--max-memory`).
    max_memory: u64,
    /// For each process, the number of bytes that it would read, send and receive. Empty unless this is the preview of
    /// a run in which processes exchange data.
    pub loads: Vec<Load>,
    /// Warnings about options that have no effect.
    pub unused_options: Vec<String>,
}

/// Returns the notes that are printed before the work begins.
pub fn notes(conversion: &Prepared) -> Vec<String> {
    let source = &conversion.source;
    let mut notes = source.selection.notes.clone();
    notes.extend_from_slice(&conversion.reservation.notes);
    notes.extend_from_slice(&conversion.notes);
    notes.extend(partial_values::notes(&source.checkpoint.catalog, &conversion.reservation));
    notes
}

/// Returns two lists of the values that are not written. The first list has groups of values, for the closing line; the
/// second list has the names of single tensors and objects. Series and folders that were not read are only in the first
/// list. The JSON document has both lists.
pub fn left_out(conversion: &Prepared) -> (Vec<String>, Vec<String>) {
    let source = &conversion.source;
    let left = &source.selection.left_out;
    let objects = [&left.objects, &conversion.reservation.left_out].into_iter().flatten();
    let objects: Vec<String> =
        objects.chain(&source.conflicts.dropped).chain(&source.checkpoint.catalog.dropped).cloned().collect();
    let number = (!objects.is_empty()).then(|| count(objects.len(), "object"));
    let series = source.checkpoint.skipped_series.iter().map(|name| format!("series {name}"));
    let tensors = left.groups.iter().map(|(top, number)| format!("{} ({top})", count(*number, "tensor")));
    let differing = &source.conflicts.dropped_tensors;
    let differing_number = (!differing.is_empty()).then(|| format!("{} (differing)", count(differing.len(), "tensor")));
    let folders = source.checkpoint.skipped_folders.iter().map(|name| format!("folder {name}"));
    let groups = tensors.chain(differing_number).chain(number).chain(series).chain(folders).collect();
    (groups, [&left.tensors, differing, &objects].into_iter().flatten().cloned().collect())
}

/// Returns the number of cast tensors for each pair of dtypes, for example `290 f32->bf16`.
fn cast_text(stats: &Stats) -> Vec<String> {
    stats.casts.iter().map(|((from, to), cast)| format!("{} {from}->{to}", cast.tensors)).collect()
}

/// Returns warnings about values in casts that overflowed or are NaN, for each pair of dtypes.
fn cast_warnings(stats: &Stats) -> Vec<String> {
    let mut warnings = Vec::new();
    for ((from, to), cast) in &stats.casts {
        if cast.overflows > 0 {
            warnings.push(format!("{} overflowed in the cast from {from} to {to}", count_values(cast.overflows)));
        }
        if cast.nans > 0 {
            warnings.push(format!("{} are NaN after the cast from {from} to {to}", count_values(cast.nans)));
        }
    }
    warnings
}

fn count_values(number: u64) -> String {
    format!("{number} {}", if number == 1 { "value" } else { "values" })
}

impl<'a> ReportSource<'a> {
    pub fn new(
        conversion: &'a Prepared,
        args: &'a ConvertOptions,
        options: &'a Options,
        unused_options: Vec<String>,
    ) -> Self {
        let (destination, max_memory) = (args.dst.as_deref(), args.source.max_memory);
        Self {
            conversion,
            destination,
            options,
            before: anonymous_memory(),
            max_memory,
            loads: Vec::new(),
            unused_options,
        }
    }

    /// Returns the texts of the preview. `destination_state` is a warning about what a run would find at the destination,
    /// if there is one.
    pub fn forecast(&self, stats: &Stats, destination_state: Option<String>) -> Forecast {
        let mut document = self.document(stats);
        if let Some(warnings) = document["warnings"].as_array_mut() {
            warnings.extend(destination_state.iter().map(|warning| json!(warning)));
        }
        let warnings: Vec<String> = self.memory_warning(stats).into_iter().chain(destination_state).collect();
        let facts = self.dry_run_facts(stats);
        let lines: Vec<String> = facts.iter().map(|(name, value)| format!("{name:13} {value}\n")).collect();
        let text = lines.concat();
        let page = self.page(facts, &warnings);
        Forecast { text, document, warnings, page }
    }

    fn page(&self, facts: Vec<(&'static str, String)>, warnings: &[String]) -> Page {
        let Prepared { source, reservation, carried, .. } = self.conversion;
        let names: Vec<(String, u64)> =
            (reservation.files.iter().map(|file| (file.path.display().to_string(), file.len)))
                .chain(carried.iter().map(|file| (file.to.display().to_string(), file.len)))
                .collect();
        let keyed = names.iter().map(|(name, len)| (name.as_str(), *len)).collect();
        let row = |group: NameGroup| {
            let (number, len) = (group.members.len(), names[group.members[0]].1);
            let total = len.saturating_mul(number as u64);
            [group.name(), number.to_string(), human_bytes(len), human_bytes(total)].map(Cell::new).to_vec()
        };
        let rows = numbered_groups(keyed, Varying::Numbers).into_iter().map(row).collect();
        let total = ["total".into(), names.len().to_string(), String::new(), human_bytes(self.conversion.len_bytes())];
        let columns = [("file", false), ("count", true), ("each", true), ("total", true)];
        let table = Table::new(&columns, rows).with_total(total.map(Cell::new).to_vec());
        let caption =
            "The files that a run would write. Files of equal length whose names differ only in numbers share a row.";
        let files = Section::new("Files of DST", caption, table);
        let problem = |warning: &String| Problem { subject: String::from("warning"), detail: warning.clone() };
        let notes = notes(self.conversion);
        let facts = facts.into_iter().chain(notes.into_iter().map(|note| ("note", note)));
        Page {
            title: format!("Plan of a conversion of {}", source.given().0.display()),
            result: format!(
                "{}, {}, {}; nothing is written yet",
                count(names.len(), "file"),
                count(reservation.tensors.len(), "tensor"),
                human_bytes(self.conversion.len_bytes())
            ),
            problems: warnings.iter().map(problem).collect(),
            facts: facts.map(|(name, value)| (name.to_owned(), value)).collect(),
            sections: vec![files],
        }
    }

    /// Returns the report of an execution that ended with `outcome`.
    pub fn report(&self, stats: &Stats, outcome: Outcome, run: &Run<'_>) -> Report {
        let (time, part) = (run.started.elapsed(), run.launch.part);
        let destination = self.destination.map(|path| path.display().to_string()).unwrap_or_default();
        let mut document = self.document(stats);
        let line = match outcome {
            Outcome::UpToDate => {
                document["already"] = json!(true);
                format!("{destination} exists already, made from the same SRC and options")
            }
            Outcome::PartDone => format!(
                "part {} of {} is done in {:.1} s; the last part publishes {destination}",
                part.index,
                part.of,
                time.as_secs_f64(),
            ),
            Outcome::Published | Outcome::PublishedByOther => self.closing_line(stats, time),
        };
        if outcome != Outcome::UpToDate && !part.is_alone() {
            document["part"] = json!({
                "index": part.index,
                "of": part.of,
                "published": outcome != Outcome::PartDone,
                "publisher": outcome == Outcome::Published,
            });
        }
        // Only the publishing process knows the cast losses of all parts.
        let warnings = if outcome == Outcome::PublishedByOther { Vec::new() } else { cast_warnings(stats) };
        let Prepared { reservation, carried, .. } = self.conversion;
        Report {
            outcome,
            files: reservation.files.len() + carried.len(),
            tensors: reservation.tensors.len(),
            bytes_written: self.conversion.len_bytes(),
            bytes_read: stats.bytes_read,
            time,
            warnings,
            hint: if outcome == Outcome::UpToDate { None } else { self.left_out_hint() },
            line,
            document,
        }
    }

    /// Returns a hint that names the options with which values that are left out would be included.
    fn left_out_hint(&self) -> Option<String> {
        let Prepared { source, reservation, .. } = self.conversion;
        let tensors = source.left_out_remedy.filter(|_| !source.selection.left_out.groups.is_empty());
        // Each verb writes other formats with objects.
        let with_objects = if self.conversion.to.writing_verbs().contains(&"reshard") {
            "use options::to dcp or options::to torch-ranks to write objects, too"
        } else {
            "use options::to torch to write objects, too"
        };
        let objects = (!reservation.left_out.is_empty()).then_some(with_objects);
        let has_series = !source.checkpoint.skipped_series.is_empty();
        let series = has_series.then_some("use options::series all to include the series that are left out");
        let has_folders = !source.checkpoint.skipped_folders.is_empty();
        let folders = has_folders.then_some("use options::series all to include the folders that are left out");
        let remedies: Vec<&str> = [tensors, objects, series, folders].into_iter().flatten().collect();
        (!remedies.is_empty()).then(|| remedies.join("; "))
    }

    /// Returns the closing line, for example `wrote 7 files, 291 tensors, 14.96 GB in 9.8 s (1.53 GB/s); left out: 54
    /// tensors (optim), 12 objects; cast 290 f32->bf16`.
    fn closing_line(&self, stats: &Stats, time: Duration) -> String {
        let reservation = &self.conversion.reservation;
        let (carried, bytes) = (&self.conversion.carried, self.conversion.len_bytes());
        let before = match stats.bytes_already_written {
            0 => String::new(),
            before => format!(" ({} by an earlier run)", human_bytes(before)),
        };
        let rate = match bytes.saturating_sub(stats.bytes_already_written) {
            0 => None,
            now => human_rate(now, time),
        };
        let rate = rate.map(|rate| format!(" ({rate})")).unwrap_or_default();
        let mut line = format!(
            "wrote {}, {}, {}{before} in {:.1} s{rate}",
            count(reservation.files.len() + carried.len(), "file"),
            count(reservation.tensors.len(), "tensor"),
            human_bytes(bytes),
            time.as_secs_f64(),
        );
        let (left_out, _) = left_out(self.conversion);
        let wire = (stats.global_totals.received > 0).then(|| human_bytes(stats.global_totals.received));
        let parts =
            [("left out: ", left_out), ("cast ", cast_text(stats)), ("on the wire ", wire.into_iter().collect())];
        for (what, list) in parts.into_iter().filter(|(_, list)| !list.is_empty()) {
            line.push_str(&format!("; {what}{}", list.join(", ")));
        }
        line
    }

    /// Returns a warning if the run may use more memory than `--max-memory` allows.
    fn memory_warning(&self, stats: &Stats) -> Option<String> {
        beyond(peak_bytes(self.conversion, self.options, self.before, stats), self.max_memory)
    }

    fn document(&self, stats: &Stats) -> Json {
        let Prepared { source, reservation, carried, to, tied, .. } = self.conversion;
        let (checkpoint, (given, format)) = (&source.checkpoint, source.given());
        let carried = carried.iter().map(|file| json!({ "path": file.to.display().to_string(), "bytes": file.len }));
        let files: Vec<Json> = reservation.files.iter().map(file_document).chain(carried).collect();
        let (groups, names) = left_out(self.conversion);
        let left_out = [groups, names].concat();
        let cast: Map<String, Json> = (stats.casts.iter())
            .map(|((from, to), cast)| {
                let counts = json!({ "tensors": cast.tensors, "overflows": cast.overflows, "nans": cast.nans });
                (format!("{from}->{to}"), counts)
            })
            .collect();
        let tied: BTreeMap<&str, &str> = tied.iter().map(|(alias, kept)| (alias.as_str(), kept.as_str())).collect();
        let mut warnings = checkpoint.catalog.warnings.clone();
        warnings.extend(notes(self.conversion));
        warnings.extend_from_slice(&self.unused_options);
        warnings.extend(cast_warnings(stats));
        warnings.extend(self.memory_warning(stats));
        let mut document = json!({
            "source": { "path": given.display().to_string(), "format": format.name() },
            "target": {
                "path": self.destination.map(|path| path.display().to_string()),
                "format": to.name(),
            },
            "files": files,
            "tensors": reservation.tensors.len(),
            "bytes_read": stats.bytes_read,
            "bytes_written": self.conversion.len_bytes(),
            "runs": stats.runs,
            "mean_run_bytes": mean_run_bytes(stats),
            "peak_bytes": peak_bytes(self.conversion, self.options, self.before, stats),
            "left_out": left_out,
            "cast": cast,
            "tied": tied,
            "warnings": warnings,
        });
        if let Some(map) = &source.map {
            document["map"] = map.clone();
        }
        if source.is_exchanged() && self.loads.is_empty() {
            document["bytes_sent"] = json!(stats.traffic.sent);
            document["bytes_received"] = json!(stats.traffic.received);
        }
        if !self.loads.is_empty() {
            let of_rank = |load: &Load| json!({ "read": load.read, "sent": load.sent(), "received": load.received() });
            document["ranks"] = self.loads.iter().map(of_rank).collect();
        }
        document
    }

    /// Returns the lines of `--dry-run`: names and values.
    fn dry_run_facts(&self, stats: &Stats) -> Vec<(&'static str, String)> {
        let Prepared { source, reservation, carried, to, .. } = self.conversion;
        let (given, format) = source.given();
        let mut facts = vec![
            ("source", format!("{} ({format})", given.display())),
            (
                "target",
                format!(
                    "{} ({to})",
                    self.destination.map_or_else(|| String::from("-"), |path| path.display().to_string())
                ),
            ),
            ("files", (reservation.files.len() + carried.len()).to_string()),
            ("tensors", reservation.tensors.len().to_string()),
            ("bytes read", human_bytes(stats.bytes_read)),
            ("bytes written", human_bytes(self.conversion.len_bytes())),
            ("runs", format!("{} (mean {})", stats.runs, human_bytes(mean_run_bytes(stats)))),
            (
                "peak memory",
                format!("{} (anonymous)", human_bytes(peak_bytes(self.conversion, self.options, self.before, stats))),
            ),
        ];
        if !self.loads.is_empty() {
            let of_all = |of: fn(&Load) -> u64| (self.loads.iter().map(of).sum(), self.loads.iter().map(of).max());
            // A message to all processes is sent once and received by each of them, so the total is the sum of the
            // received bytes.
            let ((_, most_sent), (received, most_received)) = (of_all(Load::sent), of_all(Load::received));
            let text = format!(
                "{}; at most {} from a process, {} to one",
                human_bytes(received),
                human_bytes(most_sent.unwrap_or(0)),
                human_bytes(most_received.unwrap_or(0))
            );
            facts.push(("on the wire", text));
        }
        let (left_out, _) = left_out(self.conversion);
        let lists = [("left out", left_out), ("cast", cast_text(stats))];
        for (what, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            facts.push((what, escape_invisible(&list.join(", "))));
        }
        facts
    }
}

fn mean_run_bytes(stats: &Stats) -> u64 {
    stats.bytes_read.checked_div(stats.runs).unwrap_or(0)
}

fn file_document(file: &OutputFile) -> Json {
    json!({ "path": file.path.display().to_string(), "bytes": file.len })
}
