# SPDX-License-Identifier: Apache-2.0
"""The current device of the calling thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any


class _Thread(threading.local):
    has_context = False  # set once this thread has made a device current


_thread = _Thread()


@contextlib.contextmanager
def current_device(index: int) -> Iterator[None]:
    """Make `index` CUDA's current device of this thread, and leave it as it was."""
    before = runtime().getDevice()
    if before == index and _thread.has_context:
        yield
        return
    runtime().setDevice(index)  # gives a new thread the device's context, which a launch needs
    _thread.has_context = True
    try:
        yield
    finally:
        if before != index:
            runtime().setDevice(before)


def ready() -> int:
    """The current device of this thread, or -1 before `current_device` has given it a context."""
    return runtime().getDevice() if _thread.has_context else -1


@functools.cache
def runtime() -> Any:
    """CuPy's view of CUDA's runtime; importing it at each call would cost as much as a launch."""
    from cupy.cuda import runtime

    return runtime
