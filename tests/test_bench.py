# SPDX-License-Identifier: Apache-2.0
"""Timing: what it reports, and on a GPU that its copies and rings are what they claim to be."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest

from cupy_rmsnorm import _bench


def test_cases_are_distinct() -> None:
    assert [(c.rows, c.hidden_size, c.scale) for c in _bench.CASES["study"]] == [
        (4096, 512, 1.0),
        (4096, 512, 100.0),
        (4096, 1024, 1.0),
        (4096, 2048, 1.0),
        (4096, 4096, 1.0),
        (4096, 8192, 1.0),
        (8192, 8192, 1.0),
    ]
    names = [case.name for cases in _bench.CASES.values() for case in cases]
    assert len(names) == len(set(names))


def test_race_reports_medians_and_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": [5.0, 1.0, 2.0], "copy: a": [3.0, 3.0, 9.0], "copy: b": [4.0, 1.0, 1.5]}

    def copy_rings(nbytes: int, placements: int) -> tuple[list[object], list[object]]:
        assert (nbytes, placements) == (64, 4)
        return [], []

    def copy_candidates(sources: object, targets: object) -> dict[str, _bench.Call]:
        return {name: print for name in times if name.startswith("copy")}

    def gpu_time(candidates: dict[str, _bench.Call], **options: int) -> _bench.Times:
        assert options == {"placements": 4, "rounds": 3}
        return {name: times[name] for name in candidates}

    monkeypatch.setattr(_bench, "copy_rings", copy_rings)
    monkeypatch.setattr(_bench, "copy_candidates", copy_candidates)
    monkeypatch.setattr(_bench, "gpu_time", gpu_time)
    found = _bench.race({"ours": print}, nbytes=64, placements=4, rounds=3)
    assert found == {"ours": 2.0, "copy": 1.5}


def test_cpu_time_takes_turns() -> None:
    order = []
    candidates = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = _bench.cpu_time(candidates, rounds=3, window=0.0)
    assert order == ["a", "a", "b", "b", *["a", "b"] * 3]  # two calls each to warm up
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert all(second >= 0 for seconds in times.values() for second in seconds)


def test_cpu_time_measures() -> None:
    data = np.ones(1 << 16)
    times = _bench.cpu_time(
        {"one": lambda: data.sum(), "eight": lambda: [data.sum() for _ in range(8)]},
        window=0.01,
    )
    assert 2 < min(times["eight"]) / min(times["one"]) < 32


@pytest.mark.gpu
@pytest.mark.parametrize("vectors", [1, 255, 256, 257, 1025, 100_003])
def test_copies_copy(cupy: ModuleType, vectors: int) -> None:
    sources, targets = _bench.copy_rings(32 * vectors, 2)
    copies = _bench.copy_candidates(sources, targets)
    assert len(copies) == 3
    for call in copies.values():
        for source, target in zip(sources, targets, strict=True):
            assert source.nbytes == target.nbytes == 16 * vectors
            target.fill(0)
        call(0)
        call(1)
        for source, target in zip(sources, targets, strict=True):
            assert bool((target == source).all())


@pytest.mark.gpu
def test_rings_are_aligned_and_apart(cupy: ModuleType) -> None:
    arrays = _bench.ring((3, 7), cupy.float16, 5)
    starts = [array.data.ptr for array in arrays]
    assert all(start % 512 == 0 for start in starts)
    assert np.diff(starts).tolist() == [512] * 4
    assert {(array.shape, array.dtype.name) for array in arrays} == {((3, 7), "float16")}


@pytest.mark.gpu
def test_a_ring_exceeds_the_cache(cupy: ModuleType) -> None:
    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    assert _bench.placement_count(1 << 14) >= 2 * l2 // (1 << 14)
    assert _bench.placement_count(1 << 28) == _bench.PLACEMENTS
    free, _ = cupy.cuda.runtime.memGetInfo()
    assert _bench.placement_count(free) == 1


@pytest.mark.gpu
def test_twice_the_bytes_take_twice_the_time(cupy: ModuleType) -> None:
    """Device time of copies, beyond the cache: a cached or an unmeasured copy would not scale."""
    once, twice = (_bench.copy_seconds(size << 20) for size in (256, 512))
    assert math.isclose(twice / once, 2, rel_tol=0.15)
