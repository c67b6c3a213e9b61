# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend below the public functions: casts, tiles, threads, memory."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from cupy_rmsnorm import _cpu, _cpu_cast, _cpu_pool
from cupy_rmsnorm._call import Array, Backward, Device, Forward, Space
from tests import compare, inputs, oracle

CPU = Device("cpu", 0)
NORMS = ("rms", "layer")
DTYPES = tuple(oracle.DTYPES)
CODED = _cpu_cast.CODED


class _NoSpace:
    """The NumPy backend takes no memory from the caller's library."""

    device, stream = CPU, 0


def described(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    strides = tuple(stride // value.itemsize for stride in value.strides)
    return Array(name, value, value.ctypes.data, value.shape, strides, value.dtype.name, CPU, value)


def record(kind: type[Any], **arguments: Any) -> Any:
    """A Forward or Backward of NumPy arrays."""
    space: Space = _NoSpace()  # type: ignore[assignment]
    values = {
        "function": "test",
        "norm": "rms",
        "space": space,
        "normalized_ndim": 1,
        "weight": 1.0,
        "weight_offset": 0.0,
        "eps": 1e-6,
        "cast": "once",
        "per_head": False,
        "groups": 1,
        "mask_rows": 1,
        "masked": "zero",
    } | arguments
    names = (field.name for field in dataclasses.fields(kind))
    return kind(**{name: described(name, values.get(name)) for name in names})


def forward(x: np.ndarray, **arguments: Any) -> dict[str, np.ndarray]:
    """Every output of a forward call, in new arrays unless given."""
    norm, ndim = arguments.get("norm", "rms"), arguments.get("normalized_ndim", 1)
    rows = x.shape[: x.ndim - ndim]
    results = {"y": np.full(x.shape, np.nan, x.dtype)}
    results["rstd"] = np.full(rows, np.nan, oracle.accumulation(x))
    if norm == "layer":
        results["mean"] = np.full(rows, np.nan, oracle.accumulation(x))
    if (residual := arguments.get("residual")) is not None:
        results["residual_out"] = np.full(x.shape, np.nan, residual.dtype)
    results |= {name: arguments[name] for name in results if name in arguments}
    _cpu.forward(record(Forward, x=x, **arguments | results))
    return results


def backward(dout: np.ndarray, x: np.ndarray, **arguments: Any) -> dict[str, np.ndarray]:
    """dx, dweight and dbias, in new arrays unless given."""
    weight_shape = x.shape[x.ndim - arguments.get("normalized_ndim", 1) :]
    if arguments.get("per_head"):
        weight_shape = x.shape[-2:]
    results = {"dx": np.full(x.shape, np.nan, x.dtype)}
    results |= {
        name: np.full(weight_shape, np.nan, oracle.accumulation(x)) for name in ("dweight", "dbias")
    }
    results |= {name: arguments.pop(name) for name in results if name in arguments}
    _cpu.backward(record(Backward, dout=dout, x=x, **arguments | results))
    return results


def same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], rows: Any = ...) -> None:
    __tracebackhide__ = True
    assert got.keys() == expected.keys()
    for name, result in got.items():
        rowwise = name not in ("dweight", "dbias")
        compare.equal(result, expected[name][rows] if rowwise else expected[name], name)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Any number of rows is worth that many threads."""
    monkeypatch.setattr(_cpu, "threads", lambda: request.param)
    monkeypatch.setattr(_cpu, "PARALLEL_SIZE", 0)
    count: int = request.param
    return count


# Casts


def decoded(dtype: str, codes: np.ndarray) -> np.ndarray:
    values = codes.view(np.int16).astype(np.int32).view(np.float32)
    _cpu_cast.decode(dtype, values)
    return values


def encoded(dtype: str, values: np.ndarray) -> np.ndarray:
    before = values.copy()
    code, spare = np.empty_like(values), np.empty_like(values)
    with np.errstate(all="ignore"):
        codes = _cpu_cast.encode(dtype, values, code, spare)
    compare.equal(values, before, "the encoded values")
    assert np.array_equal(codes, codes.astype(np.int16)), "codes are not sign-extended"
    return codes.astype(np.int16).view(oracle.DTYPES[dtype])


@pytest.mark.parametrize("dtype", CODED)
def test_every_code_decodes(dtype: str) -> None:
    codes = np.arange(2**16, dtype=np.uint16)
    expected = codes.view(oracle.DTYPES[dtype]).astype(np.float32)
    compare.equal(decoded(dtype, codes), expected)
    finite = np.isfinite(expected)
    compare.equal(decoded(dtype, codes[finite]), expected[finite], "without infinities")


@pytest.mark.parametrize("dtype", CODED)
def test_every_code_survives(dtype: str) -> None:
    codes = np.arange(2**16, dtype=np.uint16).view(oracle.DTYPES[dtype])
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        compare.equal(encoded(dtype, codes.astype(np.float32)), codes)


def midpoints(dtype: str) -> np.ndarray:
    """The float32 numbers half way between neighbours of `dtype`, and their neighbours."""
    codes = np.arange(2**16, dtype=np.uint16).view(oracle.DTYPES[dtype])
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the codes
        numbers = np.unique(codes[np.isfinite(codes)].astype(np.float64))
    middle = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    infinity = np.float32(np.inf)
    return np.concatenate([middle, np.nextafter(middle, infinity), np.nextafter(middle, -infinity)])


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("below", [np.inf, 65520.0, 1.0, 2.0**-13, 2.0**-14, 2.0**-20])
def test_ties_go_to_even(dtype: str, below: float) -> None:
    """Few and many subnormal results, with and without overflow, take different ways."""
    values = midpoints(dtype)
    values = values[np.abs(values) < below]
    for part in (values, values[::7], np.repeat(values, 9)[: values.size * 2]):
        compare.equal(encoded(dtype, part.copy()), oracle.round_to(part, dtype))


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("largest", [1e-30, 1e-4, 1.0, 60000.0, 3e38])
def test_random_values_are_rounded_once(dtype: str, largest: float) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(200_000) * largest / 8).astype(np.float32)
    values[::3] = 0  # a row of many zeros has few subnormals
    compare.equal(encoded(dtype, values), oracle.round_to(values, dtype))


@pytest.mark.parametrize("dtype", CODED)
def test_encoding_keeps_infinities_and_every_nan(dtype: str) -> None:
    nan = [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FC00000, 0xFFC00001, 0x7FBFFFFF]
    values = np.array([*nan, 0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32).view(np.float32)
    got = encoded(dtype, values).astype(np.float32)
    assert np.isnan(got[: len(nan)]).all()
    assert got[len(nan) :].tolist() == [np.inf, -np.inf, np.inf]


# Rows and tiles


def edge_counts(hidden_size: int, dtype: str) -> list[int]:
    """Row counts around one and two tiles."""
    itemsize = 8 if dtype == "float64" else 4
    tile = max(1, _cpu.TILE_BYTES // itemsize // hidden_size)
    larger = (_cpu.CAST_TILE_BYTES, _cpu.BARE_TILE_BYTES)
    edges = {max(1, size // itemsize // hidden_size) + 1 for size in larger}
    return sorted({1, 2, max(1, tile - 1), tile, tile + 1, 2 * tile + 1} | edges)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "hidden_size"),
    [
        ("float32", 1),
        ("float16", 7),
        ("bfloat16", 129),
        ("float32", 513),
        ("float16", 4096),
        ("bfloat16", 40_000),
        ("float32", 70_001),
        ("float64", 2880),
    ],
)
def test_a_row_does_not_know_its_tile(norm: str, dtype: str, hidden_size: int) -> None:
    counts = edge_counts(hidden_size, dtype)
    x = inputs.array((counts[-1], hidden_size), dtype)
    dout = inputs.array(x.shape, dtype, seed=1)
    options = {"norm": norm, "weight": inputs.weight(hidden_size, dtype), "eps": 1e-5}
    bias = inputs.bias(hidden_size, dtype)
    whole = forward(x, bias=bias, **options)
    for count, place in itertools.product(counts[:-1], ("first", "last")):
        rows = slice(0, count) if place == "first" else slice(len(x) - count, None)
        same(forward(x[rows].copy(), bias=bias, **options), whole, rows)
    dx = backward(dout, x, **options)["dx"]
    for row in (0, len(x) // 2, len(x) - 1):
        alone = backward(dout[row], x[row], **options)["dx"]
        compare.equal(alone, dx[row], f"dx of row {row}")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 700), (3, 70_000), (2000, 5, 33)])
def test_threads_and_tiles_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, norm: str, dtype: str, shape: tuple[int, ...]
) -> None:
    x, dout = inputs.array(shape, dtype), inputs.array(shape, dtype, seed=1)
    options = {"norm": norm, "weight": inputs.weight(shape[-1], dtype), "eps": 1e-5}
    monkeypatch.setattr(_cpu, "PARALLEL_SIZE", 0)
    results = []
    for count in (1, 2, 5):
        monkeypatch.setattr(_cpu, "threads", lambda count=count: count)
        results.append((forward(x, **options), backward(dout, x, **options)))
    for other in results[1:]:
        same(other[0], results[0][0])
        same(other[1], results[0][1])
    for name in ("TILE_BYTES", "CAST_TILE_BYTES", "BARE_TILE_BYTES"):
        monkeypatch.setattr(_cpu, name, getattr(_cpu, name) // 4)
    same(forward(x, **options), results[0][0])
    compare.equal(backward(dout, x, **options)["dx"], results[0][1]["dx"], "dx in smaller tiles")


LAYOUTS = {
    "row gap": lambda a: _into(np.empty((*a.shape[:-1], a.shape[-1] + 5), a.dtype)[..., 2:-3], a),
    "inner stride": lambda a: _into(
        np.empty((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)[..., ::2], a
    ),
    "reversed": lambda a: _into(np.flip(np.empty(a.shape, a.dtype)), a),
    "transposed": lambda a: _into(np.empty(a.shape[::-1], a.dtype).T, a),
    "odd address": lambda a: _into(
        np.empty(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape), a
    ),
}


def _into(view: np.ndarray, values: np.ndarray) -> np.ndarray:
    view[...] = values
    return view


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(33, 6, 96), (2, 3, 50_000)])
def test_layouts_change_no_bit(norm: str, dtype: str, layout: str, shape: tuple[int, ...]) -> None:
    x, dout = inputs.array(shape, dtype), inputs.array(shape, dtype, seed=1)
    weight = inputs.weight(shape[-1], dtype)
    options = {"norm": norm, "eps": 1e-5}
    lay = LAYOUTS[layout]
    expected = forward(x, weight=weight, residual=dout, **options)
    given = {name: lay(np.zeros_like(result)) for name, result in expected.items()}
    got = forward(lay(x), weight=lay(weight), residual=lay(dout), **options | given)
    same(got, expected)
    expected = backward(dout, x, weight=weight, dresidual_out=x, **options)
    given = {name: lay(np.zeros_like(result)) for name, result in expected.items()}
    got = backward(lay(dout), lay(x), weight=lay(weight), dresidual_out=lay(x), **options | given)
    same(got, expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(4, 6, 50), (3, 40, 2500)])
def test_axes_that_do_not_join_change_no_bit(norm: str, shape: tuple[int, ...]) -> None:
    x, dout = inputs.array(shape, "bfloat16"), inputs.array(shape, "float32", seed=1)
    weight = inputs.weight(shape[1:], "float16")
    options = {"norm": norm, "normalized_ndim": 2}
    lay = LAYOUTS["row gap"]
    same(
        forward(lay(x), weight=lay(weight), **options),
        forward(x, weight=weight, **options),
    )
    expected = backward(dout, x, weight=weight, **options)
    compare.equal(
        backward(lay(dout), lay(x), weight=lay(weight), **options)["dx"], expected["dx"], "dx"
    )


def test_expanded_gradients() -> None:
    x = inputs.array((7, 65), "float16")
    row = inputs.array((1, 65), "float16", seed=1)
    for dout in (np.broadcast_to(row, x.shape), np.broadcast_to(row[0, 0], x.shape)):
        same(backward(dout, x), backward(dout.copy(), x))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(1, 3), (5, 2000, 64), (3, 5, 30_000), (2, 3, 100_001)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_per_head_is_one_norm_a_head(norm: str, shape: tuple[int, ...], dtype: str) -> None:
    x, dout = inputs.array(shape, dtype), inputs.array(shape, dtype, seed=1)
    weight, bias = inputs.weight(shape[-2:], dtype), inputs.bias(shape[-2:], dtype)
    got = forward(x, weight=weight, bias=bias, norm=norm, per_head=True)
    gradients = backward(dout, x, weight=weight, norm=norm, per_head=True)
    reference = oracle.backward(dout, x, weight, norm=norm, eps=1e-6)
    for name in ("dx", "dweight", "dbias"):
        part: oracle.Reference = getattr(reference, name)
        compare.close(gradients[name], part.value, part.bound(gradients[name].dtype.name), name)
    for head in range(shape[-2]):
        alone = forward(x[..., head, :], weight=weight[head], bias=bias[head], norm=norm)
        compare.equal(got["y"][..., head, :], alone["y"], f"y of head {head}")
        if head == 3:
            break


# Sums


@pytest.mark.parametrize("kind", ["normal", "offset"])
def test_mean_of_a_million_columns(kind: str) -> None:
    x = inputs.array((2, 1_000_003), "float32", kind)
    got = forward(x, norm="layer")
    wide = x.astype(np.float64)
    compare.close(got["mean"], wide.mean(-1), 1e-7 * np.abs(wide.mean(-1)), "mean")
    compare.close(got["rstd"], 1 / np.sqrt(wide.var(-1) + 1e-6), 3e-7, "rstd")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weight_gradients_of_a_million_rows(norm: str, dtype: str) -> None:
    x = inputs.array((1_000_000, 3), dtype, "offset")
    dout = inputs.array(x.shape, dtype, seed=1)
    got = backward(dout, x, norm=norm, eps=1e-3)
    wide = dout.astype(np.float64)
    compare.close(got["dbias"], wide.sum(0), 2e-7 * np.abs(wide).sum(0), "dbias")
    reference = oracle.backward(dout, x, norm=norm, eps=1e-3)
    compare.close(got["dweight"], reference.dweight.value, reference.dweight.error, "dweight")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", ["once", "before_weight"])
def test_long_rows(norm: str, dtype: str, cast: str) -> None:
    """More than one tile a row, and no multiple of anything."""
    x, dout = inputs.array((3, 200_003), dtype), inputs.array((3, 200_003), dtype, seed=1)
    weight, bias = inputs.weight(200_003, dtype), inputs.bias(200_003, dtype)
    options = {"weight": weight, "norm": norm, "eps": 1e-5, "cast": cast}
    got = forward(x, bias=bias, **options)
    exact = oracle.rounded_forward(x, got["rstd"], got.get("mean"), weight, bias, cast=cast)
    compare.equal(got["y"], exact, "y")
    reference = oracle.forward(x, weight, bias, norm=norm, eps=1e-5, cast=cast)
    compare.close(got["y"], reference.y.value, reference.y.bound(dtype), "y")
    gradients = backward(dout, x, **options)
    expected = oracle.backward(dout, x, weight, norm=norm, eps=1e-5, cast=cast)
    for name in ("dx", "dweight", "dbias"):
        part: oracle.Reference = getattr(expected, name)
        compare.close(gradients[name], part.value, part.bound(gradients[name].dtype.name), name)


# Masks, aliases


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 3, 24), (6, 3, 70_000)])
@pytest.mark.parametrize("masked", ["keep", "zero"])
def test_masks(threads: int, norm: str, dtype: str, shape: tuple[int, ...], masked: str) -> None:
    x, residual = inputs.array(shape, dtype), inputs.array(shape, dtype, seed=1)
    where = np.random.default_rng(2).random(shape[:-1]) < 0.5
    where[:2], where[2:4] = True, False
    count = int(np.prod(shape[:-1])) - 4
    computed = where & (np.arange(where.size).reshape(where.shape) < count)
    options = {"norm": norm, "weight": inputs.weight(shape[-1], dtype), "residual": residual}
    expected = forward(x, **options)
    poisoned = np.where(computed[..., None], x, np.full_like(x, np.nan))
    mask = {"where": where, "valid_rows": np.array(count), "masked": masked}
    got = forward(poisoned, **options, **mask)
    for name, result in got.items():
        compare.equal(result[computed], expected[name][computed], name)
        others = result[~computed]
        left = np.full_like(others, np.nan) if masked == "keep" else np.zeros_like(others)
        compare.equal(others, left, f"{name} of other rows")
    del options["residual"]
    gradients = backward(residual, poisoned, **options, **mask)
    reference = oracle.backward(
        residual, x, options["weight"], norm=norm, eps=1e-6, computed=computed
    )
    for name in ("dx", "dweight", "dbias"):
        part: oracle.Reference = getattr(reference, name)
        compare.close(gradients[name], part.value, part.bound(gradients[name].dtype.name), name)
    assert not gradients["dx"][~computed].any()


def test_no_row_computed() -> None:
    x = inputs.array((9, 40), "float16")
    got = backward(x, x, valid_rows=np.array(-3))
    assert all((result == 0).all() for result in got.values())
    got = forward(x, where=np.zeros(9, bool))
    assert all((result == 0).all() for result in got.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hidden_size", [96, 70_000])
def test_in_place(norm: str, dtype: str, hidden_size: int) -> None:
    shape = (5, hidden_size)
    x, residual = inputs.array(shape, dtype), inputs.array(shape, dtype, seed=1)
    options = {"norm": norm, "weight": inputs.weight(hidden_size, dtype)}
    buffer = x.copy()
    same(forward(buffer, y=buffer, **options), forward(x, **options))
    expected = forward(x, residual=residual, **options)
    for crossed in (False, True):
        first, second = x.copy(), residual.copy()
        y, residual_out = (second, first) if crossed else (first, second)
        same(forward(first, residual=second, y=y, residual_out=residual_out, **options), expected)
    expected = backward(residual, x, **options, dresidual_out=x)
    for name in ("dout", "x", "dresidual_out"):
        arrays = {"dout": residual.copy(), "x": x.copy(), "dresidual_out": x.copy()}
        same(backward(**arrays, dx=arrays[name], **options), expected)


def test_inputs_are_not_written() -> None:
    """An upcast that is a copy for 16 bits is none for float32."""
    for dtype in DTYPES:
        arrays = [inputs.array((40, 48), dtype, seed=seed) for seed in range(3)]
        weight = inputs.weight(48, dtype)
        before = [array.copy() for array in (*arrays, weight)]
        for norm in NORMS:
            forward(arrays[0], residual=arrays[1], weight=weight, norm=norm)
            forward(arrays[0], norm=norm)
            backward(arrays[0], arrays[1], weight=weight, dresidual_out=arrays[2], norm=norm)
            backward(arrays[0], arrays[1], norm=norm, valid_rows=np.array(3))
        for array, old in zip((*arrays, weight), before, strict=True):
            compare.equal(array, old)


def test_dresidual_of_another_dtype() -> None:
    x, dout = inputs.array((9, 40), "bfloat16"), inputs.array((9, 40), "bfloat16", seed=1)
    dresidual = np.empty(x.shape, np.float32)
    got = backward(dout, x, dresidual=dresidual)
    compare.equal(oracle.round_to(dresidual, "bfloat16"), got["dx"])
    alone = np.empty(x.shape, np.float32)
    backward(dout, x, dresidual=alone, dx=None)
    compare.equal(alone, dresidual)


# Published faults, by their place in the list of cases


def test_overflow_of_squares_in_16_bits() -> None:
    """B10: squares, or their sum, are past float16's largest number."""
    signs = np.where(np.arange(4096) % 2, -1, 1)
    for values in (np.full(4096, 300.0), np.full(4096, 16.0), 60000.0 * signs):
        x = values.astype(np.float16)
        got = forward(x, eps=0.0)["y"]
        compare.equal(got, np.sign(values).astype(np.float16))
    x, residual = np.full(8, 40000, np.float16), np.full(8, 30000, np.float16)
    got = forward(x, residual=residual)
    assert (got["y"] == 1).all()
    assert np.isinf(got["residual_out"]).all()


