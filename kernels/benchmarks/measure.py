"""What the benches share: ratios measured in turns, the machine's own bandwidth, who else uses the CPU.

Contract: contenders of a case run one after another in every round, each round starting with another of them, and
their ratio is the median over rounds of the ratio within a round: what slows the machine down slows both. A run of a
contender goes once through several copies of its data ("layers"), which together exceed the processor's caches
where memory allows, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hf_paged_kernels as kernels

MIB, GIB = 2**20, 2**30
OUT_OF_CACHE = 192 * MIB  # what a run should go through; the last-level caches of servers hold some 32 to 128 MiB
MAX_LAYERS = 30  # as many as the demo model has: a small case may stay in a cache, as it may in the model

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


# -- time ------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds of each round, by contender."""

    rounds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, to: str) -> float:
        """How many times as long as `to` a contender takes, the median over rounds."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[to], strict=True))


def in_turns(contenders: dict[str, Callable[[], object]], seconds: float, least: int = 5) -> Times:
    """Run all contenders in rounds, for about `seconds` and at least `least` rounds, after one to warm up."""
    names = list(contenders)
    rounds = {name: [] for name in names}
    for name in names:
        contenders[name]()
    end = time.perf_counter() + seconds
    count = 0
    while count < least or time.perf_counter() < end:
        shift = count % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            contenders[name]()
            rounds[name].append(time.perf_counter() - start)
        count += 1
    return Times(rounds)


def fastest(candidates: dict[str, Callable[[], object]], seconds: float) -> str:
    """Which of several ways to the same result is the fastest here."""
    times = in_turns(candidates, seconds, least=3) if len(candidates) > 1 else None
    return min(candidates, key=times.median) if times else next(iter(candidates))


def layers_of(bytes_read: int, bytes_needed: int, limit: int) -> int:
    """How many copies of a case a run goes through: beyond the caches, within `limit` bytes, at most MAX_LAYERS."""
    return max(1, min(MAX_LAYERS, -(-OUT_OF_CACHE // bytes_read), limit // bytes_needed))


# -- the machine -----------------------------------------------------------------------------------


def bandwidth(num_bytes: int) -> dict[str, float]:
    """Bytes a second of this machine, by torch and its threads: `copy` counts what is read and what is written."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    ways = {"copy": lambda: target.copy_(source), "sum": source.sum, "amax": source.amax, "norm": source.norm}
    times = in_turns(ways, seconds=0.0, least=9)
    best = {name: num_bytes / min(times.rounds[name]) for name in ways}
    return {"copy": 2 * best.pop("copy"), "read": max(best.values())}


def processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict:
    return {
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": kernels.describe(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class Others:
    """CPU time that other processes take, between `start` and `share`."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), self._all(), time.process_time()

    def share(self) -> float:
        """Cores that others kept busy, on average."""
        others = self._all() - self._busy - (time.process_time() - self._own)
        return max(0.0, others / max(1e-9, time.perf_counter() - self._wall))

    @staticmethod
    def _all() -> float:
        spent = psutil.cpu_times()
        return sum(spent) - spent.idle - getattr(spent, "iowait", 0.0) - getattr(spent, "guest", 0.0)


def warn_of_others(share: float, when: str) -> None:
    if share > 0.1:
        console.print(
            f"[bold yellow]warning:[/] {when} other processes kept {share:.1f} of {psutil.cpu_count()} cores busy: "
            "do not trust these times"
        )


# -- one bench -------------------------------------------------------------------------------------


def arguments(description: str, sizes: dict, quick: dict) -> argparse.ArgumentParser:
    """Options of every bench; sizes: option -> its values, quick: those of --quick (see `parse`)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backends", nargs="+", help="those to measure (default: the compiled ones of this machine)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long to measure each case")
    parser.add_argument("--max-gib", type=float, default=4.0, help="leave out cases that need more memory")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="few and small cases, briefly: shows that all of it works")
    parser.add_argument("--block-size", type=int, default=16)
    for name, values in sizes.items():
        parser.add_argument(f"--{name}", nargs="+", type=int, help=f"default {values}, with --quick {quick[name]}")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, sizes: dict, quick: dict) -> argparse.Namespace:
    """The options, with the sizes that were not given filled in."""
    options = parser.parse_args(argv)
    for name, values in (quick if options.quick else sizes).items():
        setattr(options, name, getattr(options, name) or values)
    return options


