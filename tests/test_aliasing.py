# SPDX-License-Identifier: Apache-2.0
"""Which arrays may share memory, and that nothing but outputs is written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_rmsnorm as norms
from cupy_rmsnorm import _overlap
from cupy_rmsnorm._libraries import NUMPY

F32 = np.float32
W = np.array([1, -2, 0.5, 3], F32)


def rows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 4)).astype(F32)


def described(values: np.ndarray, name: str = "a") -> Any:
    return NUMPY.describe(name, values, output=False)


# In place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, F32, np.float64])
@pytest.mark.parametrize("function", [norms.rms_norm, norms.layer_norm])
def test_out_may_be_exactly_x(function: Any, dtype: Any) -> None:
    x = rows().astype(dtype)
    expected = function(x, W.astype(dtype))
    assert function(x, W.astype(dtype), out=x) is x
    np.testing.assert_array_equal(x, expected)


def test_out_may_be_another_view_of_exactly_x() -> None:
    x = rows()
    expected = norms.rms_norm(x, W)
    norms.rms_norm(x, W, out=x[:])
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("first", ["x", "residual"])
@pytest.mark.parametrize("second", ["x", "residual", None])
def test_add_in_place(first: str, second: str | None) -> None:
    arrays = {"x": rows(0), "residual": rows(1), None: None}
    y, residual_out = norms.add_rms_norm(arrays["x"], arrays["residual"], W)
    outputs = {"out": arrays[first], "residual_out": arrays[second]}
    if first == second:
        with pytest.raises(ValueError, match=r"^out must not overlap residual_out, got"):
            norms.add_rms_norm(arrays["x"], arrays["residual"], W, **outputs)
        return
    got = norms.add_rms_norm(arrays["x"], arrays["residual"], W, **outputs)
    assert got[0] is arrays[first]
    assert second is None or got[1] is arrays[second]
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[1], residual_out)


def test_x_may_be_the_residual_and_both_be_written() -> None:
    x = rows()
    y, residual_out = norms.add_rms_norm(x, x, W)
    got = norms.add_rms_norm(x, x, W, residual_out=x)
    assert got[1] is x
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(x, residual_out)


@pytest.mark.parametrize("backward", [norms.rms_norm_backward, norms.layer_norm_backward])
def test_dx_may_be_exactly_x(backward: Any) -> None:
    x, dout = rows(0), rows(1)
    expected = backward(dout, x, W, bias=W)
    dx, dweight, dbias = backward(dout, x, W, bias=W, dx_out=x)
    assert dx is x
    for got, want in zip((dx, dweight, dbias), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_dx_may_be_exactly_residual_out() -> None:
    x, dout = rows(0), rows(1)
    expected, _, _, _ = norms.add_rms_norm_backward(dout, dout, x, W)
    dx, dresidual, _, _ = norms.add_rms_norm_backward(dout, dout, x, W, dx_out=x)
    assert dx is x
    assert dresidual is x
    np.testing.assert_array_equal(x, expected)


def test_qk_in_place_in_one_buffer() -> None:
    tokens, q_heads, k_heads, head_size = 5, 3, 2, 4
    qkv = np.random.default_rng(0).standard_normal((tokens, 7, head_size)).astype(F32)
    before = qkv.copy()
    q, k = qkv[:, :q_heads], qkv[:, q_heads : q_heads + k_heads]
    expected = norms.qk_norm(q.copy(), k.copy(), W, 2 * W)
    got = norms.qk_norm(q, k, W, 2 * W, q_out=q, k_out=k)
    assert got[0] is q
    assert got[1] is k
    np.testing.assert_array_equal(q, expected[0])
    np.testing.assert_array_equal(k, expected[1])
    np.testing.assert_array_equal(qkv[:, q_heads + k_heads :], before[:, q_heads + k_heads :])


def test_columns_of_one_buffer_do_not_overlap() -> None:
    buffer = np.random.default_rng(0).standard_normal((6, 12)).astype(F32)
    x, out, weight = buffer[:, :4], buffer[:, 4:8], buffer[3, 8:]
    expected = norms.rms_norm(x.copy(), weight.copy())
    norms.rms_norm(x, weight, out=out)
    np.testing.assert_array_equal(out, expected)


def test_inputs_may_overlap_inputs() -> None:
    buffer = rows().ravel()
    x, residual = buffer[:8].reshape(2, 4), buffer[4:].reshape(2, 4)
    got = norms.add_rms_norm(x, residual, buffer[2:6])
    want = norms.add_rms_norm(x.copy(), residual.copy(), buffer[2:6].copy())
    np.testing.assert_array_equal(got, want)


# Refused overlaps ----------------------------------------------------------------------------


def refused(message: str, function: Any, *args: Any, **options: Any) -> None:
    arrays = [value for value in (*args, *options.values()) if isinstance(value, np.ndarray)]
    before = [value.tobytes() for value in arrays]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        function(*args, **options)
    assert before == [value.tobytes() for value in arrays]


UNLESS_X = "out must not overlap x, unless it is exactly x, got two views of the same memory"


def test_shifted_out_is_refused() -> None:
    buffer = np.ones(16, F32)
    refused(UNLESS_X, norms.rms_norm, buffer[:12].reshape(3, 4), out=buffer[4:].reshape(3, 4))


def test_out_of_another_shape_of_x_is_refused() -> None:
    x = rows()
    refused(UNLESS_X, norms.rms_norm, x, out=x.view(np.float16)[:, :4])
    refused(UNLESS_X, norms.rms_norm, x, out=x[::-1])
    refused(UNLESS_X, norms.rms_norm, x[:, ::-1], out=x)
    square = np.ones((4, 4), F32)
    refused(UNLESS_X, norms.rms_norm, square, out=square.T)


def test_overlap_with_other_inputs_is_refused() -> None:
    buffer = rows()
    gone = ", got two views of the same memory"
    refused("out must not overlap weight" + gone, norms.rms_norm, rows(1), buffer[1], out=buffer)
    refused("out must not overlap bias" + gone, norms.rms_norm, rows(1), W, buffer[1], out=buffer)
    mask = buffer.view(bool)[0, :3]
    refused("out must not overlap where" + gone, norms.rms_norm, rows(1), out=buffer, where=mask)
    count = buffer.view(np.int32)[0, :1]
    refused(
        "out must not overlap valid_rows" + gone,
        norms.rms_norm,
        rows(1),
        out=buffer,
        valid_rows=count,
    )
    refused(
        "residual_out must not overlap residual, unless it is exactly residual" + gone,
        norms.add_rms_norm,
        rows(1),
        buffer,
        residual_out=buffer[::-1],
    )


def test_overlap_of_outputs_is_refused() -> None:
    buffer = rows()
    refused(
        "out must not overlap rstd_out, got two views of the same memory",
        norms.rms_norm_forward,
        rows(1),
        out=buffer,
        rstd_out=buffer.ravel()[:3],
    )
    refused(
        "mean_out must not overlap rstd_out, got two views of the same memory",
        norms.layer_norm_forward,
        rows(1),
        mean_out=buffer.ravel()[:3],
        rstd_out=buffer.ravel()[2:5],
    )


@pytest.mark.parametrize("name", ["dout", "weight", "rstd"])
def test_dx_over_another_input_is_refused(name: str) -> None:
    x, dx = rows(0), rows(1)
    arrays = {"dout": rows(2), "x": x, "weight": W.copy(), "rstd": np.ones(3, F32)}
    arrays[name] = dx if name == "dout" else dx.ravel()[: arrays[name].size]
    refused(
        f"dx_out must not overlap {name}, got two views of the same memory",
        norms.rms_norm_backward,
        *arrays.values(),
        dx_out=dx,
    )


def test_gradients_over_each_other_are_refused() -> None:
    dx = rows(1)
    refused(
        "dx_out must not overlap dweight_out, got two views of the same memory",
        norms.rms_norm_backward,
        rows(2),
        rows(0),
        W,
        dx_out=dx,
        dweight_out=dx[0],
    )


@pytest.mark.parametrize(
    "backward", [norms.rms_norm_backward, norms.layer_norm_backward], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["dweight_out", "dbias_out"])
def test_sums_over_exactly_x_are_refused(backward: Any, name: str) -> None:
    x, dout = rows()[0], rows(1)[0]
    refused(
        f"{name} must not overlap x, got two views of the same memory",
        backward,
        dout,
        x,
        W,
        bias=W + 1,
        **{name: x},
    )


def test_sums_over_exactly_residual_out_are_refused() -> None:
    x = rows()[0]
    refused(
        "dweight_out must not overlap residual_out, got two views of the same memory",
        norms.add_rms_norm_backward,
        rows(1)[0],
        None,
        x,
        W,
        dweight_out=x,
    )


def test_qk_outputs_over_the_other_half_are_refused() -> None:
    q, k = rows(0), rows(1)
    gone = ", got two views of the same memory"
    refused("q_out must not overlap k" + gone, norms.qk_norm, q, k, q_out=k)
    refused("k_out must not overlap q" + gone, norms.qk_norm, q, k, k_out=q)
    out = rows(2)
    refused("q_out must not overlap k_out" + gone, norms.qk_norm, q, k, q_out=out, k_out=out)
    refused("q_out must not overlap k_weight" + gone, norms.qk_norm, q, k, W, out[0], q_out=out)


# Nothing but outputs is written --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, F32, np.float64])
def test_inputs_are_untouched(dtype: Any) -> None:
    x, residual, dout = (rows(seed).astype(dtype) for seed in range(3))
    weight, bias = W.astype(dtype), (W + 1).astype(dtype)
    where = np.array([True, False, True])
    valid = np.array(2, np.int64)
    masks = {"where": where, "valid_rows": valid, "masked": "zero"}
    arrays = (x, residual, dout, weight, bias, where, valid)
    before = [value.tobytes() for value in arrays]
    _, mean, rstd = norms.layer_norm_forward(x, weight, bias, **masks)
    norms.rms_norm_forward(x, weight, bias, cast="before_weight")
    norms.add_rms_norm_forward(x, residual, weight, bias)
    norms.add_layer_norm(x, residual, weight, bias, **masks)
    norms.rms_norm_backward(dout, x, weight, bias=bias, **masks)
    norms.layer_norm_backward(dout, x, weight, mean, rstd, bias=bias)
    norms.add_layer_norm_backward(dout, residual, x, weight, mean, rstd, bias=bias)
    norms.qk_norm(x, residual, weight, bias)
    assert before == [value.tobytes() for value in arrays]


# The arithmetic of overlaps ------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn, buffer: np.ndarray) -> np.ndarray:
    """A view of `buffer` by slices, a transposition, a reshape or other strides."""
    width = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48]))
    view = buffer.reshape(-1, width)
    slices = []
    for size in view.shape:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        step = draw(st.integers(1, 3))
        slices.append(slice(start, stop, step))
    view = view[tuple(slices)]
    if draw(st.booleans()):
        view = view[::-1]
    return view.T if draw(st.booleans()) else view


def touched(values: np.ndarray, base: int) -> set[int]:
    strides = values.strides
    return {
        values.__array_interface__["data"][0]
        - base
        + sum(index * stride for index, stride in zip(place, strides, strict=True))
        + byte
        for place in np.ndindex(values.shape)
        for byte in range(values.itemsize)
    }


@given(st.data())
def test_no_overlap_is_missed(data: st.DataObject) -> None:
    buffer = np.zeros(48, np.int16)
    base = buffer.ctypes.data
    a, b = data.draw(views(buffer)), data.draw(views(buffer))
    a_array, b_array = described(a.view(np.float16)), described(b.view(np.float16))
    if touched(a, base) & touched(b, base):
        assert _overlap.overlap(a_array, b_array)
        assert _overlap.overlap(b_array, a_array)
    if _overlap.is_injective(a_array):
        assert len(touched(a, base)) == a.size * a.itemsize


@given(st.integers(1, 6), st.integers(1, 20), st.data())
def test_columns_of_one_buffer_are_apart(height: int, width: int, data: st.DataObject) -> None:
    buffer = np.zeros((height, width + 1), np.float16)
    cut = data.draw(st.integers(1, width))
    left, right = described(buffer[:, :cut]), described(buffer[:, cut:])
    assert not _overlap.overlap(left, right)
    assert not _overlap.overlap(right, left)
    touching = described(buffer[:, cut - 1 :])
    assert _overlap.overlap(left, touching)
    assert _overlap.overlap(touching, left)


def test_slices_by_batch_and_token_are_apart() -> None:
    qkv = np.zeros((2, 5, 3, 8), np.float16)
    q, k = described(qkv[:, :, 0]), described(qkv[:, :, 1])
    assert not _overlap.overlap(q, k)
    assert _overlap.overlap(q, described(qkv[:, :, 0, 4:]))
    assert not _overlap.overlap(described(qkv[:, 0]), described(qkv[:, 1:]))


def test_empty_arrays_overlap_nothing() -> None:
    buffer = np.zeros((4, 4), F32)
    assert not _overlap.overlap(described(buffer[:0]), described(buffer))