def test_many_ones_in_bfloat16() -> None:
    """B79: sums of bfloat16 stop at 256."""
    got = forward(np.ones(20000, oracle.BFLOAT16), eps=0.0)
    assert (got["y"] == 1).all()
    assert (forward(np.full(4096, 300, np.float16), eps=0.0)["y"] == 1).all()


def test_weight_gradient_is_summed_in_float32() -> None:
    """B15: bfloat16 sums stall at 256; float16 gradients are not rounded through bfloat16."""
    ones = np.ones((4096, 64), oracle.BFLOAT16)
    got = backward(ones, ones, eps=0.0, dweight=np.empty(64, oracle.BFLOAT16))
    assert (got["dweight"] == 4096).all()
    one = np.ones((1, 8), np.float16)
    got = backward(one * np.float16(1 + 2**-10), one, eps=0.0, dweight=np.empty(8, np.float16))
    assert (got["dweight"] == 1.0009765625).all()


X16 = np.array([1, 2, 3, 4], np.float32)
WEIGHT16 = np.array([1, 2, 0.5, -1], np.float32)
DOUT16 = np.array([1, -1, 2, 0.5], np.float32)


def test_gradients_by_hand() -> None:
    """B16, B17: one factor of the weight in dx; what arrives at the sum joins after the norm."""
    got = backward(DOUT16, X16, weight=WEIGHT16)
    compare.close(got["dx"], [0.389492, -0.681610, 0.438178, -0.085201], 2e-6, "dx")
    compare.close(got["dweight"], [0.365148, -0.730297, 2.190890, 0.730297], 2e-6, "dweight")
    arriving = np.array([10, 20, 30, 40], np.float32)
    got = backward(DOUT16, X16, weight=WEIGHT16, dresidual_out=arriving)
    compare.close(got["dx"], [10.389492, 19.318390, 30.438178, 39.914799], 2e-5, "dx")
    got = backward(np.zeros(4, np.float32), X16, weight=WEIGHT16, dresidual_out=arriving)
    compare.equal(got["dx"], arriving)


