//! Reports for people, as HTML pages: a page is one file without scripts, and loads nothing from a network.
//!
//! Other modules describe a page as data: facts, problems, and sections with tables and pictures. This module turns the
//! data into HTML. All text passes through maud, which escapes it, because names in a checkpoint are untrusted; a
//! Content-Security-Policy forbids scripts and requests in addition. Switches are radio buttons that style sheets react
//! to. The figures of every picture are also text, and no picture depends on colours alone.

mod bars;
mod grid;
mod heat;
mod table;
mod treemap;

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};

pub use bars::{Bar, Bars};
pub use grid::{Grid, GridCell, GridSet};
pub use heat::{Heat, HeatCell};
pub use table::{Cell, Table};
pub use treemap::{Colouring, TreeNode, Treemap};

use crate::error::{Error, Result};
use crate::text::escape_invisible;

const STYLE: &str = include_str!("style.css");

/// The number of distinct colours for the categories of a picture.
pub const COLOURS: usize = 8;

/// A page.
#[derive(Clone, Debug)]
pub struct Page {
    pub title: String,
    /// One sentence with the result, such as `2 findings in 54 tensors`.
    pub result: String,
    /// The problems, which the page shows first.
    pub problems: Vec<Problem>,
    /// The summary: names and values.
    pub facts: Vec<(String, String)>,
    pub sections: Vec<Section>,
}

/// A problem of a checkpoint, such as missing files.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The name of a tensor or object, or what the problem is about.
    pub subject: String,
    pub detail: String,
}

/// A section of a page: a heading, an explanation and the content.
#[derive(Clone, Debug)]
pub struct Section {
    title: String,
    caption: String,
    content: Markup,
}

impl Section {
    /// Makes a section. `caption` explains the content to readers who have never seen such a page.
    pub fn new(title: impl Into<String>, caption: impl Into<String>, content: impl Render) -> Self {
        Self { title: title.into(), caption: caption.into(), content: content.render() }
    }
}

/// The maximum number of problems that a page shows.
const MOST_PROBLEMS: usize = 200;

impl Page {
    /// Returns the page as a complete HTML document.
    #[must_use]
    pub fn document(&self) -> String {
        let title = escape_invisible(&self.title);
        let policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta http-equiv="Content-Security-Policy" content=(policy);
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    meta name="generator" content=(concat!("dtshard ", env!("CARGO_PKG_VERSION")));
                    title { (title) }
                    style { (PreEscaped(STYLE)) (PreEscaped(treemap::style())) }
                }
                body {
                    main {
                        h1 { (title) }
                        p.result.bad[!self.problems.is_empty()] { (escape_invisible(&self.result)) }
                        (self.problems())
                        (self.contents())
                        section aria-labelledby="summary" {
                            h2 id="summary" { "Summary" }
                            dl { @for (name, value) in &self.facts {
                                div { dt { (escape_invisible(name)) } dd { (escape_invisible(value)) } }
                            } }
                        }
                        @for (index, section) in self.sections.iter().enumerate() {
                            @let id = format!("section-{index}");
                            section aria-labelledby=(id) {
                                h2 id=(id) { (escape_invisible(&section.title)) }
                                p.caption { (escape_invisible(&section.caption)) }
                                (section.content)
                            }
                        }
                    }
                }
            }
        }
        .into_string()
    }

    fn problems(&self) -> Markup {
        let rest = self.problems.len().saturating_sub(MOST_PROBLEMS);
        html! {
            @if !self.problems.is_empty() {
                section.problems aria-labelledby="problems" {
                    h2 id="problems" { "Problems (" (self.problems.len()) ")" }
                    ul { @for Problem { subject, detail } in self.problems.iter().take(MOST_PROBLEMS) {
                        li { strong { (escape_invisible(subject)) } ": " (escape_invisible(detail)) }
                    } }
                    @if rest > 0 { p { (rest) " more problems are not listed here." } }
                }
            }
        }
    }

    fn contents(&self) -> Markup {
        html! {
            nav aria-label="Contents" { ul {
                @if !self.problems.is_empty() { li { a href="#problems" { "Problems" } } }
                li { a href="#summary" { "Summary" } }
                @for (index, section) in self.sections.iter().enumerate() {
                    li { a href=(format!("#section-{index}")) { (escape_invisible(&section.title)) } }
                }
            } }
        }
    }
}

