"""Plots the table `tmpfs` as SVG: time relative to `cp`, and peak anonymous memory, for dtshard and its peers.

Both axes are logarithmic, because dtshard and its peers differ by one to three orders of magnitude. Only works that have a
peer are drawn. Colours follow the reader's light or dark scheme.
"""

import math
import statistics
from html import escape

LABEL, PANEL, GAP, ROW, HEAD, FOOT = 370, 260, 60, 19, 62, 46
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .work { font-weight: 600 }
.small { font-size: 11px; fill: #57606a } .axis { stroke: #d0d7de } .one { stroke: #57606a; stroke-dasharray: 3 3 }
.ours { fill: #0969da } .peer { fill: #c4c9cf }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .axis { stroke: #3d444d } .one { stroke: #9198a1 }
  .ours { fill: #4493f8 } .peer { fill: #59636e } }
"""


def bars(case):
    """Yields, for each command except `cp`: name, whether it is dtshard, time relative to `cp`, peak anonymous megabytes."""
    copy, *rows = case["rows"]
    for row in rows:
        if row["runs"]:
            ratio = statistics.median(a["wall"] / b["wall"] for a, b in zip(row["runs"], copy["runs"]))
            memory = statistics.median(run["anonymous"] for run in row["runs"]) / 1e6
            yield row["name"].replace("`", ""), row["kind"] == "dtshard", ratio, max(memory, 1)


class Axis:
    """A logarithmic axis from `low` to a power of ten that leaves room for the number beside the longest bar."""

    def __init__(self, left, low, values, title, unit):
        self.left, self.title, self.unit = left, title, unit
        self.low = math.log10(min(low, *values))
        self.high = math.ceil(math.log10(max(values) * 1.6))

    def x(self, value):
        return self.left + PANEL * (math.log10(value) - self.low) / (self.high - self.low)

    def grid(self, bottom):
        yield f'<text class="work" x="{self.left}" y="22">{self.title}</text>'
        for power in range(math.ceil(self.low), self.high + 1):
            x, label = self.x(10**power), f"{10**power:g}{self.unit}"
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 16}" y2="{bottom}"/>'
            yield f'<text class="small" x="{x:.1f}" y="{HEAD - 22}" text-anchor="middle">{label}</text>'

    def bar(self, y, value, kind, text):
        end = self.x(value)
        wide = f'width="{max(end - self.left, 1):.1f}" height="{ROW - 6}"'
        yield f'<rect class="{kind}" x="{self.left}" y="{y}" {wide} rx="2"/>'
        yield f'<text class="small" x="{end + 5:.1f}" y="{y + 11}">{text}</text>'


def draw(results):
    """Returns the plot, or None if no work was measured with a peer."""
    tables = [result["cases"] for result in results["tables"] if result["table"] == "tmpfs"]
    cases = [case for cases in tables for case in cases if case["rows"][0]["kind"] == "copy"]
    groups = [(case["work"], list(bars(case))) for case in cases if len(list(bars(case))) > 1]
    if not groups:
        return None
    drawn = [bar for _, bars_ in groups for bar in bars_]
    bottom = HEAD + sum(ROW * (len(bars_) + 1) + 8 for _, bars_ in groups)
    time = Axis(LABEL, 0.3, [bar[2] for bar in drawn], "Time, as a multiple of cp", " x")
    memory = Axis(LABEL + PANEL + GAP, 1, [bar[3] for bar in drawn], "Peak anonymous memory", " MB")
    width, height = LABEL + 2 * PANEL + GAP + 50, bottom + FOOT
    sizes = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {sizes}>']
    parts += [f"<style>{STYLE}</style>", *time.grid(bottom), *memory.grid(bottom)]
    parts.append(f'<line class="one" x1="{time.x(1):.1f}" x2="{time.x(1):.1f}" y1="{HEAD - 16}" y2="{bottom}"/>')
    y = HEAD
    for work, bars_ in groups:
        parts.append(f'<text class="work" x="8" y="{y + 12}">{escape(work)}</text>')
        for name, ours, ratio, megabytes in bars_:
            y += ROW
            kind = "ours" if ours else "peer"
            parts.append(f'<text x="{LABEL - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>')
            parts += time.bar(y, ratio, kind, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}")
            parts += memory.bar(y, megabytes, kind, f"{megabytes:.0f}")
        y += ROW + 8
    setup = results["setup"]
    caption = f"{setup['gigabytes']:g} GB, {setup['ranks']} ranks, {setup['cores']} cores, tmpfs, page cache warm"
    caption += f"; commit {setup['commit']}, {setup['date']}"
    parts.append(f'<text class="small" x="8" y="{bottom + 26}">{escape(caption)}</text></svg>')
    return "\n".join(parts) + "\n"
