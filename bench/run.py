"""Measure dtshard side by side with `cp` and every peer (another tool), on the same files: `run.py`, `run.py --quick`.
To compare with another build of dtshard instead: `run.py --against BINARY`.

Each work is done in rounds. In each round, `cp`, dtshard and the peers run one after the other; a ratio always compares two
runs of one round. A first round warms up, and its results are verified. There are three tables. `tmpfs`: only computing and
copying (`--no-sync`). `disk`: until everything is on disk; dtshard waits for this itself, and the other times include `sync -f
DST`. `cold`: as `disk`, but SRC is not in the page cache. All files that are made are removed, also on Ctrl-C.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import against
import report
from cases import Case, Kind, Table, cases, sources
from machine import describe, file_system, free_bytes
from measure import Failed, drop_cache, measure, size

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GROUPS = ("consolidate", "unshard", "reshard", "dcp", "flat", "layouts", "cast", "small", "scale")
PEER_MEMORY = 3  # memory of a peer, as a multiple of the checkpoint: eight processes may read all of it


class Sources:
    """The checkpoints of one table: made when a case needs them, removed after the last case that needs them."""

    def __init__(self, args, work, planned):
        self.args, self.work = args, work
        self.sources = sources(args.ranks, args.small)
        self.left = [self.needs(case) for case in planned]
        self.peers = [any(command.kind == Kind.PEER for command in case.commands) for case in planned]

    def needs(self, case):
        """Returns the names of the case's sources, and of the sources from which they are made."""
        names = dict.fromkeys(name for source in case.sources() for name in (self.sources[source].base, source))
        return [name for name in names if name]

    def path(self, name):
        return self.work / name / self.sources[name].file if self.sources[name].file else self.work / name

    def get(self, name):
        path, source = self.path(name), self.sources[name]
        if not path.exists():
            note(f"making {name}")
            path.parent.mkdir(exist_ok=True)
            if source.base:
                words = {"BASE": self.get(source.base), "SRC": path, "dtshard": self.args.dtshard}
                command = fill(source.argv, words)
            else:
                shape = ["--ranks", str(self.args.ranks), "--gigabytes", str(self.args.gigabytes * source.scale)]
                command = [sys.executable, HERE / "make_checkpoint.py", path, *source.options, *shape]
            try:
                measure(command)
            except Failed as failure:
                sys.exit(f"{name} could not be made: {failure}")
        return path

    def done(self):
        """Ends a case: removes the sources that no later case needs."""
        ended, *self.left = self.left
        for name in set(ended).difference(*self.left):
            remove(self.work / name)

    def peak_bytes(self, memory):
        """Returns the largest total of the sources that exist at a time and one output; with `memory`, a peer's memory, too."""
        last = {name: index for index, needs in enumerate(self.left) for name in needs}
        first = {name: index for index, needs in reversed(list(enumerate(self.left))) for name in needs}
        alive = lambda index: [self.sources[name].scale for name in first if first[name] <= index <= last[name]]
        scales = [sum(alive(index)) + max(alive(index)) for index in range(len(self.left))]
        if memory and self.args.peer_rounds:
            scales = [scale + PEER_MEMORY * has_peer for scale, has_peer in zip(scales, self.peers)]
        return max(scales, default=0) * self.args.gigabytes * 1e9


def fill(argv, words):
    """Replaces the placeholders in a command by paths; `SRC.flat_layout.json` is beside SRC."""
    filled = []
    for word in map(str, argv):
        name, dot, rest = word.partition(".")
        filled.append(f"{words[name]}{dot}{rest}" if name in words else word)
    return filled


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def note(text):
    print(text, file=sys.stderr, flush=True)


class Bench:
    """Runs the cases of one table, one after the other, in the folder `work`."""

    def __init__(self, args, table, work):
        self.args, self.table, self.work = args, table, work
        planned = [case for case in cases(args.ranks, args.small) if table in case.tables and case.group in args.groups]
        self.cases = planned
        self.sources = Sources(args, work, planned)

    def run(self):
        return [self.case(case) for case in self.cases]

    def case(self, case: Case):
        commands = [command for command in case.commands if command.kind != Kind.PEER or self.args.peer_rounds > 0]
        rows = [{"name": command.name, "kind": command.kind, "runs": [], "failed": None} for command in commands]
        bytes_of = [size(self.sources.get(command.source or case.source)) for command in commands]
        note(f"{self.table}: {case.work}")
        for round_ in range(self.args.rounds + 1):
            for command, row in zip(commands, rows):
                if row["failed"] or (command.kind == Kind.PEER and round_ > self.args.peer_rounds):
                    continue
                try:
                    run = self.once(case, command, check=round_ == 0)
                except Failed as failure:
                    if command.kind != Kind.PEER:
                        sys.exit(f"{case.work}: {command.name}: {failure}")
                    note(f"{command.name}: {failure}")
                    row["failed"] = str(failure)
                    continue
                if round_ > 0:
                    row["runs"].append(asdict(run))
        self.sources.done()
        for row, source_bytes in zip(rows, bytes_of):
            row["source_bytes"] = source_bytes
        return {"group": case.group, "work": case.work, "rows": rows}

    def run_against(self):
        """Returns the rows of `--against`: both programs run each command of dtshard."""
        rows = []
        for case in self.cases:
            for command in (command for command in case.commands if command.kind == Kind.DTSHARD):
                name = case.work if command.name == Kind.DTSHARD else f"{case.work}, {command.name}"
                note(f"{self.table}: {name}")

                def once(program, check):
                    try:
                        return self.once(case, command, check, program)
                    except Failed as failure:
                        sys.exit(f"{name}: {program}: {failure}")

                rows.append(against.compare(name, (self.args.dtshard, self.args.against), self.args.runs, once))
            self.sources.done()
        return rows

    def once(self, case, command, check, program=None):
        """Measures one run. It begins without leftovers of earlier runs, and DST is removed afterwards."""
        source, target = self.sources.get(command.source or case.source), self.work / "target"
        if case.file and command.kind != Kind.COPY:
            target.mkdir()
            target = target / case.file
        argv = fill(command.argv, {"SRC": source, "DST": target, "dtshard": program or self.args.dtshard})
        synced = self.table != Table.TMPFS
        if synced:
            os.sync()
        if self.table == Table.COLD:
            drop_cache(source)
        if command.kind == Kind.DTSHARD and not synced:
            argv.append("--no-sync")
        run = measure(argv, tree=command.kind == Kind.PEER)
        if command.kind != Kind.DTSHARD and synced:
            run = run.then(measure(["sync", "-f", target]))
        if check and command.kind != Kind.COPY:
            measure([self.args.dtshard, "verify", source, target, *case.check, "--quiet"])
        remove(self.work / "target")
        return run


