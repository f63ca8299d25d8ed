"""Progress on the terminal for steps that take more than two seconds.

Contract: `step(message)` is a context manager. On a terminal it shows a spinner with the time
elapsed and leaves one line behind; elsewhere (a log, a pipe) it prints one plain line when the
step starts and one when it ends, so that a log never looks hung. Everything goes to stderr:
stdout belongs to results. An exception passes through and the line says that the step failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def step(message: str, enabled: bool = True) -> Iterator[None]:
    if not enabled:
        yield
        return
    # The stream of this moment, so that a step may redirect stderr inside without losing the spinner.
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    start = time.perf_counter()
    outcome = "failed after"
    try:
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=console, transient=True, redirect_stderr=False) as progress:
                progress.add_task(message, total=None)
                yield
        else:
            console.print(f"{message} ...", markup=False)
            yield
        outcome = "done in"
    finally:
        console.print(f"{message}: {outcome} {time.perf_counter() - start:.1f} s", markup=False)
