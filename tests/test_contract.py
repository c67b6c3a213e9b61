# SPDX-License-Identifier: Apache-2.0
"""The public surface: signatures, what comes back, and what the docstrings promise."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_rmsnorm as norms

F32 = np.float32
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(F32)
RESIDUAL = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(F32)
DOUT = np.random.default_rng(2).standard_normal((2, 3, 4)).astype(F32)
W = np.array([1, -2, 0.5, 3], F32)
B = np.array([0, 1, -1, 2], F32)
ROWS = X.shape[:-1]

BEFORE = "weight_offset=0.0, axis=-1, cast='once', per_head=False, groups=1"
MASKS = "where=None, valid_rows=None, masked='keep'"
RMS = f"{BEFORE}, partial=None, {MASKS}"
LAYER = f"{BEFORE}, {MASKS}"
OUT = "out=None, out_dtype=None"
GRADIENTS = (
    "need_dx=True, need_dweight=True, dx_out=None, dweight_out=None, dbias_out=None, "
    "dweight_dtype=None"
)

SIGNATURES = {
    "rms_norm": f"x, weight=None, bias=None, *, eps=1e-06, {RMS}, {OUT}",
    "layer_norm": f"x, weight=None, bias=None, *, eps=1e-05, {LAYER}, {OUT}",
    "add_rms_norm": (
        f"x, residual, weight=None, bias=None, *, eps=1e-06, {RMS}, {OUT}, residual_out=None"
    ),
    "add_layer_norm": (
        f"x, residual, weight=None, bias=None, *, eps=1e-05, {LAYER}, {OUT}, residual_out=None"
    ),
    "rms_norm_forward": (f"x, weight=None, bias=None, *, eps=1e-06, {RMS}, {OUT}, rstd_out=None"),
    "layer_norm_forward": (
        f"x, weight=None, bias=None, *, eps=1e-05, {LAYER}, {OUT}, mean_out=None, rstd_out=None"
    ),
    "add_rms_norm_forward": (
        f"x, residual, weight=None, bias=None, *, eps=1e-06, {RMS}, {OUT}, "
        "residual_out=None, rstd_out=None"
    ),
    "add_layer_norm_forward": (
        f"x, residual, weight=None, bias=None, *, eps=1e-05, {LAYER}, {OUT}, "
        "residual_out=None, mean_out=None, rstd_out=None"
    ),
    "rms_norm_backward": (
        f"dout, x, weight=None, rstd=None, *, eps=1e-06, bias=None, {RMS}, {GRADIENTS}"
    ),
    "layer_norm_backward": (
        f"dout, x, weight=None, mean=None, rstd=None, *, eps=1e-05, bias=None, {LAYER}, {GRADIENTS}"
    ),
    "add_rms_norm_backward": (
        "dout, dresidual_out, residual_out, weight=None, rstd=None, *, eps=1e-06, bias=None, "
        f"{RMS}, {GRADIENTS}, x_dtype=None"
    ),
    "add_layer_norm_backward": (
        "dout, dresidual_out, residual_out, weight=None, mean=None, rstd=None, *, eps=1e-05, "
        f"bias=None, {LAYER}, {GRADIENTS}, x_dtype=None"
    ),
    "qk_norm": (
        "q, k, q_weight=None, k_weight=None, *, eps=1e-06, weight_offset=0.0, cast='once', "
        "q_out=None, k_out=None"
    ),
    "bind_rms_norm": f"weight, bias=None, *, eps=1e-06, {BEFORE}, partial=None, out_dtype=None",
    "bind_layer_norm": f"weight, bias=None, *, eps=1e-05, {BEFORE}, out_dtype=None",
    "is_available": "",
    "info": "",
    "load_plans": "path",
    "warmup": (
        "op=None, *, hidden_size=None, dtype=None, weight_dtype=None, bias_dtype=None, "
        "residual_dtype=None, out_dtype=None, dout_dtype=None, dweight_dtype=None, cast='once', "
        "per_head=False, masked=None, groups=1, partial=None, need_dx=True, "
        "need_dweight=True, calls=None"
    ),
}
FUNCTIONS = [name for name in norms.__all__ if callable(getattr(norms, name))]


def plain_signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return text[1:-1]


# The surface ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert plain_signature(getattr(norms, name)) == SIGNATURES[name]


def test_every_public_function_has_its_signature_here() -> None:
    assert set(SIGNATURES) == set(FUNCTIONS)
    assert norms.__all__ == sorted(norms.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", norms.__version__)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        norms.rms_norm(X, W, B, 1e-6)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional argument"):
        norms.warmup("rms_norm", 64)  # type: ignore[misc]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_is_whole(name: str) -> None:
    function = getattr(norms, name)
    text = inspect.getdoc(function) or ""
    assert "{" not in text.replace('{"once"', "").replace('{"keep"', "")
    assert max(map(len, text.splitlines())) <= 100
    sections = re.findall(r"^(\w+)\n-+$", text, flags=re.MULTILINE)
    assert "Examples" in sections
    described = [
        word
        for line in re.findall(r"^([\w, ]+)(?: : .*)?$", text, flags=re.MULTILINE)
        for word in line.split(", ")
    ]
    for parameter in inspect.signature(function).parameters:
        assert parameter in described, f"{name} does not describe {parameter}"
    if name not in ("is_available", "info"):
        assert "Raises" in sections
        assert "TypeError" in text
        assert re.search(r"\bround(s|ed|ing)\b", text, re.IGNORECASE), f"how does {name} round?"


@pytest.mark.parametrize("module", ["_api", "_api_forward", "_api_backward", "_tools"])
def test_examples_run(module: str) -> None:
    loaded = importlib.import_module(f"cupy_rmsnorm.{module}")
    result = doctest.testmod(loaded)
    assert result.attempted > 10
    assert result.failed == 0


# What comes back -----------------------------------------------------------------------------


def outputs_of(name: str) -> list[str]:
    return [
        parameter
        for parameter in inspect.signature(getattr(norms, name)).parameters
        if parameter == "out" or parameter.endswith("_out")
    ]


FORWARD = {
    "rms_norm": (X,),
    "layer_norm": (X,),
    "add_rms_norm": (X, RESIDUAL),
    "add_layer_norm": (X, RESIDUAL),
    "rms_norm_forward": (X,),
    "layer_norm_forward": (X,),
    "add_rms_norm_forward": (X, RESIDUAL),
    "add_layer_norm_forward": (X, RESIDUAL),
}


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", FORWARD)
def test_given_outputs_come_back_as_the_same_objects(name: str) -> None:
    function = getattr(norms, name)
    made = as_tuple(function(*FORWARD[name], W, B))
    given = {
        output: np.full_like(array, np.nan)
        for output, array in zip(outputs_of(name), made, strict=True)
    }
    got = as_tuple(function(*FORWARD[name], W, B, **given))
    assert [id(array) for array in got] == [id(array) for array in given.values()]
    for one, other in zip(got, made, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", FORWARD)
def test_new_outputs_are_contiguous_and_new(name: str) -> None:
    x = np.asfortranarray(X)
    for array in as_tuple(getattr(norms, name)(x, *FORWARD[name][1:], W)):
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert not np.shares_memory(array, x)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (4,)])
def test_no_rows_and_one_row(name: str, shape: tuple[int, ...]) -> None:
    arrays = [np.ones(shape, F32) for _ in FORWARD[name]]
    got = as_tuple(getattr(norms, name)(*arrays, W))
    shapes = [array.shape for array in got]
    statistics = 2 if name.startswith(("layer", "add_layer")) else 1
    statistics *= name.endswith("_forward")
    values = len(arrays)
    assert shapes == [shape] * values + [shape[:-1]] * statistics


@pytest.mark.parametrize("x_dtype", ["float16", ml_dtypes.bfloat16, "float32"])
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32"])
def test_dtypes_are_independent(x_dtype: Any, dtype: Any) -> None:
    x, other = X.astype(x_dtype), RESIDUAL.astype(dtype)
    weight, bias = W.astype(dtype), B.astype(dtype)
    y, residual_out, mean, rstd = norms.add_layer_norm_forward(x, other, weight, bias)
    assert [array.dtype for array in (y, residual_out, mean, rstd)] == [x.dtype, dtype, F32, F32]
    assert norms.rms_norm(x, weight, out_dtype=dtype).dtype == np.dtype(dtype)
    dx, dresidual, dweight, dbias = norms.add_layer_norm_backward(
        y, None, residual_out, weight, mean, rstd, bias=bias, x_dtype=x_dtype
    )
    got = [array.dtype for array in (dx, dresidual, dweight, dbias)]
    assert got == [x.dtype, dtype, dtype, dtype]
    assert (dresidual is dx) == (x.dtype == np.dtype(dtype))


def test_float64_throughout() -> None:
    x, weight, bias = (array.astype(np.float64) for array in (X, W, B))
    y, mean, rstd = norms.layer_norm_forward(x, weight, bias)
    gradients = norms.layer_norm_backward(y, x, weight, mean, rstd, bias=bias)
    assert {array.dtype for array in (y, mean, rstd, *gradients)} == {np.dtype(np.float64)}


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_statistics_change_no_bit(norm: str) -> None:
    plain, forward = getattr(norms, f"{norm}_norm"), getattr(norms, f"{norm}_norm_forward")
    np.testing.assert_array_equal(plain(X, W, B), forward(X, W, B)[0])
    plain = getattr(norms, f"add_{norm}_norm")
    forward = getattr(norms, f"add_{norm}_norm_forward")
    for one, other in zip(plain(X, RESIDUAL, W), forward(X, RESIDUAL, W), strict=False):
        np.testing.assert_array_equal(one, other)


# Gradients that are and are not there --------------------------------------------------------


def backward(name: str, **options: Any) -> tuple[Any, ...]:
    leading = (DOUT, RESIDUAL, X) if name.startswith("add_") else (DOUT, X)
    result = getattr(norms, name)(*leading, **options)
    assert isinstance(result, tuple)
    assert len(result) == (4 if name.startswith("add_") else 3)
    return result


BACKWARD = [name for name in SIGNATURES if name.endswith("_backward")]


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize(
    ("options", "dx", "dweight", "dbias"),
    [
        ({}, True, False, False),
        ({"weight": W}, True, True, False),
        ({"weight": W, "bias": B}, True, True, True),
        ({"bias": B}, True, False, True),
        ({"weight": 2.0, "bias": 1.0}, True, False, False),
        ({"weight": W, "need_dx": False}, False, True, False),
        ({"weight": W, "bias": B, "need_dweight": False}, True, False, True),
        ({"weight": W, "need_dx": False, "need_dweight": False}, False, False, False),
    ],
)
def test_none_stands_for_a_gradient_that_is_not_there(
    name: str, options: dict[str, Any], dx: bool, dweight: bool, dbias: bool
) -> None:
    got = backward(name, **options)
    present = [array is not None for array in got]
    assert present == [dx] * (len(got) - 2) + [dweight, dbias]
    if len(got) == 4:
        assert got[1] is got[0]


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_do_not_depend_on_which_are_asked_for(name: str) -> None:
    dx, *_, dweight, dbias = backward(name, weight=W, bias=B)
    np.testing.assert_array_equal(backward(name, weight=W, bias=B, need_dx=False)[-2], dweight)
    np.testing.assert_array_equal(backward(name, weight=W, bias=B, need_dx=False)[-1], dbias)
    np.testing.assert_array_equal(backward(name, weight=W, need_dweight=False)[0], dx)


@pytest.mark.parametrize("name", BACKWARD)
def test_given_gradients_come_back_as_the_same_objects(name: str) -> None:
    expected = backward(name, weight=W, bias=B)
    given = {
        "dx_out": np.full_like(X, np.nan),
        "dweight_out": np.full_like(W, np.nan),
        "dbias_out": np.full_like(B, np.nan),
    }
    got = backward(name, weight=W, bias=B, **given)
    assert got[0] is given["dx_out"]
    assert got[-2] is given["dweight_out"]
    assert got[-1] is given["dbias_out"]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dweight_in_a_wider_dtype() -> None:
    weight = W.astype(ml_dtypes.bfloat16)
    _, dweight, _ = norms.rms_norm_backward(DOUT, X, weight, dweight_dtype="float32")
    assert dweight is not None
    assert dweight.dtype == F32
    out = np.empty(4, F32)
    _, given, _ = norms.rms_norm_backward(DOUT, X, weight, dweight_out=out)
    assert given is out
    np.testing.assert_array_equal(out, dweight)


def test_dx_in_the_dtype_of_the_given_output() -> None:
    out = np.empty(X.shape, np.float16)
    dx, dresidual, _, _ = norms.add_rms_norm_backward(DOUT, None, X, dx_out=out)
    assert dx is out
    assert dresidual is not None
    assert dresidual.dtype == F32
    expected = norms.add_rms_norm_backward(DOUT, None, X)[0]
    assert expected is not None
    np.testing.assert_array_equal(dresidual, expected)
    np.testing.assert_array_equal(dx, expected.astype(np.float16))


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("masked", ["keep", "zero"])
def test_rows_that_were_not_computed_have_no_gradient(name: str, masked: str) -> None:
    where = np.array([[True, False, True], [False, True, True]])
    got = backward(name, weight=W, bias=B, where=where, valid_rows=np.array(5), masked=masked)
    computed = where & (np.arange(6).reshape(2, 3) < 5)
    assert not got[0][~computed].any()
    assert got[0][computed].all(axis=-1).all()
    leading = (DOUT, RESIDUAL, X) if name.startswith("add_") else (DOUT, X)
    rows = getattr(norms, name)(*(array[computed] for array in leading), weight=W, bias=B)
    np.testing.assert_array_equal(got[0][computed], rows[0])
    np.testing.assert_allclose(got[-2], rows[-2], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[-1], rows[-1], rtol=1e-6, atol=1e-6)


# Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [2, (-1,), (2,), np.int64(-1)])
def test_axis_in_any_spelling(axis: Any) -> None:
    np.testing.assert_array_equal(norms.rms_norm(X, W, axis=axis), norms.rms_norm(X, W))


@pytest.mark.parametrize("axis", [(-2, -1), (1, 2), (-1, -2), (1, -1)])
def test_two_axes_make_one_row(axis: tuple[int, ...]) -> None:
    weight = np.arange(12, dtype=F32).reshape(3, 4)
    y, rstd = norms.rms_norm_forward(X, weight, axis=axis)
    want, want_rstd = norms.rms_norm_forward(X.reshape(2, 12), weight.ravel())
    np.testing.assert_array_equal(y.reshape(2, 12), want)
    np.testing.assert_array_equal(rstd, want_rstd)
    assert rstd.shape == (2,)


def test_all_axes_make_one_row() -> None:
    y, rstd = norms.rms_norm_forward(X, axis=(0, 1, 2))
    assert rstd.shape == ()
    np.testing.assert_array_equal(y.ravel(), norms.rms_norm(X.ravel()))


def test_per_head_weights() -> None:
    weight = np.arange(12, dtype=F32).reshape(3, 4)
    y = norms.rms_norm(X, weight, weight + 1, per_head=True)
    for head in range(3):
        want = norms.rms_norm(X[:, head], weight[head], weight[head] + 1)
        np.testing.assert_array_equal(y[:, head], want)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_groups_are_heads_of_a_view(norm: str) -> None:
    x, weight, dout = X.reshape(2, 12), np.arange(12, dtype=F32), DOUT.reshape(2, 12)
    forward = getattr(norms, f"{norm}_norm_forward")
    got, wanted = forward(x, weight, groups=3), forward(X, weight.reshape(3, 4), per_head=True)
    np.testing.assert_array_equal(got[0], wanted[0].reshape(2, 12))
    for statistic, expected in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(statistic, expected)
    backward = getattr(norms, f"{norm}_norm_backward")
    statistics = dict(zip(("rstd",) if norm == "rms" else ("mean", "rstd"), got[1:], strict=True))
    gradients = backward(dout, x, weight, groups=3, bias=weight, **statistics)
    heads = weight.reshape(3, 4)
    expected = backward(DOUT, X, heads, per_head=True, bias=heads, **statistics)
    for gradient, want in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(gradient, want.reshape(gradient.shape))


def test_masks_count_rows_and_not_groups() -> None:
    x = X.reshape(2, 12)
    y = norms.rms_norm(x, groups=3, valid_rows=np.array(1), masked="zero")
    z = norms.rms_norm(x, groups=3, where=np.array([True, False]), masked="zero")
    want = norms.rms_norm(x, groups=3)
    want[1] = 0
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(z, want)


def test_partial_takes_its_statistic_from_the_first_columns() -> None:
    y, rstd = norms.rms_norm_forward(X, W, partial=3)
    np.testing.assert_array_equal(rstd, norms.rms_norm_forward(X[..., :3])[1])
    np.testing.assert_array_equal(y, X * rstd[..., None] * W)
    np.testing.assert_array_equal(norms.rms_norm(X, W, partial=4), norms.rms_norm(X, W))
    grouped = norms.rms_norm(X.reshape(2, 12), groups=3, partial=3)
    np.testing.assert_array_equal(grouped.reshape(X.shape), norms.rms_norm(X, partial=3))


def test_bound_norms_take_groups_and_partial() -> None:
    x, weight = X.reshape(2, 12), np.arange(12, dtype=F32)
    options: dict[str, Any] = {"groups": 3, "partial": 2}
    want = norms.rms_norm(x, weight, **options)
    np.testing.assert_array_equal(norms.bind_rms_norm(weight, **options)(x), want)
    want = norms.layer_norm(x, weight, groups=3)
    np.testing.assert_array_equal(norms.bind_layer_norm(weight, groups=3)(x), want)


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.int16(2), ml_dtypes.bfloat16(2)])
def test_scalars_are_constants(scale: Any) -> None:
    want = norms.rms_norm(X, np.full(4, 2, F32), np.full(4, 2, F32))
    np.testing.assert_array_equal(norms.rms_norm(X, scale, scale), want)


def test_no_weight_is_a_weight_of_ones() -> None:
    np.testing.assert_array_equal(norms.rms_norm(X), norms.rms_norm(X, np.ones(4, F32)))


def test_qk_norm_is_two_rms_norms() -> None:
    q, k = X, RESIDUAL[:, :2]
    shared, per_head = W, np.arange(8, dtype=F32).reshape(2, 4)
    q_out, k_out = norms.qk_norm(q, k, shared, per_head, eps=1e-3, weight_offset=1.0)
    options: dict[str, Any] = {"eps": 1e-3, "weight_offset": 1.0}
    np.testing.assert_array_equal(q_out, norms.rms_norm(q, shared, **options))
    np.testing.assert_array_equal(k_out, norms.rms_norm(k, per_head, per_head=True, **options))


# Bound norms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bound_norm_is_the_function(norm: str) -> None:
    function, bind = getattr(norms, f"{norm}_norm"), getattr(norms, f"bind_{norm}_norm")
    options = {"eps": 1e-3, "weight_offset": 1.0, "cast": "before_weight", "out_dtype": "float16"}
    bound = bind(W, B, **options)
    want = function(X, W, B, **options)
    np.testing.assert_array_equal(bound(X), want)
    out = np.empty(X.shape, np.float16)
    assert bound(X, out) is out
    assert bound(X, out=out) is out
    np.testing.assert_array_equal(out, want)
    assert repr(bound) == f"<bound {norm}_norm>"
    np.testing.assert_array_equal(bind(None)(X), function(X))


def test_copies_of_a_bound_norm_have_their_own_weight() -> None:
    weight = W.copy()
    bound = norms.bind_layer_norm(weight, weight_offset=1.0, out_dtype=np.float16)
    expected = bound(X)
    copies = copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))
    weight[...] = 0
    assert copy.copy(bound)(X).tobytes() == bound(X).tobytes() != expected.tobytes()
    for each in copies:
        assert each(X).tobytes() == expected.tobytes()
        assert repr(each) == "<bound layer_norm>"


def test_bound_norm_sees_a_weight_that_was_updated() -> None:
    weight = W.copy()
    bound = norms.bind_rms_norm(weight)
    weight *= 2
    np.testing.assert_array_equal(bound(X), norms.rms_norm(X, 2 * W))


def test_bound_norm_sees_a_parameter_that_moved() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.from_numpy(W.copy()))
    bound = norms.bind_rms_norm(parameter)
    parameter.data = torch.from_numpy(2 * W)
    with torch.no_grad():
        y = bound(torch.from_numpy(X))
    np.testing.assert_array_equal(y.numpy(), norms.rms_norm(X, 2 * W))
    bound(torch.from_numpy(X)).sum().backward()
    assert parameter.grad is not None
    xhat = norms.rms_norm(X)
    np.testing.assert_allclose(parameter.grad.numpy(), xhat.sum(axis=(0, 1)), rtol=1e-5)


def test_bound_norm_checks_x_at_each_call() -> None:
    with pytest.raises(ValueError, match=r"^x must end in the axes \(4,\), got shape \(2, 3, 3\)$"):
        norms.bind_rms_norm(W)(X[..., :3])


# Warm-up and the machine ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", [name for name in SIGNATURES if "norm" in name and "bind" not in name]
)
def test_warmup_knows_every_operation(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_rmsnorm._tools.is_available", lambda: False)
    norms.warmup(op, hidden_size=64, dtype="bfloat16", weight_dtype=F32)
    norms.warmup(calls=[{"op": op, "hidden_size": size, "dtype": "float32"} for size in (1, 7)])


def test_machine() -> None:
    assert isinstance(norms.is_available(), bool)
    assert isinstance(norms.info(), dict)