def folder(args, table):
    return Path(args.directory if table == Table.TMPFS else args.disk)


def check_space(args):
    """Ends the program if the files of a table would not fit."""
    for table in args.tables:
        needed = Bench(args, table, Path()).sources.peak_bytes(memory=table == Table.TMPFS)
        where = folder(args, table)
        where.mkdir(parents=True, exist_ok=True)
        if free_bytes(where) < needed:
            sys.exit(f"{table} needs {needed / 1e9:.1f} GB in {where}, {free_bytes(where) / 1e9:.1f} GB are free: "
                     "--gigabytes makes it smaller, --directory and --disk choose where, --only what")


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description without rewrapping it, and the default of every option."""


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the largest DCP directory, at most")
    parser.add_argument("--ranks", type=int, default=8, help="that saved it")
    parser.add_argument("--rounds", type=int, default=9, help="of cp and dtshard")
    parser.add_argument("--peer-rounds", type=int, default=3, help="of those with peers, too; 0 leaves peers out")
    parser.add_argument("--against", metavar="BINARY", help="another build to compare with, without cp and peers")
    parser.add_argument("--runs", type=int, default=15, help="of each program in each row of --against")
    parser.add_argument("--small", type=int, default=100_000, metavar="N", help="number of small tensors")
    parser.add_argument("--quick", action="store_true",
                        help="0.2 GB, 3 rounds, 1 with peers: to try the bench itself, or --against in minutes")
    parser.add_argument("--only", action="extend", nargs="+", default=[], choices=[*map(str, Table), *GROUPS],
                        help="these tables, and these groups of works")
    parser.add_argument("--directory", default="/dev/shm", help="for the table tmpfs")
    parser.add_argument("--disk", default=ROOT / "target/bench", help="for the tables disk and cold")
    parser.add_argument("--dtshard", default=ROOT / "target/release/dtshard", help="the program")
    parser.add_argument("--json", type=Path, help="write all runs to a file; report.py makes everything of it again")
    parser.add_argument("--print", action="store_true", help="leave the docs as they are, as --quick does")
    args = parser.parse_args()
    if args.quick:
        args.gigabytes, args.rounds, args.peer_rounds, args.small = 0.2, 3, min(args.peer_rounds, 1), 2000
    if args.against:
        args.peer_rounds = 0
    args.tables = [table for table in Table if table in args.only or not set(args.only) & set(Table)]
    args.groups = [group for group in GROUPS if group in args.only or not set(args.only) & set(GROUPS)]
    return args


def print_against(args):
    for table in args.tables:
        where = folder(args, table)
        with tempfile.TemporaryDirectory(prefix="dtshard-bench-", dir=where) as work:
            rows = Bench(args, table, Path(work)).run_against()
        if rows:
            print(f"\n## {report.TITLES[table]}\n\n{against.table(rows)}\n\n{against.summary(rows)}", flush=True)


def main():
    args = parse()
    for program in filter(None, (args.dtshard, args.against)):
        if not Path(program).exists():
            sys.exit(f"{program} is not there: build it with `cargo build --release`")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_space(args)
    if args.against:
        return print_against(args)
    results = {"setup": describe(args.dtshard, ROOT), "tables": []}
    results["setup"] |= {"ranks": args.ranks, "gigabytes": args.gigabytes, "small": args.small}
    for table in args.tables:
        where = folder(args, table)
        with tempfile.TemporaryDirectory(prefix="dtshard-bench-", dir=where) as work:
            bench = Bench(args, table, Path(work))
            results["tables"].append({"table": table, "file_system": file_system(where), "cases": bench.run()})
        if args.json:
            report.write_json(args.json, results)
    report.publish(results, None if args.print or args.quick else ROOT / "docs/explanation")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; nothing is left behind")
