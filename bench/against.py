"""Compare two builds of dtshard: `run.py --against BINARY`.

Each row is one command of dtshard on one source. First, each program runs it once to warm up, and the result is verified.
Then each program runs it `--runs` times, in turns; the program that begins a turn alternates. A ratio is the cost of the
program under test divided by that of BINARY: above 1, the program under test is slower.
"""

import statistics

from report import markdown

TOLERANCE = 0.05  # a ratio that differs from 1 by more is printed in bold

MEASURES = {
    "minimum": lambda runs: min(run.wall for run in runs),
    "median": lambda runs: statistics.median(run.wall for run in runs),
    "CPU": lambda runs: statistics.median(run.user + run.system for run in runs),
}


def compare(name, programs, runs, run_once):
    """Measures one row. `run_once(program, check)` runs the command of this name with one of the two programs."""
    for program in programs:
        run_once(program, check=True)
    measured = {program: [] for program in programs}
    for turn in range(runs):
        for program in programs if turn % 2 == 0 else programs[::-1]:
            measured[program].append(run_once(program, check=False))
    own, other = (measured[program] for program in programs)
    return {"name": name, **{measure: (of(own), of(other)) for measure, of in MEASURES.items()}}


def is_outside(own, other):
    return abs(own / other - 1) > TOLERANCE


def table(rows):
    """Returns a table in Markdown: milliseconds of both programs and their ratio, in bold outside of the tolerance."""

    def cells(own, other):
        ratio = f"{own / other:.3f}"
        return f"{own * 1e3:.1f}", f"{other * 1e3:.1f}", f"**{ratio}**" if is_outside(own, other) else ratio

    head = ["work"]
    for measure in MEASURES:
        head += [f"{measure}, ms", "against", "ratio"]
    lines = [[row["name"], *(cell for measure in MEASURES for cell in cells(*row[measure]))] for row in rows]
    return markdown(head, lines)


def summary(rows):
    """Returns, for each measure, how many rows are outside of the tolerance, and a list of these rows."""
    lines = []
    for measure in MEASURES:
        ratios = {row["name"]: row[measure][0] / row[measure][1] for row in rows}
        outside = [f"\n  - {row['name']}: {ratios[row['name']]:.3f}" for row in rows if is_outside(*row[measure])]
        lines.append(f"{measure}: {len(outside)} of {len(rows)} rows differ by more than {TOLERANCE:.0%}, "
                     f"mean ratio {statistics.geometric_mean(ratios.values()):.3f}" + "".join(outside))
    return "\n".join(lines)
