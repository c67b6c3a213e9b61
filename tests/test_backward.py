# SPDX-License-Identifier: Apache-2.0
"""The backward functions against the oracle, and bit for bit against themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests import compare, inputs, oracle
from tests.backends import Backend
from tests.calls import Case, Gradient, backward, check_backward, forward
from tests.test_forward import NARROW, NORMS, full_case


def run(
    backend: Backend, case: Case, given: Gradient, **outputs: Any
) -> dict[str, np.ndarray | None]:
    got = backward(backend, case, given, **outputs)
    check_backward(case, given, got)
    return got


def same(
    got: dict[str, np.ndarray | None], expected: dict[str, np.ndarray | None], what: str
) -> None:
    __tracebackhide__ = True
    for output, result in expected.items():
        if result is None:
            assert got[output] is None, f"{output}, {what}"
        else:
            compare.equal(got[output], result, f"{output}, {what}")


def gradient(shape: tuple[int, ...], dtype: str, **given: Any) -> Gradient:
    return Gradient(dout=inputs.lay(inputs.array(shape, dtype, seed=5)), **given)


def saved(backend: Backend, case: Case) -> dict[str, np.ndarray]:
    """The statistics that the forward call returns."""
    results = forward(backend, case, statistics=True)
    return {name: results[name] for name in ("mean", "rstd") if name in results}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("x", "weight", "dout"), [*itertools.product(NARROW, NARROW, NARROW)])
def test_dtypes_mix(backend: Backend, norm: str, x: str, weight: str, dout: str) -> None:
    bias = NARROW[(NARROW.index(x) + NARROW.index(weight) + NARROW.index(dout)) % 3]
    shape = (7, 72)
    case = full_case(shape, x, weight_dtype=weight, bias_dtype=bias, norm=norm)
    run(backend, case, gradient(shape, dout))
    arriving = inputs.array(shape, weight, seed=6)
    run(backend, case, gradient(shape, dout, added=True, dresidual_out=arriving, x_dtype=bias))


@pytest.mark.parametrize("norm", NORMS)
def test_float64_throughout(backend: Backend, norm: str) -> None:
    case = full_case((7, 72), "float64", norm=norm, weight_offset=0.5)
    arriving = inputs.array((7, 72), "float64", seed=6)
    run(backend, case, gradient((7, 72), "float64", added=True, dresidual_out=arriving))
    run(backend, case, gradient((7, 72), "float64", **saved(backend, case)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hidden_size", inputs.HIDDEN_SIZES)
def test_every_hidden_size(backend: Backend, norm: str, hidden_size: int) -> None:
    dtype = NARROW[inputs.HIDDEN_SIZES.index(hidden_size) % 3]
    shape = (3, hidden_size)
    case = full_case(shape, dtype, kind="row_tagged", norm=norm, eps=1e-3)
    run(backend, case, gradient(shape, dtype))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", inputs.ROWS)
def test_every_row_count(backend: Backend, rows: int) -> None:
    shape = (rows, 24)
    case = full_case(shape, NARROW[rows % 3], norm=NORMS[rows % 2])
    given = gradient(shape, NARROW[rows % 3])
    backend.poison(max(case.x.nbytes, 4096))
    run(backend, case.but(weight=case.weight.astype(np.float32)), given)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_hard_values(backend: Backend, norm: str, dtype: str, kind: str) -> None:
    case = full_case((5, 257), dtype, kind=kind, norm=norm, eps=1e-3)
    run(backend, case, gradient((5, 257), dtype))
    run(backend, case.but(weight=None, bias=None), gradient((5, 257), dtype))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("cast", ["once", "before_weight"])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0, -0.3])
def test_casts_and_offsets(
    backend: Backend, norm: str, dtype: str, cast: str, weight_offset: float
) -> None:
    shape = (6, 96)
    case = full_case(shape, dtype, norm=norm, cast=cast, weight_offset=weight_offset)
    got = run(backend, case, gradient(shape, dtype))
    if weight_offset:
        plain = run(backend, case.but(weight_offset=0.0), gradient(shape, dtype))
        compare.equal(got["dweight"], plain["dweight"], "dweight does not depend on the offset")
        assert (got["dx"] != plain["dx"]).any()


@pytest.mark.parametrize("norm", NORMS)
def test_dweight_of_the_cast_before_the_weight_takes_the_rounded_value(
    backend: Backend, norm: str
) -> None:
    """One row and a dout of ones: dweight is xhat, rounded to x's dtype, bit for bit."""
    case = full_case((1, 96), "bfloat16", weight_dtype="float32", norm=norm, bias=None)
    statistics = saved(backend, case)
    given = Gradient(dout=np.ones((1, 96), np.float32), **statistics)
    xhat = oracle.rounded_forward(
        case.x, statistics["rstd"], statistics.get("mean"), out_dtype="float32"
    )
    once = run(backend, case, given)["dweight"]
    compare.equal(once, xhat[0], "dweight")
    before = run(backend, case.but(cast="before_weight"), given)["dweight"]
    rounded = oracle.round_to(xhat, "bfloat16").astype(np.float32)
    compare.equal(before, rounded[0], "dweight")
    assert (once != before).any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_saved_statistics(backend: Backend, norm: str, dtype: str) -> None:
    """Given, they are used as they are: a wrong rstd gives the gradients of that rstd."""
    shape = (6, 129)
    case = full_case(shape, dtype, norm=norm, kind="offset" if norm == "layer" else "normal")
    statistics = saved(backend, case)
    run(backend, case, gradient(shape, dtype, **statistics))
    statistics["rstd"] = statistics["rstd"] * 2
    run(backend, case, gradient(shape, dtype, **statistics))
    if norm == "layer":
        run(backend, case, gradient(shape, dtype, rstd=statistics["rstd"]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_whole_way_of_an_added_residual(backend: Backend, norm: str, dtype: str) -> None:
    """Forward keeps the statistics of the unrounded sum, backward gets the rounded sum."""
    case = full_case((5, 96), dtype, norm=norm, residual_dtype=dtype)
    results = forward(backend, case, statistics=True)
    after = case.but(x=results["residual_out"], residual=None)
    arriving = inputs.array((5, 96), dtype, seed=6)
    statistics = {name: results[name] for name in ("mean", "rstd") if name in results}
    given = gradient((5, 96), dtype, added=True, dresidual_out=arriving, **statistics)
    run(backend, after, given)
    # Nothing that arrives is the same as zeros that arrive.
    none = gradient((5, 96), dtype, added=True, **statistics)
    zeros = gradient(
        (5, 96), dtype, added=True, dresidual_out=np.zeros_like(arriving), **statistics
    )
    got, expected = run(backend, after, none), run(backend, after, zeros)
    np.testing.assert_array_equal(got["dx"], expected["dx"])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("residual", "x"), [("bfloat16", "float32"), ("float32", "float16")])
def test_dresidual_has_its_own_dtype(backend: Backend, norm: str, residual: str, x: str) -> None:
    case = full_case((5, 96), residual, norm=norm)
    arriving = inputs.array((5, 96), residual, seed=6)
    given = gradient((5, 96), x, added=True, dresidual_out=arriving, x_dtype=x)
    run(backend, case, given)
    out = backend.empty((5, 96), x)
    got = backward(backend, case, gradient((5, 96), x, added=True, x_dtype=x), dx=out)
    assert got["dresidual"].dtype.name == residual


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("need_dx", [True, False])
@pytest.mark.parametrize("need_dweight", [True, False])
@pytest.mark.parametrize("parameters", ["both", "weight", "bias", "none", "constants"])
def test_only_what_is_needed(
    backend: Backend, norm: str, need_dx: bool, need_dweight: bool, parameters: str
) -> None:
    case = full_case((5, 96), "float16", norm=norm)
    if parameters in ("bias", "none"):
        case = case.but(weight=None)
    if parameters in ("weight", "none"):
        case = case.but(bias=None)
    if parameters == "constants":
        case = case.but(weight=-1.5, bias=0.5)
    for added in (False, True):
        given = gradient(
            (5, 96), "float16", need_dx=need_dx, need_dweight=need_dweight, added=added
        )
        run(backend, case, given)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weight", NARROW)
@pytest.mark.parametrize("dweight", NARROW)
def test_dweight_dtype(backend: Backend, norm: str, weight: str, dweight: str) -> None:
    case = full_case((5, 96), "bfloat16", weight_dtype=weight, norm=norm)
    run(backend, case, gradient((5, 96), "bfloat16", dweight_dtype=dweight))
    out = backend.empty((96,), dweight)
    run(backend, case, gradient((5, 96), "bfloat16", dweight_dtype=dweight), dweight=out)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 4, 33), (0, 33), (3, 0, 33), (1, 1, 1)])