/// Returns a frame for a page within another page, such as a notebook. The frame is sandboxed, so the styles and switches
/// of the two pages do not affect each other.
///
/// ```
/// use dtshard::{Checkpoint, html_frame};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/fsdp4/ranks")?;
/// let options = dtshard::options::InspectOptions::default();
/// let page = checkpoint.inspect(&options)?.to_html()?;
/// assert!(html_frame(&page).starts_with("<iframe sandbox"));
/// # Ok::<(), dtshard::Error>(())
/// ```
#[must_use]
pub fn html_frame(document: &str) -> String {
    html! {
        iframe sandbox="" srcdoc=(document) title="Report of dtshard" width="100%" height="720" style="border:0" {}
    }
    .into_string()
}

/// The beginning of every page.
const BEGINNING: &[u8] = b"<!DOCTYPE html>";

/// Writes a page to a file. The file appears complete or not at all. An existing file is replaced if it is an HTML page.
///
/// # Errors
/// `Usage` for an existing file that is no HTML page, such as a file of a checkpoint; `Io` with the file.
pub fn write_html(file: &Path, page: &str) -> Result<()> {
    if let Ok(mut existing) = File::open(file) {
        let mut start = [0; BEGINNING.len()];
        let read = existing.read_exact(&mut start);
        if !existing.metadata().is_ok_and(|metadata| metadata.is_file()) || read.is_err() || start != BEGINNING {
            return Err(Error::usage(
                format!("{}: the file exists and is no HTML page, so a report does not replace it", file.display()),
                "give options::html another path",
            ));
        }
    }
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = file.with_file_name(name);
    let written = fs::write(&partial, page).and_then(|()| fs::rename(&partial, file));
    written.map_err(|error| {
        let _ = fs::remove_file(&partial);
        Error::io("write", file)(error)
    })
}

/// An element that is hidden until the reader opens it.
pub struct Details<T>(pub String, pub T);

impl<T: Render> Render for Details<T> {
    fn render(&self) -> Markup {
        html! { details { summary { (escape_invisible(&self.0)) } (self.1) } }
    }
}

/// Several pictures side by side.
pub struct Gallery(pub Vec<Grid>);

impl Render for Gallery {
    fn render(&self) -> Markup {
        html! { div.gallery { @for grid in &self.0 { (grid) } } }
    }
}

/// Formats a share of a total: `12.5 %`.
pub fn percent(part: u64, total: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let share = if total == 0 { 0.0 } else { part as f64 * 100.0 / total as f64 };
    format!("{share:.1} %")
}

/// Returns `part` / `total` as a length of `full`, 0 if `total` is 0.
#[expect(clippy::cast_precision_loss, reason = "a length of a picture")]
fn scaled(part: u64, total: u64, full: f64) -> f64 {
    if total == 0 { 0.0 } else { part as f64 / total as f64 * full }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let hostile = String::from("<script>alert(1)</script>\"'&\u{202e}");
        Page {
            title: hostile.clone(),
            result: hostile.clone(),
            problems: vec![Problem { subject: hostile.clone(), detail: hostile.clone() }],
            facts: vec![(hostile.clone(), hostile.clone())],
            sections: vec![Section::new(
                hostile.clone(),
                hostile.clone(),
                Details(hostile.clone(), Table::new(&[(&hostile, false)], vec![vec![Cell::new(hostile.clone())]])),
            )],
        }
    }

    #[test]
    fn all_text_is_escaped() {
        let document = page().document();
        assert!(!document.contains("<script"), "{document}");
        assert!(!document.contains('\u{202e}'), "{document}");
        assert_eq!(document.matches("&lt;script&gt;").count(), document.matches("alert(1)").count());
    }

    #[test]
    fn page_loads_and_runs_nothing() {
        let document = page().document();
        assert!(document.contains("default-src 'none'"));
        for forbidden in ["http://", "https://", "src=", "url(", "@import", "javascript:", "onclick", "onload"] {
            assert!(!document.contains(forbidden), "{forbidden}");
        }
    }

    #[test]
    fn frame_has_the_page_as_an_attribute() {
        let frame = html_frame(&page().document());
        assert_eq!(frame.matches('<').count(), 2, "{frame}");
        assert!(frame.contains("sandbox=\"\""));
    }
}
