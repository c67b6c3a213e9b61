# SPDX-License-Identifier: Apache-2.0
"""The references, the rounding, the comparisons and the guards are themselves right."""

from __future__ import annotations

import numpy as np
import pytest

from tests import compare, inputs, oracle
from tests.backends import Backend


def test_bfloat16_is_rounded_once() -> None:
    value = np.array([1 + 2**-8 + 2**-30])
    assert float(value.astype(oracle.BFLOAT16)[0]) == 1.0  # through float32: why round_to exists
    assert float(oracle.round_to(value, "bfloat16")[0]) == 1.0078125


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to even, down
        (1 + 3 * 2**-8, 1 + 2**-6),  # and up
        (-1 - 2**-8, -1.0),
        (2**-133, 2**-133),  # the smallest subnormal
        (2**-134, 0.0),
        (2**-134 * 1.001, 2**-133),
        (3.3895313892515355e38, 3.3895313892515355e38),  # the largest number
        (3.3961775292304601e38, np.inf),  # half way to the next: even is infinity
        (3.396177529230460e38 * 0.9999999, 3.3895313892515355e38),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
    ],
)
def test_bfloat16_edges(value: float, expected: float) -> None:
    assert float(oracle.round_to(np.array([value]), "bfloat16")[0]) == expected


