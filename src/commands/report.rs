//! What a conversion tells of itself: notes before it begins, the closing line, the dry run, the JSON document.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};

use super::conversion::Conversion;
use super::estimate::{beyond, peak_bytes};
use super::partial;
use super::printer::harmless;
use dtshard::catalog::OutputFile;
use dtshard::exec::Options;
use dtshard::exec::copy::Stats;
use dtshard::exec::exchange::Load;
use dtshard::quantity::{count, human_bytes, human_rate};
use dtshard::storage::memory::Anonymous;

/// What a run tells of itself.
pub struct Report<'a> {
    pub conversion: &'a Conversion<'a>,
    pub destination: Option<&'a Path>,
    pub options: &'a Options,
    /// Memory when all is read and laid out, and no tensor data has moved.
    pub before: Option<Anonymous>,
    /// What `--max-memory` allows.
    pub max_memory: u64,
    /// What each process would move, where they give each other bytes and this was asked for.
    pub loads: Vec<Load>,
    /// Options that have no effect.
    pub idle: Vec<String>,
}

/// Lines for the user before the work begins.
pub fn notes(conversion: &Conversion<'_>) -> Vec<String> {
    let source = &conversion.source;
    let mut notes = source.wanted.notes.clone();
    notes.extend_from_slice(&conversion.reservation.notes);
    notes.extend_from_slice(&conversion.notes);
    notes.extend(partial::notes(&source.checkpoint.catalog, &conversion.reservation));
    notes
}

/// What is not written: groups for the closing line, then every name for the document.
pub fn left_out(conversion: &Conversion<'_>) -> (Vec<String>, Vec<String>) {
    let source = &conversion.source;
    let left = &source.wanted.left_out;
    let objects = [&left.objects, &conversion.reservation.left_out].into_iter().flatten();
    let objects: Vec<String> =
        objects.chain(&source.settled.dropped).chain(&source.checkpoint.catalog.dropped).cloned().collect();
    let number = (!objects.is_empty()).then(|| count(objects.len(), "object"));
    let series = source.checkpoint.skipped_series.iter().map(|name| format!("series {name}"));
    let tensors = left.groups.iter().map(|(top, number)| format!("{} ({top})", count(*number, "tensor")));
    let differing = &source.settled.dropped_tensors;
    let differing_number = (!differing.is_empty()).then(|| format!("{} (differing)", count(differing.len(), "tensor")));
    let groups = tensors.chain(differing_number).chain(number).chain(series).collect();
    (groups, [&left.tensors, differing, &objects].into_iter().flatten().cloned().collect())
}

/// `290 f32->bf16`
fn cast_text(stats: &Stats) -> Vec<String> {
    stats.casts.iter().map(|((from, to), cast)| format!("{} {from}->{to}", cast.tensors)).collect()
}

pub fn cast_warnings(stats: &Stats) -> Vec<String> {
    let mut warnings = Vec::new();
    for ((from, to), cast) in &stats.casts {
        if cast.overflows > 0 {
            warnings.push(format!("{} overflowed from {from} to {to}", count_values(cast.overflows)));
        }
        if cast.nans > 0 {
            warnings.push(format!("{} that were cast from {from} to {to} are NaN", count_values(cast.nans)));
        }
    }
    warnings
}

fn count_values(number: u64) -> String {
    format!("{number} {}", if number == 1 { "value" } else { "values" })
}

impl Report<'_> {
    /// `wrote 7 files, 291 tensors, 14.96 GB in 9.8 s (1.53 GB/s); left out: 54 tensors (optim), 12 objects; cast 290
    /// f32->bf16`
    pub fn closing_line(&self, stats: &Stats, time: Duration) -> String {
        let reservation = &self.conversion.reservation;
        let (carried, bytes) = (&self.conversion.carried, self.conversion.len_bytes());
        let before = match stats.bytes_before {
            0 => String::new(),
            before => format!(", {} of it before", human_bytes(before)),
        };
        let rate = match bytes.saturating_sub(stats.bytes_before) {
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
        let wire = (stats.together.received > 0).then(|| human_bytes(stats.together.received));
        let parts =
            [("left out: ", left_out), ("cast ", cast_text(stats)), ("on the wire ", wire.into_iter().collect())];
        for (what, list) in parts.into_iter().filter(|(_, list)| !list.is_empty()) {
            line.push_str(&format!("; {what}{}", list.join(", ")));
        }
        line
    }

    /// Of a run that may take more memory than is allowed.
    pub fn memory_warning(&self, stats: &Stats) -> Option<String> {
        beyond(peak_bytes(self.conversion, self.options, self.before, stats), self.max_memory)
    }

    pub fn document(&self, stats: &Stats) -> Json {
        let Conversion { source, reservation, carried, to, tied, .. } = self.conversion;
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
        warnings.extend_from_slice(&self.idle);
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

    pub fn dry_run_text(&self, stats: &Stats) -> String {
        let Conversion { source, reservation, carried, to, .. } = self.conversion;
        let (given, format) = source.given();
        let mut lines = vec![
            format!("source        {} ({format})", given.display()),
            format!(
                "target        {} ({to})",
                self.destination.map_or_else(|| String::from("-"), |path| path.display().to_string()),
            ),
            format!("files         {}", reservation.files.len() + carried.len()),
            format!("tensors       {}", reservation.tensors.len()),
            format!("bytes read    {}", human_bytes(stats.bytes_read)),
            format!("bytes written {}", human_bytes(self.conversion.len_bytes())),
            format!("runs          {} (mean {})", stats.runs, human_bytes(mean_run_bytes(stats))),
            format!(
                "peak memory   {} (anonymous)",
                human_bytes(peak_bytes(self.conversion, self.options, self.before, stats))
            ),
        ];
        if !self.loads.is_empty() {
            let of_all = |of: fn(&Load) -> u64| (self.loads.iter().map(of).sum(), self.loads.iter().map(of).max());
            // What is told to all arrives at each of them.
            let ((_, most_sent), (received, most_received)) = (of_all(Load::sent), of_all(Load::received));
            lines.push(format!(
                "on the wire   {}; at most {} from a process, {} to one",
                human_bytes(received),
                human_bytes(most_sent.unwrap_or(0)),
                human_bytes(most_received.unwrap_or(0))
            ));
        }
        let (left_out, _) = left_out(self.conversion);
        let lists = [("left out", left_out), ("cast", cast_text(stats))];
        for (what, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            lines.push(harmless(&format!("{what:13} {}", list.join(", "))));
        }
        lines.join("\n") + "\n"
    }
}

fn mean_run_bytes(stats: &Stats) -> u64 {
    stats.bytes_read.checked_div(stats.runs).unwrap_or(0)
}

fn file_document(file: &OutputFile) -> Json {
    json!({ "path": file.path.display().to_string(), "bytes": file.len })
}
