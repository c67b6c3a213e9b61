# SPDX-License-Identifier: Apache-2.0
"""Shapes and timing that the command and the benchmarks share.

GPU time is device time of captured graphs. Each candidate works through a ring of placements
(sets of input and output buffers) that together exceed the L2 cache, so that every call reads and
writes memory, and several addresses count alike. Candidates take turns within one run, each behind
a copy of other data, beside device copies of the same number of bytes: speed is reported as a ratio
to the faster copy.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Call = Callable[[int], object]  # enqueues the work on placement i on CuPy's current stream
Times = dict[str, list[float]]  # seconds of one call, one figure a round

PLACEMENTS = 4  # at least: no single place of the buffers decides
MAX_PLACEMENTS = 8192  # at most: a longer ring of tiny buffers takes seconds to capture
L2_MULTIPLE = 2  # a ring of twice the L2 leaves nothing of a placement there when it comes round
MEMORY_SHARE = 0.4  # of the free memory, for the buffers of one candidate
WINDOW = 3e-3  # seconds of GPU work between two events, whose resolution is 0.5 us
MAX_LAUNCHES = 2000  # per graph, where the ring itself is not longer


class Case(NamedTuple):
    """One benchmarked shape; `scale` multiplies the input."""

    name: str
    rows: int
    hidden_size: int
    scale: float = 1.0


CASES: dict[str, tuple[Case, ...]] = {
    "study": (
        Case("4096x512", 4096, 512),
        Case("4096x512 times 100", 4096, 512, 100.0),
        Case("4096x1024", 4096, 1024),
        Case("4096x2048", 4096, 2048),
        Case("4096x4096", 4096, 4096),
        Case("4096x8192", 4096, 8192),
        Case("8192x8192", 8192, 8192),
    ),
    "decode": (
        Case("7B, 1 token", 1, 4096),
        Case("7B, 16 tokens", 16, 4096),
        Case("70B, 128 tokens", 128, 8192),
    ),
    "prefill": (
        Case("heads of 128, 4096 tokens of 32 heads", 131072, 128),
        Case("7B, 16384 tokens", 16384, 4096),
        Case("70B, 8192 tokens", 8192, 8192),
        Case("671B, 16384 tokens", 16384, 7168),
    ),
    "long": (
        Case("8192x16384", 8192, 16384),
        Case("8192x32768", 8192, 32768),
        Case("8192x65536", 8192, 65536),
        Case("4096x131072", 4096, 131072),
    ),
}


def placement_count(nbytes: int) -> int:
    """How many placements of `nbytes` (inputs and outputs together) a ring needs here."""
    import cupy

    l2 = int(cupy.cuda.Device().attributes["L2CacheSize"])
    free = int(cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())
    nbytes = max(nbytes, 1)
    wanted = min(MAX_PLACEMENTS, max(PLACEMENTS, math.ceil(L2_MULTIPLE * l2 / nbytes)))
    return max(1, min(wanted, int(MEMORY_SHARE * free / nbytes)))


def ring(shape: tuple[int, ...], dtype: Any, count: int) -> list[Any]:
    """`count` CuPy arrays of one shape, each at an address that is a multiple of 512 bytes.

    One allocation: a ring of small arrays can have thousands of members.
    """
    import cupy

    size = math.prod(shape) * cupy.dtype(dtype).itemsize
    pitch = -(-size // 512) * 512
    memory = cupy.empty(count * pitch, cupy.uint8)
    return [memory[i * pitch : i * pitch + size].view(dtype).reshape(shape) for i in range(count)]


def race(
    candidates: Mapping[str, Call], *, nbytes: int, placements: int, rounds: int = 7
) -> dict[str, float]:
    """Median seconds of each candidate and, as ``"copy"``, of the fastest copy of `nbytes`.

    `nbytes` is what a candidate must at least read and write together.
    """
    copies = copy_candidates(*copy_rings(nbytes, placements))
    times = gpu_time({**candidates, **copies}, placements=placements, rounds=rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    fastest = min(medians.pop(name) for name in copies)
    return {**medians, "copy": fastest}


def copy_seconds(nbytes: int, *, rounds: int = 7) -> float:
    """Median seconds of the fastest device copy that reads and writes `nbytes` together."""
    return race({}, nbytes=nbytes, placements=placement_count(nbytes), rounds=rounds)["copy"]


_COPY = """
template <int VECS>
__global__ void __launch_bounds__(256) copy(uint4* y, const uint4* x, long long count) {
    long long first = (long long)blockIdx.x * (256 * VECS) + threadIdx.x;
    uint4 held[VECS];
#pragma unroll
    for (int i = 0; i < VECS; ++i)
        if (first + 256 * i < count) held[i] = x[first + 256 * i];
#pragma unroll
    for (int i = 0; i < VECS; ++i)
        if (first + 256 * i < count) y[first + 256 * i] = held[i];
}
"""


def copy_rings(nbytes: int, placements: int) -> tuple[list[Any], list[Any]]:
    """Sources and targets of copies that read and write `nbytes` together."""
    import cupy

    vectors = max(1, nbytes // 32)
    sources = ring((4 * vectors,), cupy.uint32, placements)
    targets = ring((4 * vectors,), cupy.uint32, placements)
    # Constant data would draw less power than activations do, and run at higher clocks.
    sources[0][...] = cupy.arange(4 * vectors, dtype=cupy.uint32) * cupy.uint32(2654435761)
    for source in sources[1:]:
        source[...] = sources[0]
    return sources, targets


def copy_candidates(sources: list[Any], targets: list[Any]) -> dict[str, Call]:
    """Device copies of whole rings, each array a number of 16-byte vectors.

    The driver's copy is slower than a plain kernel on large buffers, and a kernel with more vectors
    a thread is slower on small ones: whoever wins is the yardstick.
    """
    import cupy
    import numpy as np

    runtime, nbytes = cupy.cuda.runtime, sources[0].nbytes
    vectors = nbytes // 16

    def by_driver(i: int) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(targets[i].data.ptr, sources[i].data.ptr, nbytes, kind, stream)

    def by_kernel(vecs: int) -> Call:
        name = f"copy<{vecs}>"
        module = cupy.RawModule(code=_COPY, options=("-std=c++17",), name_expressions=(name,))
        kernel, blocks = module.get_function(name), -(-vectors // (256 * vecs))

        def call(i: int) -> None:
            kernel((blocks,), (256,), (targets[i], sources[i], np.int64(vectors)))

        return call

    return {
        "copy: driver": by_driver,
        "copy: kernel, 1 vector a thread": by_kernel(1),
        "copy: kernel, 4 vectors a thread": by_kernel(4),
    }


def gpu_time(
    candidates: Mapping[str, Call], *, placements: int, rounds: int = 7, window: float = WINDOW
) -> Times:
    """Seconds of device time of one call of each candidate, one figure a round.

    A candidate enqueues its work on placement i, 0 <= i < placements, on CuPy's current stream.
    It may not synchronise. Its first calls, before the capture, compile and fill memory pools.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    times: Times = {name: [] for name in candidates}
    cupy.cuda.Device().synchronize()  # whatever fills the buffers runs on another stream
    with stream:
        fill_l2 = l2_filler()
        graphs = {
            name: _graph(call, placements, stream, window=window)
            for name, call in candidates.items()
        }
        for number in range(rounds):
            # In turns, and every other round backwards: no candidate always follows the same one.
            for name in list(graphs)[:: -1 if number % 2 else 1]:
                graph, launches = graphs[name]
                fill_l2(0)
                times[name].append(_replay(graph, stream) / launches)
    return times


