//! Horizontal bars, such as the bytes of each rank.

use maud::{Markup, Render, html};

use super::scaled;
use crate::quantity::human_bytes;
use crate::text::escape_invisible;

/// Bars of numbers of bytes, with a line at the mean.
#[derive(Debug)]
pub struct Bars {
    /// The heading of the labels: `rank`.
    pub heading: String,
    pub rows: Vec<Bar>,
    /// The mean of all values, in bytes.
    pub mean: u64,
}

/// One bar, for one value or for the values of several ranks.
#[derive(Debug)]
pub struct Bar {
    pub label: String,
    /// The smallest and the largest value, in bytes.
    pub least: u64,
    pub most: u64,
    /// A remark, such as `3 empty shards`.
    pub remark: String,
}

impl Render for Bars {
    fn render(&self) -> Markup {
        let most = self.rows.iter().map(|bar| bar.most).max().unwrap_or(0);
        let figure = |bar: &Bar| {
            let [least, most] = [bar.least, bar.most].map(human_bytes);
            if least == most { most } else { format!("{least} to {most}") }
        };
        let mean = format!("{:.2}%", scaled(self.mean, most, 100.0));
        let has_remarks = self.rows.iter().any(|bar| !bar.remark.is_empty());
        html! {
            div.scroll tabindex="0" role="region" aria-label="Bars" {
                table.bars {
                    thead { tr {
                        th scope="col" { (escape_invisible(&self.heading)) }
                        th scope="col" { "bytes (dashed line: mean, " (human_bytes(self.mean)) ")" }
                        th scope="col" .n { "figure" }
                        @if has_remarks { th scope="col" { "remark" } }
                    } }
                    tbody { @for bar in &self.rows { tr {
                        th scope="row" { (escape_invisible(&bar.label)) }
                        td.bar { svg aria-hidden="true" width="100%" height="14" {
                            rect.light width=(format!("{:.2}%", scaled(bar.most, most, 100.0))) height="14" {}
                            rect.full width=(format!("{:.2}%", scaled(bar.least, most, 100.0))) height="14" {}
                            line.mean x1=(mean) x2=(mean) y1="0" y2="14" {}
                        } }
                        td.n { (figure(bar)) }
                        @if has_remarks { td.bad[!bar.remark.is_empty()] { (escape_invisible(&bar.remark)) } }
                    } } }
                }
            }
        }
    }
}
