"""The machine that a bench runs on: what it is, how busy others keep it, memory, bandwidth.

Contract: everything is read from the machine at the time; nothing is assumed where it cannot be read. A process counts
with all that it has started, so an engine that works in processes of its own is not taken for somebody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import transformers

import hf_paged
import hf_paged_kernels

MIB = 2**20


def describe(device: str = "cpu") -> dict:
    """Machine, versions and date, as every result carries them."""
    about = {
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_paged": hf_paged.__version__,
        "kernels": hf_paged_kernels.describe(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if torch.device(device).type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
        about["gpu_memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return about


def processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def tree(pid: int | None = None) -> list[psutil.Process]:
    """A process (None: this one) and all that it has started."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Others:
    """CPU time that processes which are not ours take."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float:
        """Cores that others kept busy since the start, on average."""
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, others / max(1e-9, time.perf_counter() - self._wall))


def _busy_seconds() -> float:
    spent = psutil.cpu_times()
    # Linux counts the time of guests in user and nice as well.
    idle = spent.idle + getattr(spent, "iowait", 0.0) + getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)
    return sum(spent) - idle


def _own_seconds() -> float:
    total = 0.0
    for process in tree():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            # Of children that have ended, the parent keeps the sum.
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


BUSY = 0.1  # cores of others from which times are not to be trusted


def others_warning(cores: float, when: str) -> str | None:
    """What to tell the user of a machine that others use, or None if it is quiet."""
    if cores <= BUSY:
        return None
    return f"{when} other processes kept {cores:.1f} of {psutil.cpu_count()} cores busy: do not trust these times"


# -- memory ----------------------------------------------------------------------------------------


def trim() -> None:
    """Give what Python and the C library no longer use back, so that the next peak is the next one's own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def measured(pid: int | None) -> list[psutil.Process]:
    """Whose memory counts: another process with all that it has started, or (None) this one without them."""
    return [psutil.Process()] if pid is None else tree(pid)


def resident(pid: int | None = None) -> int:
    """Bytes of memory that `measured(pid)` hold now."""
    total = 0
    for process in measured(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


class Peak:
    """The largest memory in use while something runs: of the GPU if `device` is one, else resident memory.

    Linux keeps the largest resident size of each process itself and lets it be reset. Elsewhere a thread looks every
    `interval` seconds, and a peak between two looks is missed; `how` says which it was.

    Attributes:
        before, peak: bytes.
        how: "allocator", "kernel" or "sampled".
    """

    def __init__(self, pid: int | None = None, device: str = "cpu", interval: float = 0.02) -> None:
        self._pid, self._device, self._interval = pid, torch.device(device), interval
        self.before = self.peak = 0

    def __enter__(self) -> Peak:
        if self._device.type == "cuda" and self._pid is None:
            self.how = "allocator"
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before = torch.cuda.memory_allocated(self._device)
            return self
        self.before = self.peak = resident(self._pid)
        self.how = "kernel" if all([_reset_peak(process.pid) for process in measured(self._pid)]) else "sampled"
        if self.how == "sampled":
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.how == "allocator":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        elif self.how == "kernel":
            self.peak = max(self.before, sum(_peak_of(process.pid) for process in measured(self._pid)))
        else:
            self._end.set()
            self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(self._interval):
            self.peak = max(self.peak, resident(self._pid))


def _reset_peak(pid: int) -> bool:
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        return _peak_of(pid) > 0
    except OSError:
        return False


def _peak_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


# -- time ------------------------------------------------------------------------------------------


def synchronize(device) -> None:
    """Wait until the device has done what was asked of it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device="cpu") -> float:
    """Wall seconds of one call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def in_turns(ways: dict[str, Callable[[], object]], rounds: int, device="cpu") -> dict[str, list[float]]:
    """Seconds of each round, all ways one after another in every round, after one to warm up.

    Each round starts with another of them: what slows the machine down slows all.
    """
    names = list(ways)
    for name in names:
        ways[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(seconds_of(ways[name], device))
    return seconds


def copy_bandwidth(num_bytes: int, device="cpu", rounds: int = 9) -> float:
    """Bytes a second of a large copy by torch and its threads, read and written bytes together; the fastest round."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(in_turns({"copy": lambda: target.copy_(source)}, rounds, device)["copy"])


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Have torch use so many threads (None: as many as it does) for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