def l2_filler() -> Call:
    """A copy that leaves the L2 full of data that no candidate reads.

    A kernel that asks for its data to be evicted first would otherwise be quick or slow by what the
    candidate before it left there: its own rows, which then stay, or another's.
    """
    import cupy

    nbytes = L2_MULTIPLE * int(cupy.cuda.Device().attributes["L2CacheSize"])
    return copy_candidates(*copy_rings(nbytes, 1))["copy: kernel, 1 vector a thread"]


def _graph(
    call: Call,
    placements: int,
    stream: Any,
    *,
    first_calls: int | None = None,
    window: float = WINDOW,
) -> tuple[Any, int]:
    """A graph of whole trips round the ring that fills `window`, and its number of calls.

    `first_calls`, else one on each placement, run before the capture.
    """
    for i in range(placements if first_calls is None else min(first_calls, placements)):
        call(i)
    stream.synchronize()
    trip = _capture(call, placements, 1, stream)
    if 2 * placements > MAX_LAUNCHES:
        return trip, placements
    seconds = min(_replay(trip, stream) for _ in range(3))
    fitting = min(math.ceil(window / max(seconds, 1e-6)), MAX_LAUNCHES // placements)
    if fitting <= 1:
        return trip, placements
    return _capture(call, placements, fitting, stream), placements * fitting


def _capture(call: Call, placements: int, trips: int, stream: Any) -> Any:
    stream.begin_capture()
    try:
        for _ in range(trips):
            for i in range(placements):
                call(i)
    finally:
        graph = stream.end_capture()
    return graph


def _replay(graph: Any, stream: Any) -> float:
    """Seconds on the device of one replay that another replay leads in."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    # The first replay keeps the GPU busy while the host launches the second, which is timed.
    graph.launch(stream)
    begin.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3


def cpu_time(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 7, window: float = 0.05
) -> Times:
    """Seconds of wall-clock time of one call of each candidate, one figure a round, in turns."""
    times: Times = {name: [] for name in candidates}
    calls = {}
    for name, call in candidates.items():
        call()  # fills caches, starts threads
        begin = time.perf_counter()
        call()
        calls[name] = max(1, round(window / max(time.perf_counter() - begin, 1e-9)))
    for _ in range(rounds):
        for name, call in candidates.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                call()
            times[name].append((time.perf_counter() - begin) / calls[name])
    return times