def test_rounding_before_or_after_the_weight() -> None:
    """B30, and dweight uses the value that was rounded."""
    x = np.array([1, 2, 3, 6], oracle.BFLOAT16)
    weight = np.full(4, 3, oracle.BFLOAT16)
    for cast, first in (("once", 0.84765625), ("before_weight", 0.8515625)):
        y = forward(x, weight=weight, cast=cast)["y"].astype(float).tolist()
        assert y == [first, 2 * first, 2.546875, 5.09375]
    got = backward(np.ones(4, np.float32), x, weight=weight, cast="before_weight")
    rstd = 1 / np.sqrt(np.float64(12.5 + 1e-6))
    xhat = oracle.round_to(x.astype(np.float64) * rstd, "bfloat16")
    compare.equal(got["dweight"], xhat.astype(np.float32))


def test_large_mean_and_small_spread() -> None:
    """B38: E[x^2] - E[x]^2 cancels."""
    x = np.array([80000, 80001, 80002, 80003], np.float32)
    got = forward(x, norm="layer", eps=1e-5)
    compare.close(got["y"], [-1.341635, -0.447212, 0.447212, 1.341635], 1e-6)
    bias = inputs.bias(256, "float32")
    x = np.full(256, 1234, np.float32)
    weight = inputs.weight(256, "float32")
    compare.equal(forward(x, norm="layer", weight=weight, bias=bias, eps=1e-5)["y"], bias)
    for mean in (0, 100, 1000, 10000, 1449):
        x = (mean + np.arange(16) * 1e-3).astype(np.float32)
        reference = oracle.forward(x, norm="layer", eps=1e-5)
        compare.close(
            forward(x, norm="layer", eps=1e-5)["y"], reference.y.value, reference.y.error, "y"
        )
        gradients = backward(x, x, norm="layer", eps=1e-5)
        expected = oracle.backward(x, x, norm="layer", eps=1e-5)
        compare.close(gradients["dx"], expected.dx.value, expected.dx.error, "dx")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_column(dtype: str) -> None:
    """B40."""
    x, dout = inputs.array((50, 1), dtype), inputs.array((50, 1), dtype, seed=1)
    weight, bias = inputs.weight(1, dtype), inputs.bias(1, dtype)
    got = forward(x, norm="layer", weight=weight, bias=bias)
    compare.equal(got["y"], np.broadcast_to(bias, x.shape))
    gradients = backward(dout, x, norm="layer", weight=weight)
    assert (gradients["dx"] == 0).all()
    assert (gradients["dweight"] == 0).all()
    three = np.array([3], oracle.DTYPES[dtype])
    dx = backward(np.ones_like(three), three)["dx"]
    assert abs(float(dx[0])) <= 1e-6
    if dtype == "float32":
        assert forward(three)["y"][0] == np.float32(0.99999994)


