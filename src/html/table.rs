//! Tables.

use maud::{Markup, Render, html};

use crate::text::escape_invisible;

/// The maximum number of rows that a table shows.
const MOST_ROWS: usize = 1000;

/// A table with a row of headings. The first cell of each row is the heading of the row.
#[derive(Debug)]
pub struct Table {
    /// The headings, and whether a column has numbers, which are aligned to the right.
    columns: Vec<(String, bool)>,
    rows: Vec<Vec<Cell>>,
    /// A row with totals.
    total: Option<Vec<Cell>>,
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    is_bad: bool,
}

impl Cell {
    /// Makes a cell.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_bad: false }
    }

    /// Makes a cell that shows a problem.
    pub fn bad(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_bad: true }
    }
}

impl Table {
    /// Makes a table. A column has a heading, and true if the column has numbers.
    pub fn new(columns: &[(&str, bool)], rows: Vec<Vec<Cell>>) -> Self {
        Self { columns: columns.iter().map(|(text, right)| ((*text).to_owned(), *right)).collect(), rows, total: None }
    }

    /// Adds a row with totals.
    pub fn with_total(mut self, total: Vec<Cell>) -> Self {
        self.total = Some(total);
        self
    }

    fn row(&self, cells: &[Cell]) -> Markup {
        html! {
            tr { @for (index, (Cell { text, is_bad }, (_, right))) in cells.iter().zip(&self.columns).enumerate() {
                @let text = escape_invisible(text);
                @if index == 0 { th scope="row" { (text) } } @else { td.n[*right].bad[*is_bad] { (text) } }
            } }
        }
    }
}

impl Render for Table {
    fn render(&self) -> Markup {
        let rest = self.rows.len().saturating_sub(MOST_ROWS);
        html! {
            div.scroll tabindex="0" role="region" aria-label="Table" {
                table {
                    thead { tr { @for (heading, right) in &self.columns {
                        th scope="col" .n[*right] { (escape_invisible(heading)) }
                    } } }
                    tbody { @for row in self.rows.iter().take(MOST_ROWS) { (self.row(row)) } }
                    @if let Some(total) = &self.total { tfoot { (self.row(total)) } }
                }
            }
            @if rest > 0 { p.caption { (rest) " more rows are not shown." } }
        }
    }
}
