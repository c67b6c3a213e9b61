# SPDX-License-Identifier: Apache-2.0
"""Which road a call takes.

Traced by torch.compile, torch.export or torch.jit.trace, or seen by a mode of torch, it becomes an
operator. Like one before it, it takes the short road. Followed by torch's autograd, it becomes a
node of its graph. Any other takes the general road.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

from . import _fast, _fast_pair, _run
from ._call import Norm

ArrayT = TypeVar("ArrayT")


def traced(x: object) -> bool:
    """Whether torch traces this call, or has a mode that sees what is called.

    A launch is nothing to either: they would go on without it, with memory that was not written.
    It is asked within what is traced, where looking torch up in `sys.modules` has dynamo describe
    every module there, and fail where that imports another.
    """
    if not any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(x).__mro__):
        return False
    import torch

    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
    )


def _traced(x: object, asked: bool = False) -> bool:
    """The same, cheaper where the short road knows x's library, or `asked` it before."""
    library = _fast.libraries.get(type(x))
    if library is None:
        return not asked and traced(x)
    return library.traced is not None and library.traced()


def _recorded(x: object, *others: object) -> bool:
    """Whether autograd follows one of these, and x is a tensor, so that y can be followed too."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled() or not isinstance(x, torch.Tensor):
        return False
    for value in (x, *others):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            # Transforms of torch.func are refused where arrays are described.
            return not torch._C._are_functorch_transforms_active()
    return False


@functools.cache
def _autograd() -> Any:
    from . import _torch_autograd

    return _torch_autograd


def normalize(
    function: str,
    norm: Norm,
    adds: bool,
    x: Any,
    residual: object,
    weight: object,
    bias: object,
    eps: object,
    weight_offset: object,
    axis: object,
    cast: object,
    per_head: object,
    masked: object,
    groups: object,
    partial: object,
    where: object,
    valid_rows: object,
    out: Any,
    out_dtype: object,
    residual_out: Any,
) -> Any:
    """Run a function without statistics: y, or where it `adds` y and residual_out."""
    kept = None
    if where is None and valid_rows is None and not (adds and residual is None):
        library = _fast.libraries.get(type(x))
        if library is None:
            if not traced(x):
                options = (eps, weight_offset, axis, cast, per_head, masked, groups, partial)
                kept = _fast.kept(function, options, out_dtype)
        elif library.compiled is None or not library.compiled():
            # What `_fast.kept` would find, without its cost.
            last = _fast.recent[function]
            kept, dtype_, eps_, offset_, axis_, cast_, per_head_, masked_, groups_, partial_ = last
            if not (
                eps is eps_
                and out_dtype is dtype_
                and weight_offset is offset_
                and axis is axis_
                and cast is cast_
                and per_head is per_head_
                and masked is masked_
                and groups is groups_
                and partial is partial_
            ):
                options = (eps, weight_offset, axis, cast, per_head, masked, groups, partial)
                kept = _fast.kept(function, options, out_dtype)
            if kept is None:
                pass
            elif bias is None and not adds:
                y = library.plain(kept, weight, x, out)
                if y is not None:
                    return y
            elif bias is None and out is not None and residual_out is not None:
                if library.add(kept, weight, x, residual, out, residual_out):
                    return out, residual_out
            else:
                done = library.road(kept, x, residual, weight, bias, out, residual_out)
                if done is not None:
                    return done[:2] if adds else done[0]
    return normalize_anew(
        *(function, norm, adds, x, residual, weight, bias),
        (eps, weight_offset, axis, cast, per_head, masked, groups, partial),
        *(where, valid_rows, out, out_dtype, residual_out, kept),
    )


def normalize_anew(
    function: str,
    norm: Norm,
    adds: bool,
    x: Any,
    residual: object,
    weight: object,
    bias: object,
    options: _run.Values,
    where: object,
    valid_rows: object,
    out: Any,
    out_dtype: object,
    residual_out: Any,
    kept: _fast.Kept | None,
) -> Any:
    """Run such a function where the short road did not; `kept` is what that keeps of such calls."""
    given = x, weight, bias, options, where, valid_rows, out, out_dtype
    if _traced(x, asked=kept is not None):
        outputs = _operator(function, *given, residual=residual, residual_out=residual_out)
    elif not _recorded(x, residual, weight, bias):
        outputs = _run.forward(
            *(function, norm, x, weight, bias, options),
            where=where,
            valid_rows=valid_rows,
            out=out,
            out_dtype=out_dtype,
            residual=residual,
            residual_out=residual_out,
            adds=adds,
            kept=kept,
        )
    elif kept is not None and out is residual_out is None:
        call = function, norm, options, None, None, out_dtype
        return _autograd().apply(x, residual, weight, bias, call)
    else:
        outputs = _autograd().normalize(function, norm, *given, residual, residual_out)
    return (outputs.y, outputs.residual_out) if adds else outputs.y


def forward(
    function: str,
    norm: Norm,
    x: ArrayT,
    weight: object,
    bias: object,
    options: _run.Values,
    *,
    where: object,
    valid_rows: object,
    out: ArrayT | None,
    out_dtype: object,
    residual: object = None,
    residual_out: ArrayT | None = None,
    mean_out: ArrayT | None = None,
    rstd_out: ArrayT | None = None,
    adds: bool = False,
) -> _run.Outputs[ArrayT]:
    """Run a function that returns statistics; autograd records none."""
    if _traced(x):
        return _operator(
            function,
            x,
            weight,
            bias,
            options,
            where,
            valid_rows,
            out,
            out_dtype,
            residual=residual,
            residual_out=residual_out,
            mean_out=mean_out,
            rstd_out=rstd_out,
        )
    return _run.forward(
        function,
        norm,
        x,
        weight,
        bias,
        options,
        where=where,
        valid_rows=valid_rows,
        out=out,
        out_dtype=out_dtype,
        residual=residual,
        residual_out=residual_out,
        mean_out=mean_out,
        rstd_out=rstd_out,
        adds=adds,
        statistics=True,
    )


def backward(
    function: str,
    norm: Norm,
    dout: object,
    x: ArrayT,
    weight: object,
    bias: object,
    options: _run.Values,
    *,
    added: bool = False,
    **arguments: Any,
) -> _run.Gradients[ArrayT]:
    """Run a backward function; autograd records none."""
    if _traced(x):
        from . import _torch_ops

        return _torch_ops.backward(function, dout, x, weight, bias, options, **arguments)
    return _run.backward(function, norm, dout, x, weight, bias, options, added=added, **arguments)


def qk_norm(
    q: ArrayT,
    k: ArrayT,
    q_weight: object,
    k_weight: object,
    eps: float,
    weight_offset: float,
    cast: str,
    q_out: ArrayT | None,
    k_out: ArrayT | None,
) -> tuple[ArrayT, ArrayT]:
    """Run qk_norm."""
    if _traced(q):
        from . import _torch_ops

        return _torch_ops.qk_norm(q, k, q_weight, k_weight, eps, weight_offset, cast, q_out, k_out)
    kept = _run.qk_kept(eps, weight_offset, cast)
    if kept is not None:
        done = _fast_pair.forward(kept, q, k, q_weight, k_weight, q_out, k_out)
        if done is not None:
            return done
    if _recorded(q, k, q_weight, k_weight):
        return _autograd().qk_norm(  # type: ignore[no-any-return]
            q, k, q_weight, k_weight, eps, weight_offset, cast, q_out, k_out
        )
    return _run.qk_forward(q, k, q_weight, k_weight, eps, weight_offset, cast, q_out, k_out, kept)


def _operator(*arguments: Any, **outputs: Any) -> _run.Outputs[Any]:
    from . import _torch_ops

    return _torch_ops.forward(*arguments, **outputs)
