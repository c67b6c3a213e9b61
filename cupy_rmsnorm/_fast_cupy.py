# SPDX-License-Identifier: Apache-2.0
"""The short road of CuPy arrays; `_fast` says which calls take it.

Arrays are described the same way in four functions, for the sake of their speed: each with all
that chose its launch in one key. Length and size of a matrix cost less than its shape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from . import _device
from ._dtypes import numpy_dtype
from ._fast import Bound, BoundNorm, Done, Entry, Kept, Library, keep


def library(cupy: Any) -> Library:
    """What the short road asks of CuPy."""
    ndarray, current_stream = cupy.ndarray, cupy.cuda.get_current_stream
    current_device = _device.runtime().getDevice

    def strided_address(array: Any, device: int) -> int:
        if type(array) is not ndarray:
            return 0
        data = array.data
        return data.ptr if data.device_id == device else 0

    def address(array: Any, device: int) -> int:
        at = strided_address(array, device)
        return at if at and array._c_contiguous else 0

    def road(
        kept: Kept,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        out: Any,
        residual_out: Any,
        learnt: Entry | None = None,
        bound: Bound | None = None,
    ) -> Done | None:
        residual_at = weight_at = bias_at = y_at = residual_out_at = 0
        weight_dtype = weight_shape = bias_dtype = bias_shape = None
        residual_dtype = residual_shape = y_dtype = y_shape = None
        residual_out_dtype = residual_out_shape = None
        data = x.data
        device = data.device_id
        x_at = data.ptr
        x_shape = x.shape if x._c_contiguous else (x.shape, x.strides)
        if weight is not None:
            if type(weight) is not ndarray or not weight._c_contiguous:
                return None
            weight_at = weight.data.ptr
            weight_dtype = weight.dtype
            weight_shape = weight.shape
        if bias is not None:
            if type(bias) is not ndarray or not bias._c_contiguous:
                return None
            bias_at = bias.data.ptr
            bias_dtype = bias.dtype
            bias_shape = bias.shape
        if residual is not None:
            if type(residual) is not ndarray:
                return None
            residual_at = residual.data.ptr
            residual_dtype = residual.dtype
            residual_shape = residual.shape
            if not residual._c_contiguous:
                residual_shape = residual_shape, residual.strides
        if out is not None:
            if type(out) is not ndarray:
                return None
            y_at = out.data.ptr
            y_dtype = out.dtype
            y_shape = out.shape if out._c_contiguous else (out.shape, out.strides)
        if residual_out is not None:
            if type(residual_out) is not ndarray:
                return None
            residual_out_at = residual_out.data.ptr
            residual_out_dtype = residual_out.dtype
            residual_out_shape = residual_out.shape
            if not residual_out._c_contiguous:
                residual_out_shape = residual_out_shape, residual_out.strides
        try:
            current = current_device()
        except RuntimeError:  # a fork without CUDA: the general road says so
            return None
        kind = (
            "cupy",  # a torch tensor of the same shape may lie in the same memory
            current,
            device,
            x.dtype,
            x_shape,
            weight_dtype,
            weight_shape,
            bias_dtype,
            bias_shape,
            residual_dtype,
            residual_shape,
            y_dtype,
            y_shape,
            residual_out_dtype,
            residual_out_shape,
        )
        stream = current_stream(device).ptr
        at = (stream, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, 0, 0)
        if out is not None and bound is None:
            found = kept.launches.get(at)
            if found is not None and found[2] == kind:
                try:
                    if found[0]():
                        return None
                except RuntimeError:
                    return None
                return out, residual_out, None, None
        if learnt is not None:
            keep(kept, kind, learnt)
            return None
        entry: Entry | None = kept.entries.get(kind)
        if entry is None:
            return None
        return entry.run(kept, kind, at, (x, residual, weight, bias, out, residual_out), bound)

    def plain(kept: Kept, weight: Any, x: Any, out: Any) -> Any:
        bound = None
        if (
            type(out) is ndarray
            and type(weight) is ndarray
            and x._c_contiguous
            and out._c_contiguous
            and weight._c_contiguous
        ):
            device = current_device()
            rows = y_rows = None
            if x.ndim == out.ndim == 2 and weight.ndim == 1:
                rows, y_rows = len(x), len(out)
                size, y_size, columns = x.size, out.size, len(weight)
            else:
                size, y_size, columns = x.shape, out.shape, weight.shape
            place = (
                device,
                current_stream(device).ptr,
                x.data.ptr,
                out.data.ptr,
                weight.data.ptr,
                x.dtype,
                out.dtype,
                weight.dtype,
                rows,
                size,
                y_rows,
                y_size,
                columns,
            )
            try:
                found = kept.launches[place]
                return None if found[0]() else out
            except KeyError:
                bound = (kept.launches, place, ())
            except RuntimeError:
                return None
        done = road(kept, x, None, weight, None, out, None, None, bound)
        return None if done is None else done[0]

    def add(kept: Kept, weight: Any, x: Any, residual: Any, out: Any, residual_out: Any) -> bool:
        bound = None
        if (
            type(residual) is type(weight) is type(out) is type(residual_out) is ndarray
            and x._c_contiguous
            and residual._c_contiguous
            and weight._c_contiguous
            and out._c_contiguous
            and residual_out._c_contiguous
        ):
            device = current_device()
            rows = residual_rows = y_rows = sum_rows = None
            if x.ndim == residual.ndim == out.ndim == residual_out.ndim == 2 and weight.ndim == 1:
                rows, residual_rows = len(x), len(residual)
                y_rows, sum_rows = len(out), len(residual_out)
                size, residual_size, columns = x.size, residual.size, len(weight)
                y_size, sum_size = out.size, residual_out.size
            else:
                size, residual_size, columns = x.shape, residual.shape, weight.shape
                y_size, sum_size = out.shape, residual_out.shape
            place = (
                device,
                current_stream(device).ptr,
                x.data.ptr,
                residual.data.ptr,
                weight.data.ptr,
                out.data.ptr,
                residual_out.data.ptr,
                x.dtype,
                residual.dtype,
                weight.dtype,
                out.dtype,
                residual_out.dtype,
                rows,
                size,
                residual_rows,
                residual_size,
                y_rows,
                y_size,
                sum_rows,
                sum_size,
                columns,
            )
            try:
                found = kept.launches[place]
                return not found[0]()
            except KeyError:
                bound = (kept.launches, place, ())
            except RuntimeError:
                return False
        return road(kept, x, residual, weight, None, out, residual_out, None, bound) is not None

    def bind(kept: Kept, weight: Any, general: BoundNorm) -> BoundNorm:
        # An array keeps its memory and its dtype for life: the weight needs no further look.
        own = Kept(kept.out_like_x)
        launches = own.launches

        def bound(x: Any, out: Any = None) -> Any:
            if type(x) is not ndarray:
                return general(x, out)
            how = None
            try:
                if type(out) is ndarray and x._c_contiguous and out._c_contiguous:
                    device = current_device()
                    rows = y_rows = None
                    if x.ndim == out.ndim == 2:
                        rows, y_rows = len(x), len(out)
                        size, y_size = x.size, out.size
                    else:
                        size, y_size = x.shape, out.shape
                    place = (
                        device,
                        current_stream(device).ptr,
                        x.data.ptr,
                        out.data.ptr,
                        x.dtype,
                        out.dtype,
                        rows,
                        size,
                        y_rows,
                        y_size,
                    )
                    found = launches.get(place)
                    if found is None:  # what `bound` refers to lives: `_fast.forget` clears that
                        how = (own.launches, place, ())
                    elif not found[0]():
                        return out
                done = road(kept, x, None, weight, None, out, None, None, how)
            except RuntimeError:  # of the launch, or in a process that CUDA does not serve
                done = None
            return general(x, out) if done is None else done[0]

        return bound

    def maker(shape: tuple[int, ...], name: str) -> Callable[[Any], Any]:
        dtype = numpy_dtype(name)
        return lambda x: ndarray(shape, dtype)

    return Library(
        road=road,
        plain=plain,
        add=add,
        bind=bind,
        compiled=None,
        traced=None,
        input=address,
        strided_input=strided_address,
        strided_output=strided_address,
        strides=operator.attrgetter("strides"),
        maker=maker,
        new_at=operator.attrgetter("data.ptr"),
        stream=lambda index: current_stream(index).ptr,
        written=None,
    )
