# SPDX-License-Identifier: Apache-2.0
"""Calls on torch tensors that autograd follows, as nodes of its graph. Needs torch.

A node keeps what backward reads and no more. Backward runs on a thread of autograd's own, which
has made forward's device and stream current there.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from . import _fast, _refuse, _run
from ._call import Norm
from ._check import Options


def normalize(
    function: str,
    norm: Norm,
    x: Any,
    weight: Any,
    bias: Any,
    options: _run.Values,
    where: Any,
    valid_rows: Any,
    out: Any,
    out_dtype: Any,
    residual: Any,
    residual_out: Any,
) -> _run.Outputs[Any]:
    """Run rms_norm or layer_norm, or one of their add_* forms."""
    refuse_unrecorded(
        {"x": x, "residual": residual, "weight": weight, "bias": bias},
        options,
        where,
        valid_rows,
        {"out": out, "residual_out": residual_out},
    )
    made = apply(x, residual, weight, bias, (function, norm, options, where, valid_rows, out_dtype))
    y, sums = made if isinstance(made, tuple) else (made, None)
    return _run.Outputs(y, sums, None, None)


def qk_norm(
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    eps: object,
    weight_offset: object,
    cast: object,
    q_out: Any,
    k_out: Any,
) -> Any:
    """Run qk_norm."""
    refuse_unrecorded(
        {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight},
        (),
        None,
        None,
        {"q_out": q_out, "k_out": k_out},
    )
    return _apply_qk(q, k, q_weight, k_weight, eps, weight_offset, cast)


def refuse_unrecorded(
    inputs: dict[str, Any],
    options: _run.Values,
    where: Any,
    valid_rows: Any,
    outputs: dict[str, Any],
) -> None:
    """Refuse what a node cannot do: write into the caller's arrays, or leave rows untouched."""
    masked = where is not None or valid_rows is not None
    if not masked and all(value is None for value in outputs.values()):
        return
    recorded = next(name for name, value in inputs.items() if requires_grad(value))
    for name, value in outputs.items():
        if value is not None:
            if requires_grad(value):
                _refuse.output_needs_gradient(name)
            _refuse.output_while_recorded(name, recorded)
    if masked and Options(*options).masked == "keep":
        _refuse.kept_rows_while_recorded(recorded)


def requires_grad(value: Any) -> bool:
    """Whether autograd would follow it, were it asked to."""
    return isinstance(value, torch.Tensor) and value.requires_grad


class Node(torch.autograd.Function):  # type: ignore[misc]
    """What the nodes share: they differentiate backwards, and once."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse.has_tangent("an input")

    @classmethod
    def backward(cls, ctx: Any, *douts: Any) -> Any:
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint recomputes them for one reading
        if not torch.is_grad_enabled():
            return cls.gradients(ctx, saved, *douts)
        with torch.no_grad():
            gradients = cls.gradients(ctx, saved, *douts)
        # With create_graph=True a gradient is differentiated in its turn. torch's
        # once_differentiable would leave out gradients that no douts with a graph lead to, and
        # would let torch.autograd.grad pass by on its way to an input.
        anchor = torch.empty(0, requires_grad=True)
        sources = anchor, *saved, *douts
        return tuple(
            None if gradient is None else _Gradient.apply(gradient, *sources)
            for gradient in gradients
        )

    @staticmethod
    def gradients(ctx: Any, saved: tuple[Any, ...], *douts: Any) -> tuple[Any, ...]:
        """The gradient of each input of forward, or None."""
        raise NotImplementedError


class _Gradient(torch.autograd.Function):  # type: ignore[misc]
    """A gradient that says so where it is differentiated, by whichever of its sources."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, *sources: Any) -> Any:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> NoReturn:
        _refuse.second_derivative()