def test_where_eps_stands() -> None:
    """B42, B43."""
    x = np.zeros(1000, np.float32)
    assert (forward(x, eps=1e-5)["y"] == 0).all()
    x[0] = 1000
    compare.close(forward(x, eps=1e-5)["y"][:1], [31.622776], 4e-6)
    for value, eps, expected in ((1e-3, 1e-6, 0.70710678), (1e-4, 1e-5, 0.03160698), (4, 0, 1)):
        y = forward(np.full(8, value, np.float32), eps=eps)["y"]
        compare.close(y, np.full(8, expected), 2e-7)


@pytest.mark.parametrize("dtype", CODED)
def test_statistics_are_float32_and_rounding_has_no_bias(dtype: str) -> None:
    """B56."""
    x = inputs.array((250, 4000), dtype)
    got = forward(x)
    assert got["rstd"].dtype == np.float32
    reference = oracle.forward(x, eps=1e-6)
    ulps = (got["y"].astype(np.float64) - reference.y.value) / oracle.ulp(reference.y.value, dtype)
    assert abs(ulps.mean()) < 0.01
    assert abs(ulps).max() < 0.501 if dtype == "bfloat16" else abs(ulps).max() < 0.51


def test_the_sum_is_normalised_unrounded() -> None:
    """B81."""
    x = np.array([0.5, -0.5, 0.25, 0.5], oracle.BFLOAT16)
    residual = np.array([128, 64, -128, 32], oracle.BFLOAT16)
    got = forward(x, residual=residual)
    assert got["residual_out"].astype(float).tolist() == [128, 63.5, -128, 32.5]
    assert got["y"].astype(float).tolist() == [1.3203125, 0.65234375, -1.3125, 0.333984375]


