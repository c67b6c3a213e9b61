# SPDX-License-Identifier: Apache-2.0
"""What docs/numerics.md says of the edges of a dtype: NaN, infinity, overflow, small numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests import compare, inputs, oracle
from tests.backends import Backend, Cupy, TorchCuda
from tests.calls import Case, Gradient, backward, check_forward, forward

NORMS = ("rms", "layer")
ROW = 1  # of three: the one that holds something odd


def odd_case(dtype: str, norm: str, value: float, at: int = 5) -> Case:
    """Three ordinary rows, but for one element."""
    case = Case(
        x=inputs.array((3, 67), dtype),
        norm=norm,
        weight=inputs.weight(67, dtype),
        bias=inputs.bias(67, dtype),
    )
    case.x[ROW, at] = value
    return case


def values(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def runs_kernels(backend: Backend) -> bool:
    """Where float32 is flushed; the others compute with NumPy."""
    return isinstance(backend, (Cupy, TorchCuda))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(
    backend: Backend, norm: str, dtype: str, value: float
) -> None:
    case = odd_case(dtype, norm, value)
    ordinary = forward(backend, odd_case(dtype, norm, 0.5), statistics=True)
    got = forward(backend, case, statistics=True)
    for output, result in got.items():
        compare.equal(result[::2], ordinary[output][::2], f"{output} of the other rows")
    y = values(got["y"][ROW])
    if np.isnan(value) or norm == "layer":
        assert np.isnan(y).all()
    else:
        # The sum is infinite and rstd 0: infinity * 0 at the infinite element, the bias elsewhere.
        assert got["rstd"][ROW] == 0
        assert np.isnan(y[5])
        others = np.arange(67) != 5
        compare.equal(got["y"][ROW][others], case.bias[others], "the rest of the row")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_in_the_weight_stays_in_its_column(backend: Backend, norm: str, dtype: str) -> None:
    case = odd_case(dtype, norm, 0.5)
    expected = forward(backend, case)["y"]
    weight = case.weight.copy()
    weight[7] = np.nan
    got = forward(backend, case.but(weight=weight))["y"]
    others = np.arange(67) != 7
    assert np.isnan(values(got)[:, 7]).all()
    compare.equal(got[:, others], expected[:, others], "the other columns")


@pytest.mark.parametrize("norm", NORMS)
def test_nan_in_a_residual(backend: Backend, norm: str) -> None:
    case = odd_case("float16", norm, 0.5)
    residual = inputs.array((3, 67), "bfloat16", seed=1)
    residual[ROW, 3] = np.nan
    got = forward(backend, case.but(residual=residual))
    assert np.isnan(values(got["y"])).tolist() == [[r == ROW] * 67 for r in range(3)]
    assert np.isnan(values(got["residual_out"])).sum() == 1


@pytest.mark.parametrize("norm", NORMS)
def test_nan_in_backward_stays_in_its_row_of_dx(backend: Backend, norm: str) -> None:
    case = odd_case("float32", norm, 0.5)
    dout = inputs.array((3, 67), "float32", seed=2)
    expected = backward(backend, case, Gradient(dout=dout))
    bad = dout.copy()
    bad[ROW, 9] = np.nan
    got = backward(backend, case, Gradient(dout=bad))
    assert np.isnan(got["dx"][ROW]).all()
    compare.equal(got["dx"][::2], expected["dx"][::2], "dx of the other rows")
    others = np.arange(67) != 9
    for name in ("dweight", "dbias"):
        assert np.isnan(got[name][9])
        compare.equal(got[name][others], expected[name][others], name)


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_rows_without_a_spread(backend: Backend, dtype: str) -> None:
    """With eps they are the bias, exactly; without eps 0 * infinity."""
    for norm, fill in (("rms", 0.0), ("layer", 0.0), ("layer", 3.0)):
        case = odd_case(dtype, norm, 0.5)
        case.x[ROW] = fill
        got = forward(backend, case, statistics=True)
        check_forward(case, got)
        compare.equal(got["y"][ROW], case.bias, norm)
        got = forward(backend, case.but(eps=0.0), statistics=True)
        assert np.isposinf(got["rstd"][ROW])
        assert np.isnan(values(got["y"][ROW])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden_size", [4, 4096, 20000])
def test_an_overflowing_sum_of_squares(backend: Backend, dtype: str, hidden_size: int) -> None:
    x = oracle.round_to(np.full((2, hidden_size), 2e19), dtype)
    x[:, ::2] *= -1
    bias = inputs.bias(hidden_size, dtype)
    for norm in NORMS:
        case = Case(x=x, norm=norm, weight=inputs.weight(hidden_size, dtype), bias=bias)
        got = forward(backend, case, statistics=True)
        np.testing.assert_array_equal(got["rstd"], 0)
        compare.equal(got["y"], np.broadcast_to(bias, x.shape), norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("hidden_size", "value"), [(64, 1e20), (4096, 1e18)])
def test_backward_of_an_overflowing_sum_of_squares(
    backend: Backend, norm: str, hidden_size: int, value: float
) -> None:
    x = np.full((2, hidden_size), value, np.float32)
    x[:, ::2] *= -1
    arriving = inputs.array(x.shape, "float32")
    case = Case(x=x, norm=norm, weight=inputs.weight(hidden_size, "float32"))
    given = Gradient(dout=np.ones_like(x), added=True, dresidual_out=arriving)
    got = backward(backend, case, given)
    compare.equal(got["dx"], arriving, norm)
    np.testing.assert_array_equal(got["dweight"], 0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("saved", [False, True])
def test_backward_where_the_sum_behind_dx_overflows_too(
    backend: Backend, norm: str, saved: bool
) -> None:
    """Kernels sum dout * weight * (x - mean) before they multiply by rstd, which is 0."""
    x = np.full((2, 64), 1e37, np.float32)
    x[:, ::2] *= -1
    case = Case(x=x, norm=norm, weight=np.ones(64, np.float32))
    zeros = np.zeros(2, np.float32) if saved else None
    mean = zeros if norm == "layer" else None
    got = backward(backend, case, Gradient(dout=np.sign(x) * 10, mean=mean, rstd=zeros))
    np.testing.assert_array_equal(got["dx"], np.nan if runs_kernels(backend) else 0)
    np.testing.assert_array_equal(got["dweight"], 0)


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_a_plain_sum_that_overflows(backend: Backend, out_dtype: str | None) -> None:
    """LayerNorm's mean is formed by one where y has 16 bits, but not with NumPy."""
    x = oracle.round_to(np.full((2, 64), 2e37), "bfloat16")
    bias = inputs.bias(64, "bfloat16")
    case = Case(x=x, norm="layer", bias=bias, weight=np.ones(64, np.float32), out_dtype=out_dtype)
    got = forward(backend, case, statistics=True)
    if runs_kernels(backend) and out_dtype is None:
        assert np.isposinf(got["mean"]).all()
        assert np.isnan(values(got["y"])).all()
    else:
        compare.equal(got["mean"], x[:, 0].astype(np.float32), "mean")
        np.testing.assert_array_equal(values(got["y"]), np.broadcast_to(values(bias), x.shape))