def test_shapes(backend: Backend, norm: str, shape: tuple[int, ...]) -> None:
    backend.poison(4096)
    run(backend, full_case(shape, "float32", norm=norm), gradient(shape, "float32"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("axis", [(-1,), (-2, -1), (1, 2, 3), (0, 1, 2, 3)])
def test_axes(backend: Backend, norm: str, axis: tuple[int, ...]) -> None:
    shape = (2, 3, 4, 9)
    case = full_case(shape, "float16", parameter_shape=shape[4 - len(axis) :], norm=norm, axis=axis)
    run(backend, case, gradient(shape, "float16"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("axis", "heads"), [(-1, (6, 40)), ((-2, -1), (3, 6, 40))])
def test_a_weight_for_each_head(
    backend: Backend, norm: str, axis: Any, heads: tuple[int, ...]
) -> None:
    shape = (4, 3, 6, 40)
    case = full_case(shape, "bfloat16", parameter_shape=heads, per_head=True, norm=norm, axis=axis)
    run(backend, case, gradient(shape, "bfloat16"))
    run(backend, case.but(weight=None), gradient(shape, "bfloat16"))


def gradients_of_odd_layout() -> dict[str, np.ndarray]:
    shape = (6, 5, 40)
    dense = inputs.array(shape, "float32", seed=5)
    found = {layout: inputs.lay(dense, layout) for layout in inputs.LAYOUTS}
    found["every second row"] = inputs.lay(np.repeat(dense, 2, axis=0))[::2]
    found["swapped axes"] = np.ascontiguousarray(dense.swapaxes(0, 1)).swapaxes(0, 1)
    found["one number"] = np.broadcast_to(np.float32(1.25), shape)
    found["one row"] = np.broadcast_to(dense[0, 0], shape)
    found["one column"] = np.broadcast_to(dense[..., :1], shape)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", gradients_of_odd_layout())
def test_layouts_of_dout_change_no_bit(backend: Backend, norm: str, layout: str) -> None:
    dout = gradients_of_odd_layout()[layout]
    if not backend.holds(dout):
        dout = np.swapaxes(dout, 0, 1)[:5, :5].swapaxes(0, 1)[::1, :, :]
        dout = inputs.lay(dout, "inner_2")
    shape = dout.shape
    case = full_case(shape, "float32", norm=norm)
    arriving = inputs.array(shape, "float32", seed=6)
    expected = run(
        backend,
        case,
        Gradient(dout=np.ascontiguousarray(dout), added=True, dresidual_out=arriving),
    )
    got = run(backend, case, Gradient(dout=dout, added=True, dresidual_out=arriving))
    same(got, expected, f"dout {layout}")
    got = run(
        backend,
        case,
        Gradient(dout=np.ascontiguousarray(dout), added=True, dresidual_out=arriving),
        dx=backend.empty(shape, "float32", "row_gap_3"),
    )
    same(got, expected, "into dx")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_layouts_change_no_bit(backend: Backend, norm: str, layout: str) -> None:
    shape = (6, 5, 40)
    case = full_case(shape, "bfloat16", norm=norm)
    arriving = inputs.array(shape, "bfloat16", seed=6)
    given = gradient(shape, "bfloat16", added=True, dresidual_out=arriving, **saved(backend, case))
    expected = run(backend, case, given)
    if not backend.holds(inputs.lay(np.zeros((2, 2)), layout)):
        layout = "inner_2"
    laid = {name: inputs.lay(getattr(case, name), layout) for name in ("x", "weight")}
    for name, array in laid.items():
        same(run(backend, case.but(**{name: array}), given), expected, f"{name} {layout}")
    names = [n for n in ("dout", "dresidual_out", "rstd", "mean") if getattr(given, n) is not None]
    everything = {name: inputs.lay(getattr(given, name), layout) for name in names if shape}
    outputs = {
        "dx": backend.empty(shape, "bfloat16", layout),
        "dweight": backend.empty((40,), "bfloat16", layout),
        "dbias": backend.empty((40,), "bfloat16", layout),
    }
    given_laid = Gradient(added=True, **everything)
    same(run(backend, case.but(**laid), given_laid, **outputs), expected, f"all {layout}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("dtype", "hidden_size"), [("bfloat16", 2048), ("float32", 257)])
def test_dx_does_not_know_its_batch(
    backend: Backend, norm: str, dtype: str, hidden_size: int
) -> None:
    shape = (130, hidden_size)
    case, given = full_case(shape, dtype, norm=norm), gradient(shape, dtype)
    whole = run(backend, case, given)["dx"]
    for rows in ([0], [129], [0, 77], range(1, 130), range(64)):
        part = case.but(x=np.ascontiguousarray(case.x[list(rows)]))
        given_part = Gradient(dout=np.ascontiguousarray(given.dout[list(rows)]))
        compare.equal(run(backend, part, given_part)["dx"], whole[list(rows)], f"rows {rows}")
    without = run(backend, case.but(bias=None), gradient(shape, dtype, need_dweight=False))
    compare.equal(without["dx"], whole, "without dweight")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_rows(backend: Backend, norm: str, dtype: str) -> None:
    """Layout, place and neighbours change no bit of a row that no backend holds whole."""
    shape = (3, 140_001)
    case = full_case(shape, dtype, norm=norm)
    arriving = inputs.array(shape, dtype, seed=6)
    given = gradient(shape, dtype, added=True, dresidual_out=arriving)
    expected = run(backend, case, given)
    for layout in ("row_gap_3", "inner_2", "transposed"):
        laid = case.but(x=inputs.lay(case.x, layout))
        dx = backend.output(laid.x)
        laid_given = Gradient(
            dout=inputs.lay(given.dout, layout),
            added=True,
            dresidual_out=inputs.lay(arriving, layout),
        )
        same(run(backend, laid, laid_given, dx=dx), expected, f"{layout}, in place")
        backend.verify()
        backend.forget()
    alone = Gradient(dout=given.dout[1:2].copy(), added=True, dresidual_out=arriving[1:2].copy())
    got = run(backend, case.but(x=case.x[1:2].copy()), alone)
    compare.equal(got["dx"], expected["dx"][1:2], "dx alone")
    broadcast = Gradient(dout=np.broadcast_to(given.dout[:1], shape))
    dense = Gradient(dout=np.array(broadcast.dout))
    same(run(backend, case, broadcast), run(backend, case, dense), "a broadcast dout")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(1, 48), (1027, 48), (9, 4096)])
def test_repeats_are_equal(backend: Backend, norm: str, shape: tuple[int, ...]) -> None:
    case, given = full_case(shape, "float16", norm=norm), gradient(shape, "float16")
    expected = run(backend, case, given)
    for _ in range(5):
        backend.poison(4 * case.x.nbytes)
        same(backward(backend, case, given), expected, "in a repeat")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["contiguous", "row_gap_3", "inner_2"])
@pytest.mark.parametrize("added", [False, True])
def test_in_place(backend: Backend, norm: str, layout: str, added: bool) -> None:
    """dx may be written over x; dweight still sees x."""
    shape = (37, 129)
    case = full_case(shape, "float32", norm=norm)
    given = gradient(shape, "float32", added=added)
    expected = run(backend, case, given)
    case = case.but(x=inputs.lay(case.x, layout))
    got = run(backend, case, given, dx=backend.output(case.x))
    same(got, expected, "in place")
