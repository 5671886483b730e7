"""Conversions over NCCL, which are compared with those of one process without GPUs."""

from gpu_files import first_difference, remove, spread, write_safetensors
from gpu_processes import Failed, together
from gpu_partial_values import PartialValues

RANKS = (1, 2, 3, 4)

# Verb, source in `fixtures`, name of the result, options.
CONVERSIONS = [
    ("reshard", "odd4/dcp", "out", "--mesh a=3"),
    ("reshard", "fsdp_tp/dcp", "out", "--mesh fsdp=6"),
    ("reshard", "fsdp4/ranks", "out", "--mesh tp=3 --placements S(1)"),
    ("reshard", "titan/step-1000", "out", "--mesh dp_shard=3,tp=2 --placements S(0),S(1)"),
    ("reshard", "fsdp1_sharded/ranks", "out", "--mesh dp=3"),
    ("reshard", "flat2/views", "out", "--mesh dp=3 --flat-layout {fixtures}/flat2/views.flat_layout.json"),
    ("reshard", "partial2/ranks", "out", "--mesh dp=2"),
    ("unshard", "partial2/ranks", "out.pt", ""),
    ("unshard", "partial2/ranks", "out.pt", "--dtype bf16"),
    ("reshard", "fsdp4/ranks", "out", "--mesh tp=3 --placements S(1) --dtype f16"),
    ("unshard", "fsdp_tp/ranks", "out.pt", ""),
    ("consolidate", "llama_tiny/dcp", "out", "--dtype f32"),
    ("consolidate", "verl/global_step_10/actor", "out", ""),
    ("reshard", "dcp_hf/shards", "out", "--mesh dp=4"),
]