def test_backward_without_a_mean_whose_plain_sum_overflows(backend: Backend) -> None:
    x = np.full((2, 64), 2e37, np.float32)
    dout = inputs.array(x.shape, "float32")
    case = Case(x=x, norm="layer", weight=np.ones(64, np.float32))
    got = backward(backend, case, Gradient(dout=dout))["dx"]
    assert (np.isnan(got) if runs_kernels(backend) else np.isfinite(got)).all()
    saved = forward(backend, case, statistics=True)
    given = Gradient(dout=dout, mean=saved["mean"], rstd=saved["rstd"])
    assert np.isfinite(backward(backend, case, given)["dx"]).all()


@pytest.mark.parametrize("norm", NORMS)
def test_float64_does_not_overflow_there(backend: Backend, norm: str) -> None:
    case = Case(x=1e20 * inputs.array((2, 64), "float64"), norm=norm)
    check_forward(case, forward(backend, case, statistics=True))


def test_an_output_past_its_dtype_is_infinite(backend: Backend) -> None:
    case = Case(x=np.ones((2, 64), np.float16), weight=np.full(64, 70000, np.float32), eps=0.0)
    got = forward(backend, case, statistics=True)
    check_forward(case, got)
    assert np.isposinf(values(got["y"])).all()
    got = backward(backend, case.but(weight=np.ones(64, np.float16)), Gradient(dout=case.x * 60000))
    assert np.isposinf(values(got["dweight"])).all()


def test_float16_subnormals(backend: Backend) -> None:
    """All of them are ordinary numbers where the sums are formed."""
    x = (np.arange(1, 65, dtype=np.uint16) * 13).view(np.float16)[None]
    assert (np.abs(x) < 2**-14).all()
    for norm in NORMS:
        case = Case(x=x, norm=norm, eps=0.0)
        check_forward(case, forward(backend, case, statistics=True))
    case = Case(x=inputs.array((2, 64), "float16"), weight=np.full(64, 1e-6, np.float32))
    got = forward(backend, case, statistics=True)
    check_forward(case, got)
    assert (np.abs(values(got["y"])) < 2**-14).any()


