# SPDX-License-Identifier: Apache-2.0
"""The study as pytest-benchmark runs it: `pytest benchmarks/test_study.py --benchmark-json=F`.

A round replays a CUDA graph of many launches over a ring of buffers that exceeds the L2 cache, and
the timer is the device's clock divided by their number: seconds of one launch. A group is a case,
dtype and operation, so that its table compares the variants; `extra_info` has bytes and GB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from cupy_rmsnorm import _bench, _info, _study, variants
from cupy_rmsnorm._dtypes import TABLE as DTYPES

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

_usable, _reason = _info.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _usable, reason=f"no GPU: {_reason}")]

ROUNDS = 20
PEERS = ("ours", "torch", "torch naive", "cupy naive")
CASES = [
    case
    for case in _study.cases(36, 1024)
    if case.group == "rows" and case.name != _study.ACTIVATIONS
]

_clock = 0.0


def device_seconds() -> float:
    """Device seconds of one launch, added up over all rounds."""
    return _clock


def _parameters() -> Iterator[Any]:
    """(case, dtype, op, name); neighbours share their buffers."""
    for case in CASES:
        for dtype in ("float32", "float16", "bfloat16"):
            yield pytest.param(case, dtype, "copy", "copy", id=f"{case.name}-{dtype}-copy")
            for op in _study.OPS:
                fitting = [
                    variant.name
                    for variant in variants.TABLE
                    if f"{variant.norm}_norm" == op
                    and variant.dtype == dtype
                    and case.hidden_size in variant.sizes
                ]
                for name in (*fitting, *PEERS):
                    label = f"{case.name}-{dtype}-{op}-{name}".replace(" ", "_")
                    yield pytest.param(case, dtype, op, name, id=label)


@functools.lru_cache(maxsize=1)
def _candidates(case: _study.Case, dtype: str) -> tuple[int, int, dict[tuple[str, str], Any]]:
    """Placements, bytes of a call, and the calls by (op, name)."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    race = _study.Race(case, dtype, _study.OPS, None, _study.activations(_study.SAMPLE))
    variants.load(race.instances(), cupy.cuda.Device().id)
    xs, ys, candidates = race.prepare()
    for name, call in _bench.copy_candidates(xs, ys).items():
        candidates["copy", name] = call
    return len(xs), race.nbytes, candidates


def _fastest_copy(candidates: dict[tuple[str, str], Any], placements: int) -> str:
    copies = {name: call for (op, name), call in candidates.items() if op == "copy"}
    times = _bench.gpu_time(copies, placements=placements, rounds=3)
    return min(times, key=lambda name: min(times[name]))


class Candidate(NamedTuple):
    """What is timed."""

    impl: str
    call: Any  # runs on placement i
    placements: int
    nbytes: int


@pytest.fixture
def candidate(case: _study.Case, dtype: str, op: str, name: str) -> Candidate:
    """Skips what does not run here: pytest-benchmark warns of its fixture where it is not used."""
    placements, nbytes, candidates = _candidates(case, dtype)
    if name == "copy":
        name = _fastest_copy(candidates, placements)
    if (op, name) not in candidates:
        pytest.skip(f"{name} does not run here: the GPU is too old for it, or torch is missing")
    return Candidate(name, candidates[op, name], placements, nbytes)


@pytest.mark.benchmark(timer=device_seconds)
@pytest.mark.parametrize(("case", "dtype", "op", "name"), list(_parameters()))
def test_study(
    candidate: Candidate, benchmark: Any, case: _study.Case, dtype: str, op: str, name: str
) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        graph, launches = _bench._graph(candidate.call, candidate.placements, stream)
        fill_l2 = _bench.l2_filler()

        def replay() -> None:
            global _clock
            fill_l2(0)
            _clock += _bench._replay(graph, stream) / launches

        benchmark.group = f"{case.name} {dtype} {op}"
        benchmark.pedantic(replay, rounds=ROUNDS, iterations=1, warmup_rounds=2)
    if benchmark.stats is None:  # --benchmark-disable
        return
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "impl": candidate.impl,
        "rows": case.rows,
        "hidden_size": case.hidden_size,
        "itemsize": DTYPES[dtype].itemsize,
        "bytes": candidate.nbytes,
        "gb_per_second": candidate.nbytes / seconds / 1e9,
        "launches": launches,
    }