def test_float32_squares_overflow_to_zero() -> None:
    """The rule of docs/numerics.md: the sum is infinite, rstd 0 and y 0; no warning, no NaN."""
    for dtype in ("float32", "bfloat16"):
        x = np.full((2, 4), 1e20, oracle.DTYPES[dtype])
        got = forward(x)
        assert (got["rstd"] == 0).all()
        assert (got["y"] == 0).all()
        assert (backward(x, x)["dx"].astype(np.float32) == 0).all() or dtype == "float32"
    y = forward(np.full(4096, 1e17, np.float32))["y"]
    compare.close(y, np.ones(4096), 2**-23)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_infinities_and_nans_stay_in_their_row(dtype: str, norm: str) -> None:
    clean = inputs.array((4, 65), dtype)
    x = clean.copy()
    x[1, 7], x[2, 64] = np.nan, np.inf
    got, expected = forward(x, norm=norm), forward(clean, norm=norm)
    same({name: result[[0, 3]] for name, result in got.items()}, expected, [0, 3])
    assert np.isnan(got["y"][1].astype(np.float64)).all()
    assert np.isnan(got["y"][2, 64].astype(np.float64))
    gradients = backward(clean, x, norm=norm)
    compare.equal(gradients["dx"][[0, 3]], backward(clean, clean, norm=norm)["dx"][[0, 3]])
    assert np.isnan(gradients["dweight"][7])


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 2520), (0,), (2, 0, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    shape = shape if len(shape) > 1 else (0, 1)
    x = np.empty(shape, np.float16)
    assert forward(x, norm="layer")["y"].shape == shape
    got = backward(x, x, norm="layer")
    assert (got["dweight"] == 0).all()
    assert (got["dbias"] == 0).all()


# Memory, threads, processes


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(1024, 4096), (40_000, 64), (64, 40_000), (8, 300_000), (3000, 32, 32)]
)
def test_extra_memory(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: str, shape: tuple[int, ...]
) -> None:
    """Under 2 MiB a thread, in forward and backward, whatever the layout."""
    monkeypatch.setattr(_cpu, "threads", lambda: count)
    x = inputs.array(shape, dtype)
    strided = LAYOUTS["row gap"](x)
    per_head = len(shape) == 3
    weight = inputs.weight(shape[-1 - per_head :], dtype)
    common = {"weight": weight, "per_head": per_head}
    options = common | {"norm": "layer", "cast": "before_weight"}
    calls = []
    for source in (x, strided):
        outputs = {"y": np.empty_like(source), "mean": None, "rstd": None}
        calls.append((_cpu.forward, record(Forward, x=source, bias=weight, **common | outputs)))
        outputs = {"y": np.empty_like(source), "mean": None, "rstd": None}
        calls.append((_cpu.forward, record(Forward, x=source, bias=weight, **options | outputs)))
        outputs = {"dx": np.empty_like(source)} | {
            name: np.empty_like(weight) for name in ("dweight", "dbias")
        }
        calls.append((_cpu.backward, record(Backward, x=source, dout=source, **options | outputs)))
    for function, call in calls:
        function(call)  # what is imported or started once is not counted
        tracemalloc.start()
        function(call)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < count * 2 * 2**20, f"{function.__name__}: {peak / 2**20:.2f} MiB"


