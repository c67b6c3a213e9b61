# SPDX-License-Identifier: Apache-2.0
"""The general road of a call: border -> check -> backend -> border.

Border and check come at the first call: an import of the package is not to wait for them.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from . import _fast, _fast_backward, _fast_learn, _fast_pair
from ._call import Backward, Device, Forward, Norm

if TYPE_CHECKING:
    from ._cuda_backward import Launches
    from ._enqueue import Launched

ArrayT = TypeVar("ArrayT")
Values = tuple[object, ...]  # of Options, in its order
WATCHED = "1" in map(os.environ.get, ("CUPY_RMSNORM_DEBUG", "CUPY_RMSNORM_NVTX"))  # see _watch


class Backend(Protocol):
    """What the NumPy and the CUDA backend have in common."""

    def forward(self, call: Forward) -> Launched | None:
        """Write the outputs of `call`; on a GPU it returns what was launched."""

    def forward_pair(self, q: Forward, k: Forward) -> Launched | None:
        """Write the outputs of both halves of qk_norm."""

    def backward(self, call: Backward) -> Launches | None:
        """Write the gradients of `call`; as `forward`."""


@dataclass(slots=True)
class Outputs(Generic[ArrayT]):
    """What a forward call can return; what the function does not ask for is None."""

    y: ArrayT
    residual_out: ArrayT
    mean: ArrayT
    rstd: ArrayT


@dataclass(slots=True)
class Gradients(Generic[ArrayT]):
    """What a backward call returns."""

    dx: ArrayT | None
    dresidual: ArrayT | None
    dweight: ArrayT | None
    dbias: ArrayT | None


def backend(device: Device) -> Backend:
    """The backend that computes on `device`, imported when it is first needed."""
    if device.kind == "cpu":
        from . import _cpu

        return _cpu
    _require_cupy()
    if WATCHED:
        from . import _watch

        return _watch
    from . import _cuda

    return _cuda


@functools.cache
def _require_cupy() -> None:
    try:
        import cupy  # noqa: F401
    except Exception as error:  # a broken CuPy raises anything from ImportError to OSError
        from . import _info

        reason = _info.available()[1] or f"import cupy failed ({error})"
        raise RuntimeError(f"the GPU backend cannot run: {reason}") from error


def forward(
    function: str,
    norm: Norm,
    x: ArrayT,
    weight: object,
    bias: object,
    options: Values,
    *,
    where: object = None,
    valid_rows: object = None,
    out: object = None,
    out_dtype: object = None,
    residual: object = None,
    residual_out: object = None,
    mean_out: object = None,
    rstd_out: object = None,
    adds: bool = False,
    statistics: bool = False,
    kept: _fast.Kept | None = None,
) -> Outputs[ArrayT]:
    """Run one forward function; `adds` and `statistics` say which of its kind it is.

    `kept` is given where the short road was tried, and a later call like this one may take it.
    """
    masked = where is not None or valid_rows is not None
    if kept is None and not masked and mean_out is None and rstd_out is None:
        kept = _fast.kept(function, options, out_dtype)
        if kept is not None and (residual is not None) == adds:
            done = _fast.forward(kept, x, residual, weight, bias, out, residual_out)
            if done is not None:
                return Outputs(*done)
    from ._border import Caller, dtype_name
    from ._check import Options, check_forward

    caller = Caller("x", x)
    checked = check_forward(
        function,
        norm,
        caller.space,
        x=caller.x,
        residual=caller.input("residual", residual) if adds else None,
        weight=caller.parameter("weight", weight),
        bias=caller.parameter("bias", bias),
        where=caller.optional("where", where),
        valid_rows=caller.optional("valid_rows", valid_rows),
        options=Options(*options),
        out=caller.output("out", out),
        out_dtype=dtype_name("out_dtype", out_dtype),
        residual_out=caller.output("residual_out", residual_out),
        mean_out=caller.output("mean_out", mean_out),
        rstd_out=caller.output("rstd_out", rstd_out),
        statistics=statistics,
    )
    began = _fast.epoch
    launched = backend(caller.x.device).forward(checked.by_heads())
    if launched is not None and kept is not None:
        arrays = (x, residual, weight, bias, out, residual_out)
        _fast_learn.remember(kept, *arrays, checked, launched, began)
    return Outputs(
        caller.give(checked.y, out),
        caller.give(checked.residual_out, residual_out),
        caller.give(checked.mean, mean_out),
        caller.give(checked.rstd, rstd_out),
    )


def backward(
    function: str,
    norm: Norm,
    dout: object,
    x: ArrayT,
    weight: object,
    bias: object,
    options: Values,
    *,
    mean: object = None,
    rstd: object,
    where: object,
    valid_rows: object,
    need_dx: object,
    need_dweight: object,
    dx_out: object,
    dweight_out: object,
    dbias_out: object,
    dweight_dtype: object,
    dresidual_out: object = None,
    x_dtype: object = None,
    added: bool = False,
) -> Gradients[ArrayT]:
    """Run one backward function; `added` says that x is the residual_out of an add_* function."""
    arrays = dout, x, dresidual_out, weight, mean, rstd, bias, dx_out, dweight_out, dbias_out
    arguments, kept = (*arrays, need_dx, need_dweight), None
    if where is None and valid_rows is None:
        dtypes = None if dweight_dtype is None and x_dtype is None else (dweight_dtype, x_dtype)
        kept = _fast.kept(function, options, dtypes)
        if kept is not None:
            done = _fast_backward.backward(kept, arguments)
            if done is not None:
                return Gradients(*done)
    from ._border import Caller, dtype_name
    from ._check import Options, check_backward

    caller = Caller("residual_out" if added else "x", x)
    call = check_backward(
        function,
        norm,
        caller.space,
        dout=caller.input("dout", dout),
        dresidual_out=caller.optional("dresidual_out", dresidual_out),
        x=caller.x,
        weight=caller.parameter("weight", weight),
        bias=caller.parameter("bias", bias),
        mean=caller.optional("mean", mean),
        rstd=caller.optional("rstd", rstd),
        where=caller.optional("where", where),
        valid_rows=caller.optional("valid_rows", valid_rows),
        options=Options(*options),
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=caller.output("dx_out", dx_out),
        dweight_out=caller.output("dweight_out", dweight_out),
        dbias_out=caller.output("dbias_out", dbias_out),
        dweight_dtype=dtype_name("dweight_dtype", dweight_dtype),
        x_dtype=dtype_name("x_dtype", x_dtype),
        added=added,
    )
    if call.dx is not None or call.dweight is not None or call.dbias is not None:
        began = _fast.epoch
        launches = backend(caller.x.device).backward(call.by_heads())
        if launches is not None and kept is not None:
            _fast_backward.remember(kept, arguments, call, launches, began)
    dx = caller.give(call.dx, dx_out)
    return Gradients(
        dx,
        dx if call.dresidual is None else caller.give(call.dresidual, None),
        caller.give(call.dweight, dweight_out),
        caller.give(call.dbias, dbias_out),
    )


def qk_kept(eps: object, weight_offset: object, cast: object) -> _fast.Kept | None:
    """What the short road has kept of qk_norm with these options."""
    options = eps, weight_offset, -1, cast, False, "keep", 1, None
    return _fast.kept("qk_norm", options, None)


def qk_forward(
    q: ArrayT,
    k: ArrayT,
    q_weight: object,
    k_weight: object,
    eps: object,
    weight_offset: object,
    cast: object,
    q_out: object,
    k_out: object,
    kept: _fast.Kept | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Run qk_norm; `kept` is as in `forward`."""
    arrays = q, k, q_weight, k_weight, q_out, k_out
    began = _fast.epoch
    if kept is None:
        kept = qk_kept(eps, weight_offset, cast)
        if kept is not None:
            done = _fast_pair.forward(kept, *arrays)
            if done is not None:
                return done
    from ._border import Caller
    from ._check import Options, check_qk

    q_caller, k_caller = Caller("q", q), Caller("k", k)
    q_caller.same_library(k_caller)
    q_call, k_call = check_qk(
        q_caller.space,
        q=q_caller.x,
        k=k_caller.x,
        q_weight=q_caller.parameter("q_weight", q_weight),
        k_weight=k_caller.parameter("k_weight", k_weight),
        options=Options(eps, weight_offset, cast=cast),
        q_out=q_caller.output("q_out", q_out),
        k_out=q_caller.output("k_out", k_out),
    )
    launched = backend(q_caller.x.device).forward_pair(q_call, k_call)
    if launched is not None and kept is not None:
        _fast_pair.remember(kept, *arrays, q_call, k_call, launched, began)
    return q_caller.give(q_call.y, q_out), k_caller.give(k_call.y, k_out)
