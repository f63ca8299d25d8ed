"""Who makes the steps of a batcher.

Contract: at most one thread at a time makes steps; any number may wait for what they bring. If a background thread
runs it makes them; otherwise one of the waiting threads does, for all of them, and another one goes on when it is
done. What a step raises reaches the thread that made it; the others learn of it from their requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable


class Drivers:
    """The right to make steps.

    Args:
        step: makes one step and delivers what it brought; may raise.
        context: entered around several steps of one thread.
        has_background: whether a background thread makes the steps, so that those who wait do not.
    """

    def __init__(
        self,
        step: Callable[[], None],
        context: Callable[[], contextlib.AbstractContextManager],
        has_background: Callable[[], bool],
    ) -> None:
        self._step, self._context, self._has_background = step, context, has_background
        self._progress = threading.Condition()
        self._driver: threading.Thread | None = None

    def run_until(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, making steps if nobody else does, until `done()`; False if `timeout` seconds passed before."""
        end = None if timeout is None else time.perf_counter() + timeout
        if self._driver is threading.current_thread():
            raise RuntimeError("a callback of a request waits, inside a step, for what only further steps can bring")
        try:
            with self._progress:
                while not done() and (self._driver is not None or self._has_background()):
                    left = None if end is None else end - time.perf_counter()
                    if left is not None and left <= 0:
                        return False
                    self._progress.wait(left)
                if done():
                    return True
                self._driver = threading.current_thread()
            with self._context():
                while not done():
                    if end is not None and time.perf_counter() >= end:
                        return False
                    self._step()
                    self.tell()
            return True
        finally:
            self._give_up()

    def run_while(self, wanted: Callable[[], bool]) -> None:
        """Take the right to make steps over from whoever has it, and make them while they are wanted."""
        try:
            with self._progress:
                while self._driver is not None:
                    self._progress.wait()
                self._driver = threading.current_thread()
            with self._context():
                while wanted():
                    self._step()
                    self.tell()
        finally:
            self._give_up()

    def tell(self) -> None:
        """Have those who wait look again."""
        with self._progress:
            self._progress.notify_all()

    def _give_up(self) -> None:
        with self._progress:
            if self._driver is threading.current_thread():
                self._driver = None
            self._progress.notify_all()


class Background:
    """A thread that makes a batcher's steps while there is work.

    While it is idle it holds no reference to the batcher, so that one which nobody wants any more can go.

    Args:
        batcher: has `has_work`, `drivers`, and `fail_all(error)` for what goes wrong outside of its steps.

    Attributes:
        error: what a step raised, set by the batcher; the thread ends then.
    """

    def __init__(self, batcher) -> None:
        self.error: BaseException | None = None
        self._wake, self._stopping = threading.Event(), False
        reference = weakref.ref(batcher, lambda _: self._wake.set())
        self._thread = threading.Thread(target=self._run, args=(reference,), name="hf_paged-batcher", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._stopping and self.error is None

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """There may be work."""
        self._wake.set()

    def stop(self, timeout: float | None = None) -> None:
        """Have the thread end after the step that it makes now, and wait for that."""
        self._stopping = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self, reference: weakref.ref) -> None:
        while not self._stopping:
            batcher = reference()
            if batcher is None:
                return
            try:
                if batcher.has_work:
                    batcher.drivers.run_while(lambda batcher=batcher: batcher.has_work and not self._stopping)
            except BaseException as error:
                if self.error is None:  # else the batcher has told everyone, and may have begun anew
                    self.error = error
                    batcher.fail_all(error)
                return
            finally:
                del batcher
            self._wake.wait()
            self._wake.clear()
