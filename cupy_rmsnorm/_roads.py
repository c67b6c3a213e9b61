# SPDX-License-Identifier: Apache-2.0
"""Which road a call takes.

Traced by torch.compile or torch.export, it becomes an operator. Like one before it, it takes the
short road. Followed by torch's autograd, it becomes a node of its graph. Any other takes the
general road.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

from . import _fast, _fast_pair, _run
from ._call import Norm

ArrayT = TypeVar("ArrayT")


def traced(x: object) -> bool:
    """Whether torch traces this call.

    It is asked within what is traced, where looking torch up in `sys.modules` has dynamo describe
    every module there, and fail where that imports another.
    """
    if not any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(x).__mro__):
        return False
    import torch

    compiling: bool = torch.compiler.is_compiling()
    return compiling


def _traced(x: object) -> bool:
    """The same, cheaper where the short road knows x's library."""
    library = _fast.libraries.get(type(x))
    if library is None:
        return traced(x)
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
    x: ArrayT,
    weight: object,
    bias: object,
    options: _run.Values,
    where: object,
    valid_rows: object,
    out: ArrayT | None,
    out_dtype: object,
) -> ArrayT:
    """Run rms_norm or layer_norm."""
    kept = None
    if where is None and valid_rows is None:
        library = _fast.libraries.get(type(x))
        if library is None:
            kept = None if traced(x) else _fast.kept(function, options, out_dtype)
        elif library.traced is None or not library.traced():
            kept = _fast.kept(function, options, out_dtype)
            if kept is not None and bias is None:
                y: ArrayT | None = library.plain(kept, weight, x, out)
                if y is not None:
                    return y
            elif kept is not None:
                done = library.road(kept, x, None, weight, bias, out, None)
                if done is not None:
                    return done[0]  # type: ignore[no-any-return]
    if kept is not None and out is None and _recorded(x, weight, bias):
        call = function, norm, options, None, None, out_dtype
        return _autograd().apply(x, None, weight, bias, call)  # type: ignore[no-any-return]
    return normalize_anew(
        function,
        norm,
        x,
        weight,
        bias,
        options,
        where,
        valid_rows,
        out,
        out_dtype,
        kept,
        traceable=kept is None,
    ).y


def normalize_anew(
    function: str,
    norm: Norm,
    x: ArrayT,
    weight: object,
    bias: object,
    options: _run.Values,
    where: object,
    valid_rows: object,
    out: ArrayT | None,
    out_dtype: object,
    kept: _fast.Kept | None,
    *,
    residual: object = None,
    residual_out: ArrayT | None = None,
    adds: bool = False,
    traceable: bool = True,
) -> _run.Outputs[ArrayT]:
    """Run a function without statistics where the short road did not.

    `traceable` says that nobody asked yet whether the call is traced.
    """
    given = x, weight, bias, options, where, valid_rows, out, out_dtype
    if traceable and traced(x):
        return _operator(function, *given, residual=residual, residual_out=residual_out)
    if _recorded(x, residual, weight, bias):
        return _autograd().normalize(  # type: ignore[no-any-return]
            function, norm, *given, residual, residual_out
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
        adds=adds,
        kept=kept,
    )


def add_normalize(
    function: str,
    norm: Norm,
    x: ArrayT,
    residual: object,
    weight: object,
    bias: object,
    options: _run.Values,
    where: object,
    valid_rows: object,
    out: ArrayT | None,
    out_dtype: object,
    residual_out: ArrayT | None,
) -> tuple[ArrayT, ArrayT]:
    """Run add_rms_norm or add_layer_norm."""
    kept = None
    if where is None and valid_rows is None and residual is not None:
        library = _fast.libraries.get(type(x))
        if library is None:
            kept = None if traced(x) else _fast.kept(function, options, out_dtype)
        elif library.traced is None or not library.traced():
            kept = _fast.kept(function, options, out_dtype)
            if kept is None:
                pass
            elif bias is None and out is not None and residual_out is not None:
                if library.add(kept, weight, x, residual, out, residual_out):
                    return out, residual_out
            else:
                done = library.road(kept, x, residual, weight, bias, out, residual_out)
                if done is not None:
                    return done[0], done[1]
    if kept is not None and out is residual_out is None and _recorded(x, residual, weight, bias):
        call = function, norm, options, None, None, out_dtype
        return _autograd().apply(x, residual, weight, bias, call)  # type: ignore[no-any-return]
    outputs = normalize_anew(
        function,
        norm,
        x,
        weight,
        bias,
        options,
        where,
        valid_rows,
        out,
        out_dtype,
        kept,
        residual=residual,
        residual_out=residual_out,
        adds=True,
        traceable=kept is None,
    )
    return outputs.y, outputs.residual_out


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
