# SPDX-License-Identifier: Apache-2.0
"""Public functions around the operations: bound weights, what the machine offers, warm-up."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from . import _fast, _fast_learn, _roads, _run
from ._call import Norm, WarmupCall
from ._docs import Axis, CastOption, MaskedOption, documented
from ._fast import BoundNorm

ArrayT = TypeVar("ArrayT")


class _Bound(functools.partial[Any]):
    """A bound norm: called without a Python frame of its own, copied and pickled by `made_of`."""

    __name__: str  # torch.jit.trace asks for it
    made_of: tuple[Any, ...]  # the arguments of _bound

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound, self.made_of

    def __repr__(self) -> str:
        return f"<bound {self.made_of[0]}>"


def _bound(
    function: str,
    norm: Norm,
    weight: object,
    bias: object,
    options: _run.Values,
    out_dtype: object,
) -> BoundNorm:
    from ._border import dtype_name, look_at_parameter
    from ._check import Options
    from ._check_tools import check_bound

    dtype = dtype_name("out_dtype", out_dtype)
    check_bound(
        look_at_parameter("weight", weight),
        look_at_parameter("bias", bias),
        Options(*options),
        dtype,
    )

    kept = _fast.kept(function, options, dtype)
    cls = _fast_learn.library_of_parameter(weight)

    def general(x: ArrayT, out: ArrayT | None = None) -> ArrayT:
        try:
            if type(x) is cls:  # then the short road was tried, unless this is being compiled
                return _roads.normalize_anew(  # type: ignore[no-any-return]
                    *(function, norm, False, x, None, weight, bias, options),
                    *(None, None, out, dtype, None, kept),
                )
            given: Any = function, norm, False, x, None, weight, bias, *options
            arguments: Any = *given, None, None, out, dtype, None
            return _roads.normalize(*arguments)  # type: ignore[no-any-return]
        except ValueError:
            _blame(x, weight, bias)
            raise

    short = general
    if kept is not None and cls is not None:
        short = _fast.bind(cls, kept, weight, bias, general)
    bound = _Bound(short)
    bound.__name__ = f"bound_{function}"
    bound.made_of = function, norm, weight, bias, options, dtype
    return bound


def _blame(x: object, *parameters: object) -> None:
    """Where x is of another shape than what is bound, an error is not to name the latter."""
    from ._refuse import ends_in

    shape = getattr(x, "shape", None)
    for parameter in parameters:
        if shape is not None:
            ends_in("x", shape, getattr(parameter, "shape", ()))


@documented
def bind_rms_norm(
    weight: object,
    bias: object = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    partial: int | None = None,
    out_dtype: object = None,
) -> BoundNorm:
    """Hold a weight and options for many calls of `rms_norm`.

    The weight is checked once. It is not copied: each call reads where it lies then, so a weight
    that was updated or moved in place is seen. Rounding is that of `rms_norm`.

    Parameters
    ----------
    {bound_parameters}
    eps : float, default 1e-6
        As in `rms_norm`.
    {bound_options}
    partial : int, optional
        As in `rms_norm`.

    Returns
    -------
    callable
        ``norm(x, out=None)``, with x and out as in `rms_norm`.

    Raises
    ------
    {raises_plain}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import bind_rms_norm
    >>> norm = bind_rms_norm(np.array([1, 2], np.float32), eps=0.0)
    >>> norm(np.array([[3, 4]], np.float32)).round(4)
    array([[0.8485, 2.2627]], dtype=float32)
    """
    options = (eps, weight_offset, axis, cast, per_head, "keep", groups, partial)
    return _bound("rms_norm", "rms", weight, bias, options, out_dtype)


@documented
def bind_layer_norm(
    weight: object,
    bias: object = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    out_dtype: object = None,
) -> BoundNorm:
    """Hold a weight and options for many calls of `layer_norm`.

    The weight is checked once. It is not copied: each call reads where it lies then, so a weight
    that was updated or moved in place is seen. Rounding is that of `layer_norm`.

    Parameters
    ----------
    {bound_parameters}
    eps : float, default 1e-5
        As in `layer_norm`.
    {bound_options}

    Returns
    -------
    callable
        ``norm(x, out=None)``, with x and out as in `layer_norm`.

    Raises
    ------
    {raises_plain}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import bind_layer_norm
    >>> norm = bind_layer_norm(np.array([1, 2], np.float32), eps=0.0)
    >>> norm(np.array([[3, 4]], np.float32))
    array([[-1.,  2.]], dtype=float32)
    """
    options = (eps, weight_offset, axis, cast, per_head, "keep", groups, None)
    return _bound("layer_norm", "layer", weight, bias, options, out_dtype)


def is_available() -> bool:
    """Whether arrays on a GPU can be computed here; `info` says why not.

    Returns
    -------
    bool
        True if there is a driver, a device, CuPy and NVRTC that fit each other.

    Examples
    --------
    >>> from cupy_rmsnorm import is_available
    >>> is_available() in (True, False)
    True
    """
    from . import _info

    return _info.available()[0]


def info() -> dict[str, Any]:
    """What the machine offers: versions, devices, and why a GPU is not used if it is not.

    Returns
    -------
    dict
        Plain strings, numbers and lists, fit for JSON; the command ``cupy-rmsnorm info`` prints it.

    Examples
    --------
    >>> from cupy_rmsnorm import info
    >>> isinstance(info(), dict)
    True
    """
    from . import _info, _plan_file

    loaded = _plan_file.loaded()
    return {
        **_info.info(),
        "plan_file": loaded.path if loaded else None,
        "plan_file_sha256": loaded.sha256 if loaded else None,
    }


def load_plans(path: str | os.PathLike[str] | None) -> None:
    """Compute by the plans of a file that ``cupy-rmsnorm tune`` wrote on this device model.

    Nothing else reads such a file. Calls from now on take its plans where it has one for their
    function, hidden size and dtypes, on every device of the file's model; CUDA graphs keep what
    they captured. A plan decides the order of a row's sum, not where a result is rounded: bits may
    differ from those without the file, within the same bounds, and depend as little on the batch,
    the alignment or the strides. Their kernels are compiled at first calls, or by `warmup` after
    this. `info` says which file is loaded, and its hash.

    Parameters
    ----------
    path : str or path-like, or None
        The file, in place of one that was loaded before; None goes back to the library's own plans.

    Raises
    ------
    TypeError
        `path` is none.
    OSError
        The file cannot be read.
    ValueError
        It was made on another device model or by another version of the library, or an entry is
        not one that tune writes: the message names the entry and the reason. Nothing has changed.
    RuntimeError
        There is no GPU here that the plans could be for.

    Examples
    --------
    >>> from cupy_rmsnorm import load_plans
    >>> load_plans(None)
    """
    from . import _plan_file

    if path is None:
        _plan_file.unload()
    else:
        try:
            name = os.fsdecode(path)
        except TypeError:
            raise TypeError(f"path must be a str or path-like, got {type(path).__name__}") from None
        from . import _info

        content = _plan_file.read(name)
        usable, reason = _info.available()
        if not usable:
            raise RuntimeError(f"plans are for a GPU's model, and there is none here: {reason}")
        _plan_file.load(name, content, sys.modules[__package__ or ""].__version__)
    _fast.forget()


def warmup(
    op: str | None = None,
    *,
    hidden_size: int | None = None,
    dtype: object = None,
    weight_dtype: object = None,
    bias_dtype: object = None,
    residual_dtype: object = None,
    out_dtype: object = None,
    dout_dtype: object = None,
    dweight_dtype: object = None,
    cast: CastOption = "once",
    per_head: bool = False,
    masked: MaskedOption | None = None,
    groups: int = 1,
    partial: int | None = None,
    need_dx: bool = True,
    need_dweight: bool = True,
    calls: Iterable[Mapping[str, Any]] | None = None,
) -> None:
    """Build the kernels of coming calls, so that none of them waits for a compilation.

    Needed before a CUDA graph captures a first call. Kernels are built for the current device;
    nothing runs on it, and no value is computed or rounded. Where no GPU is available the
    arguments are checked and nothing is built. Arrays are taken to be contiguous and to begin
    on multiples of 16 bytes, as new ones are; a call with others may compile its kernel first.
    So may the backward of a LayerNorm that is given rstd without mean.

    Parameters
    ----------
    op : str
        The name of a public function, such as "rms_norm" or "layer_norm_backward". It,
        `hidden_size` and `dtype` are required, here or in each mapping of `calls`.
    hidden_size : int
        The number of elements of a row.
    dtype : dtype
        x's dtype; for the backward of an add_* function, residual_out's.
    weight_dtype, bias_dtype : dtype, optional
        None for a call without one, or with a constant. A qk_norm whose two weights differ in
        dtype, or of which one is None, takes the kernels of two calls of rms_norm.
    residual_dtype : dtype, optional
        Of an add_* function's residual; x's if it is not given.
    out_dtype : dtype, optional
        The dtype of y, or of dx; x's if it is not given.
    dout_dtype, dweight_dtype : dtype, optional
        Of a backward function; x's and weight's if they are not given.
    cast : {"once", "before_weight"}, default "once"
        As in the call.
    per_head : bool, default False
        As in the call.
    masked : {"keep", "zero"}, optional
        As in the call; None for calls without `where` and `valid_rows`.
    groups : int, default 1
        As in the call.
    partial : int, optional
        As in the call.
    need_dx, need_dweight : bool, default True
        As in the call of a backward function, which takes other kernels without one of them.
    calls : iterable of mapping, optional
        Many calls at once, each a mapping of the parameters above, in place of all of them.

    Raises
    ------
    TypeError
        A wrong kind or dtype of an argument, or `calls` beside other arguments.
    ValueError
        An op that is none, a hidden size below 1, something that the op does not have.

    Examples
    --------
    >>> from cupy_rmsnorm import warmup
    >>> warmup("rms_norm", hidden_size=4096, dtype="bfloat16", weight_dtype="bfloat16")
    >>> warmup(calls=[dict(op="layer_norm", hidden_size=n, dtype="float32") for n in (64, 128)])
    """
    from ._check_tools import check_calls, check_only_calls

    if calls is not None:
        check_only_calls(
            op,
            hidden_size,
            dtype,
            weight_dtype,
            bias_dtype,
            residual_dtype,
            out_dtype,
            dout_dtype,
            dweight_dtype,
            None if cast == "once" else cast,
            None if per_head is False else per_head,
            masked,
            None if groups == 1 else groups,
            partial,
            None if need_dx is True else need_dx,
            None if need_dweight is True else need_dweight,
        )
        checked = check_calls(calls, _warmup_call)
    else:
        checked = [
            _warmup_call(
                op=op,
                hidden_size=hidden_size,
                cast=cast,
                per_head=per_head,
                masked=masked,
                groups=groups,
                partial=partial,
                need_dx=need_dx,
                need_dweight=need_dweight,
                dtype=dtype,
                weight_dtype=weight_dtype,
                bias_dtype=bias_dtype,
                residual_dtype=residual_dtype,
                out_dtype=out_dtype,
                dout_dtype=dout_dtype,
                dweight_dtype=dweight_dtype,
            )
        ]
    if is_available():
        from . import _cuda_warmup

        _cuda_warmup.warmup(checked)


def _warmup_call(
    *,
    op: object = None,
    hidden_size: object = None,
    cast: object = "once",
    per_head: object = False,
    masked: object = None,
    groups: object = 1,
    partial: object = None,
    need_dx: object = True,
    need_dweight: object = True,
    dtype: object = None,
    weight_dtype: object = None,
    bias_dtype: object = None,
    residual_dtype: object = None,
    out_dtype: object = None,
    dout_dtype: object = None,
    dweight_dtype: object = None,
) -> WarmupCall:
    from ._border import dtype_name
    from ._check_tools import check_warmup

    return check_warmup(
        op,
        hidden_size,
        cast,
        per_head,
        masked,
        groups,
        partial,
        need_dx,
        need_dweight,
        dtype=dtype_name("dtype", dtype),
        weight_dtype=dtype_name("weight_dtype", weight_dtype),
        bias_dtype=dtype_name("bias_dtype", bias_dtype),
        residual_dtype=dtype_name("residual_dtype", residual_dtype),
        out_dtype=dtype_name("out_dtype", out_dtype),
        dout_dtype=dtype_name("dout_dtype", dout_dtype),
        dweight_dtype=dtype_name("dweight_dtype", dweight_dtype),
    )