@pytest.mark.parametrize("value", [1e-38, 1e-40, 1e-45])
def test_what_eps_outweighs_shows_nowhere(backend: Backend, value: float) -> None:
    """Flushed or kept, a subnormal x is far below what any y here resolves."""
    case = Case(x=oracle.round_to(np.full((2, 64), value), "float32"), eps=1e-6)
    got = forward(backend, case, statistics=True)
    np.testing.assert_allclose(got["rstd"], 1000, rtol=1e-6)
    assert (np.abs(got["y"]) <= 1001 * case.x).all()


@pytest.mark.parametrize("norm", NORMS)
def test_squares_that_vanish_beside_eps(backend: Backend, norm: str) -> None:
    """The largest that do, beside the smallest eps that outweighs them."""
    x = np.full((2, 64), 1.08e-19, np.float32)
    x[:, ::2] *= -1
    case = Case(x=x, norm=norm, eps=1e-32)
    check_forward(case, forward(backend, case, statistics=True))


@pytest.mark.parametrize(
    ("value", "kept"), [(1e-20, 1.0000026), (3e-23, 0.8014122), (2.6e-23, np.inf)]
)
def test_squares_that_vanish_without_eps(backend: Backend, value: float, kept: float) -> None:
    """Kernels flush them all; NumPy keeps ever fewer digits of them, and then none."""
    case = Case(x=np.full((2, 64), value, np.float32), eps=0.0)
    got = forward(backend, case, statistics=True)
    expected = np.inf if runs_kernels(backend) else kept
    np.testing.assert_allclose(got["y"], expected, rtol=1e-6)
    np.testing.assert_allclose(got["rstd"], expected / value, rtol=1e-6)


def test_squares_that_do_not_vanish_without_eps(backend: Backend) -> None:
    case = Case(x=np.full((2, 64), 1.2e-19, np.float32), eps=0.0)
    check_forward(case, forward(backend, case, statistics=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("first", "gain"), [(1.0, 1e-39), (0.5, 1.5e-38)], ids=["weight", "y"])
def test_subnormal_weights_and_results(
    backend: Backend, dtype: str, first: float, gain: float
) -> None:
    x = oracle.round_to(np.ones((2, 64)), dtype)
    x[:, 0] = first
    weight = oracle.round_to(np.full(64, gain), dtype)
    case = Case(x=x, weight=weight, eps=0.0)
    got = forward(backend, case, statistics=True)
    small = values(x) * values(got["rstd"])[:, None] * values(weight) < 2.0**-126
    assert small[:, 0].all()
    if runs_kernels(backend):
        np.testing.assert_array_equal(values(got["y"]) == 0, small)
    else:
        check_forward(case, got)
        assert (values(got["y"]) > 0).all()


def test_float64_is_not_flushed(backend: Backend) -> None:
    case = Case(x=1e-150 * inputs.array((2, 64), "float64"), eps=0.0)
    check_forward(case, forward(backend, case, statistics=True))


@pytest.mark.parametrize(
    ("dtype", "hidden_size"),
    [
        *itertools.product(oracle.DTYPES, (1, 3, 7, 100, 1000, 1537, 8192)),
        *(("bfloat16", size) for size in (32768, 50001, 65536)),
        *(("float32", 65536), ("float32", 1_000_000), ("float64", 25002)),
    ],
)
def test_a_constant_row_gives_exactly_the_bias(
    backend: Backend, dtype: str, hidden_size: int
) -> None:
    """eps is small, so that a mean that is off by its last place would show."""
    rows = inputs.array((9, 1), dtype)
    case = Case(
        x=np.repeat(rows, hidden_size, axis=1),
        norm="layer",
        eps=1e-12,
        weight=inputs.weight(hidden_size, dtype),
        bias=inputs.bias(hidden_size, dtype),
    )
    got = forward(backend, case, statistics=True)
    compare.equal(got["mean"], rows[:, 0].astype(got["mean"].dtype), "mean")
    compare.equal(got["y"], np.broadcast_to(case.bias, case.x.shape), "y")


def test_no_heads_have_no_gradients(backend: Backend) -> None:
    x, weight = np.empty((2, 0, 4), np.float32), np.empty((0, 4), np.float32)
    got = backward(backend, Case(x=x, norm="rms", weight=weight, per_head=True), Gradient(dout=x))
    assert got["dx"].shape == (2, 0, 4)
    assert got["dweight"].shape == (0, 4)
