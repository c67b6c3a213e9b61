# SPDX-License-Identifier: Apache-2.0
"""What torch.compile and torch.export see: the functions as operators of torch. Needs torch.

``torch.ops.cupy_rmsnorm`` has every function under its own name, with new tensors for its outputs,
and beside them `norm_out` and `qk_norm_out`, which write into given ones. Of each there is a form
that knows shapes and dtypes alone. A gradient that does not exist is an empty tensor there. One
that is composite falls apart into others where torch compiles it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from . import _refuse, _run
from ._border import dtype_name
from ._call import Norm
from ._check import Options, axes_of, keep_needs
from ._torch_autograd import refuse_unrecorded, requires_grad, tensor_or_none


class Kind(NamedTuple):
    """What a function of a norm is about."""

    norm: Norm
    adds: bool
    statistics: bool
    outputs: tuple[str, ...]  # what the forward function returns, in its order


RESULTS = ("y", "residual_out", "mean", "rstd")


def _kind_of(norm: Norm, adds: bool, statistics: bool) -> Kind:
    there = True, adds, statistics and norm == "layer", statistics
    return Kind(norm, adds, statistics, tuple(itertools.compress(RESULTS, there)))


NORMS: tuple[Norm, ...] = ("rms", "layer")
KINDS = [_kind_of(*which) for which in itertools.product(NORMS, (False, True), (False, True))]


def _name(kind: Kind, suffix: str) -> str:
    return f"{'add_' if kind.adds else ''}{kind.norm}_norm{suffix}"


FORWARD = {_name(kind, "_forward" if kind.statistics else ""): kind for kind in KINDS}
BACKWARD = {_name(kind, "_backward"): kind for kind in KINDS if kind.statistics}
GRADIENTS = ("dx", "dresidual", "dweight", "dbias")

# The options in the order of `_check.Options`.
OPTIONS = {
    "eps": "float",
    "weight_offset": "float",
    "axis": "int[]",
    "cast": "str",
    "per_head": "bool",
    "masked": "str",
    "groups": "int",
    "partial": "int?",
}
OPTION_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in OPTIONS.items())
FORWARD_ARGUMENTS = (
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? where, Tensor? valid_rows, "
    f"float? weight_constant, float? bias_constant, {OPTION_ARGUMENTS}, ScalarType? out_dtype"
)
BACKWARD_ARGUMENTS = (
    "Tensor dout, Tensor? dresidual_out, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, "
    "Tensor? rstd, Tensor? where, Tensor? valid_rows, float? weight_constant, "
    f"{OPTION_ARGUMENTS}, bool need_dx, bool need_dweight, ScalarType? dweight_dtype, "
    "ScalarType? x_dtype"
)
QK_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, float? q_constant, "
    "float? k_constant, float eps, float weight_offset, str cast"
)

LIBRARY = torch.library.Library("cupy_rmsnorm", "DEF")


# Calls that torch traces ----------------------------------------------------------------------


def forward(
    function: str,
    x: Any,
    weight: Any,
    bias: Any,
    options: _run.Values,
    where: Any,
    valid_rows: Any,
    out: Any,
    out_dtype: Any,
    residual: Any = None,
    residual_out: Any = None,
    mean_out: Any = None,
    rstd_out: Any = None,
) -> _run.Outputs[Any]:
    """Run a forward function by its operator."""
    weight, bias = _parameter(weight), _parameter(bias)
    where, valid_rows = _array("where", where), _array("valid_rows", valid_rows)
    if FORWARD[function].adds:
        residual = _array("residual", residual, needed=True)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    outputs = {"out": out, "residual_out": residual_out, "mean_out": mean_out, "rstd_out": rstd_out}
    _refuse_outputs_with_gradients(outputs)
    if _recorded(inputs):
        if FORWARD[function].statistics:
            _refuse_recorded(inputs)
        refuse_unrecorded(inputs, options, where, valid_rows, outputs)
        if not torch.jit.is_tracing():  # which compares with a trace that has no gradients
            function = f"{function}_forward"
    arguments = (
        x,
        residual,
        tensor_or_none(weight),
        tensor_or_none(bias),
        where,
        valid_rows,
        _constant(weight),
        _constant(bias),
        *_scalars(options),
        _scalar_type(out_dtype),
    )
    kind = FORWARD[function]
    if out is None and residual_out is None and mean_out is None and rstd_out is None:
        results = OPERATORS[function](*arguments)
        made = dict(zip(kind.outputs, _all(results), strict=True))
    else:
        given = dict(zip(RESULTS, outputs.values(), strict=True))
        if (where is not None or valid_rows is not None) and Options(*options).masked == "keep":
            named = zip(RESULTS, outputs.items(), strict=True)
            keep_needs([item for result, item in named if result in kind.outputs])
        made = _empty_outputs(kind, *arguments)
        made.update({name: value for name, value in given.items() if value is not None})
        OPERATORS["norm_out"](function, *arguments, *[made.get(name) for name in RESULTS])
    return _run.Outputs(made["y"], made.get("residual_out"), made.get("mean"), made.get("rstd"))


def backward(
    function: str,
    dout: Any,
    x: Any,
    weight: Any,
    bias: Any,
    options: _run.Values,
    *,
    mean: Any = None,
    rstd: Any,
    where: Any,
    valid_rows: Any,
    need_dx: bool,
    need_dweight: bool,
    dx_out: Any,
    dweight_out: Any,
    dbias_out: Any,
    dweight_dtype: Any,
    dresidual_out: Any = None,
    x_dtype: Any = None,
) -> _run.Gradients[Any]:
    """Run a backward function by its operator."""
    weight, bias = _parameter(weight), _parameter(bias)
    inputs = {"dout": dout, "dresidual_out": dresidual_out, "x": x, "weight": weight, "bias": bias}
    _refuse_outputs_with_gradients(
        {"dx_out": dx_out, "dweight_out": dweight_out, "dbias_out": dbias_out}
    )
    if _recorded(inputs):
        _refuse_recorded(inputs)
    gradients = _gradients(
        function,
        dout,
        dresidual_out,
        x,
        tensor_or_none(weight),
        tensor_or_none(bias),
        mean,
        rstd,
        where,
        valid_rows,
        _constant(weight),
        *_scalars(options),
        need_dx,
        need_dweight,
        _scalar_type(dweight_dtype) if dweight_out is None else dweight_out.dtype,
        _scalar_type(x_dtype) if dx_out is None or not BACKWARD[function].adds else dx_out.dtype,
    )
    dx = _written("dx_out", gradients.dx, dx_out)
    return _run.Gradients(
        dx,
        dx if gradients.dresidual is gradients.dx else gradients.dresidual,
        _written("dweight_out", gradients.dweight, dweight_out),
        _written("dbias_out", gradients.dbias, dbias_out),
    )


def qk_norm(
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    eps: float,
    weight_offset: float,
    cast: str,
    q_out: Any,
    k_out: Any,
) -> tuple[Any, Any]:
    """Run qk_norm by its operator."""
    q_weight, k_weight = _parameter(q_weight), _parameter(k_weight)
    inputs = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight}
    _refuse_outputs_with_gradients({"q_out": q_out, "k_out": k_out})
    if _recorded(inputs):
        refuse_unrecorded(inputs, (), None, None, {"q_out": q_out, "k_out": k_out})
    arguments = (
        q,
        k,
        tensor_or_none(q_weight),
        tensor_or_none(k_weight),
        _constant(q_weight),
        _constant(k_weight),
        _number("eps", eps),
        _number("weight_offset", weight_offset),
        cast,
    )
    if q_out is None and k_out is None:
        q_new, k_new = OPERATORS["qk_norm"](*arguments)
        return q_new, k_new
    q_out = q.new_empty(q.shape) if q_out is None else q_out
    k_out = k.new_empty(k.shape) if k_out is None else k_out
    OPERATORS["qk_norm_out"](*arguments, q_out, k_out)
    return q_out, k_out


def _all(results: Any) -> tuple[Any, ...]:
    """The results of an operator, which is no tuple where there is one alone."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _written(name: str, gradient: Any, out: Any) -> Any:
    """The gradient, in the caller's tensor if there is one."""
    if out is None:
        return gradient
    if gradient is None:
        raise ValueError(f"{name} was given, and there is no such gradient")
    if out.shape != gradient.shape or out.dtype != gradient.dtype:
        raise ValueError(
            f"{name} must have shape {tuple(gradient.shape)} and dtype {gradient.dtype}, "
            f"got {tuple(out.shape)} and {out.dtype}"
        )
    return out.copy_(gradient)


