# SPDX-License-Identifier: Apache-2.0
"""Promises over drawn shapes, strides, dtypes, masks and aliases."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from tests import compare, inputs, oracle
from tests.backends import Backend
from tests.calls import Case, Gradient, backward, check_backward, check_forward, forward

SIZES = st.integers(1, 9) | st.sampled_from([31, 32, 33, 64, 127, 128, 129, 257])
NARROW = st.sampled_from(["float16", "bfloat16", "float32"])


@st.composite
def layouts(draw: st.DrawFn, values: np.ndarray) -> np.ndarray:
    """`values` in a larger buffer of NaN: any order of axes, any step and gap, any start."""
    order = draw(st.permutations(range(values.ndim)))
    room, window = [], []
    for axis in order:
        step = draw(st.sampled_from([1, 1, 1, 2, 3, -1]))
        low, high = draw(st.integers(0, 2)), draw(st.integers(0, 3))
        size = values.shape[axis]
        # Positions low, low + |step|, ...; backwards for a negative step.
        room.append(low + size * abs(step) + high)
        places = slice(low, low + size * abs(step), abs(step))
        window.append((places, slice(None, None, 1 if step > 0 else -1)))
    start = draw(st.integers(0, 8))
    nothing = True if values.dtype == bool else np.nan
    buffer = inputs.lay(np.full(start + math.prod(room), nothing, values.dtype))
    view = buffer[start:].reshape(room)
    view = view[(..., *(places for places, _ in window))][(..., *(turn for _, turn in window))]
    view = view.transpose(np.argsort(order))
    view[...] = values
    return view


@st.composite
def cases(draw: st.DrawFn, backend: Backend, *, added: bool) -> Case:
    """A call with any options, every array in its own layout."""

    def lay(values: np.ndarray) -> np.ndarray:
        view = draw(layouts(values))
        return view if backend.holds(view) else view.copy()

    rows = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    axes = draw(st.integers(1, 2))
    hidden = (*(draw(st.integers(1, 3)) for _ in range(axes - 1)), draw(SIZES))
    wide = draw(st.integers(0, 5)) == 0
    dtype = st.just("float64") if wide else NARROW
    per_head = bool(rows) and rows[-1] > 0 and draw(st.booleans())
    groups = 1 if per_head or axes > 1 else draw(st.sampled_from([1, 1, 2, 3]))
    norm = draw(st.sampled_from(["rms", "layer"]))
    partial = None
    if norm == "rms" and draw(st.integers(0, 2)) == 0:
        partial = draw(st.integers(1, math.prod(hidden)))
    hidden = (*hidden[:-1], groups * hidden[-1])
    shape = (*rows, *hidden)
    parameter = (*rows[-1:], *hidden) if per_head else hidden
    seed = draw(st.integers(0, 99))
    x = inputs.array(shape, "float64", seed=seed) + draw(st.sampled_from([0.0, 1.0, -40.0]))
    case = Case(
        x=lay(oracle.round_to(x, draw(dtype))),
        norm=norm,
        eps=draw(st.sampled_from([1e-6, 1e-3, 1.0])),
        cast=draw(st.sampled_from(["once", "before_weight"])),
        per_head=per_head,
        axis=tuple(range(-axes, 0)),
        masked=draw(st.sampled_from(["keep", "zero"])),
        groups=groups,
        partial=partial,
    )
    weight = draw(st.sampled_from(["array", "constant", "none"]))
    if weight == "array":
        case = case.but(weight=lay(inputs.weight(parameter, draw(dtype), seed)))
    elif weight == "constant":
        case = case.but(weight=draw(st.sampled_from([-2.0, 0.5, 3])))
    if weight != "none":
        case = case.but(weight_offset=draw(st.sampled_from([0.0, 0.0, 1.0, -0.25])))
    kinds = ["array", *(["constant"] if weight == "constant" else []), "none"]
    bias = draw(st.sampled_from(kinds))
    if bias == "array":
        case = case.but(bias=lay(inputs.bias(parameter, draw(dtype), seed)))
    elif bias == "constant":
        case = case.but(bias=draw(st.sampled_from([-2.0, 0.5, 3])))
    if added:
        case = case.but(residual=lay(inputs.array(shape, draw(dtype), seed=seed + 1)))
    if draw(st.booleans()):
        random = np.random.default_rng(seed)
        case = case.but(where=lay(random.random(rows) < 0.6))
    if draw(st.booleans()):
        count = np.array(draw(st.integers(-2, 40)), draw(st.sampled_from(["int32", "int64"])))
        case = case.but(valid_rows=count.reshape(draw(st.sampled_from([(), (1,)]))))
    # What rows that are not computed hold is no business of the call's.
    if case.where is not None or case.valid_rows is not None:
        case.x[~case.computed] = draw(st.sampled_from([np.nan, 0.0, 7.0]))
    return case


def plain(case: Case) -> Case:
    """The same values, all contiguous."""
    names = ("x", "weight", "bias", "residual", "where")
    arrays = {name: getattr(case, name) for name in names}
    return case.but(**{n: a.copy() for n, a in arrays.items() if isinstance(a, np.ndarray)})


@given(data=st.data())
def test_forward(backend: Backend, data: st.DataObject) -> None:
    case = data.draw(cases(backend, added=data.draw(st.booleans(), "added")), "case")
    outputs = case.outputs(statistics=True)
    aliases = ["x", *(["residual"] if case.residual is not None else [])]
    free = dict.fromkeys(aliases, True)
    into, before = {}, {}
    for output, dtype in outputs.items():
        choices = ["given"]
        if case.masked == "zero" or (case.where is None and case.valid_rows is None):
            choices.append("new")
        for alias in aliases:
            source = getattr(case, alias)
            if output in ("y", "residual_out") and free[alias] and source.dtype.name == dtype:
                choices.append(alias)
        choice = data.draw(st.sampled_from(choices), output)
        if choice == "given":
            blank = np.full(case.shape(output), np.nan, oracle.DTYPES[dtype])
            view = data.draw(layouts(blank))
            view = view if backend.holds(view) else inputs.lay(blank, "inner_2")
            into[output] = backend.output(view)
        elif choice != "new":
            free[choice] = False
            source = getattr(case, choice)
            into[output] = backend.output(source)
            before[output] = source
    note(f"strides {[case.x.strides, getattr(case.residual, 'strides', None)]}")
    got = forward(backend, case, statistics=True, **into)
    check_forward(case, got, before)
    # Layout, place and alias change no bit.
    contiguous = plain(case).but(masked="zero")
    expected = forward(backend, contiguous, statistics=True)
    for output, result in got.items():
        compare.equal(result[case.computed], expected[output][case.computed], output)
    backend.verify()
    backend.forget()


@given(data=st.data())
def test_backward(backend: Backend, data: st.DataObject) -> None:
    added = data.draw(st.booleans(), "added")
    case = data.draw(cases(backend, added=False), "case")

    def values(seed: int) -> np.ndarray:
        dtype = "float64" if case.x.dtype == np.float64 else data.draw(NARROW)
        view = data.draw(layouts(inputs.array(case.x.shape, dtype, seed=seed)))
        return view if backend.holds(view) else view.copy()

    saved = forward(backend, case.but(masked="zero"), statistics=True)
    kept = data.draw(st.booleans(), "saved statistics")
    given = Gradient(
        dout=values(11),
        added=added,
        dresidual_out=values(12) if added and data.draw(st.booleans()) else None,
        rstd=saved["rstd"] if kept else None,
        mean=saved.get("mean") if kept else None,
        need_dx=data.draw(st.booleans(), "need_dx"),
        need_dweight=data.draw(st.booleans(), "need_dweight"),
    )
    outputs = {}
    if given.need_dx and data.draw(st.booleans(), "in place"):
        outputs["dx"] = backend.output(case.x)
    got = backward(backend, case, given, **outputs)
    check_backward(case, given, got)
    contiguous = dataclasses.replace(given, dout=given.dout.copy())
    again = backward(backend, plain(case), contiguous)
    check_backward(case, given, again)
    for output, result in got.items():
        if result is not None:
            compare.equal(result, again[output], output)
    backend.verify()
    backend.forget()
