# SPDX-License-Identifier: Apache-2.0
"""A small pool of threads for the NumPy backend: NumPy releases the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 16  # memory, not arithmetic, is the limit from a few threads on

Item = TypeVar("Item")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def threads() -> int:
    """How many threads may work at once: the CPUs that the calling thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MAX_THREADS)
    return min(os.cpu_count() or 1, MAX_THREADS)


def _forget() -> None:
    """In a forked child: the parent's threads do not exist here, and its lock may be held."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _submit(work: Callable[[], None]) -> Future[None] | None:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="cupy_rmsnorm")
    try:
        return _pool.submit(work)
    except RuntimeError:  # the interpreter is shutting down: the caller does it all
        return None


def run(items: Iterable[Item], worker: Callable[[Iterable[Item]], None], helpers: int) -> None:
    """Let `worker` take items in turn, here and in up to `helpers` more threads."""
    queue = deque(items)

    def taken() -> Iterable[Item]:
        while queue:
            try:
                yield queue.popleft()
            except IndexError:
                return

    futures = [_submit(lambda: worker(taken())) for _ in range(min(helpers, len(queue) - 1))]
    try:
        worker(taken())
    finally:
        queue.clear()
        errors = [
            future.exception() for future in futures if future is not None and not future.cancel()
        ]
    for error in errors:
        if error is not None:
            raise error