def test_no_warning_and_no_change_of_state() -> None:
    state = np.geterr(), np.getbufsize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(all="raise"):
            forward(np.full((3, 600), 3e38, np.float32), norm="layer")
            backward(np.full((3, 600), 3e38, np.float32), np.zeros((3, 600), np.float32), eps=0.0)
    assert (np.geterr(), np.getbufsize()) == state


def test_concurrent_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu, "threads", lambda: 4)
    monkeypatch.setattr(_cpu, "PARALLEL_SIZE", 0)
    arrays = [inputs.array((500, 300), "float16", seed=seed) for seed in range(6)]
    expected = [backward(x, x) for x in arrays]
    failures: list[BaseException] = []

    def caller(x: np.ndarray, result: dict[str, np.ndarray]) -> None:
        try:
            for _ in range(10):
                same(backward(x, x), result)
        except BaseException as error:
            failures.append(error)

    callers = [
        threading.Thread(target=caller, args=pair) for pair in zip(arrays, expected, strict=True)
    ]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_pool_takes_every_item_once_and_reports_errors(helpers: int) -> None:
    taken: list[int] = []

    def worker(items: Iterable[int]) -> None:
        for item in items:
            taken.append(item)
            if item == 70:
                raise ArithmeticError

    _cpu_pool.run(range(50), worker, helpers)
    assert sorted(taken) == list(range(50))
    with pytest.raises(ArithmeticError):
        _cpu_pool.run(range(50, 100), worker, helpers)
    _cpu_pool.run([], worker, helpers)
    assert _cpu_pool.threads() >= 1


def test_a_forked_child_computes() -> None:
    """The parent's threads do not exist in the child; waiting for them would never end."""
    script = """
        import os, sys, warnings
        import numpy as np
        import cupy_rmsnorm
        from cupy_rmsnorm import _cpu

        _cpu.threads, _cpu.PARALLEL_SIZE = lambda: 3, 0
        x = np.arange(60_000, dtype=np.float32).reshape(200, 300)
        expected = cupy_rmsnorm.rms_norm(x)
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads at a fork
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(cupy_rmsnorm.rms_norm(x), expected) else 1)
        _, status = os.waitpid(child, 0)
        sys.exit(status)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
