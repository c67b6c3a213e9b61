# SPDX-License-Identifier: Apache-2.0
"""Rows that are left out: untouched or zeroed, never read, without a share in a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm
from cupy_rmsnorm import _kernel
from cupy_rmsnorm._plan import choose_plan, fewest_dealt_rows
from tests import compare, inputs
from tests.backends import BACKENDS, Backend, Cupy, skip_without
from tests.calls import Case, Gradient, backward, check_backward, check_forward, forward

ROWS = (3, 5)
WHERE = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 1]], bool)


def masks() -> dict[str, dict[str, np.ndarray]]:
    counts = {
        "none": np.array(0, np.int32),
        "one": np.array([1], np.int64),
        "some": np.array(7, np.int64),
        "all": np.array([15], np.int32),
        "more than there are": np.array(10**6, np.int64),
        "past 32 bits": np.array(2**32 + 1, np.int64),
        "negative": np.array([-3], np.int32),
        "very negative": np.array(-(2**40), np.int64),
    }
    found = {f"valid_rows {name}": {"valid_rows": count} for name, count in counts.items()}
    found["where"] = {"where": WHERE}
    found["where nothing"] = {"where": np.zeros(ROWS, bool)}
    found["where everything"] = {"where": np.ones(ROWS, bool)}
    found["both"] = {"where": WHERE, "valid_rows": counts["some"]}
    found["where transposed"] = {"where": inputs.lay(WHERE, "transposed")}
    found["where of a row"] = {"where": np.broadcast_to(WHERE[0], ROWS)}
    return found


MASKS = masks()


def spoil(array: np.ndarray, computed: np.ndarray) -> None:
    """NaN and infinity in every other masked row: reading it shows, and computing the rest."""
    rows = array.reshape(-1, array.shape[-1])
    assert np.shares_memory(rows, array)
    masked = np.flatnonzero(~computed.reshape(-1))[::2]
    rows[masked] = np.nan
    rows[masked, ::2] = np.inf


def masked_case(mask: dict[str, np.ndarray], **changes: Any) -> Case:
    """A case whose other rows hold what shows where they are read."""
    shape = (*ROWS, 65)
    case = Case(
        x=inputs.array(shape, "bfloat16"),
        weight=inputs.weight(65, "float32"),
        bias=inputs.bias(65, "float32"),
        residual=inputs.array(shape, "float16", seed=1),
    ).but(**mask, **changes)
    for array in (case.x, case.residual):
        if array is not None:
            spoil(array, case.computed)
    return case.but(x=inputs.lay(case.x, "row_gap_3"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("masked", ["keep", "zero"])
@pytest.mark.parametrize("mask", MASKS)
def test_forward(backend: Backend, norm: str, masked: str, mask: str) -> None:
    case = masked_case(MASKS[mask], norm=norm, masked=masked)
    for part in (case, case.but(residual=None)):
        into = {
            output: backend.empty(part.shape(output), dtype, "row_gap_3")
            for output, dtype in part.outputs(statistics=True).items()
        }
        got = forward(backend, part, statistics=True, **into)
        check_forward(part, got)
        # A row that is computed has the bits that it has without a mask.
        plain = part.but(x=np.nan_to_num(part.x, posinf=1, neginf=1), where=None, valid_rows=None)
        if part.residual is not None:
            plain = plain.but(residual=np.nan_to_num(part.residual, posinf=1, neginf=1))
        expected = forward(backend, plain, statistics=True)
        for output, result in got.items():
            compare.equal(result[part.computed], expected[output][part.computed], output)


def many_rows(backend: Backend, hidden_size: int) -> int:
    """As many as blocks deal among themselves, and a last chunk that is not whole."""
    on_gpu = backend.gpu or isinstance(backend, Cupy)
    sm_count = _kernel.device_properties(0).sm_count if on_gpu else 4
    plan = choose_plan("rms", hidden_size, "float32", None, 90)
    return fewest_dealt_rows(plan, sm_count) // 96 * 96 + 96 + 21


@pytest.mark.parametrize("hidden_size", [40, 520])
@pytest.mark.parametrize(
    "mask", ["where", "where in front", "where misaligned", "both", "heads", "groups"]
)
def test_many_rows(backend: Backend, hidden_size: int, mask: str) -> None:
    rows = many_rows(backend, hidden_size)
    random = np.random.default_rng(rows)
    where = random.random(rows) < np.linspace(0, 1, rows) ** 2  # from sparse to dense
    if mask == "where in front":
        where = np.arange(rows) < rows // 5
    case = Case(
        x=inputs.array((rows, hidden_size), "float32"),
        weight=inputs.weight(hidden_size, "float32"),
        where=inputs.lay(where, "offset_1") if mask == "where misaligned" else where,
        masked="keep",
    )
    if mask == "both":
        case = case.but(valid_rows=np.array(rows - 40))
    elif mask == "heads":
        case = case.but(
            x=case.x.reshape(rows // 3, 3, hidden_size), where=where.reshape(rows // 3, 3)
        )
    elif mask == "groups":
        case = case.but(groups=2)
    spoil(case.x, case.computed)
    into = {
        output: backend.empty(case.shape(output), dtype)
        for output, dtype in case.outputs(statistics=True).items()
    }
    check_forward(case, forward(backend, case, statistics=True, **into))


@pytest.mark.parametrize("hidden_size", [40, 520])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", ["emulator", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_any_byte_of_a_mask_but_zero_is_true(name: str, hidden_size: int, many: bool) -> None:
    skip_without(name)
    backend = BACKENDS[name]()
    with backend.running():
        rows = many_rows(backend, hidden_size) if many else 77
        held = np.resize([0, 1, 2, 16, 0, 128, 255, 0], rows).astype(np.uint8)
        x = backend.input(inputs.array((rows, hidden_size), "float32"))
        out = backend.output(np.full((rows, hidden_size), 7, np.float32))
        where = backend.input(held.view(np.bool_))
        cupy_rmsnorm.rms_norm(x, where=where, out=out)
        plain = backend.numpy(cupy_rmsnorm.rms_norm(x))
        expected = np.where(held[:, None] != 0, plain, np.float32(7))
        compare.equal(backend.numpy(out), expected, "y")
        backend.synchronize()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("mask", ["where", "both"])
def test_zeroed_rows_of_new_outputs(backend: Backend, norm: str, mask: str) -> None:
    case = masked_case(MASKS[mask], norm=norm, masked="zero")
    for statistics in (False, True):
        backend.poison(case.x.nbytes)
        check_forward(case, forward(backend, case, statistics=statistics))


@pytest.mark.parametrize("masked", ["keep", "zero"])
@pytest.mark.parametrize("layout", ["contiguous", "inner_2", "transposed", "offset_1"])
def test_in_place(backend: Backend, masked: str, layout: str) -> None:
    """In place, "keep" leaves x's and the residual's own values in the other rows."""
    case = masked_case(MASKS["both"], masked=masked)
    case = case.but(
        x=inputs.lay(np.nan_to_num(case.x, posinf=3), layout),
        residual=inputs.lay(np.nan_to_num(case.residual, posinf=5), layout),
    )
    into = {"y": backend.output(case.x), "residual_out": backend.output(case.residual)}
    got = forward(backend, case, **into)
    check_forward(case, got, before={"y": case.x, "residual_out": case.residual})


@pytest.mark.parametrize("masked", ["keep", "zero"])
def test_one_row_without_leading_axes(backend: Backend, masked: str) -> None:
    for mask in (np.array(True), np.array(False)):
        case = Case(x=inputs.array((33,), "float32"), where=mask, masked=masked)
        into = {"y": backend.empty((33,), "float32"), "rstd": backend.empty((), "float32")}
        check_forward(case, forward(backend, case, statistics=True, **into))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_with_a_weight_for_each_head(backend: Backend, norm: str) -> None:
    case = masked_case(MASKS["both"], norm=norm, masked="zero").but(
        weight=inputs.weight((5, 65), "float32"),
        bias=inputs.bias((5, 65), "float32"),
        per_head=True,
    )
    check_forward(case, forward(backend, case, statistics=True))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("masked", ["keep", "zero"])
@pytest.mark.parametrize("mask", MASKS)
def test_backward(backend: Backend, norm: str, masked: str, mask: str) -> None:
    """dx of another row is zero, whatever masked says; dweight and dbias do not know it."""
    case = masked_case(MASKS[mask], norm=norm, masked=masked, residual=None)
    shape = case.x.shape
    dout, dresidual_out = (inputs.array(shape, "bfloat16", seed=seed) for seed in (2, 3))
    for array in (dout, dresidual_out):
        array[~case.computed] = np.nan
    for given in (
        Gradient(dout=dout),
        Gradient(dout=dout, added=True, dresidual_out=dresidual_out),
    ):
        dx = backend.empty(shape, "bfloat16", "row_gap_3")
        for outputs in ({}, {"dx": dx}):
            check_backward(case, given, backward(backend, case, given, **outputs))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_backward_with_saved_statistics(backend: Backend, norm: str) -> None:
    """Statistics of other rows may hold anything."""
    case = masked_case(MASKS["both"], norm=norm, masked="zero", residual=None)
    saved = forward(backend, case, statistics=True)
    for statistic in saved.values():
        statistic[~case.computed] = np.nan
    dout = inputs.array(case.x.shape, "bfloat16", seed=2)
    given = Gradient(dout=dout, rstd=saved["rstd"], mean=saved.get("mean"))
    check_backward(case, given, backward(backend, case, given))


# Rows that no backend holds whole, and work for more threads or blocks than one.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("masked", ["keep", "zero"])
@pytest.mark.parametrize("shape", [(2, 3, 140_001), (40, 9, 1024)])
def test_large(backend: Backend, norm: str, masked: str, shape: tuple[int, ...]) -> None:
    size = shape[-1]
    where = np.arange(shape[0] * shape[1]).reshape(shape[:2]) % 3 != 1
    case = Case(
        x=inputs.lay(inputs.array(shape, "bfloat16")),
        norm=norm,
        weight=inputs.weight((shape[1], size), "float32"),
        bias=inputs.bias((shape[1], size), "float32"),
        residual=inputs.lay(inputs.array(shape, "bfloat16", seed=1), "row_gap_3"),
        per_head=True,
        where=where,
        masked=masked,
    )
    into = {"y": backend.output(case.x), "residual_out": backend.output(case.residual)}
    for statistic in ("mean", "rstd") if norm == "layer" else ("rstd",):
        into[statistic] = backend.empty(shape[:2], "float32")
    got = forward(backend, case, statistics=True, **into)
    check_forward(case, got, before={"y": case.x, "residual_out": case.residual})

    after = case.but(x=got["residual_out"], residual=None)
    arriving = inputs.array(shape, "bfloat16", seed=2)
    statistics = {name: got[name] for name in ("mean", "rstd") if name in got}
    given = Gradient(dout=arriving, added=True, dresidual_out=arriving, **statistics)
    dx = backend.output(after.x)
    check_backward(after, given, backward(backend, after, given, dx=dx))
    before, given = case.but(x=case.x.copy(), residual=None), Gradient(dout=arriving)
    check_backward(before, given, backward(backend, before, given))