def test_round_to_keeps_nan_and_the_sign_of_zero() -> None:
    got = oracle.round_to(np.array([np.nan, -0.0, -(2.0**-140)]), "bfloat16").astype(np.float32)
    assert np.isnan(got[0])
    assert np.signbit(got[1:]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_round_to_is_numpys_own_rounding(dtype: str) -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(20000) * np.exp2(random.uniform(-30, 20, 20000))
    with np.errstate(over="ignore", under="ignore"):
        compare.equal(oracle.round_to(values, dtype), values.astype(oracle.DTYPES[dtype]))


def test_round_to_agrees_with_every_bfloat16_between_float32_neighbours() -> None:
    """From float32 ml_dtypes rounds once, so both must agree, in every binade."""
    bits = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    compare.equal(oracle.round_to(values, "bfloat16"), values.astype(oracle.BFLOAT16))


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_ulp_is_the_distance_to_the_next_number(dtype: str) -> None:
    if dtype == "bfloat16":
        values = np.array([1.0, 1.5, 2.0, 3e38, 2**-126, 2**-133, 0.0])
        expected = [2**-7, 2**-7, 2**-6, 2**120, 2**-133, 2**-133, 2**-133]
    else:
        values = np.array([1.0, 1.5, 2.0, 1000.0, 2**-14, 0.0]).astype(dtype)
        expected = np.spacing(values).tolist()
    np.testing.assert_array_equal(oracle.ulp(values.astype(np.float64), dtype), expected)


# The numbers here are worked by hand: x = 1, 2, 3, 4, so mean 2.5, variance 1.25, mean square 7.5.
def test_forward_by_hand() -> None:
    x = np.array([[1, 2, 3, 4]], np.float32)
    weight, bias = np.array([1, 2, 0.5, -1], np.float32), np.array([0, 1, 2, 3], np.float32)
    rms = oracle.forward(x, weight, bias, norm="rms", eps=0.5)
    np.testing.assert_allclose(rms.rstd.value, [8**-0.5], rtol=1e-15)
    np.testing.assert_allclose(
        rms.y.value[0], np.array([1, 4, 1.5, -4]) * 8**-0.5 + bias, rtol=1e-15
    )
    layer = oracle.forward(x, weight, bias, norm="layer", eps=0.75, weight_offset=1.0)
    np.testing.assert_allclose(layer.mean.value, [2.5], rtol=1e-15)
    np.testing.assert_allclose(layer.rstd.value, [2**-0.5], rtol=1e-15)
    expected = np.array([-1.5, -0.5, 0.5, 1.5]) * 2**-0.5 * np.array([2, 3, 1.5, 0]) + bias
    np.testing.assert_allclose(layer.y.value[0], expected, rtol=1e-14)


def test_forward_over_two_axes_is_forward_over_the_joined_axis() -> None:
    x, weight = inputs.array((3, 4, 6), "float32"), inputs.weight((4, 6), "float32")
    two = oracle.forward(x, weight, norm="layer", eps=1e-5, ndim=2)
    one = oracle.forward(x.reshape(3, 24), weight.reshape(24), norm="layer", eps=1e-5)
    np.testing.assert_allclose(two.y.value.reshape(3, 24), one.y.value, rtol=1e-13, atol=1e-15)
    assert two.rstd.value.shape == (3,)


def test_float64_references_are_longer_than_float64() -> None:
    y = oracle.forward(inputs.array((2, 5), "float64"), norm="rms", eps=1e-6).y.value
    assert np.finfo(y.dtype).eps < np.finfo(np.float64).eps


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("per_head", [False, True])
def test_backward_is_the_derivative_of_forward(norm: str, per_head: bool) -> None:
    """Central differences of sum(dout * y), in longdouble, in every input's direction."""
    x, dout = inputs.array((2, 3, 5), "float64"), inputs.array((2, 3, 5), "float64", seed=1)
    shape = (3, 5) if per_head else (5,)
    weight, bias = inputs.weight(shape, "float64"), inputs.bias(shape, "float64")
    options = {"norm": norm, "eps": 0.1, "weight_offset": 0.5}
    got = oracle.backward(dout, x, weight, **options)

    def loss(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> float:
        return (dout * oracle.forward(x, weight, bias, **options).y.value).sum()

    step = 1e-5
    arrays = [x, weight, bias]
    for place, gradient in enumerate((got.dx, got.dweight, got.dbias)):
        assert gradient.value.shape == arrays[place].shape
        for index in np.ndindex(arrays[place].shape):
            sides = []
            for sign in (1, -1):
                moved = [array.copy() for array in arrays]
                moved[place][index] += sign * step
                sides.append(loss(*moved))
            difference = (sides[0] - sides[1]) / (2 * step)
            assert abs(difference - gradient.value[index]) < 1e-8


def test_backward_leaves_rows_out() -> None:
    x, dout = inputs.array((3, 5), "float32"), inputs.array((3, 5), "float32", seed=1)
    weight = inputs.weight(5, "float32")
    computed = np.array([True, False, True])
    got = oracle.backward(dout, x, weight, norm="layer", eps=1e-5, computed=computed)
    rest = oracle.backward(dout[::2], x[::2], weight, norm="layer", eps=1e-5)
    np.testing.assert_allclose(got.dx.value[::2], rest.dx.value, rtol=1e-15)
    np.testing.assert_allclose(got.dweight.value, rest.dweight.value, rtol=1e-15)
    assert (got.dx.value[1] == 0).all()


def test_rounded_forward_rounds_every_step() -> None:
    """B30: the two cast orders differ in two of four elements."""
    x = oracle.round_to(np.array([[1.0, 2, 3, 6]]), "bfloat16")
    rstd = (1 / np.sqrt(np.float32(12.5 + 1e-6))).reshape(1)
    weight = np.array([3, 3, 3, 3], np.float32)
    once = oracle.rounded_forward(x, rstd, weight=weight)
    before = oracle.rounded_forward(x, rstd, weight=weight, cast="before_weight")
    assert once.astype(float).tolist() == [[0.84765625, 1.6953125, 2.546875, 5.09375]]
    assert before.astype(float).tolist() == [[0.8515625, 1.703125, 2.546875, 5.09375]]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_bound_holds_for_careful_rounding_and_for_no_worse(
    norm: str, dtype: str, kind: str
) -> None:
    """The correctly rounded result is inside, three ulps (or 4 E) off is outside."""
    x, weight = inputs.array((4, 33), dtype, kind), inputs.weight(33, dtype)
    expected = oracle.forward(x, weight, norm=norm, eps=1e-6).y
    bound = expected.bound(dtype)
    exact = oracle.round_to(expected.value, dtype)
    compare.close(exact, expected.value, bound)
    off = np.where(expected.value == 0, 0, np.maximum(3 * oracle.ulp(exact, dtype), 4 * bound))
    wrong = oracle.round_to(expected.value + off, dtype)
    with pytest.raises(AssertionError):
        compare.close(wrong, expected.value, bound)


# What the comparisons must refuse.
VALUES = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.mark.parametrize(
    ("change", "bound", "message"),
    [
        ({(1, 0): 3.5}, 0.25, r"y: 1 of 4 .* \(1, 0\): got 3.5, expected 3.0, .* allowed 0.25"),
        ({(0, 1): 2 + 2**-21}, 0.0, r"\(0, 1\): .* 2 ulps of float32"),
        ({(0, 0): np.nan}, 1e9, r"\(0, 0\): got nan, expected 1.0"),
        ({(0, 0): np.inf}, 1e9, r"\(0, 0\): got inf, expected 1.0"),
        ({(0, 0): 1.1, (1, 1): 9.0}, 0.01, r"2 of 4 .* \(1, 1\): got 9.0"),
    ],
)
def test_close_names_the_worst_element(
    change: dict[tuple[int, int], float], bound: float, message: str
) -> None:
    got = VALUES.copy()
    for index, value in change.items():
        got[index] = value
    with pytest.raises(AssertionError, match=message):
        compare.close(got, VALUES.astype(np.float64), bound, "y")


def test_close_refuses_a_number_where_nan_belongs() -> None:
    with pytest.raises(AssertionError, match=r"got 1\.0, expected nan"):
        compare.close(np.ones(1, np.float32), np.array([np.nan]), 1e9)
    compare.close(np.array([np.nan], np.float32), np.array([np.nan]), 0.0)


def test_close_refuses_a_nan_bound() -> None:
    with pytest.raises(AssertionError):
        compare.close(np.ones(1, np.float32), np.ones(1), np.array([np.nan]))


def test_close_knows_where_a_dtype_ends() -> None:
    """65520 is half way between float16's largest number and the next: either is right there."""
    got = np.array([np.inf, 65504], np.float16)
    compare.close(got, np.array([65520.0, 65520.0]), 16.0)
    with pytest.raises(AssertionError, match="got inf"):
        compare.close(got[:1], np.array([65500.0]), 16.0)
    with pytest.raises(AssertionError, match="got 65504"):
        compare.close(got[1:], np.array([1e6]), 16.0)
    with pytest.raises(AssertionError, match="got inf"):
        compare.close(got[:1], np.array([-1e6]), 16.0)


def test_comparisons_refuse_other_shapes_and_dtypes() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2, 2\), expected \(2,\)"):
        compare.close(VALUES, VALUES[0], 1e9)
    with pytest.raises(AssertionError, match=r"shape \(2, 2\), expected \(1, 2, 2\)"):
        compare.equal(VALUES, VALUES[None])
    with pytest.raises(AssertionError, match="got dtype float32, expected float64"):
        compare.equal(VALUES, VALUES.astype(np.float64))


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_equal_sees_one_bit(dtype: str) -> None:
    values = inputs.array((3, 4), dtype)
    compare.equal(values.copy(), values)
    other = values.copy()
    compare.bits(other)
    other.view(f"u{other.itemsize}")[2, 1] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 12 .* \(2, 1\).* 1 ulps"):
        compare.equal(other, values)
    zero = np.zeros(1, values.dtype)
    with pytest.raises(AssertionError):
        compare.equal(-zero, zero)
    nan = np.full(1, np.nan, values.dtype)
    compare.equal(nan, nan)
    with pytest.raises(AssertionError):
        compare.equal(nan, zero)


# What the arrays that tests hand out must be.
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_inputs_repeat_and_differ_by_seed(kind: str) -> None:
    first, again = (inputs.array((5, 40), "float32", kind) for _ in range(2))
    compare.equal(first, again)
    assert (inputs.array((5, 40), "float32", kind, seed=1) != first).any()
    assert np.isfinite(inputs.array((5, 40), "float16", kind).astype(np.float64)).all()


def test_weights_have_every_sign() -> None:
    weight = inputs.weight(64, "bfloat16").astype(np.float32)
    assert (weight < 0).any()
    assert (weight == 0).any()
    assert (weight > 0).any()
    assert np.unique(weight).size > 30


def test_row_tagged_rows_are_told_apart_by_roll_and_scale() -> None:
    x = inputs.array((100, 24), "float64", "row_tagged")
    for row in (1, 50, 99):
        np.testing.assert_array_equal(x[row], (row % 97 + 1) * np.roll(x[0], -row))


@pytest.mark.parametrize("dtype", [*oracle.DTYPES, "bool"])
@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_layouts_change_no_value(backend: Backend, layout: str, dtype: str) -> None:
    values = inputs.array((3, 2, 17), "float32")
    values = values > 0 if dtype == "bool" else oracle.round_to(values, dtype)
    view = inputs.lay(values, layout)
    np.testing.assert_array_equal(view, values)
    if backend.holds(view):
        np.testing.assert_array_equal(backend.numpy(backend.input(view)), values)


def test_layouts_have_their_strides() -> None:
    def strides(layout: str) -> list[int]:
        return [stride // 4 for stride in inputs.lay(np.zeros((5, 16), np.float32), layout).strides]

    assert strides("contiguous") == strides("offset_1") == [16, 1]
    assert strides("row_gap_3") == [19, 1]
    assert strides("inner_2") == [32, 2]
    assert strides("transposed") == [1, 5]
    assert strides("reversed") == [16, -1]


def test_views_of_one_buffer_share_one_buffer(backend: Backend) -> None:
    buffer = inputs.lay(inputs.array((4, 12), "float32"))
    whole, part = backend.output(buffer), backend.output(buffer[:, 3:8])
    backend.fill(part, 7)
    backend.synchronize()
    assert (backend.numpy(whole)[:, 3:8] == 7).all()
    assert (backend.numpy(whole)[:, :3] == buffer[:, :3]).all()


def test_a_write_outside_the_outputs_is_found() -> None:
    backend = Backend()
    out = backend.empty((3, 4), "float32", "row_gap_3")
    out[...] = 1
    backend.verify()
    past_the_row = np.lib.stride_tricks.as_strided(out, (3, 5), out.strides)
    past_the_row[1, 4] = 0
    with pytest.raises(AssertionError, match="1 elements that are no output"):
        backend.verify()


def test_a_changed_input_is_found() -> None:
    backend = Backend()
    x = backend.input(inputs.lay(inputs.array((3, 4), "bfloat16"), "inner_2"))
    backend.verify()
    x[2, 1] = 0
    with pytest.raises(AssertionError, match="1 elements that are no output"):
        backend.verify()
