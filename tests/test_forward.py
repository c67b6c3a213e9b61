# SPDX-License-Identifier: Apache-2.0
"""The forward functions against the oracle, and bit for bit against themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm
from tests import compare, inputs, oracle
from tests.backends import Backend
from tests.calls import Case, check_forward, forward

NORMS = ("rms", "layer")
NARROW = ("float16", "bfloat16", "float32")


def full_case(
    shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    kind: str = "normal",
    weight_dtype: str | None = None,
    bias_dtype: str | None = None,
    residual_dtype: str | None = None,
    parameter_shape: tuple[int, ...] | None = None,
    **changes: Any,
) -> Case:
    """A case with weight and bias, and a residual if it has a dtype; everything between guards."""
    parameter_shape = parameter_shape or shape[-1:]
    residual = None
    if residual_dtype is not None:
        residual = inputs.lay(inputs.array(shape, residual_dtype, seed=1))
    return Case(
        x=inputs.lay(inputs.array(shape, dtype, kind)),
        weight=inputs.lay(inputs.weight(parameter_shape, weight_dtype or dtype)),
        bias=inputs.lay(inputs.bias(parameter_shape, bias_dtype or dtype)),
        residual=residual,
    ).but(**changes)


def run(backend: Backend, case: Case, layout: str = "contiguous", **kept: Any) -> dict[str, Any]:
    """Forward with statistics into outputs full of NaN, checked."""
    outputs = {
        output: backend.empty(case.shape(output), dtype, layout)
        for output, dtype in case.outputs(statistics=True).items()
    }
    got = forward(backend, case, statistics=True, **(outputs | kept))
    check_forward(case, got)
    return got


def same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str) -> None:
    __tracebackhide__ = True
    for output in expected:
        compare.equal(got[output], expected[output], f"{output}, {what}")


# Which dtypes may meet: with three dtypes a place, 27 cases hold every triple of x, weight and out,
# and every pair with bias and residual.
@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("x", "weight", "out"), [*itertools.product(NARROW, NARROW, NARROW)])
def test_dtypes_mix(backend: Backend, norm: str, x: str, weight: str, out: str) -> None:
    place = NARROW.index(x) + NARROW.index(weight) + NARROW.index(out)
    case = full_case(
        (3, 72),
        x,
        weight_dtype=weight,
        bias_dtype=NARROW[place % 3],
        residual_dtype=NARROW[(place + NARROW.index(weight)) % 3],
        norm=norm,
        out_dtype=out,
    )
    run(backend, case)
    run(backend, case.but(residual=None))


@pytest.mark.parametrize("norm", NORMS)
def test_float64_throughout(backend: Backend, norm: str) -> None:
    run(backend, full_case((3, 72), "float64", residual_dtype="float64", norm=norm))
    run(backend, full_case((2, 513), "float64", norm=norm, kind="offset"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hidden_size", inputs.HIDDEN_SIZES)
def test_every_hidden_size(backend: Backend, norm: str, hidden_size: int) -> None:
    """Three rows, each its own roll and scale: a row sum that is short or shared shows."""
    place = inputs.HIDDEN_SIZES.index(hidden_size)
    dtype = NARROW[place % 3]
    # x of one element equals its mean: only eps keeps that row finite.
    eps = 1e-5 if norm == "layer" else 0.0
    run(backend, full_case((3, hidden_size), dtype, kind="row_tagged", norm=norm, eps=eps))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", inputs.ROWS)
@pytest.mark.parametrize("hidden_size", [8, 65])
def test_every_row_count(backend: Backend, rows: int, hidden_size: int) -> None:
    norm = NORMS[rows % 2]
    dtype = NARROW[rows % 3]
    run(backend, full_case((rows, hidden_size), dtype, kind="row_tagged", norm=norm))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_hard_values(backend: Backend, norm: str, dtype: str, kind: str) -> None:
    case = full_case((5, 257), dtype, kind=kind, norm=norm)
    run(backend, case)
    run(backend, case.but(weight=None, bias=None, eps=1e-3))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("cast", ["once", "before_weight"])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0, -0.3])
def test_casts_and_offsets(
    backend: Backend, norm: str, dtype: str, cast: str, weight_offset: float
) -> None:
    case = full_case((4, 96), dtype, norm=norm, cast=cast, weight_offset=weight_offset)
    run(backend, case)
    run(backend, case.but(bias=None))
    if dtype != "float64":
        residual = inputs.array((4, 96), "float32", seed=1)
        run(backend, case.but(residual=residual, out_dtype="float32"))


def test_the_casts_differ(backend: Backend) -> None:
    case = full_case((4, 96), "bfloat16")
    once, before = (run(backend, case.but(cast=cast))["y"] for cast in ("once", "before_weight"))
    assert (once != before).any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("weight", "bias", "weight_offset"),
    [
        (None, None, 0.0),
        (1.5, None, 0.25),
        (1, -0.5, 0.0),
        (-2, 3, 1),
        (np.float32(0.75), 0, 0.0),
    ],
)
def test_constants(
    backend: Backend, norm: str, weight: Any, bias: Any, weight_offset: float
) -> None:
    case = full_case((3, 40), "bfloat16", norm=norm)
    run(backend, case.but(weight=weight, bias=bias, weight_offset=weight_offset))
    if weight is not None:
        run(backend, case.but(weight=weight, weight_offset=weight_offset))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_no_weight_is_a_weight_of_ones(backend: Backend, norm: str, dtype: str) -> None:
    case = full_case((3, 40), dtype, norm=norm, bias=None)
    ones = np.ones(40, oracle.DTYPES[dtype])
    expected = run(backend, case.but(weight=ones))
    same(run(backend, case.but(weight=None)), expected, "without a weight")
    same(run(backend, case.but(weight=1)), expected, "with the constant 1")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 4, 33), (0, 33), (3, 0, 33), (1, 1, 1)])
def test_shapes(backend: Backend, norm: str, shape: tuple[int, ...]) -> None:
    run(backend, full_case(shape, "float16", norm=norm, residual_dtype="float32"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("axis", [-1, (-1,), (-2, -1), (-1, -2), (1, 2, 3), (0, 1, 2, 3)])
def test_axes(backend: Backend, norm: str, axis: Any) -> None:
    shape = (2, 3, 4, 9)
    count = 1 if axis == -1 else len(axis)
    case = full_case(shape, "float16", parameter_shape=shape[4 - count :], norm=norm, axis=axis)
    run(backend, case)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("axis", "heads"), [(-1, (6, 40)), ((-2, -1), (3, 6, 40))])
def test_a_weight_for_each_head(
    backend: Backend, norm: str, axis: Any, heads: tuple[int, ...]
) -> None:
    shape = (2, 3, 6, 40)
    case = full_case(shape, "bfloat16", parameter_shape=heads, per_head=True, norm=norm, axis=axis)
    got = run(backend, case)
    # Each head is the call on that head alone.
    for head in range(heads[0]):
        alone = (slice(None),) * (4 - len(heads)) + (head,)
        part = case.but(
            x=case.x[alone], weight=case.weight[head], bias=case.bias[head], per_head=False
        )
        compare.equal(run(backend, part)["y"], got["y"][alone], f"head {head}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_layouts_change_no_bit(backend: Backend, norm: str, dtype: str, layout: str) -> None:
    case = full_case((3, 5, 40), dtype, norm=norm, residual_dtype=dtype)
    expected = run(backend, case)
    if not backend.holds(inputs.lay(np.zeros((2, 2)), layout)):
        layout = "inner_2"

    def laid(*names: str) -> Case:
        return case.but(**{name: inputs.lay(getattr(case, name), layout) for name in names})

    every = ("x", "residual", "weight", "bias")
    for names in (*((name,) for name in every), every):
        same(run(backend, laid(*names)), expected, f"{names} {layout}")
    for output, dtype_name in case.outputs(statistics=True).items():
        into = {output: backend.empty(case.shape(output), dtype_name, layout)}
        same(run(backend, case, **into), expected, f"{output} {layout}")
    same(run(backend, laid(*every), layout), expected, f"all {layout}")


@pytest.mark.parametrize("hidden_size", [1024, 1023])
def test_alignment_changes_no_bit(backend: Backend, hidden_size: int) -> None:
    """Views that begin 0 to 7 elements past an aligned address, independently."""
    case = full_case((3, hidden_size), "float16", residual_dtype="float16")
    expected = run(backend, case)

    def at(offset: int, values: np.ndarray) -> np.ndarray:
        buffer = np.full(values.size + 16, np.nan, values.dtype)
        view = buffer[offset : offset + values.size].reshape(values.shape)
        view[...] = values
        return view

    for offset in range(1, 8):
        for name in ("x", "residual", "weight", "bias"):
            moved = case.but(**{name: at(offset, getattr(case, name))})
            same(run(backend, moved), expected, f"{name} at {offset}")
        blank = np.full(case.x.shape, np.nan, np.float16)
        for output in ("y", "residual_out"):
            into = {output: backend.output(at(offset, blank))}
            same(run(backend, case, **into), expected, f"{output} at {offset}")
        everything = case.but(
            x=at(offset, case.x),
            weight=at((3 * offset) % 8, case.weight),
            residual=at((5 * offset) % 8, case.residual),
        )
        into = {"y": backend.output(at((7 * offset) % 8, blank))}
        same(run(backend, everything, **into), expected, f"all around {offset}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("dtype", "hidden_size"), [("bfloat16", 4096), ("float32", 257)])
def test_a_row_does_not_know_its_batch(
    backend: Backend, norm: str, dtype: str, hidden_size: int
) -> None:
    case = full_case((257, hidden_size), dtype, norm=norm)
    whole = run(backend, case)
    for rows in ([0], [7], [256], [0, 256], range(0, 257, 5), range(1, 256), range(64)):
        x = np.ascontiguousarray(case.x[list(rows)])
        part = run(backend, case.but(x=x))
        same(part, {name: array[list(rows)] for name, array in whole.items()}, f"rows {rows}")
    cube = case.but(x=case.x[:256].reshape(4, 64, hidden_size))
    compare.equal(run(backend, cube)["y"].reshape(256, -1), whole["y"][:256], "as a cube")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_rows(backend: Backend, norm: str, dtype: str) -> None:
    """Layout, place and neighbours change no bit of a row that no backend holds whole."""
    case = full_case((3, 140_001), dtype, norm=norm, residual_dtype=dtype)
    expected = run(backend, case)
    for layout in ("row_gap_3", "inner_2", "transposed"):
        laid = case.but(x=inputs.lay(case.x, layout), residual=inputs.lay(case.residual, layout))
        same(run(backend, laid, layout), expected, layout)
        into = {"y": backend.output(laid.residual), "residual_out": backend.output(laid.x)}
        same(run(backend, laid, **into), expected, f"{layout}, in place")
        backend.verify()
        backend.forget()
    alone = case.but(x=case.x[1:2].copy(), residual=case.residual[1:2].copy())
    same(run(backend, alone), {name: part[1:2] for name, part in expected.items()}, "alone")


@pytest.mark.parametrize("norm", NORMS)
def test_repeats_are_equal(backend: Backend, norm: str) -> None:
    case = full_case((9, 769), "float16", norm=norm, residual_dtype="float16")
    expected = run(backend, case)
    for _ in range(5):
        backend.poison(case.x.nbytes)
        same(forward(backend, case, statistics=True), expected, "in a repeat")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", [None, "float32"])
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_new_given_and_statistics_agree(
    backend: Backend, norm: str, residual: str | None, dtype: str
) -> None:
    """Outputs that are new, given, or come with the statistics have the same bits."""
    if residual and dtype == "float64":
        residual = "float64"
    case = full_case((5, 129), dtype, norm=norm, residual_dtype=residual)
    expected = run(backend, case)
    for statistics in (False, True):
        backend.poison(case.x.nbytes)
        new = forward(backend, case, statistics=statistics)
        check_forward(case, new)
        same(new, {name: expected[name] for name in new}, "new")
    y = backend.empty(case.x.shape, dtype)
    given = forward(backend, case, y=y)
    same(given, {name: expected[name] for name in given}, "into y alone")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["contiguous", "row_gap_3", "inner_2", "transposed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_in_place(backend: Backend, norm: str, layout: str, dtype: str) -> None:
    case = full_case((5, 129), dtype, norm=norm, residual_dtype=dtype)
    plain, added = run(backend, case.but(residual=None)), run(backend, case)
    for places in (
        {"y": "x"},
        {"y": "residual"},
        {"residual_out": "x"},
        {"residual_out": "residual"},
        {"y": "x", "residual_out": "residual"},
        {"y": "residual", "residual_out": "x"},
    ):
        fresh = case.but(x=inputs.lay(case.x, layout), residual=inputs.lay(case.residual, layout))
        into = {output: backend.output(getattr(fresh, name)) for output, name in places.items()}
        got = forward(backend, fresh, **into)
        same(got, {name: added[name] for name in got}, f"in place: {places}")
    alone = case.but(x=inputs.lay(case.x, layout), residual=None)
    same(forward(backend, alone, y=backend.output(alone.x)), {"y": plain["y"]}, "in place")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_sum_is_normalised_before_it_is_rounded(backend: Backend, dtype: str) -> None:
    case = full_case((4, 64), dtype, residual_dtype=dtype)
    fused = run(backend, case)
    two_steps = run(backend, case.but(x=fused["residual_out"], residual=None))
    assert (fused["y"] != two_steps["y"]).any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_statistics_are_right(backend: Backend, norm: str, dtype: str) -> None:
    """The saved statistics stay in the accumulation dtype, whatever the output is."""
    got = run(backend, full_case((6, 200), dtype, norm=norm, kind="large"))
    wanted = "float64" if dtype == "float64" else "float32"
    assert got["rstd"].dtype.name == wanted


def test_eps_defaults(backend: Backend) -> None:
    x = inputs.array((3, 32), "bfloat16", "tiny")
    native = backend.input(x)
    for norm, eps, function in (
        ("rms", 1e-6, cupy_rmsnorm.rms_norm),
        ("layer", 1e-5, cupy_rmsnorm.layer_norm),
    ):
        check_forward(Case(x=x, norm=norm, eps=eps), {"y": backend.numpy(function(native))})


@pytest.mark.parametrize("norm", NORMS)
def test_bound_functions_are_the_functions(backend: Backend, norm: str) -> None:
    case = full_case((5, 96), "bfloat16", weight_dtype="float32", norm=norm, weight_offset=1.0)
    bind = {"rms": cupy_rmsnorm.bind_rms_norm, "layer": cupy_rmsnorm.bind_layer_norm}[norm]
    weight = backend.output(case.weight)
    bound = bind(weight, backend.input(case.bias), eps=case.eps, weight_offset=1.0)
    expected = forward(backend, case)["y"]
    compare.equal(backend.numpy(bound(backend.input(case.x))), expected)
    out = backend.empty(case.x.shape, "bfloat16")
    assert bound(backend.input(case.x), out=out) is out
    compare.equal(backend.numpy(out), expected)
    # The weight is read at each call, not kept.
    backend.fill(weight, 2)
    twos = case.but(weight=np.full(96, 2, np.float32))
    check_forward(twos, {"y": backend.numpy(bound(backend.input(case.x)))})


# q and k -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("cast", ["once", "before_weight"])
def test_qk_norm_is_two_norms(backend: Backend, dtype: str, cast: str) -> None:
    q, k = inputs.array((7, 6, 40), dtype), inputs.array((7, 2, 40), dtype, seed=1)
    weights = [inputs.weight(40, dtype, seed) for seed in (0, 1)]
    options = {"eps": 1e-5, "weight_offset": 0.5, "cast": cast}
    results = cupy_rmsnorm.qk_norm(
        backend.input(q), backend.input(k), *map(backend.input, weights), **options
    )
    assert len(results) == 2
    for x, weight, result in zip((q, k), weights, results, strict=True):
        case = Case(x=x, weight=weight, **options)
        check_forward(case, {"y": backend.numpy(result)})
        compare.equal(backend.numpy(result), forward(backend, case)["y"], "qk_norm and rms_norm")


@pytest.mark.parametrize("place", ["new", "in place", "given"])
def test_qk_norm_of_one_packed_buffer(backend: Backend, place: str) -> None:
    """q and k lie side by side in the rows of one buffer; v and the guards stay as they are."""
    tokens, q_heads, kv_heads, size = 33, 6, 2, 96
    heads = q_heads + 2 * kv_heads
    qkv = inputs.lay(inputs.array((tokens, heads, size), "bfloat16", "row_tagged"))
    q, k = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads]
    weights = [inputs.weight(size, "bfloat16", seed) for seed in (0, 1)]
    outputs = {}
    if place == "in place":
        outputs = {"q_out": backend.output(q), "k_out": backend.output(k)}
    elif place == "given":
        outputs = {
            "q_out": backend.empty(q.shape, "bfloat16", "row_gap_3"),
            "k_out": backend.empty(k.shape, "bfloat16", "inner_2"),
        }
    natives = [backend.input(q), backend.input(k), *map(backend.input, weights)]
    results = cupy_rmsnorm.qk_norm(*natives, eps=0, **outputs)
    for x, weight, result in zip((q, k), weights, results, strict=True):
        check_forward(Case(x=x, weight=weight, eps=0), {"y": backend.numpy(result)})
    assert [any(r is given for given in outputs.values()) for r in results] == [bool(outputs)] * 2
