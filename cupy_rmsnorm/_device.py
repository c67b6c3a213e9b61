# SPDX-License-Identifier: Apache-2.0
"""The current device of the calling thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()


@contextlib.contextmanager
def current_device(index: int) -> Iterator[None]:
    """Make `index` CUDA's current device of this thread, and leave it as it was."""
    from cupy.cuda import runtime

    before = runtime.getDevice()
    if before == index and getattr(_thread, "has_context", False):
        yield
        return
    runtime.setDevice(index)  # gives a new thread the device's context, which a launch needs
    _thread.has_context = True
    try:
        yield
    finally:
        if before != index:
            runtime.setDevice(before)
