# SPDX-License-Identifier: Apache-2.0
"""How the driver is told of a launch: cuLaunchKernel, or cuLaunchKernelEx where launches overlap.

On a GPU of compute capability 9.0 or later a kernel may be launched while the one before it in the
stream still runs (programmatic dependent launch): its blocks take their places, and wait there
until that one has ended and its writes are seen. Only kernels whose first statement is that wait
may be launched so, and only those that say when the next one may begin gain by it: behind any other
kernel such a launch takes longer than a plain one. So launches overlap where a kernel of this
library is known to come before, which is in a graph that is being captured. What else stands before
or behind in the graph may be any work at all.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _build

OVERLAP_ARCH = 90
OVERLAP_DRIVER = 12030  # CUDA 12.3: its graphs can capture it, and say where they end


class Function(NamedTuple):
    """A loaded kernel."""

    kernel: Any  # keeps it loaded
    ptr: int
    overlaps: bool  # waits for the kernel before it


class Launched(NamedTuple):
    """A launch that was enqueued, and how to enqueue it again."""

    function: Any
    grid: int
    block: int
    shared_bytes: int
    packed: bytes

    def again(self, stream: int, parameters: int) -> Callable[[], object]:
        """What enqueues it with the arguments in the driver's list `parameters`; see `prepare`."""
        return prepare(
            self.function, self.grid, self.block, self.shared_bytes, stream, parameters, 0
        )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value of an int."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_int * 15),
    )


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


DEFAULT_STREAMS = (0, 1)  # CU_STREAM_LEGACY by both its handles; no graph is captured there

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_OVERLAP = _Attribute(id=6, value=1)


def prepare(
    function: Any,
    grid: int,
    block: int,
    shared_bytes: int,
    stream: int,
    parameters: int,
    extra: int,
) -> Callable[[], object]:
    """What enqueues this launch as often as it is called, from any thread.

    It returns something true or raises RuntimeError where the driver refuses. The driver copies the
    arguments, to which one of `parameters` and `extra` is the pointer, as it enqueues.
    """
    plain = functools.partial(
        launcher(),
        function.ptr,
        *(grid, 1, 1),
        *(block, 1, 1),
        *(shared_bytes, stream, parameters, extra),
    )
    if not function.overlaps or stream in DEFAULT_STREAMS:
        return plain
    configuration = _Configuration(
        (grid, 1, 1), (block, 1, 1), shared_bytes, stream, ctypes.pointer(_OVERLAP), 1
    )
    # Converted once, and of no declared types, which would be looked at in each call.
    pointers = map(ctypes.c_void_p.from_param, (function.ptr, parameters, extra))
    overlapping = functools.partial(
        _build.driver().cuLaunchKernelEx, ctypes.byref(configuration), *pointers
    )

    captures = capture_test()

    def enqueue() -> object:
        if not captures(stream):
            return plain()
        end = end_of_capture(stream)
        failed = overlapping() if end[1] and end == _own_end else plain()
        remember(stream)
        return failed

    return enqueue


End = tuple[int, int]
_own_end: End | None = None  # where a capture ended behind the latest launch of this library in one


def remember(stream: int) -> None:
    """Where the stream's capture ends now is a kernel that says when the next one may begin."""
    global _own_end
    _own_end = end_of_capture(stream)


def end_of_capture(stream: int) -> End:
    """The graph that a stream captures, and the node that the next one will follow.

    That is 0 where it will follow none or several.
    """
    status, capture, skipped = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    results = map(ctypes.byref, (status, capture, skipped, nodes, skipped, count))
    failed = _build.driver().cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *results)
    return capture.value, nodes[0] if not failed and count.value == 1 else 0


@functools.cache
def capture_test() -> Callable[[int], bool]:
    """Whether a stream captures a graph: CuPy's function, which costs less than one by ctypes."""
    from cupy.cuda import runtime

    found: Callable[[int], bool] = runtime.streamIsCapturing
    return found


def may_overlap(arch: int) -> bool:
    """Whether launches on the current device can overlap."""
    return arch >= OVERLAP_ARCH and _driver_version() >= OVERLAP_DRIVER


@functools.cache
def _driver_version() -> int:
    from cupy.cuda import runtime

    version: int = runtime.driverGetVersion()
    return version


@functools.cache
def launcher() -> Callable[..., object]:
    """cuLaunchKernel: CuPy's, which it does not document, or the driver's own."""
    from cupy.cuda import driver

    found: Callable[..., object] | None = getattr(driver, "launchKernel", None)
    return found or _driver_launch_kernel()


def _driver_launch_kernel() -> Callable[..., object]:
    enqueue: Any = _build.driver().cuLaunchKernel
    count, pointer = ctypes.c_uint, ctypes.c_void_p
    enqueue.argtypes = (pointer, *(7 * [count]), pointer, pointer, pointer)
    return enqueue  # type: ignore[no-any-return]


def error_name(status: object) -> str:
    """What the driver calls a status."""
    name = ctypes.c_char_p()
    _build.driver().cuGetErrorName(status, ctypes.byref(name))
    return f"{(name.value or b'').decode()} ({status})"
