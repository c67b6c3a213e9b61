# SPDX-License-Identifier: Apache-2.0
"""`warmup` builds what coming calls launch: held against calls on the way to their launch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _cuda, _cuda_warmup, _kernel, _plan, _tools
from cupy_rmsnorm._check_tools import check_warmup
from cupy_rmsnorm._kernel import DeviceProperties, Specialisation
from tests.recorder import recorded

SM_COUNT = 132
ROWS = (1, 2, 100, 131, 132, 133, 300, 1000, 5000, 20000)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"masked": "zero"},
    {"per_head": True},
    {"weight_dtype": None},
    {"cast": "before_weight", "bias_dtype": "float16"},
    {"groups": 4, "masked": "zero"},
)
OPERATIONS = (
    "rms_norm",
    "layer_norm_forward",
    "add_rms_norm",
    "rms_norm_backward",
    "add_layer_norm_backward",
)
CALLS = (
    *itertools.product(OPERATIONS, OPTIONS),
    *((op, {"partial": 30}) for op in OPERATIONS if "rms" in op),
)


def launched(op: str, rows: int, hidden_size: int, options: dict[str, Any]) -> set[Specialisation]:
    """What a real call takes."""
    shape = (rows, 2, hidden_size) if options.get("per_head") else (rows, hidden_size)
    x = np.ones(shape, np.float32)
    parameters: dict[str, Any] = {}
    weight = None
    if options.get("weight_dtype", "float32"):
        weight = np.ones(shape[1:], np.float32)
    if "bias_dtype" in options:
        parameters["bias"] = np.ones(shape[1:], options["bias_dtype"])
    if "masked" in options:
        parameters |= {"where": np.ones(shape[:-1], bool), "masked": options["masked"]}
        parameters["valid_rows"] = np.array(rows, np.int32)
    names = ("per_head", "cast", "groups", "partial")
    parameters |= {name: options[name] for name in names if name in options}
    with recorded(90, SM_COUNT) as launches:
        if op.endswith("_backward"):
            forward = [x, x] if op.startswith("add_") else [x]
            getattr(norms, op)(x, *forward, weight, **parameters)
        elif op.startswith("add_"):
            getattr(norms, op)(x, x, weight, **parameters)
        else:
            getattr(norms, op)(x, weight, **parameters)
    return {launch.specialisation for launch in launches}


@pytest.mark.parametrize(("op", "options"), CALLS, ids=str)
def test_calls_find_their_kernels(
    op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = DeviceProperties(90, SM_COUNT)
    monkeypatch.setattr(_kernel, "device_properties", lambda device: properties)
    for hidden_size in (64, 1000):
        dtypes = {"dtype": "float32", "weight_dtype": "float32", "bias_dtype": None}
        dtypes |= {name: options[name] for name in dtypes if name in options}
        for name in ("residual_dtype", "out_dtype", "dout_dtype", "dweight_dtype"):
            dtypes[name] = None
        others = [options.get("cast", "once"), options.get("per_head", False)]
        others += [options.get("masked"), options.get("groups", 1), options.get("partial")]
        call = check_warmup(op, hidden_size, *others, **dtypes)
        built = {specialisation for specialisation, _ in _cuda_warmup.specialisations(call, 0)}
        for rows in ROWS:
            missing = launched(op, rows, hidden_size, options) - built
            assert not missing, (rows, missing)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


HIDDEN_SIZES = (64, 1000, 40_000)
WITHOUT = [{"need_dx": False}, {"need_dweight": False}]
BACKWARDS = tuple(name for name in norms.__all__ if name.endswith("_backward"))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[Specialisation]]:
    """What warmup builds for a mapping of its `calls`."""
    properties = DeviceProperties(90, SM_COUNT)
    monkeypatch.setattr(_kernel, "device_properties", lambda device: properties)

    def found(**call: Any) -> set[Specialisation]:
        asked = _tools._warmup_call(**{"dtype": "float32", "weight_dtype": "float32"} | call)
        return {specialisation for specialisation, _ in _cuda_warmup.specialisations(asked, 0)}

    return found


def taken(call: Callable[[], object]) -> set[Specialisation]:
    with recorded(90, SM_COUNT) as launches:
        call()
    return {launch.specialisation for launch in launches}


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("needs", [{}, *WITHOUT], ids=str)
@pytest.mark.parametrize("op", BACKWARDS)
def test_backward_calls_of_fewer_gradients_find_their_kernels(
    op: str, needs: dict[str, bool], hidden_size: int, prepared: Callable[..., set[Specialisation]]
) -> None:
    """Beside an absent gradient: dresidual_out that is absent, and statistics that are given."""
    norm = getattr(norms, op)
    weight, adds = ones(hidden_size), op.startswith("add_")
    others: list[dict[str, Any]] = [{}]
    if adds:
        others.append({"x_dtype": "float16"})
    if "layer" in op:
        others.append({"bias": weight})
    for other, rows in itertools.product(others, (1, 100, 300, 5000 if hidden_size < 5000 else 7)):
        asked = {
            "out_dtype": other.get("x_dtype"),
            "bias_dtype": "float32" if "bias" in other else None,
        }
        built = prepared(op=op, hidden_size=hidden_size, **needs, **asked)
        x, row = ones(rows, hidden_size), ones(rows)
        given = {"rstd": row} | ({"mean": row} if "layer" in op else {})
        arrays = [(x, x, x), (x, None, x)] if adds else [(x, x)]
        for leading, statistics in itertools.product(arrays, ({}, given)):
            call = functools.partial(norm, *leading, weight, **needs, **other, **statistics)
            assert taken(call) <= built, (rows, other, len(leading), statistics)


@pytest.mark.parametrize("op", BACKWARDS)
def test_nothing_is_built_for_a_backward_call_that_computes_nothing(
    op: str, prepared: Callable[..., set[Specialisation]]
) -> None:
    asked = {"op": op, "hidden_size": 64, "need_dx": False}
    assert prepared(**asked, need_dweight=False) == set()
    assert prepared(**asked, weight_dtype=None) == set()
    assert prepared(**asked, weight_dtype=None, bias_dtype="float32") != set()


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_calls_with_constants_find_their_kernels(
    hidden_size: int, prepared: Callable[..., set[Specialisation]]
) -> None:
    for rows in (1, 132, 133, 300):
        x = ones(rows, hidden_size)
        for op in ("rms_norm", "layer_norm_forward", "add_rms_norm"):
            built = prepared(op=op, hidden_size=hidden_size, weight_dtype=None)
            leading = (x, x) if op.startswith("add_") else (x,)
            for constants in ((), (2.0,), (2.0, 0.5)):
                call = functools.partial(getattr(norms, op), *leading, *constants)
                assert taken(call) <= built, (op, rows, constants)
        built = prepared(op="rms_norm_backward", hidden_size=hidden_size, weight_dtype=None)
        assert taken(lambda x=x: norms.rms_norm_backward(x, x, 2.0, bias=0.5)) <= built


@pytest.mark.parametrize("weights", [("float32", None), (None, "float16")])
def test_a_pair_of_unlike_weights_takes_the_kernels_of_two_calls(
    weights: tuple[str | None, str | None], prepared: Callable[..., set[Specialisation]]
) -> None:
    built = set[Specialisation]()
    for dtype in weights:
        built |= prepared(op="rms_norm", hidden_size=128, weight_dtype=dtype)
    given = [None if dtype is None else np.ones(128, dtype) for dtype in weights]
    for tokens in (1, 100, 5000):
        q, k = ones(tokens, 8, 128), ones(tokens, 2, 128)
        assert taken(lambda q=q, k=k: norms.qk_norm(q, k, *given)) <= built


@pytest.mark.parametrize("sm_count", [1, 20, 108, 132])
@pytest.mark.parametrize(
    ("op", "dtype", "others"),
    [
        ("rms_norm", "float16", {}),
        ("rms_norm", "float32", {"weight_dtype": "bfloat16"}),
        ("layer_norm", "bfloat16", {"bias_dtype": "float32"}),
        ("layer_norm", "float64", {"bias_dtype": "float64"}),
        ("add_rms_norm", "bfloat16", {"weight_dtype": "float32", "bias_dtype": "float32"}),
        ("add_rms_norm", "float32", {}),
        ("qk_norm", "float32", {}),
        ("qk_norm", "bfloat16", {}),
    ],
    ids=str,
)
def test_calls_of_any_number_of_rows_find_their_kernels(
    op: str, dtype: str, others: dict[str, str], sm_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = DeviceProperties(90, sm_count)
    monkeypatch.setattr(_kernel, "device_properties", lambda device: properties)
    names = ("residual_dtype", "out_dtype", "dout_dtype", "dweight_dtype", "bias_dtype")
    dtypes: Any = dict.fromkeys(names) | {"dtype": dtype, "weight_dtype": dtype} | others
    for hidden_size in (8, 96, 1000, 4096, 5376, 12288, 14336, 16384, 20000, 32768):
        call = check_warmup(op, hidden_size, "once", False, None, **dtypes)
        built = {specialisation for specialisation, _ in _cuda_warmup.specialisations(call, 0)}
        kind = _cuda_warmup._forward_kind(call)
        plan = _cuda.forward_plan(kind, hidden_size, 0)
        pair = op == "qk_norm" and plan.kernel == "norm_forward"
        launches = {}
        last = _plan.rows_evicted_first(plan, kind.staged_itemsize) if plan.vecs_per_thread else 0
        for rows in (*range(1, 6000), *range(last - 3, last + 3), 10**6):
            if rows < 1:
                continue
            if pair:
                arguments = rows - rows // 3, max(1, rows // 3)
                launch = _plan.choose_pair_launch(plan, *arguments, kind.staged_itemsize, sm_count)
            else:
                launch = _plan.choose_launch(plan, rows, kind.staged_itemsize, sm_count)
            apart = dataclasses.replace(launch, grid=0, **({"k_share": 0} if pair else {}))
            launches.setdefault(apart, (rows, launch))
        for rows, launch in launches.values():
            for split_rows in {call.per_head, pair}:
                if pair:
                    wanted = _cuda.specialise_pair(
                        kind, hidden_size, plan, launch, aligned=True, split_rows=split_rows
                    )
                else:
                    wanted = _cuda.specialise_forward(
                        kind, hidden_size, plan, launch, arch=90, aligned=True, split_rows=False
                    )
                assert wanted in built, (hidden_size, rows)


@pytest.mark.parametrize("masked", ["keep", "zero"])
@pytest.mark.parametrize("sm_count", [4, 132])
def test_masked_calls_of_any_number_of_rows_find_their_kernels(
    masked: str, sm_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = DeviceProperties(90, sm_count)
    monkeypatch.setattr(_kernel, "device_properties", lambda device: properties)
    for hidden_size in (8, 96, 4096, 20000):
        names = ("residual_dtype", "out_dtype", "dout_dtype", "dweight_dtype", "bias_dtype")
        dtypes: Any = dict.fromkeys(names) | dict.fromkeys(("dtype", "weight_dtype"), "float16")
        call = check_warmup("rms_norm", hidden_size, "once", False, masked, **dtypes)
        built = {specialisation for specialisation, _ in _cuda_warmup.specialisations(call, 0)}
        kind = _cuda_warmup._forward_kind(call)
        plan = _cuda.forward_plan(kind, hidden_size, 0)
        dealt = 0
        for exponent, where in itertools.product(range(24), (False, True)):
            launch = _plan.choose_launch(plan, 2**exponent, 2, sm_count, masked, where)
            wanted = _cuda.specialise_forward(
                kind, hidden_size, plan, launch, arch=90, aligned=True, split_rows=False
            )
            assert wanted in built, (hidden_size, exponent, where)
            dealt += launch.teams > 0
        assert bool(dealt) == (masked == "keep" and plan.kernel == "norm_forward")


def test_kernels_are_built_once_each_by_many_threads_beside_a_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first build waits for another one to begin: on a single thread it would not end."""
    another = threading.Event()
    built: list[tuple[Specialisation, int]] = []
    steps: list[int] = []

    def function(specialisation: Specialisation, device: int, shared_bytes: int = 0) -> None:
        built.append((specialisation, device))
        if len(built) > 1:
            another.set()
        assert another.wait(60)

    class Bar(contextlib.AbstractContextManager[Any]):
        def __init__(self, title: str, count: int) -> None:
            steps.append(-count)

        def __exit__(self, *exception: object) -> None:
            steps.append(0)

        def step(self, count: int) -> None:
            steps.append(count)

    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(_cuda_warmup, "current_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(_cuda_warmup.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(_cuda_warmup, "Progress", Bar)
    monkeypatch.setattr(_kernel, "function", function)
    monkeypatch.setattr(_kernel, "device_properties", lambda device: DeviceProperties(90, SM_COUNT))
    dtypes: dict[str, Any] = dict.fromkeys(
        ("residual_dtype", "out_dtype", "dout_dtype", "dweight_dtype", "bias_dtype")
    )
    dtypes |= {"dtype": "float16", "weight_dtype": "float16"}
    calls = [
        check_warmup("rms_norm", size, "once", False, None, **dtypes)
        for size in (64, 128, 64, 4096, 1000, 64)
    ]
    wanted = {found for call in calls for found, _ in _cuda_warmup.specialisations(call, 0)}
    _cuda_warmup.warmup(calls)
    assert len(built) == len(wanted)
    assert {found for found, _ in built} == wanted
    assert steps == [-len(wanted), *len(wanted) * [1], 0]
