//! Treemaps: nested rectangles whose areas are numbers of bytes. The reader chooses by radio buttons what the colours show.

use std::fmt::Write as _;

use maud::{Markup, Render, html};

use super::{COLOURS, percent};
use crate::quantity::human_bytes;
use crate::text::escape_invisible;

/// A treemap.
#[derive(Debug)]
pub struct Treemap {
    pub roots: Vec<TreeNode>,
    pub colourings: Vec<Colouring>,
}

/// A property by which boxes are coloured, such as the dtype.
#[derive(Debug)]
pub struct Colouring {
    pub name: String,
    /// The categories, and the bytes of each.
    pub categories: Vec<(String, u64)>,
}

/// A module with its tensors, or a tensor.
#[derive(Debug, Default)]
pub struct TreeNode {
    pub label: String,
    pub bytes: u64,
    pub children: Vec<TreeNode>,
    /// For each colouring, the index of the category. Empty for a module.
    pub categories: Vec<usize>,
    /// A sentence about the node.
    pub title: String,
}

#[derive(Clone, Copy, Debug)]
struct Rect {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 520.0;

/// The height of the heading of a module.
const HEADING: f64 = 17.0;

/// The width of a character of a label.
const CHARACTER: f64 = 6.8;

/// The smallest area of a box that is drawn, in square pixels.
const LEAST_AREA: f64 = 100.0;

/// The rules that show the colours and keys of the chosen colouring.
pub(super) fn style() -> String {
    let mut style = String::new();
    for index in 0..3 {
        let chosen = format!("#colour-{index}:checked~");
        write!(style, "{chosen}.key-{index}{{display:flex}}{chosen}.scroll .t{index}{{display:inline}}")
            .expect("writing to memory");
        for colour in 0..COLOURS {
            write!(style, "{chosen}.scroll .k{index}-{colour}{{fill:var(--c{colour})}}").expect("writing to memory");
        }
    }
    style
}

impl Render for Treemap {
    fn render(&self) -> Markup {
        let mut drawn = Drawing { map: self, boxes: Vec::new(), hidden: 0 };
        drawn.children(&self.roots, Rect { x: 0.0, y: 0.0, width: WIDTH, height: HEIGHT });
        // A picture in one colour shows less than any other.
        let first = self.colourings.iter().position(|colouring| colouring.categories.len() > 1).unwrap_or(0);
        let total = self.roots.iter().map(|root| root.bytes).fold(0, u64::saturating_add);
        html! {
            fieldset.treemap {
                legend { "Colours show" }
                @for (index, colouring) in self.colourings.iter().enumerate() {
                    @let id = format!("colour-{index}");
                    input type="radio" name="colour" id=(id) checked[index == first];
                    label for=(id) { (colouring.name) }
                }
                div.scroll tabindex="0" role="region" aria-label="Treemap" {
                    svg role="img" viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) {
                        title { "Treemap of " (human_bytes(total)) }
                        desc { "The table of tensors has the same figures." }
                        @for element in &drawn.boxes { (element) }
                    }
                }
                @for (index, colouring) in self.colourings.iter().enumerate() {
                    ul class=(format!("key key-{index}")) aria-label=(colouring.name) {
                        @for (number, (category, bytes)) in colouring.categories.iter().enumerate() { li {
                            svg width="12" height="12" aria-hidden="true" {
                                rect class=(format!("f{}", number.min(COLOURS - 1))) width="12" height="12" {}
                            }
                            (escape_invisible(category)) ": " (human_bytes(*bytes)) ", " (percent(*bytes, total))
                        } }
                    }
                }
                @if drawn.hidden > 0 {
                    p.caption { "Boxes that are too small to be drawn: " (drawn.hidden) "." }
                }
            }
        }
    }
}

struct Drawing<'a> {
    map: &'a Treemap,
    boxes: Vec<Markup>,
    hidden: usize,
}

