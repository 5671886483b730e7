//! Tables whose cells are coloured by their values: bytes from rank to rank, differences by layer.

use maud::{Markup, Render, html};

use crate::text::escape_invisible;

/// A table with coloured cells.
#[derive(Debug)]
pub struct Heat {
    /// The nouns of the rows and of the columns, such as `from / to`.
    pub corner: String,
    pub columns: Vec<String>,
    /// For each row, its heading and its cells.
    pub rows: Vec<(String, Vec<HeatCell>)>,
}

/// A cell with a text and an intensity.
#[derive(Clone, Debug, Default)]
pub struct HeatCell {
    pub text: String,
    /// From 0 (no colour) to 8.
    pub intensity: u8,
}

impl Render for Heat {
    fn render(&self) -> Markup {
        html! {
            div.scroll tabindex="0" role="region" aria-label="Coloured table" {
                table.heat {
                    thead { tr {
                        th scope="col" { (escape_invisible(&self.corner)) }
                        @for column in &self.columns { th scope="col" { (breakable(column)) } }
                    } }
                    tbody { @for (heading, cells) in &self.rows { tr {
                        th scope="row" { (escape_invisible(heading)) }
                        @for HeatCell { text, intensity } in cells {
                            td class=(format!("h{}", intensity.min(&8))) { (escape_invisible(text)) }
                        }
                    } } }
                }
            }
        }
    }
}

/// Returns a name that may be broken after its dots.
fn breakable(name: &str) -> Markup {
    html! {
        @for (index, component) in escape_invisible(name).split('.').enumerate() {
            @if index > 0 { "." wbr; }
            (component)
        }
    }
}