class _Norm(Node):
    """The node of rms_norm, layer_norm and their add_* forms."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        call: tuple[str, Norm, _run.Values, Any, Any, Any],  # torch looks at each argument
    ) -> Any:
        function, norm, options, where, valid_rows, out_dtype = call
        adds, function_forward = function.startswith("add_"), f"{function}_forward"
        tensors = [weight, bias if ctx.needs_input_grad[3] else None, where, valid_rows]
        constants: dict[int, Any] = {}  # those that are none, by place; the short road takes none
        kept = done = None
        if where is None and valid_rows is None and (residual is not None) == adds:
            kept = _fast.kept(function_forward, options, out_dtype)
            if kept is not None:
                done = _fast.forward(kept, x, residual, weight, bias, None, None)
        if done is None:
            outputs = _run.forward(
                function_forward,
                norm,
                x,
                weight,
                bias,
                options,
                where=where,
                valid_rows=valid_rows,
                out_dtype=out_dtype,
                residual=residual,
                adds=adds,
                statistics=True,
                kept=kept,
            )
            done = outputs.y, outputs.residual_out, outputs.mean, outputs.rstd
            for place, value in enumerate(tensors):
                if value is not None and not isinstance(value, torch.Tensor):
                    constants[place], tensors[place] = value, None
        y, sums, mean, rstd = done
        row = sums if adds else x
        ctx.save_for_backward(row, mean, rstd, *tensors)
        ctx.set_materialize_grads(False)
        x_dtype = x.dtype if adds and x.dtype != row.dtype else None
        ctx.call = function, norm, options, constants, x_dtype, y.dtype
        return (y, sums) if adds else y

    @staticmethod
    def gradients(ctx: Any, saved: tuple[Any, ...], *douts: Any) -> tuple[Any, ...]:
        dout, *dresidual_out = douts
        x, mean, rstd, *tensors = saved
        function, norm, options, constants, x_dtype, y_dtype = ctx.call
        for place, value in constants.items():
            tensors[place] = value
        weight, bias, where, valid_rows = tensors
        (dsum,) = dresidual_out or (None,)
        if dout is None:
            if dsum is None:
                return (None,) * INPUTS
            dout = torch.zeros_like(x, dtype=y_dtype)
        needs = ctx.needs_input_grad
        gradients = _run.backward(
            f"{function}_backward",
            norm,
            dout,
            x,
            weight,
            bias,
            options,
            mean=mean,
            rstd=rstd,
            where=where,
            valid_rows=valid_rows,
            need_dx=needs[0] or needs[1],
            need_dweight=needs[2],
            dx_out=None,
            dweight_out=None,
            dbias_out=None,
            dweight_dtype=None,
            dresidual_out=dsum,
            x_dtype=x_dtype,
            added=bool(dresidual_out),
        )
        return (
            gradients.dx,
            gradients.dresidual if dresidual_out else None,
            gradients.dweight,
            gradients.dbias,
            *(None,) * (INPUTS - 4),
        )


INPUTS = 5  # of _Norm.forward
# _Norm.apply without its Python, which looks for transforms of torch.func: none is active here.
apply = super(torch.autograd.Function, _Norm).apply


class _QKNorm(Node):
    """The node of qk_norm. It keeps no statistic: backward makes it from the rows that it reads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        q_weight: Any,
        k_weight: Any,
        eps: object,
        weight_offset: object,
        cast: object,
    ) -> Any:
        outputs = _run.qk_forward(q, k, q_weight, k_weight, eps, weight_offset, cast, None, None)
        ctx.q_constant, ctx.k_constant = _other(q_weight), _other(k_weight)
        ctx.save_for_backward(q, k, tensor_or_none(q_weight), tensor_or_none(k_weight))
        ctx.set_materialize_grads(False)
        ctx.options = eps, weight_offset, cast
        return outputs

    @staticmethod
    def gradients(ctx: Any, saved: tuple[Any, ...], *douts: Any) -> tuple[Any, ...]:
        dq_out, dk_out = douts
        q, k, q_weight, k_weight = saved
        need_dq, need_dk, need_dq_weight, need_dk_weight, *_ = ctx.needs_input_grad
        q_weight = ctx.q_constant if q_weight is None else q_weight
        k_weight = ctx.k_constant if k_weight is None else k_weight
        dq, dq_weight = _half(ctx.options, dq_out, q, q_weight, need_dq, need_dq_weight)
        dk, dk_weight = _half(ctx.options, dk_out, k, k_weight, need_dk, need_dk_weight)
        return dq, dk, dq_weight, dk_weight, None, None, None


_apply_qk = super(torch.autograd.Function, _QKNorm).apply


def _half(
    options: tuple[object, object, object],
    dout: Any,
    x: Any,
    weight: Any,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Any, Any]:
    """dx and dweight of q's half of qk_norm, or of k's."""
    if dout is None or not (need_dx or need_dweight):
        return None, None
    eps, weight_offset, cast = options
    per_head = getattr(weight, "ndim", 0) == 2 and x.ndim > 1
    gradients = _run.backward(
        "rms_norm_backward",
        "rms",
        dout,
        x,
        weight,
        None,
        (eps, weight_offset, -1, cast, per_head, "keep", 1, None),
        rstd=None,
        where=None,
        valid_rows=None,
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=None,
        dweight_out=None,
        dbias_out=None,
        dweight_dtype=None,
    )
    return gradients.dx, gradients.dweight


def tensor_or_none(value: Any) -> Any:
    """A parameter that is a tensor."""
    return value if isinstance(value, torch.Tensor) else None


def _other(value: Any) -> Any:
    return None if isinstance(value, torch.Tensor) else value
