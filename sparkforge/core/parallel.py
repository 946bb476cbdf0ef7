"""Work on many items at once, in threads that end with a failed or interrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

_STOP_S = 1.0  # time for a failed run's other work to notice

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_parallel(work: Callable[[_T, Event], _R], items: Sequence[_T], width: int) -> Iterator[_R]:
    """Yield the results in order.

    A thread pool would wait for all running work after a failure or Ctrl-C. These threads get a
    signal to stop, and otherwise end with the program.

    Args:
        work: called with an item, and an event that says that its result is no longer needed.
    """
    waiting: SimpleQueue[tuple[_T, Future[_R]]] = SimpleQueue()
    futures: list[Future[_R]] = []
    stopping = Event()

    def worker() -> None:
        while True:
            try:
                item, future = waiting.get_nowait()
            except Empty:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(item, stopping))
                except BaseException as error:
                    future.set_exception(error)

    for item in items:
        futures.append(Future())
        waiting.put((item, futures[-1]))
    threads = [Thread(target=worker, daemon=True) for _ in range(width)]
    try:
        for thread in threads:
            thread.start()
        for future in futures:
            yield future.result()
    finally:
        stopping.set()
        for future in futures:
            future.cancel()
        deadline = time.monotonic() + _STOP_S
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