def _recorded(inputs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(map(requires_grad, inputs.values()))


def _refuse_recorded(inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        if requires_grad(value):
            _refuse.needs_gradient(name)


def _refuse_outputs_with_gradients(outputs: dict[str, Any]) -> None:
    for name, value in outputs.items():
        if requires_grad(value):
            _refuse.output_needs_gradient(name)


def _parameter(value: Any) -> Any:
    """A weight or bias, as a tensor if it is an array of NumPy's. Its scalars have no axis."""
    if value is None or isinstance(value, (torch.Tensor, int, float)):
        return value
    return torch.as_tensor(value) if isinstance(value, np.ndarray) and value.ndim else value


def _array(name: str, value: Any, needed: bool = False) -> Any:
    """An array that is no parameter, as a tensor."""
    if isinstance(value, torch.Tensor) or (value is None and not needed):
        return value
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    _refuse.not_an_array(name, value)


def _constant(value: Any) -> Any:
    return None if value is None or isinstance(value, torch.Tensor) else float(value)


def _number(name: str, value: Any) -> Any:
    """`value` as an operator takes it. To torch.compile a scalar of NumPy's is an array."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return float(value)
    return _refuse.number(name, value)


def _scalars(options: _run.Values) -> list[Any]:
    """The options as the operators take them."""
    eps, weight_offset, axis, *others = options
    axes = list(axis) if isinstance(axis, tuple) else [axis]
    if isinstance(axis, list):
        axes_of(axis)
    return [_number("eps", eps), _number("weight_offset", weight_offset), axes, *others]


def _scalar_type(dtype: Any) -> Any:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if torch.compiler.is_compiling() and not isinstance(dtype, str):  # one of NumPy's
        return torch.as_tensor(np.empty(0, dtype)).dtype
    return getattr(torch, dtype_name("out_dtype", dtype) or "")


# What the operators do ------------------------------------------------------------------------


def _run_forward(
    function: str,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    where: Any,
    valid_rows: Any,
    weight_constant: float | None,
    bias_constant: float | None,
    *scalars: Any,
    **outputs: Any,
) -> _run.Outputs[Any]:
    kind = FORWARD[function]
    *options, out_dtype = scalars
    return _run.forward(
        function,
        kind.norm,
        x,
        weight_constant if weight is None else weight,
        bias_constant if bias is None else bias,
        _options(options),
        where=where,
        valid_rows=valid_rows,
        out_dtype=out_dtype,
        residual=residual,
        adds=kind.adds,
        statistics=kind.statistics,
        **outputs,
    )


def _run_backward(
    function: str,
    dout: Any,
    dresidual_out: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    where: Any,
    valid_rows: Any,
    weight_constant: float | None,
    *scalars: Any,
) -> list[Any]:
    *options, need_dx, need_dweight, dweight_dtype, x_dtype = scalars
    gradients = _run.backward(
        function,
        BACKWARD[function].norm,
        dout,
        x,
        weight_constant if weight is None else weight,
        bias,
        _options(options),
        mean=mean,
        rstd=rstd,
        where=where,
        valid_rows=valid_rows,
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=None,
        dweight_out=None,
        dbias_out=None,
        dweight_dtype=dweight_dtype,
        dresidual_out=dresidual_out,
        x_dtype=x_dtype,
        added=BACKWARD[function].adds,
    )
    dx, dresidual = gradients.dx, gradients.dresidual
    made = dx, None if dresidual is dx else dresidual, gradients.dweight, gradients.dbias
    return [x.new_empty(0) if gradient is None else gradient for gradient in made]


def _options(scalars: list[Any]) -> _run.Values:
    """The options as the short road knows them."""
    eps, weight_offset, axis, *others = scalars
    return (eps, weight_offset, axis[0] if len(axis) == 1 else tuple(axis), *others)


def _empty_outputs(kind: Kind, x: Any, residual: Any, *others: Any) -> dict[str, Any]:
    """What a forward function returns, without values."""
    *_, axis, _, _, _, groups, _, out_dtype = others
    row_shape = x.shape[: x.dim() - len(axis)]
    statistics = {
        "size": row_shape if groups == 1 else (*row_shape, groups),
        "dtype": torch.float64 if x.dtype == torch.float64 else torch.float32,
    }
    made = {"y": x.new_empty(x.shape, dtype=out_dtype)}
    if kind.adds:
        made["residual_out"] = residual.new_empty(x.shape)
    for name in ("mean", "rstd"):
        if name in kind.outputs:
            made[name] = x.new_empty(**statistics)
    return made


def _empty_gradients(
    function: str, dout: Any, dresidual_out: Any, x: Any, weight: Any, bias: Any, *others: Any
) -> list[Any]:
    """What a backward function returns, without values."""
    *_, need_dx, need_dweight, dweight_dtype, x_dtype = others
    present = _present(function, x, weight, bias, need_dx, need_dweight, x_dtype)
    made = (x, x_dtype), (x, None), (weight, dweight_dtype), (bias, None)
    return [
        like.new_empty(like.shape, dtype=dtype) if there else x.new_empty(0)
        for there, (like, dtype) in zip(present, made, strict=True)
    ]


def _present(
    function: str, x: Any, weight: Any, bias: Any, need_dx: bool, need_dweight: bool, x_dtype: Any
) -> tuple[bool, bool, bool, bool]:
    """Which gradients there are: dx, a dresidual that is not dx, dweight, dbias."""
    apart = BACKWARD[function].adds and x_dtype is not None and x_dtype != x.dtype
    return (
        need_dx,
        need_dx and apart,
        need_dweight and weight is not None,
        bias is not None,
    )


# Their gradients ------------------------------------------------------------------------------


def _keep_for_backward(function: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    kind = FORWARD[function]
    made = dict(zip(kind.outputs, _all(output), strict=True))
    x, _, weight, bias, where, valid_rows, ctx.weight_constant, _, *ctx.scalars, _ = inputs
    statistics = made.get("mean"), made.get("rstd")
    ctx.mark_non_differentiable(*[value for value in statistics if value is not None])
    row = made.get("residual_out", x)
    ctx.save_for_backward(row, weight, bias, *statistics, where, valid_rows)
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    ctx.y_dtype = made["y"].dtype


def _differentiate_norm(function: str, ctx: Any, dout: Any, *others: Any) -> tuple[Any, ...]:
    kind = FORWARD[function]
    dresidual_out = others[0] if kind.adds else None
    needs = ctx.needs_input_grad
    nothing = [None] * (len(needs) - 4)
    if dout is None and dresidual_out is None:
        return (None, None, None, None, *nothing)
    x, weight, bias, *saved = ctx.saved_tensors
    if dout is None:
        dout = x.new_zeros(x.shape, dtype=ctx.y_dtype)
    gradients = _gradients(
        _name(kind, "_backward"),
        dout,
        dresidual_out,
        x,
        weight,
        bias if needs[3] else None,
        *saved,
        ctx.weight_constant,
        *ctx.scalars,
        needs[0] or needs[1],
        needs[2],
        None,
        ctx.x_dtype if kind.adds else None,
    )
    return (gradients.dx, gradients.dresidual, gradients.dweight, gradients.dbias, *nothing)


def _keep_qk_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, *ctx.scalars = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight)
    ctx.set_materialize_grads(False)


def _differentiate_qk(ctx: Any, dq_out: Any, dk_out: Any) -> tuple[Any, ...]:
    q, k, q_weight, k_weight = ctx.saved_tensors
    q_constant, k_constant, eps, weight_offset, cast = ctx.scalars
    need_dq, need_dk, need_dq_weight, need_dk_weight, *others = ctx.needs_input_grad

    def half(dout: Any, x: Any, weight: Any, constant: Any, *needs: bool) -> tuple[Any, Any]:
        if dout is None or not any(needs):
            return None, None
        per_head = weight is not None and weight.dim() == 2 and x.dim() > 1
        options = (eps, weight_offset, [-1], cast, per_head, "keep", 1, None)
        gradients = _gradients(
            "rms_norm_backward",
            dout,
            None,
            x,
            weight,
            *[None] * 5,
            constant,
            *options,
            *needs,
            None,
            None,
        )
        return gradients.dx, gradients.dweight

    dq, dq_weight = half(dq_out, q, q_weight, q_constant, need_dq, need_dq_weight)
    dk, dk_weight = half(dk_out, k, k_weight, k_constant, need_dk, need_dk_weight)
    return (dq, dk, dq_weight, dk_weight, *[None] * len(others))


def _gradients(function: str, *arguments: Any) -> _run.Gradients[Any]:
    """What a backward operator returns, without what does not exist."""
    results = OPERATORS[function](*arguments)
    _, _, x, weight, bias, *_, need_dx, need_dweight, _, x_dtype = arguments
    present = _present(function, x, weight, bias, need_dx, need_dweight, x_dtype)
    dx, dresidual, dweight, dbias = [
        result if there else None for result, there in zip(results, present, strict=True)
    ]
    if BACKWARD[function].adds and dresidual is None:
        dresidual = dx
    return _run.Gradients(dx, dresidual, dweight, dbias)


def _no_second_derivative(ctx: Any, *gradients: Any) -> NoReturn:
    _refuse.second_derivative()


def _not_within_transforms(*arguments: Any) -> NoReturn:
    _refuse.transformed("an input")


# The operators themselves ---------------------------------------------------------------------

OPERATORS: dict[str, Any] = {}


def _operator(name: str, arguments: str, results: str, run: Any, key: str) -> Any:
    LIBRARY.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, key)
    # Where every transform begins: torch has no other hook for jvp, which would take the tangents
    # of an operator for zero.
    LIBRARY.impl(name, _not_within_transforms, "FuncTorchDynamicLayerFrontMode")
    return getattr(torch.ops.cupy_rmsnorm, name).default


def _define(name: str, arguments: str, results: str, run: Any, without_values: Any) -> None:
    def fake(*given: Any) -> Any:
        # torch comes here with x's values where another tensor alone has none.
        metas = {value.is_meta for value in given if isinstance(value, torch.Tensor)}
        if len(metas) > 1:
            _refuse.unreachable_device("every array", "one on meta")
        return without_values(*given)

    made = _operator(name, arguments, results, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cupy_rmsnorm::{name}", fake, lib=LIBRARY)
    OPERATORS[name] = made


def define_composite(name: str, arguments: str, results: str, run: Any) -> Any:
    """An operator that `run` makes of others, and of nodes of autograd."""
    return _operator(name, arguments, results, run, "CompositeImplicitAutograd")


def _differentiable(name: str, backward: Any, setup: Any = None) -> None:
    torch.library.register_autograd(
        f"cupy_rmsnorm::{name}", backward, setup_context=setup, lib=LIBRARY
    )


def _define_forward(function: str, kind: Kind) -> None:
    def unpack(made: Callable[[str], Any]) -> Any:
        values = tuple(map(made, kind.outputs))
        return values if len(values) > 1 else values[0]

    def run(*arguments: Any) -> Any:
        outputs = _run_forward(function, *arguments)
        return unpack(lambda name: getattr(outputs, name))

    def without_values(*arguments: Any) -> Any:
        return unpack(_empty_outputs(kind, *arguments).__getitem__)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep_for_backward(function, ctx, inputs, output)

    def backward(ctx: Any, *gradients: Any) -> Any:
        return _differentiate_norm(function, ctx, *gradients)

    results = ", ".join(f"Tensor {name}" for name in kind.outputs)
    _define(function, FORWARD_ARGUMENTS, f"({results})", run, without_values)
    _differentiable(function, backward, setup)


def _define_backward(function: str) -> None:
    def run(*arguments: Any) -> Any:
        return tuple(_run_backward(function, *arguments))

    def without_values(*arguments: Any) -> Any:
        return tuple(_empty_gradients(function, *arguments))

    results = ", ".join(f"Tensor {name}" for name in GRADIENTS)
    _define(function, BACKWARD_ARGUMENTS, f"({results})", run, without_values)
    _differentiable(function, _no_second_derivative)


def _norm_out(function: str, *arguments: Any) -> None:
    *inputs, out, residual_out, mean_out, rstd_out = arguments
    given = {"out": out, "residual_out": residual_out, "mean_out": mean_out, "rstd_out": rstd_out}
    _run_forward(function, *inputs, **given)


def _qk_norm(
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    q_constant: float | None,
    k_constant: float | None,
    *scalars: Any,
) -> Any:
    q_given = q_constant if q_weight is None else q_weight
    k_given = k_constant if k_weight is None else k_weight
    outputs = scalars[3:] or (None, None)
    return _run.qk_forward(q, k, q_given, k_given, *scalars[:3], *outputs)


def _qk_norm_out(*arguments: Any) -> None:
    _qk_norm(*arguments)


def _no_results(*arguments: Any) -> None:
    """What an operator with given outputs returns."""


for _function, _kind in FORWARD.items():
    _define_forward(_function, _kind)
for _function in BACKWARD:
    _define_backward(_function)
_define(
    "norm_out",
    f"str function, {FORWARD_ARGUMENTS}, Tensor(a!) out, Tensor(b!)? residual_out, "
    "Tensor(c!)? mean_out, Tensor(d!)? rstd_out",
    "()",
    _norm_out,
    _no_results,
)
_define(
    "qk_norm",
    QK_ARGUMENTS,
    "(Tensor q_out, Tensor k_out)",
    _qk_norm,
    lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
)
_differentiable("qk_norm", _differentiate_qk, _keep_qk_for_backward)
_define(
    "qk_norm_out",
    f"{QK_ARGUMENTS}, Tensor(a!) q_out, Tensor(b!) k_out",
    "()",
    _qk_norm_out,
    _no_results,
)
