# SPDX-License-Identifier: Apache-2.0
"""What the signatures and docstrings of the public functions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, TypeVar

Axis = int | tuple[int, ...]
CastOption = Literal["once", "before_weight"]
MaskedOption = Literal["keep", "zero"]

Function = TypeVar("Function", bound=Callable[..., object])


def documented(function: Function) -> Function:
    """Replace each line ``{name}`` of a docstring by the paragraph of that name."""
    if function.__doc__:  # python -OO has none
        lines = inspect.cleandoc(function.__doc__).splitlines()
        function.__doc__ = "\n".join(
            PARAGRAPHS[line[1:-1]] if line.startswith("{") else line for line in lines
        )
    return function


PARAGRAPHS = {
    name: inspect.cleandoc(text)
    for name, text in {
        "x": """
            x : array
                float16, bfloat16, float32 or float64, of any strides. NumPy, torch and CuPy arrays,
                and any array with ``__dlpack__``, ``__cuda_array_interface__`` or
                ``__array_interface__``. Never written, unless it is also an output.
        """,
        "parameters": """
            weight : array or number, optional
                Shape of the normalised axes, with one more leading axis if `per_head`. Its dtype is
                independent of x's among float16, bfloat16 and float32; float64 goes with float64
                only. A Python or NumPy number is a constant.
            bias : array or number, optional
                Added after the multiplication; shape and dtypes as of `weight`. A number goes with
                a number as `weight` only. It is the last argument that may be positional: `eps` and
                all others go by name.
        """,
        "bound_parameters": """
            weight : array, number or None
                Shape of the normalised axes, with one more leading axis if `per_head`. Its dtype is
                independent of x's among float16, bfloat16 and float32; float64 goes with float64
                only. A Python or NumPy number is a constant.
            bias : array or number, optional
                Added after the multiplication; shape and dtypes as of `weight`. A number goes with
                a number as `weight` only.
        """,
        "options": """
            weight_offset : float, default 0.0
                Added to `weight` in float32 before the multiplication (Gemma: 1.0).
            axis : int or tuple of int, default -1
                The last axis, or trailing axes such as ``(-2, -1)``, which form one row together.
            cast : {"once", "before_weight"}, default "once"
                "once" multiplies in float32 and rounds once (torch, Gemma). "before_weight" rounds
                the normalised value to x's dtype first (Llama in Hugging Face).
            per_head : bool, default False
                `weight` and `bias` have a leading axis for heads: their shape is ``x.shape[-2:]``.
            groups : int, default 1
                The last axis in so many equal parts, each normalised apart, as grouped norms and
                Mamba-style norms need; `weight` and `bias` keep their full length. Statistics then
                have an axis of groups at their end. Not with `per_head` or several axes.
            where : array, optional
                Boolean, one element a row (``x.shape[:-1]`` for ``axis=-1``), which stands for all
                groups of the row; True is computed.
            valid_rows : array, optional
                int32 or int64, shape () or (1,), on x's device: how many leading rows are computed,
                clamped to [0, rows]. With `where`, a row is computed if both say so.
        """,
        "partial": """
            partial : int, optional
                The statistic comes from so many first columns of a row (of each group, if there are
                groups), all of which are scaled by it; by default from every column.
        """,
        "bound_options": """
            weight_offset, axis, cast, per_head, groups, out_dtype
                As in the function that this binds.
        """,
        "masked": """
            masked : {"keep", "zero"}, default "keep"
                What becomes of rows that are not computed: "keep" leaves them untouched in every
                output and needs every output given, "zero" zeroes them.
        """,
        "masked_backward": """
            masked : {"keep", "zero"}, default "keep"
                Taken so that forward's options can be passed on. A row that was not computed has a
                zero dx and no share in dweight and dbias either way.
        """,
        "out": """
            out : array, optional
                Of x's library, shape and device; returned as the same object. It may be exactly x.
            out_dtype : dtype, optional
                The output's dtype if it is not x's; must agree with `out`.
        """,
        "residual": """
            residual : array
                Of x's shape; its dtype is independent of x's.
        """,
        "residual_out": """
            residual_out : array, optional
                Of residual's dtype; returned as the same object. It may be exactly residual or x.
        """,
        "mean_out": """
            mean_out : array, optional
                For mean, of its shape and dtype; returned as the same object.
        """,
        "rstd_out": """
            rstd_out : array, optional
                For rstd, of its shape and dtype; returned as the same object.
        """,
        "y": """
            y : array
                Of x's library and shape; of x's dtype if neither `out_dtype` nor `out` says
                otherwise. It is `out` if that was given.
        """,
        "residual_sum": """
            residual_out : array
                ``x + residual``, rounded to residual's dtype.
        """,
        "mean_returned": """
            mean : array
                float32 (float64 for float64), one element a row.
        """,
        "rstd_rms": """
            rstd : array
                float32 (float64 for float64), one element a row: ``1 / sqrt(mean(x ** 2) + eps)``
                (over the first `partial` columns).
        """,
        "rstd_layer": """
            rstd : array
                float32 (float64 for float64), one element a row: ``1 / sqrt(variance + eps)``.
        """,
        "dout": """
            dout : array
                Gradient of the output; x's shape, any strides, its dtype independent of x's.
        """,
        "residual_inputs": """
            dresidual_out : array or None
                Gradient that arrives at residual_out, added after the norm's Jacobian.
            residual_out : array
                What the forward function returned under this name.
        """,
        "weight_backward": """
            weight : array or number, optional
                As given to forward.
        """,
        "mean_backward": """
            mean : array, optional
                As forward returned it, beside `rstd`; None recomputes it. It stands before `rstd`,
                where RMSNorm's functions have no `mean`: pass both by name.
        """,
        "rstd_backward": """
            rstd : array, optional
                As forward returned it; None recomputes it.
        """,
        "bias_backward": """
            bias : array or number, optional
                As given to forward: an array asks for dbias.
        """,
        "gradient_options": """
            need_dx, need_dweight : bool, default True
                False leaves a gradient out: None stands in its place.
            dx_out, dweight_out, dbias_out : array, optional
                Outputs, returned as the same objects. dx_out may be exactly x, or residual_out.
            dweight_dtype : dtype, optional
                dweight's dtype if it is not weight's; must agree with `dweight_out`.
        """,
        "x_dtype": """
            x_dtype : dtype, optional
                The dtype of forward's x, if it is not residual_out's; must agree with `dx_out`.
        """,
        "dx": """
            dx : array or None
                Of x's shape and dtype.
        """,
        "dx_residual": """
            dx : array or None
                Gradient of x.
            dresidual : array or None
                Gradient of residual: the same object as dx where their dtypes agree.
        """,
        "dweight": """
            dweight : array or None
                Of weight's shape and dtype; None if weight is no array or `need_dweight` is False.
            dbias : array or None
                Of bias's shape and dtype; None if bias is no array.
        """,
        "raises": """
            TypeError
                A wrong kind or dtype of an argument.
            ValueError
                A wrong shape, device or value; an output that overlaps another array other than by
                being exactly x or residual.
            RuntimeError
                A torch tensor that requires grad while grad mode is on: call it under
                ``torch.no_grad()``. An array on a GPU where the GPU backend cannot run.
        """,
        "raises_plain": """
            TypeError
                A wrong kind or dtype of an argument; a tensor within a transform of ``torch.func``.
            ValueError
                A wrong shape, device or value; an output that overlaps another array other than by
                being exactly an input that it may replace.
            RuntimeError
                A given output where a torch tensor requires grad while grad mode is on; a second
                derivative; a forward-mode tangent. An array on a GPU where the GPU backend cannot
                run.
        """,
        "torch": """
            With torch tensors it is differentiable, once: each tensor that requires grad gets a
            gradient of its own dtype, also under autocast, while numbers and other libraries'
            arrays are constants. Outputs cannot then be given, and masks need ``masked="zero"``.
            torch.compile, torch.export and torch.jit.trace record an operator, without a graph
            break. There x and outputs are tensors; other arrays may be NumPy's, options are
            Python's numbers, strings and tuples, or constants of NumPy's.
        """,
    }.items()
}
