# SPDX-License-Identifier: Apache-2.0
"""Launches that overlap on a GPU: a kernel that has begun early uses nothing that is not there yet.

The kernel before it says at once that the next may begin, and writes late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _build, _enqueue, _fast, _kernel, _source
from tests.backends import skip_without

pytestmark = pytest.mark.gpu

LATE = """
extern "C" __global__ void late(char* target, const char* source, long long bytes,
                                long long cycles) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    for (long long i = first; i < bytes; i += (long long)gridDim.x * blockDim.x) {
        target[i] = source[i];
    }
}
"""
CYCLES = 400_000  # a fifth of a millisecond
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'

Arrays = dict[str, Any]
Compute = Callable[[Arrays], tuple[Any, ...]]


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def forward(function: str, rows: int, hidden_size: int, dtype: str = "float16") -> tuple[Any, ...]:
    """A call, and its arrays."""
    arrays = {"x": normal(rows, hidden_size, dtype=dtype), "weight": normal(hidden_size)}
    if function == "add_rms_norm":
        arrays["residual"] = normal(rows, hidden_size, dtype="float32")

    def compute(given: Arrays) -> tuple[Any, ...]:
        result = getattr(norms, function)(**given)
        return result if isinstance(result, tuple) else (result,)

    return compute, arrays


def masked(rows: int, hidden_size: int) -> tuple[Any, ...]:
    arrays = {
        "x": normal(rows, hidden_size),
        "where": np.arange(rows) % 3 != 1,
        "valid_rows": np.array(rows - 2, np.int32),
    }
    return lambda given: (norms.rms_norm(masked="zero", **given),), arrays


def pair() -> tuple[Any, ...]:
    arrays = {"q": normal(60, 8, 128), "k": normal(60, 2, 128), "q_weight": normal(128)}
    return lambda given: tuple(norms.qk_norm(**given)), arrays


def backward(rows: int, hidden_size: int, *, given_rstd: bool = True) -> tuple[Any, ...]:
    arrays = {
        "dout": normal(rows, hidden_size),
        "x": normal(rows, hidden_size) + 1,
        "weight": normal(hidden_size),
    }
    if given_rstd:
        arrays["rstd"] = (np.arange(rows) % 7 + 1).astype(np.float32)

    def compute(given: Arrays) -> tuple[Any, ...]:
        return tuple(part for part in norms.rms_norm_backward(**given) if part is not None)

    return compute, arrays


CALLS = {
    "norm_forward": forward("rms_norm", 4, 4096),
    "norm_forward, LayerNorm": forward("layer_norm", 300, 1000),
    "norm_forward, residual": forward("add_rms_norm", 300, 2560),
    "norm_forward, masks": masked(5000, 256),
    "norm_forward_staged": forward("layer_norm", 3, 40_000),
    "norm_forward_staged in clusters": forward("rms_norm", 3, 200_000),
    "norm_forward_streamed": forward("rms_norm", 2, 600_000, dtype="float32"),
    "norm_forward_pair": pair(),
    "norm_backward": backward(3000, 512),
    "norm_backward_few": backward(16, 8192),
    "norm_backward_streamed": backward(3, 300_001, given_rstd=False),
}


@pytest.fixture
def stream() -> Iterator[Any]:
    skip_without("cupy")
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as made:
        yield made
        made.synchronize()


def overlapping() -> bool:
    """Whether launches overlap here."""
    return _enqueue.may_overlap(_kernel.device_properties(0).arch)


class Spy:
    """The driver's library, which counts the launches that overlap."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.overlapped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cuLaunchKernelEx(self, *arguments: Any) -> Any:
        self.overlapped += 1
        return self._driver.cuLaunchKernelEx(*arguments)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    made = Spy(_build.driver())
    monkeypatch.setattr(_build, "driver", lambda: made)
    return made


