"""Compare two builds of dtshard: `run.py --against BINARY`.

Each row is one command of dtshard on one source. Both programs run it in turns, as often as `--runs` says, after one run
each that warms up and is checked; who begins changes from turn to turn. A ratio is that of the program under test to
BINARY: above 1 it is slower.
"""

import statistics

from report import markdown

TOLERANCE = 0.05  # a ratio that differs more from 1 is marked

MEASURES = {
    "minimum": lambda runs: min(run.wall for run in runs),
    "median": lambda runs: statistics.median(run.wall for run in runs),
    "CPU": lambda runs: statistics.median(run.user + run.system for run in runs),
}


def compare(name, programs, runs, run_once):
    """A row: `run_once(program, check)` runs the command of this name by one of the two programs."""
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
    """Markdown of rows: milliseconds of both programs and their ratio, bold where it is outside of the tolerance."""

    def cells(own, other):
        ratio = f"{own / other:.3f}"
        return f"{own * 1e3:.1f}", f"{other * 1e3:.1f}", f"**{ratio}**" if is_outside(own, other) else ratio

    head = ["work"]
    for measure in MEASURES:
        head += [f"{measure}, ms", "against", "ratio"]
    return markdown(head, [[row["name"], *(cell for measure in MEASURES for cell in cells(*row[measure]))] for row in rows])


def summary(rows):
    """One line for each measure: how many rows are outside of the tolerance."""
    lines = []
    for measure in MEASURES:
        outside = [row["name"] for row in rows if is_outside(*row[measure])]
        ratio = statistics.geometric_mean(own / other for own, other in (row[measure] for row in rows))
        lines.append(f"{measure}: {len(outside)} of {len(rows)} rows differ by more than {TOLERANCE:.0%}, "
                     f"mean ratio {ratio:.3f}" + "".join(f"\n  - {name}" for name in outside))
    return "\n".join(lines)