def prepare(options: argparse.Namespace) -> dict:
    """Check the options, set the threads, measure the machine; what the JSON file says of it."""
    known = [name for name in kernels.BACKENDS if name != "triton"]  # on a CPU Triton has only an interpreter
    options.backends = options.backends or [name for name in known if name != "reference"]
    if not options.backends:
        raise SystemExit(f"no compiled backend here; --backends reference measures plain torch\n{kernels.describe()}")
    if unknown := set(options.backends) - set(known):
        raise SystemExit(
            f"--backends: expected some of {known}, got {sorted(unknown)} (Triton has only an interpreter on a CPU)"
        )
    for name in options.dtypes:
        if name not in ("float32", "bfloat16", "float16"):
            raise SystemExit(f"--dtypes: expected float32, bfloat16 or float16, got {name}")
    if options.quick:
        options.seconds = min(options.seconds, 0.02)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    others = Others()
    time.sleep(0.2 if options.quick else 1.0)
    idle = others.share()
    about = machine()
    about["bandwidth"] = bandwidth(4 * MIB if options.quick else 256 * MIB)
    about["others_before"] = idle
    console.print(f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, {about['date']}")
    console.print(about["kernels"])
    copy, read = (about["bandwidth"][name] / 1e9 for name in ("copy", "read"))
    console.print(f"memory: copy {copy:.1f} GB/s (read and written bytes together), read {read:.1f} GB/s")
    warn_of_others(idle, "before the start")
    return about


def tracked(cases: Sequence) -> Iterator:
    """The cases one by one, with progress on stderr: a bar on a terminal, else a line for each."""
    terminal = Console(stderr=True, highlight=False)
    if terminal.is_terminal:
        yield from track(cases, "measuring", console=terminal, transient=True)
        return
    for number, case in enumerate(cases, 1):
        terminal.print(f"measuring {number} of {len(cases)}: {case.op} {case.name}, {case.dtype}")
        yield case


def fits(case, max_gib: float) -> bool:
    """Whether a case may run; says so where it is left out."""
    needed = case.bytes_needed / GIB
    if needed > max_gib:
        console.print(f"left out: {case.op} {case.name}, {case.dtype}: needs {needed:.1f} GiB, --max-gib is {max_gib}")
    return needed <= max_gib


def table_of(rows: list[dict], title: str, columns: dict[str, tuple[str, str]]) -> Table:
    """A row for each case; columns: heading -> (name in the row, format)."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for head in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["case"], *(form.format(row[name]) for name, form in columns.values()))
    return table


def groups(rows: list[dict]) -> list[list[dict]]:
    """The rows of each backend, operator and dtype."""
    found = {}
    for row in rows:
        found.setdefault((row["backend"], row["op"], row["dtype"]), []).append(row)
    return list(found.values())


def summary(rows: list[dict], peer: str) -> str:
    """The ratios to a peer in one line."""
    name = f"times_{peer}"
    least = min(rows, key=lambda row: row[name])
    mean = statistics.geometric_mean([row[name] for row in rows])
    return f"against {peer}: geometric mean {mean:.2f}, least {least[name]:.2f} at {least['case']}"


def finish(options: argparse.Namespace, about: dict, results: Sequence[dict], others: Others) -> None:
    """Say whether the machine was quiet, and write the JSON file."""
    about["others_during"] = others.share()
    warn_of_others(about["others_during"], "during the measurement")
    if options.json:
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        document = {"machine": about, "options": shown, "results": list(results)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {options.json}")