class Conversions:
    """All conversions of small checkpoints that a check runs."""

    def __init__(self, check):
        self.check, self.machine, self.report, self.work = check, check.machine, check.report, check.work
        self.dtshard, self.fixtures = self.machine.folder / "dtshard", self.machine.folder / "fixtures"
        self.limit = check.args.limit
        # Numbers of ranks with which NCCL works here.
        self.ranks = []
        # The conversion whose result is in `alone-NAME`.
        self.alone = None

    def convert(self, verb, source, target, options, ranks=0, limit=None):
        """Runs a conversion with one process without GPUs, or with `ranks` processes, which may have a source each. Returns the
        seconds, and the output of each process."""
        sources = source if isinstance(source, list) else [source] * max(1, ranks)
        backend = ["--backend", "nccl" if ranks else "cpu"]
        commands = [[self.dtshard, verb, own, target, *options, *backend, "--part", rank, "--parts", len(sources)]
                    for rank, own in enumerate(sources)]
        environments = [self.machine.of_rank(rank, ranks) for rank in range(len(sources))]
        return together(commands, environments, limit or self.limit)

    def same(self, conversion, ranks, is_per_rank, bucket, limit, environment=()):
        """Returns the seconds of a conversion over NCCL; raises `Failed` if the result differs from that of one process."""
        verb, source, name, options = conversion
        expected, got = self.work / f"alone-{name}", self.work / name
        if self.alone != conversion:
            remove(expected)
            self.alone = None
            self.convert(verb, source, expected, options, limit=limit)
            self.alone = conversion
        if is_per_rank:
            source, options = self.apart(source, ranks), [*options, "--source", "per-rank"]
        options = [*options, "--bucket-size", bucket] if bucket else options
        try:
            seconds, _ = self.convert(verb, source, got, options, ranks, limit)
            difference = first_difference(expected, got)
        finally:
            # A failed conversion may leave files beside the result.
            for left in [got, *self.work.glob(f".{name}.*")]:
                remove(left)
        if difference:
            raise Failed(f"not what one process writes: {difference}")
        return seconds

    def apart(self, source, ranks):
        """Divides the files of the source among one folder per rank."""
        folders = [self.work / f"node{rank}/source" for rank in range(ranks)]
        spread(source, folders)
        return folders

    def several(self, verb, source, name, options, modes, how=""):
        """Runs a conversion in several modes: one row for all modes that succeed, and one row for each mode that fails."""
        shown = source.relative_to(self.fixtures if source.is_relative_to(self.fixtures) else self.work)
        what = f"{verb} {shown} {options}".replace("{fixtures}/", "").strip() + how
        conversion = (verb, source, name, options.format(fixtures=self.fixtures).split())
        right = []

        def work(mode, limit):
            seconds = self.same(conversion, *mode, limit)
            right.append(way(*mode) + self.check.timed(seconds, " {:.1f} s"))
            return True

        for mode in modes:
            if mode[0] in self.ranks:
                self.check.step(f"{what}, {way(*mode)}", lambda limit: work(mode, limit), self.limit)
        if right:
            self.report.check(what, True, "; ".join(right))

    def meetings(self):
        """Finds the numbers of ranks with which NCCL works here. The others are reported once, and not used again."""
        for ranks in RANKS:
            gpus = min(ranks, self.machine.gpus)
            what = f"NCCL, {ranks} ranks on {gpus} GPU{'s' * (gpus != 1)}" if ranks > 1 else "NCCL, 1 rank"
            self.check.step(what, lambda limit: self.meeting(what, ranks, limit), 100 if ranks == 2 else 40)

    def meeting(self, what, ranks, limit):
        conversion = ("reshard", self.fixtures / "odd4/dcp", "out", ["--mesh", "a=2"])
        is_shared = ranks > self.machine.gpus
        ways = [self.machine.sharing] if self.machine.sharing or not is_shared else self.machine.sharings()
        refused = []
        for sharing in ways:
            self.machine.sharing = sharing
            try:
                seconds = self.same(conversion, ranks, False, "", limit / len(ways))
            except Failed as failure:
                refused.append(f"{sharing or 'NCCL'}: {failure}")
                self.report.log(f"{what}, {sharing}", failure.log)
                self.machine.sharing = None
                continue
            self.ranks.append(ranks)
            said = [sharing] * is_shared + [self.check.timed(seconds, "{:.1f} s")] + [f"(not {why})" for why in refused]
            self.report.check(what, True, ", ".join(filter(None, said)))
            return
        raise Failed("; ".join(refused))

    def rounds(self):
        """Reshards uneven tensors in many rounds, with the kernel and without it."""
        whole, sharded = self.work / "uneven.safetensors", self.work / "uneven/dcp"
        sharded.parent.mkdir()
        factor = 1 if self.machine.is_stand_in else 16
        shapes = [("BF16", [1009, 517 * factor]), ("F32", [37, 5, 1021 * factor]), ("U8", [4099, 211]), ("F64", [3])]
        write_safetensors(whole, [(f"layer.{nth}.weight", *shape) for nth, shape in enumerate(shapes)])
        self.convert("reshard", whole, sharded, "--to dcp --mesh dp=4 --placements S(0)".split())
        modes = [(ranks, is_per_rank, bucket) for ranks in RANKS for is_per_rank in (False, True)
                 for bucket in ("1MB", "") if ranks > 1 or not is_per_rank]
        columns = ("reshard", sharded, "out", "--mesh tp=3 --placements S(1)")
        self.several(*columns, modes[1::4] if self.check.args.quick else modes)
        self.machine.environment["DTSHARD_GPU_KERNELS"] = "off"
        try:
            self.several(*columns, [(1, False, ""), (2, False, "1MB")], ", without the kernel")
        finally:
            del self.machine.environment["DTSHARD_GPU_KERNELS"]

    def small(self):
        """Runs each of CONVERSIONS with all numbers of ranks, each in another mode."""
        for nth, (verb, source, name, options) in enumerate(CONVERSIONS):
            modes = [(ranks, ranks > 1 and (ranks + nth // 2) % 2 == 0, "1KB" if (ranks + nth) % 3 == 0 else "")
                     for ranks in RANKS]
            modes = [modes[nth % len(modes)]] if self.check.args.quick else modes
            self.several(verb, self.fixtures / source, name, options, modes)

    def fast_reduce(self):
        """Compares sums of NCCL with the exact sums, within a tolerance, because NCCL adds in an order of its own."""
        for ranks in self.ranks:
            if ranks > 1:
                what = f"--fast-reduce, {ranks} ranks"
                self.check.step(what, lambda limit: self.summed(what, ranks, limit), self.limit)

    def summed(self, what, ranks, limit):
        source, got = self.work / f"values{ranks}", self.work / "sums.safetensors"
        values = PartialValues(source, ranks, self.check.args.seed)
        options = "--source per-rank --fast-reduce -v".split()
        _, said = self.convert("unshard", self.apart(source, ranks), got, options, ranks, limit)
        difference = values.difference(got)
        remove(got)
        if difference:
            raise Failed(f"further off than additions in any order can be: {difference}")
        if not any(" were reduced by NCCL" in err for _, err in said):
            raise Failed("nothing was reduced by NCCL")
        self.report.check(what, True, "sums and averages of f64, f32, f16, bf16: right within (ranks + 2) / 2 units of the last "
                          "place of all magnitudes together")


def way(ranks, is_per_rank, bucket):
    words = [f"{ranks} ranks" if ranks > 1 else "1 rank", is_per_rank and "per-rank", bucket and f"by {bucket}"]
    return " ".join(filter(None, words))
