"""Writes the results of the bench as Markdown: `report.py FILE...` rewrites docs/explanation/benchmarks.md and its plot from
files of `run.py --json`, each of which has one or more tables.

A ratio compares two runs of one round. The table has the median over all rounds, and the smallest and largest ratio in
brackets.
"""

import json
import statistics
import sys
import textwrap
from pathlib import Path

import plot

BEGIN, END = "<!-- side by side: begin -->", "<!-- side by side: end -->"

TITLES = {
    "tmpfs": "tmpfs: computing and copying only",
    "disk": "Disk, until everything is on disk",
    "cold": "Cold: SRC not in the page cache",
}
ABOUT = {
    "tmpfs": "SRC and DST are in memory. dtshard runs with `--no-sync`. The ratio is to `cp -r --reflink=never`.",
    "disk": "`sync` is called before each run. dtshard runs with its default options, so DST is on disk when it ends. The "
            "time of `cp` and of a peer includes `sync -f DST`.",
    "cold": "The runs are as in the table *disk*, but the page cache of SRC is dropped before each run. Read "
            "amplification is the number of bytes read from disk, divided by the bytes of SRC.",
}
ABOUT_PEERS = ("Peers do the work of the table above on the same files. Number of rounds with peers: {rounds}. The memory of a "
               "peer is the total of all its processes.")


def write_json(path, results):
    path.write_text(json.dumps(results, indent=1) + "\n")


def median(row, field):
    return statistics.median(run[field] for run in row["runs"])


def ratios(above, below, field="wall"):
    """Returns the ratio of two rows for each round."""
    return [a[field] / b[field] for a, b in zip(above["runs"], below["runs"])]


def spread(values, digits=2):
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def seconds(row, field="wall"):
    return f"{median(row, field):.2f} s"


def megabytes(row, field):
    return f"{median(row, field) / 1e6:.0f} MB"


def costs(row):
    times = [seconds(row, field) for field in ("wall", "user", "system")]
    return times + [megabytes(row, field) for field in ("anonymous", "resident")]


COSTS = ["wall", "user", "system", "peak anonymous", "peak resident"]


def wrapped(text):
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def markdown(head, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def of_kind(case, kind):
    return [row for row in case["rows"] if row["kind"] == kind]


def pairs(case):
    """Returns the rows of `cp` and of dtshard. Cases of the group `scale` have no `cp`."""
    return of_kind(case, "copy")[0], of_kind(case, "dtshard")[0]


def works(cases):
    head = ["work", "SRC", "`cp`", *COSTS, "ratio to `cp`"]
    rows = []
    for case in cases:
        copy, ours = pairs(case)
        source = f"{ours['source_bytes'] / 1e9:.2f} GB"
        rows.append([case["work"], source, seconds(copy), *costs(ours), spread(ratios(ours, copy))])
    return markdown(head, rows)


def peers(cases):
    head = ["work", "peer", *COSTS, "time of the peer / time of dtshard", "memory of dtshard / memory of the peer"]
    rows = []
    for case in cases:
        _, ours = pairs(case)
        for row in of_kind(case, "peer"):
            if row["failed"]:
                rows.append([case["work"], row["name"], f"failed: {row['failed']}", *[""] * (len(head) - 3)])
                continue
            part = median(ours, "anonymous") / median(row, "anonymous")
            rows.append([case["work"], row["name"], *costs(row), spread(ratios(row, ours), 1), f"{part:.1%}"])
    return markdown(head, rows) if rows else ""


def peer_rounds(cases):
    counts = {len(row["runs"]) for case in cases for row in of_kind(case, "peer") if row["runs"]}
    return " or ".join(map(str, sorted(counts)))


def scale(cases):
    head = ["work", *["SRC", "wall", "peak anonymous"] * 2, "ratio of time"]
    rows = []
    for case in cases:
        half, double = case["rows"]
        cells = [case["work"]]
        for row in (half, double):
            cells += [f"{row['source_bytes'] / 1e9:.2f} GB", seconds(row), megabytes(row, "anonymous")]
        rows.append([*cells, spread(ratios(double, half))])
    return markdown(head, rows)


def cold(cases):
    head = ["work", "command", *COSTS, "ratio to `cp`", "read amplification"]
    rows = []
    for case in cases:
        copy, _ = pairs(case)
        for row in case["rows"]:
            if row["failed"]:
                rows.append([case["work"], row["name"], f"failed: {row['failed']}", *[""] * (len(head) - 3)])
                continue
            ratio = "1" if row is copy else spread(ratios(row, copy))
            amplification = median(row, "read") / row["source_bytes"]
            rows.append([case["work"], row["name"], *costs(row), ratio, f"{amplification:.2f}"])
    return markdown(head, rows)


def table(result):
    """Yields the Markdown of one table of the bench in parts."""
    name, cases = result["table"], result["cases"]
    yield f"### {TITLES[name]}\n"
    yield wrapped(f"{ABOUT[name]} File system: {result['file_system']}.")
    if name == "cold":
        yield cold(cases) + "\n"
        return
    grown = [case for case in cases if not of_kind(case, "copy")]
    cases = [case for case in cases if of_kind(case, "copy")]
    if cases:
        yield works(cases) + "\n"
    if others := peers(cases):
        yield ABOUT_PEERS.format(rounds=peer_rounds(cases)) + "\n"
        yield others + "\n"
    if grown:
        yield "Checkpoints of half and of twice the size, measured alternately:\n"
        yield scale(grown) + "\n"


def setup(results):
    setup = results["setup"]
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    cases = [case for result in results["tables"] for case in result["cases"]]
    of_dtshard = {len(row["runs"]) for case in cases for row in case["rows"] if row["kind"] == "dtshard"}
    rounds = " to ".join(str(number) for number in sorted({min(of_dtshard), max(of_dtshard)}))
    return wrapped(
        f"{setup['date']}, commit {setup['commit']}. A Llama of {setup['gigabytes']:g} GB over {setup['ranks']} ranks, "
        f"saved by PyTorch; {rounds} rounds after one warm-up round, in which each result is verified. {setup['cores']} cores "
        f"({setup['cpu']}), {setup['memory'] / 2**30:.0f} GiB, Linux {setup['kernel']}. {versions}. "
        f"Each process that imports torch needs {setup['import_seconds']:.1f} s for the import."
    )


def section(results):
    parts = ["## Side by side\n", setup(results)]
    for result in results["tables"]:
        parts.extend(table(result))
    return "\n".join(parts)


def publish(results, docs):
    """Prints the section, or, if `docs` is given, replaces the section and the plot there."""
    text = section(results)
    if docs is None:
        print(text)
        return
    if drawing := plot.draw(results):
        (docs / "benchmarks.svg").write_text(drawing)
        text = text.replace("\n###", "\n![Time and memory of dtshard and of others](benchmarks.svg)\n\n###", 1)
    page = docs / "benchmarks.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


if __name__ == "__main__":
    first, *others = [json.loads(Path(file).read_text()) for file in sys.argv[1:]]
    first["tables"] += [table for results in others for table in results["tables"]]
    publish(first, Path(__file__).resolve().parents[1] / "docs/explanation")
