# SPDX-License-Identifier: Apache-2.0
"""Faults that were published for kernels of this kind, each as a small case with its right answer.

Kinds of fault that other tests walk more widely: alignment, layouts, batches, in place, dtype
pairs and repeats in test_forward and test_backward, left-out rows in test_masks, arguments of a
wrong kind in the tests of the checks.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib import resources
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm
from tests import compare, inputs, oracle
from tests.backends import Backend
from tests.calls import Case, Gradient, backward, check_backward, check_forward, forward

HALVES = ("float16", "bfloat16")


def array(values: Any, dtype: str = "float32") -> np.ndarray:
    return oracle.round_to(np.asarray(values, np.float64), dtype)


def full(shape: tuple[int, ...], value: float, dtype: str) -> np.ndarray:
    return array(np.full(shape, value), dtype)


def normalise(backend: Backend, x: np.ndarray, weight: Any = None, **changes: Any) -> np.ndarray:
    """The checked y of one call."""
    case = Case(x=x, weight=weight).but(**changes)
    got = forward(backend, case, statistics=True)
    check_forward(case, got)
    return got["y"]


def gradients(
    backend: Backend, dout: np.ndarray, x: np.ndarray, weight: Any = None, **changes: Any
) -> dict[str, Any]:
    """The checked gradients of one call."""
    case, given = Case(x=x, weight=weight).but(**changes), Gradient(dout=dout)
    got = backward(backend, case, given)
    check_backward(case, given, got)
    return got


# Sums over a row ---------------------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("hidden_size", inputs.HIDDEN_SIZES)
def test_a_partly_filled_warp_is_counted(backend: Backend, dtype: str, hidden_size: int) -> None:
    """The sum of 2880 squares covered 2560 of them: 1.0607 came out for 1."""
    ones = np.ones((15 if hidden_size == 2880 else 2, hidden_size), oracle.DTYPES[dtype])
    np.testing.assert_array_equal(normalise(backend, ones, eps=0.0).astype(np.float32), 1)
    dx = gradients(backend, ones, ones, eps=0.0)["dx"].astype(np.float32)
    assert np.abs(dx).max() <= 1e-6


@pytest.mark.parametrize("hidden_size", [769, 767, 1, 3, 7, 4097])
def test_an_odd_row_does_not_write_into_the_next(backend: Backend, hidden_size: int) -> None:
    x = inputs.lay(inputs.array((7, hidden_size), "float16", "row_tagged"))
    case = Case(x=x, eps=0.0)
    out = backend.empty(x.shape, "float16")
    first = forward(backend, case, y=out)
    check_forward(case, first)
    for _ in range(50):
        compare.equal(forward(backend, case, y=out)["y"], first["y"], "a repeat")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("hidden_size", [192, 255, 256, 257, 384, 511, 512, 513])
def test_short_rows_in_one_block_do_not_share_sums(
    backend: Backend, dtype: str, hidden_size: int
) -> None:
    for rows in (1, 2, 3, 5, 17):
        x = inputs.array((rows, hidden_size), dtype, "row_tagged")
        for norm in ("rms", "layer"):
            normalise(backend, x, norm=norm, eps=0.0)
            dout = inputs.array(x.shape, dtype, "row_tagged", seed=1)
            gradients(backend, dout, x, inputs.weight(hidden_size, dtype), norm=norm, eps=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("hidden_size", [8192, 12287, 12288, 12289, 16384, 16385, 57344, 65536])
def test_rows_about_the_size_of_shared_memory(backend: Backend, hidden_size: int) -> None:
    shape = (2, hidden_size)
    case = Case(
        x=inputs.array(shape, "float32"),
        weight=inputs.weight(hidden_size, "float32"),
        residual=inputs.array(shape, "float32", seed=1),
    )
    got = forward(backend, case, statistics=True)
    check_forward(case, got)
    dout = inputs.array(shape, "float32", seed=2)
    case = case.but(x=got["residual_out"], residual=None)
    given = Gradient(dout=dout, added=True, dresidual_out=dout, rstd=got["rstd"])
    check_backward(case, given, backward(backend, case, given))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [65535, 65536, 65537, 131073])
@pytest.mark.parametrize("hidden_size", [8, 64])
def test_more_rows_than_a_grid_axis_holds(backend: Backend, rows: int, hidden_size: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, hidden_size), np.float32)
    weight = inputs.weight(hidden_size, "float32")
    got = forward(backend, Case(x=x, weight=weight), statistics=True)
    dx = backward(backend, Case(x=x, weight=weight), Gradient(dout=x))["dx"]
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        case = Case(x=x[part], weight=weight)
        check_forward(case, {name: result[part] for name, result in got.items()})
        given = Gradient(dout=x[part], need_dweight=False)
        check_backward(case, given, {"dx": dx[part], "dweight": None, "dbias": None})


@pytest.mark.parametrize(("tokens", "heads"), [(1, 65537), (65537, 1)])
def test_more_heads_or_tokens_than_a_grid_axis_holds(
    backend: Backend, tokens: int, heads: int
) -> None:
    q = inputs.array((tokens, heads, 8), "float32")
    k = inputs.array((tokens, 1, 8), "float32", seed=1)
    weight = inputs.weight(8, "float32")
    results = cupy_rmsnorm.qk_norm(
        backend.input(q), backend.input(k), backend.input(weight), backend.input(weight)
    )
    for x, result in zip((q, k), results, strict=True):
        check_forward(Case(x=x, weight=weight, eps=1e-6), {"y": backend.numpy(result)})


# Layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides"), [((64, 1, 128), (128, 4194304, 1)), ((1, 64, 128), (7, 128, 1))]
)
def test_the_stride_of_an_axis_of_length_one_means_nothing(
    backend: Backend, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    flat = inputs.lay(inputs.array((64, 128), "float16", "row_tagged"))
    x = np.lib.stride_tricks.as_strided(flat, shape, [2 * stride for stride in strides])
    expected = normalise(backend, np.ascontiguousarray(x), eps=0.0)
    compare.equal(normalise(backend, x, eps=0.0), expected)
    got = gradients(backend, x, x, eps=1e-3)
    compare.equal(got["dx"], gradients(backend, flat, flat, eps=1e-3)["dx"].reshape(shape))


def test_leading_axes_need_not_collapse(backend: Backend) -> None:
    x = inputs.array((2, 257, 3600), "bfloat16")[..., :1200]
    assert [stride // 2 for stride in x.strides] == [925200, 3600, 1]
    normalise(backend, x, inputs.weight(1200, "bfloat16"))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_an_inner_stride_holds_in_every_pass(backend: Backend, norm: str) -> None:
    base = inputs.array((64, 96), "float32")
    for x in (base[:, :48].T, base[:, ::2], base[:, ::-1], base[::-2, 1::3].T):
        if backend.holds(x):
            expected = normalise(backend, np.ascontiguousarray(x), norm=norm)
            compare.equal(normalise(backend, x, norm=norm), expected)


# Overflow, underflow, cancellation ---------------------------------------------------------


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_squares_past_float16(backend: Backend, norm: str) -> None:
    for value in (300, 16):
        x = full((3, 4096), value, "float16")
        if norm == "layer":
            x[:, ::2] *= -1
        y = normalise(backend, x, norm=norm, eps=0.0)
        np.testing.assert_array_equal(np.abs(y), 1)
    x = full((3, 4096), 60000, "float16")
    x[:, ::2] *= -1
    np.testing.assert_array_equal(normalise(backend, x, norm=norm, eps=0.0), np.sign(x))


def test_a_sum_past_float16_is_normalised(backend: Backend) -> None:
    """35000 + 35000: residual_out is infinite in float16, y comes from the float32 sum."""
    case = Case(
        x=full((3, 4096), 35000, "float16"), residual=full((3, 4096), 35000, "float16"), eps=0.0
    )
    got = forward(backend, case, statistics=True)
    check_forward(case, got)
    assert (got["y"] == 1).all()
    assert np.isposinf(got["residual_out"]).all()


@pytest.mark.parametrize("hidden_size", [4096, 20000])
def test_sums_do_not_stall(backend: Backend, hidden_size: int) -> None:
    """A bfloat16 sum of ones stops at 256: the mean of 20000 came out as 0.0128."""
    ones = np.ones((2, hidden_size), oracle.BFLOAT16)
    np.testing.assert_array_equal(normalise(backend, ones, eps=0.0).astype(np.float32), 1)


def test_large_float32_rows_that_do_not_overflow(backend: Backend) -> None:
    y = normalise(backend, full((2, 4096), 1e17, "float32"), eps=1e-6)
    np.testing.assert_allclose(y, 1, rtol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_overflowing_sum_of_squares_gives_zeros(backend: Backend, dtype: str) -> None:
    """The documented result, on every backend; never NaN."""
    x = full((2, 4), 1e20, dtype)
    got = forward(backend, Case(x=x), statistics=True)
    np.testing.assert_array_equal(got["rstd"], 0)
    np.testing.assert_array_equal(got["y"].astype(np.float32), 0)


def test_float16_subnormals_are_ordinary_numbers(backend: Backend) -> None:
    x = full((2, 64), 2.0**-24, "float16")
    np.testing.assert_array_equal(normalise(backend, x, eps=0.0), 1)


def test_float32_subnormals_vanish_under_eps(backend: Backend) -> None:
    """Whether they are flushed or not."""
    got = forward(backend, Case(x=full((2, 64), 1e-40, "float32"), eps=1e-6))
    assert (np.abs(got["y"]) <= 1e-33 * 1.001e-4 + 1e-36).all()


def test_a_large_mean_with_a_small_spread(backend: Backend) -> None:
    x = array([[80000, 80001, 80002, 80003]])
    y = normalise(backend, x, norm="layer", eps=1e-5)
    np.testing.assert_allclose(y, [[-1.341635, -0.447212, 0.447212, 1.341635]], atol=2e-6)
    gradients(backend, array([[1, -1, 2, 0.5]]), x, array([1, 2, 0.5, -1]), norm="layer")


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_a_constant_row_is_exactly_the_bias(backend: Backend, dtype: str) -> None:
    bias = inputs.bias(256, dtype)
    y = normalise(backend, full((3, 256), 1234, dtype), norm="layer", bias=bias)
    compare.equal(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("mean", [0, 100, 1000, 10000])
def test_a_spread_of_a_thousandth(backend: Backend, mean: float) -> None:
    """The mean is a float32: at 10000 half its ulp is a tenth of the spread, but no NaN."""
    x = array(mean + np.arange(16) * 1e-3)[None]
    y = normalise(backend, x, norm="layer", eps=1e-5)
    assert np.isfinite(y).all()
    assert (np.diff(y) > 0).all()
    gradients(backend, inputs.array((1, 16), "float32"), x, norm="layer")


def test_variance_is_never_negative(backend: Backend) -> None:
    x = array(1449 + np.random.default_rng(0).uniform(-0.5, 0.5, (64, 768)))
    assert np.isfinite(normalise(backend, x, norm="layer")).all()
    got = gradients(backend, inputs.array(x.shape, "float32"), x, norm="layer")
    assert np.isfinite(got["dx"]).all()


@pytest.mark.parametrize("hidden_size", [33, 1000, 1536, 2520])
def test_padding_lanes_do_not_join_the_variance(backend: Backend, hidden_size: int) -> None:
    x = array(5 + np.where(np.arange(hidden_size) % 2, -1.0, 1.0))[None].repeat(3, axis=0)
    y = normalise(backend, x, norm="layer")
    if hidden_size % 2 == 0:
        np.testing.assert_allclose(np.abs(y), 1, atol=1e-5)
    dout = inputs.array(x.shape, "float32", seed=1)
    gradients(backend, dout, x, inputs.weight(hidden_size, "float32"), norm="layer")


# eps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [3.0, 3, np.float64(3), np.float32(3), np.int64(3)])
def test_eps_of_every_scalar_type(backend: Backend, eps: Any) -> None:
    ones = backend.input(np.ones((1, 4), np.float32))
    for function in (cupy_rmsnorm.rms_norm, cupy_rmsnorm.bind_rms_norm(None, eps=eps)):
        options = {"eps": eps} if function is cupy_rmsnorm.rms_norm else {}
        np.testing.assert_array_equal(backend.numpy(function(ones, **options)), 0.5)


@pytest.mark.parametrize(
    ("eps", "error"),
    [("a", TypeError), (None, TypeError), (True, TypeError), (-1e-6, ValueError)]
    + [(value, ValueError) for value in (float("nan"), float("inf"))],
)
def test_eps_that_is_none(backend: Backend, eps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="eps"):
        cupy_rmsnorm.rms_norm(backend.input(np.ones((1, 4), np.float32)), eps=eps)


def test_default_eps_is_not_the_dtypes(backend: Backend) -> None:
    x = array(0.058 * inputs.array((4, 32), "float64"), "bfloat16")
    y = backend.numpy(cupy_rmsnorm.rms_norm(backend.input(x)))
    check_forward(Case(x=x, eps=1e-6), {"y": y})


def test_eps_is_not_rounded_to_the_inputs_dtype(backend: Backend) -> None:
    """float16 cannot hold 1e-8."""
    y = normalise(backend, full((2, 64), 1e-4, "float16"), eps=1e-8)
    np.testing.assert_allclose(y.astype(np.float64), 0.7072, atol=5e-4)


def test_eps_is_not_scaled_with_the_row(backend: Backend) -> None:
    x = np.zeros((2, 1000), np.float32)
    x[0, 0] = 1000
    y = normalise(backend, x, eps=1e-5)
    np.testing.assert_allclose(y[0, 0], 31.622776, rtol=2e-6)
    np.testing.assert_array_equal(y[1], 0)


@pytest.mark.parametrize(
    ("value", "eps", "expected"),
    [(1e-3, 1e-6, 0.70710678), (1e-4, 1e-5, 0.03160698), (4, 1e-6, 0.99999997)],
)
def test_eps_stands_inside_the_root(
    backend: Backend, value: float, eps: float, expected: float
) -> None:
    y = normalise(backend, full((2, 64), value, "float32"), eps=eps)
    np.testing.assert_allclose(y, expected, rtol=2e-6)


# Weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
def test_a_weight_of_another_kind_is_no_bytes_to_reinterpret(
    backend: Backend, x: str, dtype: str
) -> None:
    with pytest.raises(TypeError, match=rf"weight must be .*{x}.*{dtype}"):
        cupy_rmsnorm.rms_norm(
            backend.input(inputs.array((2, 8), x)), backend.input(np.ones(8, dtype))
        )


@pytest.mark.parametrize("shape", [(1, 960), (960, 1), (8, 960), (959,), (961,), (0,)])
def test_a_weight_of_another_shape_is_refused(backend: Backend, shape: tuple[int, ...]) -> None:
    x, weight = inputs.array((5, 8, 960), "float32"), inputs.array(shape, "float32")
    with pytest.raises(ValueError, match="weight must have shape"):
        cupy_rmsnorm.rms_norm(backend.input(x), backend.input(weight))


def test_a_weight_for_each_head_is_numpys_broadcast(backend: Backend) -> None:
    x, weight = inputs.array((5, 8, 960), "float32"), inputs.weight((8, 960), "float32")
    y = normalise(backend, x, weight, per_head=True)
    np.testing.assert_allclose(y, normalise(backend, x) * weight, rtol=1e-6)


def test_output_dtype_is_the_inputs(backend: Backend) -> None:
    x, weight = inputs.array((2, 8), "bfloat16"), inputs.weight(8, "float32")
    case = Case(x=x, weight=weight, residual=inputs.array((2, 8), "bfloat16"))
    got = forward(backend, case)
    assert got["y"].dtype == got["residual_out"].dtype == oracle.BFLOAT16
    assert forward(backend, case.but(out_dtype="float32"))["y"].dtype == np.float32


def test_weight_offset_is_added_in_float32(backend: Backend) -> None:
    """0.00390625 + 1 is 1 in bfloat16, and 15.8125 + 1 is 16.75."""
    x = np.zeros((1, 9), np.float32)
    x[0, 0] = 3
    weight = full((9,), 0.00390625, "bfloat16")
    options = {"weight_offset": 1.0, "eps": 1e-6}
    y = normalise(backend, array(x, "bfloat16"), weight, **options)
    assert float(y[0, 0]) == 3.015625
    x[0, :4], x[0, 4:] = 1.5, 0
    weight = full((9,), 15.8125, "bfloat16")
    y = normalise(backend, array(x, "bfloat16"), weight, **options)
    assert float(y[0, 0]) == 25.25
    dout = inputs.array((1, 9), "bfloat16")
    gradients(backend, dout, array(x, "bfloat16"), weight, **options)


def test_weight_offset_is_explicit(backend: Backend) -> None:
    x, zeros = inputs.array((3, 16), "float32"), np.zeros(16, np.float32)
    compare.equal(normalise(backend, x, zeros, weight_offset=1.0), normalise(backend, x))
    np.testing.assert_array_equal(normalise(backend, x, zeros), 0)
    with pytest.raises(ValueError, match="weight_offset"):
        cupy_rmsnorm.rms_norm(backend.input(x), weight_offset=1.0)


# Rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cast", "expected"),
    [
        ("once", [0.84765625, 1.6953125, 2.546875, 5.09375]),
        ("before_weight", [0.8515625, 1.703125, 2.546875, 5.09375]),
    ],
)
def test_both_cast_orders(backend: Backend, cast: str, expected: list[float]) -> None:
    x, weight = array([[1, 2, 3, 6]], "bfloat16"), full((4,), 3, "bfloat16")
    y = normalise(backend, x, weight, cast=cast, eps=1e-6)
    assert y.astype(float).tolist() == [expected]


def test_the_unrounded_sum_is_normalised(backend: Backend) -> None:
    case = Case(
        x=array([[0.5, -0.5, 0.25, 0.5]], "bfloat16"),
        residual=array([[128, 64, -128, 32]], "bfloat16"),
        eps=1e-6,
    )
    got = forward(backend, case, statistics=True)
    check_forward(case, got)
    assert got["residual_out"].astype(float).tolist() == [[128, 63.5, -128, 32.5]]
    assert got["y"].astype(float).tolist() == [[1.3203125, 0.65234375, -1.3125, 0.333984375]]


def test_rounding_has_no_bias(backend: Backend) -> None:
    """Over a million values the signed error of bfloat16 is a small part of an ulp."""
    x = inputs.array((1000, 1000), "bfloat16")
    y = normalise(backend, x, inputs.weight(1000, "float32"))
    exact = oracle.forward(x, inputs.weight(1000, "float32"), norm="rms", eps=1e-5).y.value
    ulps = (y.astype(np.float64) - exact) / oracle.ulp(exact, "bfloat16")
    assert abs(ulps.mean()) < 0.005
    assert np.abs(ulps).max() < 0.51


def test_an_exact_half_goes_to_even(backend: Backend) -> None:
    weight = array([1 + 2**-8, 1 + 3 * 2**-8, 1, 1])
    y = normalise(backend, np.ones((1, 4), oracle.BFLOAT16), weight, eps=0.0)
    assert y.astype(float).tolist() == [[1, 1 + 2**-6, 1, 1]]


# Degenerate sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 2520)])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_no_rows(backend: Backend, shape: tuple[int, ...], norm: str) -> None:
    size = shape[-1]
    case = Case(
        x=np.zeros(shape, np.float16),
        norm=norm,
        weight=inputs.weight(size, "float16"),
        bias=inputs.bias(size, "float16"),
    )
    check_forward(case, forward(backend, case, statistics=True))
    backend.poison(2 * size)
    got = backward(backend, case, Gradient(dout=case.x))
    assert got["dx"].shape == shape
    for name in ("dweight", "dbias"):
        compare.equal(got[name], np.zeros(size, np.float16), name)
    normalise(backend, inputs.array((2, 8), "float16"), norm=norm)


def test_rows_of_no_elements_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="hidden size"):
        cupy_rmsnorm.rms_norm(backend.input(np.zeros((4, 0), np.float32)))


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_layer_norm_of_one_element_is_its_bias(backend: Backend, dtype: str) -> None:
    x, dout = inputs.array((5, 1), dtype), inputs.array((5, 1), dtype, seed=1)
    weight, bias = array([1.5], dtype), array([-0.625], dtype)
    y = normalise(backend, x, weight, norm="layer", bias=bias)
    compare.equal(y, np.broadcast_to(bias, y.shape))
    got = gradients(backend, dout, x, weight, norm="layer", bias=bias)
    assert not got["dx"].any()
    assert not got["dweight"].any()


def test_rms_norm_of_one_element(backend: Backend) -> None:
    x, one = array([[3]]), array([[1]])
    np.testing.assert_allclose(normalise(backend, x, eps=1e-6), 0.99999994, atol=6e-8)
    assert abs(gradients(backend, one, x, eps=1e-6)["dx"]) <= 1e-6
    halves = gradients(backend, array(one, "bfloat16"), array(x, "bfloat16"), eps=1e-6)
    assert np.isfinite(halves["dx"].astype(np.float32)).all()


# Backward ----------------------------------------------------------------------------------

X = array([[1, 2, 3, 4]])
WEIGHT = array([1, 2, 0.5, -1])
DOUT = array([[1, -1, 2, 0.5]])
DX = np.array([[0.389492, -0.681610, 0.438178, -0.085201]])


def test_the_gradient_of_rms_norm(backend: Backend) -> None:
    """An extra weight in the variance term gives -0.279947 for the last dx."""
    got = gradients(backend, DOUT, X, WEIGHT, eps=1e-6)
    np.testing.assert_allclose(got["dx"], DX, atol=1e-6)
    expected = [0.365148, -0.730297, 2.190890, 0.730297]
    np.testing.assert_allclose(got["dweight"], expected, atol=1e-6)


def test_the_residuals_gradient_is_added_after_the_jacobian(backend: Backend) -> None:
    case, arriving = Case(x=X, weight=WEIGHT, eps=1e-6), array([[10, 20, 30, 40]])
    given = Gradient(dout=DOUT, added=True, dresidual_out=arriving)
    got = backward(backend, case, given)
    check_backward(case, given, got)
    np.testing.assert_allclose(got["dx"], [[10.389492, 19.318390, 30.438178, 39.914799]], atol=4e-6)
    given = Gradient(dout=np.zeros_like(DOUT), added=True, dresidual_out=arriving)
    compare.equal(backward(backend, case, given)["dx"], arriving, "dx without a dout")


def test_gradients_in_place_of_x(backend: Backend) -> None:
    x = array([[1, 0, 0, 0]])
    case, given = Case(x=x, weight=np.ones(4, np.float32), eps=1e-4), Gradient(dout=x.copy())
    got = backward(backend, case, given, dx=backend.output(x))
    check_backward(case, given, got)
    np.testing.assert_allclose(got["dx"], [[0.00079952, 0, 0, 0]], atol=2e-6)
    with pytest.raises(ValueError, match="dx_out must not overlap dout"):
        backward(backend, Case(x=X), given, dx=backend.output(given.dout))


def test_two_backwards_share_one_dout(backend: Backend) -> None:
    first, second = (gradients(backend, DOUT, X, WEIGHT) for _ in range(2))
    for name in ("dx", "dweight"):
        compare.equal(first[name], second[name], name)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4), (3, 4), (1, 4096), (2, 4096), (3, 4096)])
def test_partial_sums_that_no_row_fills(backend: Backend, shape: tuple[int, ...]) -> None:
    zeros, dout = np.zeros(shape, np.float32), np.full(shape, -1, np.float32)
    weight = inputs.weight(shape[-1], "float32")
    for _ in range(10):
        backend.poison(zeros.nbytes)
        got = gradients(backend, dout, zeros, weight)
        np.testing.assert_array_equal(got["dweight"], 0)
    gradients(backend, dout, inputs.array(shape, "float32"), weight)


@pytest.mark.parametrize("rows", [1025, 1027, 65537])
def test_the_last_row_has_its_share_in_dweight(backend: Backend, rows: int) -> None:
    x = inputs.array((rows, 48), "float32")
    dout = np.zeros_like(x)
    dout[-1] = 1
    case = Case(x=x, weight=inputs.weight(48, "float32"), bias=inputs.bias(48, "float32"))
    rstd = forward(backend, case, statistics=True)["rstd"]
    got = backward(backend, case, Gradient(dout=dout, rstd=rstd))
    compare.equal(got["dweight"], x[-1] * rstd[-1], "dweight")
    compare.equal(got["dbias"], np.ones(48, np.float32), "dbias")


def test_dweight_is_summed_in_float32(backend: Backend) -> None:
    ones = np.ones((4096, 64), oracle.BFLOAT16)
    got = gradients(backend, ones, ones, np.ones(64, oracle.BFLOAT16), eps=0.0)
    np.testing.assert_array_equal(got["dweight"].astype(np.float32), 4096)


def test_float16_gradients_do_not_pass_through_bfloat16(backend: Backend) -> None:
    ones = np.ones((1, 64), np.float16)
    dout = full((1, 64), 1 + 2**-10, "float16")
    got = gradients(backend, dout, ones, ones[0], eps=0.0)
    np.testing.assert_array_equal(got["dweight"], 1.0009765625)


def test_nothing_is_written_but_the_outputs(backend: Backend) -> None:
    """Every entry point, every dtype: `backend` compares all inputs afterwards."""
    for dtype in oracle.DTYPES:
        shape = (3, 24)
        x, residual = inputs.array(shape, dtype), inputs.array(shape, dtype, seed=1)
        weight, bias = inputs.weight(24, dtype), inputs.bias(24, dtype)
        for norm in ("rms", "layer"):
            case = Case(x=x, norm=norm, weight=weight, bias=bias)
            for statistics in (False, True):
                forward(backend, case, statistics=statistics)
                forward(backend, case.but(residual=residual), statistics=statistics)
            for added in (False, True):
                arriving = residual if added else None
                backward(backend, case, Gradient(dout=x, added=added, dresidual_out=arriving))
        natives = map(backend.input, (x, residual, weight, bias))
        cupy_rmsnorm.qk_norm(*natives)
        backend.verify()


# torch, processes, real data ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1024), (1, 1, 1024), (3, 1, 1024)])
def test_torch_strides_of_axes_of_length_one(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    x = inputs.array(shape, "float16")
    strides = [1 if size == 1 else int(np.prod(shape[at + 1 :])) for at, size in enumerate(shape)]
    tensor = torch.as_strided(torch.from_numpy(x.copy()), shape, strides)
    check_forward(Case(x=x, eps=1e-6), {"y": cupy_rmsnorm.rms_norm(tensor).numpy()})


def _in_a_child(connection: Any) -> None:
    x = np.ones((600, 4096), np.float32)
    connection.send(float(cupy_rmsnorm.rms_norm(x, eps=0.0).sum()))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_runs_the_numpy_backend() -> None:
    """The parent's threads are not in the child."""
    cupy_rmsnorm.rms_norm(np.ones((600, 4096), np.float32))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_a_child, args=(theirs,))
    child.start()
    try:
        assert ours.poll(20), "the child hangs"
        assert ours.recv() == 600 * 4096
    finally:
        child.kill()
        child.join()


def test_real_activations(backend: Backend) -> None:
    """36 tokens of a language model, with elements up to 22,528."""
    file = resources.files(cupy_rmsnorm).joinpath("data/smollm2_layer22.npz")
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
        x = data["x_bfloat16_bits"].view(oracle.BFLOAT16)
        weight, eps = data["weight"], float(data["eps"])
    assert np.abs(x.astype(np.float32)).max() > 20000
    for cast in ("once", "before_weight"):
        for x_dtype in ("bfloat16", "float16", "float32"):
            for weight_dtype in ("float32", x_dtype):
                values = oracle.round_to(x, x_dtype)
                w = oracle.round_to(weight, weight_dtype)
                normalise(backend, values, w, eps=eps, cast=cast)
                gradients(backend, values, values, w, eps=eps, cast=cast)