@pytest.fixture
def behind_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches overlap whatever comes before, outside of captures as well."""
    anywhere = 1, 1
    monkeypatch.setattr(_enqueue, "capture_test", lambda: lambda stream: True)
    monkeypatch.setattr(_enqueue, "end_of_capture", lambda stream: anywhere)
    monkeypatch.setattr(_enqueue, "_own_end", anywhere)


@pytest.mark.usefixtures("behind_all")
@pytest.mark.parametrize("name", CALLS)
def test_what_an_earlier_kernel_writes_late_is_seen(name: str, stream: Any) -> None:
    compute, given = CALLS[name]
    arrays, expected, write_late = placed(compute, given, stream)
    for late in arrays:
        write_late(late)
        assert same(compute(arrays), expected), f"a late {late} was not waited for"


@pytest.mark.usefixtures("behind_all")
def test_without_the_wait_this_would_be_noticed(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not overlapping():
        pytest.skip("launches do not overlap on this GPU")
    compute, given = CALLS["norm_forward"]
    arrays, expected, write_late = placed(compute, given, stream)
    text = _source.load("norm_forward")
    assert WAIT in text
    monkeypatch.setattr(_source, "load", lambda kernel: text.replace(WAIT, ""))
    monkeypatch.setattr(_kernel, "_functions", {})
    _fast.forget()
    compute(arrays)  # compiled
    noticed = False
    for _ in range(20):  # the kernels may be apart where other processes share the GPU's time
        write_late("x")
        noticed = noticed or not same(compute(arrays), expected)
    _fast.forget()
    assert noticed


def placed(
    compute: Compute, given: dict[str, np.ndarray], stream: Any
) -> tuple[Arrays, tuple[Any, ...], Callable[[str], None]]:
    """The arrays on the GPU, what comes of them, and what writes one late after clearing it."""
    import cupy

    arrays = {name: cupy.asarray(values) for name, values in given.items()}
    sources = {name: array.copy() for name, array in arrays.items()}
    kernel = cupy.RawKernel(LATE, "late")
    stream.synchronize()
    expected = compute(arrays)

    def write_late(name: str) -> None:
        arrays[name][...] = 0
        stream.synchronize()
        source = sources[name]
        kernel((8,), (256,), (arrays[name], source, source.nbytes, CYCLES))

    return arrays, expected, write_late


def same(got: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    pairs = list(zip(got, expected, strict=True))
    return all(a.get().tobytes() == b.get().tobytes() for a, b in pairs)


# Chains -------------------------------------------------------------------------------------------


def chain(start: Any, bias: Any) -> list[Any]:
    """Calls that read what the one before them wrote: rows, weights, parts of sums."""
    x, residual = start.copy(), start.copy()
    ones = bias[None] * 0 + 1
    y, weight = x * 0, ones * 0
    seen = []
    for step in range(12):
        norms.rms_norm(ones, bias, weight_offset=1.5 + step / 8, out=weight)
        norms.rms_norm(x, weight[0], out=y)
        norms.add_rms_norm(y, residual, weight[0], out=y, residual_out=residual)
        norms.layer_norm(y, weight[0], bias, out=x)
        if step % 4 == 1:
            x[:, ::2] *= 1.25  # a kernel that does not wait
        norms.rms_norm(y, out=y)
        dx, dweight = norms.rms_norm_backward(y, x, weight[0])[:2]
        norms.rms_norm(dweight[None], out=weight)
        norms.add_rms_norm(dx, x, weight[0], out=x, residual_out=dx)
        seen += [x.copy(), residual.copy(), dx, dweight]
    return seen


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden_size"),
    [
        ("float16", 4, 4096),
        ("float32", 4096, 512),
        ("float32", 333, 4097),
        ("float32", 20_000, 128),
        ("float16", 16, 8192),
        ("float32", 40, 70_000),
    ],
)
def test_chains_have_the_bits_of_launches_one_by_one(
    dtype: str, rows: int, hidden_size: int, stream: Any, spy: Spy
) -> None:
    import cupy

    start = cupy.asarray(normal(rows, hidden_size)).astype(dtype)
    bias = cupy.linspace(-1, 1, hidden_size).astype(dtype)
    with mock.patch.object(_enqueue, "may_overlap", return_value=False):
        _kernel._functions.clear()
        _fast.forget()
        expected = chain(start, bias)
    _kernel._functions.clear()
    _fast.forget()
    got = chain(start, bias)
    assert all(function.overlaps is overlapping() for function in _kernel._functions.values())
    assert spy.overlapped == 0
    stream.begin_capture()
    try:
        captured = chain(start, bias)
    finally:
        graph = stream.end_capture()
    # At least the second, third, fourth and last call of each step.
    assert spy.overlapped >= 12 * 4 if overlapping() else spy.overlapped == 0
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    assert bool(cupy.isfinite(expected[-1]).all())
    for number, (a, b, c) in enumerate(zip(expected, got, captured, strict=True)):
        assert a.get().tobytes() == b.get().tobytes(), f"result {number}"
        assert a.get().tobytes() == c.get().tobytes(), f"result {number} of the graph"