impl Drawing<'_> {
    /// Draws nodes side by side in a rectangle.
    fn children(&mut self, nodes: &[TreeNode], within: Rect) {
        let mut nodes: Vec<&TreeNode> = nodes.iter().filter(|node| node.bytes > 0).collect();
        nodes.sort_by_key(|node| std::cmp::Reverse(node.bytes));
        #[expect(clippy::cast_precision_loss, reason = "an area")]
        let sizes: Vec<f64> = nodes.iter().map(|node| node.bytes as f64).collect();
        for (node, rect) in nodes.into_iter().zip(squarified(&sizes, within)) {
            if rect.width * rect.height < LEAST_AREA {
                self.hidden += leaves(node);
            } else if node.children.is_empty() {
                self.leaf(node, rect);
            } else {
                self.module(node, rect);
            }
        }
    }

    fn module(&mut self, node: &TreeNode, rect: Rect) {
        let has_heading = rect.height > 3.0 * HEADING && rect.width > 60.0;
        let heading = if has_heading { HEADING } else { 2.0 };
        self.boxes.push(html! {
            g {
                title { (escape_invisible(&node.title)) }
                (rect_element("module", rect))
                @if has_heading {
                    @let text = format!("{} ({})", node.label, human_bytes(node.bytes));
                    text x=(number(rect.x + 4.0)) y=(number(rect.y + 13.0)) { (fitted(&text, rect.width - 8.0)) }
                }
            }
        });
        let inner =
            Rect { x: rect.x + 2.0, y: rect.y + heading, width: rect.width - 4.0, height: rect.height - heading - 2.0 };
        if inner.width > 1.0 && inner.height > 1.0 {
            self.children(&node.children, inner);
        } else {
            self.hidden += leaves(node);
        }
    }

    fn leaf(&mut self, node: &TreeNode, rect: Rect) {
        let kinds: Vec<String> = node
            .categories
            .iter()
            .enumerate()
            .map(|(at, number)| format!("k{at}-{}", (*number).min(COLOURS - 1)))
            .collect();
        let lines = [node.label.clone(), human_bytes(node.bytes)];
        let (x, room) = (number(rect.x + 4.0), rect.width - 8.0);
        let line = |at: u32| number(rect.y + 15.0 + 14.0 * f64::from(at));
        let fits = |lines: f64| rect.width > 34.0 && rect.height > lines * 14.0 + 6.0;
        self.boxes.push(html! {
            g {
                title { (escape_invisible(&node.title)) }
                (rect_element(&kinds.join(" "), rect))
                @if fits(1.0) { text x=(x) y=(line(0)) { (fitted(&lines[0], room)) } }
                @if fits(2.0) { text x=(x) y=(line(1)) { (fitted(&lines[1], room)) } }
                @if fits(3.0) { @for (at, category) in node.categories.iter().enumerate() {
                    text x=(x) y=(line(2)) class=(format!("t{at}")) {
                        (fitted(&self.map.colourings[at].categories[*category].0, room))
                    }
                } }
            }
        });
    }
}

fn rect_element(class: &str, Rect { x, y, width, height }: Rect) -> Markup {
    html! { rect class=(class) x=(number(x)) y=(number(y)) width=(number(width)) height=(number(height)) {} }
}

fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

fn leaves(node: &TreeNode) -> usize {
    if node.children.is_empty() { 1 } else { node.children.iter().map(leaves).sum() }
}

/// Shortens a text to a width in pixels.
fn fitted(text: &str, width: f64) -> String {
    let text = escape_invisible(text);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few hundred characters")]
    let most = (width / CHARACTER).max(0.0) as usize;
    let len = text.chars().count();
    match most {
        _ if len <= most => text,
        0 | 1 => String::new(),
        _ => text.chars().take(most - 1).chain(['…']).collect(),
    }
}

/// Divides a rectangle into one rectangle for each of `sizes`, whose areas are proportional to the sizes. The sizes
/// descend. The rectangles are nearly squares: Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.
fn squarified(sizes: &[f64], within: Rect) -> Vec<Rect> {
    let mut rects = Vec::with_capacity(sizes.len());
    let mut free = within;
    let total: f64 = sizes.iter().sum();
    let scale = within.width * within.height / total.max(f64::MIN_POSITIVE);
    let mut rest = sizes;
    while !rest.is_empty() {
        let side = free.width.min(free.height).max(f64::MIN_POSITIVE);
        let worst = |row: &[f64]| {
            let sum: f64 = row.iter().sum::<f64>() * scale;
            let ratio =
                |size: &f64| (side * side * size * scale / (sum * sum)).max(sum * sum / (side * side * size * scale));
            row.iter().map(ratio).fold(0.0, f64::max)
        };
        let mut len = 1;
        // The comparison of a row with a longer row takes linear time, so rows are limited.
        while len < rest.len().min(256) && worst(&rest[..=len]) <= worst(&rest[..len]) {
            len += 1;
        }
        let (row, after) = rest.split_at(len);
        rest = after;
        let sum: f64 = row.iter().sum::<f64>() * scale;
        let depth = sum / side;
        let mut at = 0.0;
        for size in row {
            let length = size * scale / depth.max(f64::MIN_POSITIVE);
            rects.push(if free.width >= free.height {
                Rect { x: free.x, y: free.y + at, width: depth, height: length }
            } else {
                Rect { x: free.x + at, y: free.y, width: length, height: depth }
            });
            at += length;
        }
        if free.width >= free.height {
            free = Rect { x: free.x + depth, width: free.width - depth, ..free };
        } else {
            free = Rect { y: free.y + depth, height: free.height - depth, ..free };
        }
    }
    rects
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_proportional_and_within_the_rectangle() {
        let sizes = [6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0];
        let within = Rect { x: 0.0, y: 0.0, width: 600.0, height: 400.0 };
        let rects = squarified(&sizes, within);
        assert_eq!(rects.len(), sizes.len());
        for (rect, size) in rects.iter().zip(sizes) {
            assert!((rect.width * rect.height - size * 10_000.0).abs() < 1e-6, "{rect:?}");
            assert!(rect.x >= 0.0 && rect.x + rect.width <= 600.0 + 1e-6, "{rect:?}");
            assert!(rect.y >= 0.0 && rect.y + rect.height <= 400.0 + 1e-6, "{rect:?}");
        }
    }

    #[test]
    fn long_labels_are_shortened() {
        assert_eq!(fitted("self_attn.q_proj.weight", 70.0), "self_attn…");
        assert_eq!(fitted("w", 70.0), "w");
    }
}
