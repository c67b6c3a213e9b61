# SPDX-License-Identifier: Apache-2.0
"""The short road of torch tensors; `_fast` says which calls take it.

Arrays are described the same way in three functions, for the sake of their speed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from . import _device, _torch_memory
from ._fast import LIMIT, Bound, Done, Entry, Kept, Library, Short, keep
from ._layout import contiguous_strides


def library(torch: Any) -> Library:
    """What the short road asks of torch."""
    tensor, parameter = torch.Tensor, torch.nn.Parameter
    grad_enabled, forward_ad = torch.is_grad_enabled, torch.autograd.forward_ad
    increment_version = _increment_version(torch)
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is None:
        raw_stream = _public_stream(torch)
    current_device = _device.runtime().getDevice
    new = _torch_memory.new(torch)

    def strided_input(array: Any, device: int) -> int:
        cls = type(array)
        if cls is not tensor and cls is not parameter:
            return 0
        if forward_ad._current_level >= 0:  # where it may be a dual tensor
            return 0
        try:
            if array.get_device() != device or (array.requires_grad and grad_enabled()):
                return 0
            return array.data_ptr()  # type: ignore[no-any-return]
        except RuntimeError:
            return 0  # no memory of its own, as within vmap

    def strided_output(array: Any, device: int) -> int:
        if type(array) is not tensor or array.requires_grad:
            return 0
        return strided_input(array, device)

    def input(array: Any, device: int) -> int:
        at = strided_input(array, device)
        return at if at and array.is_contiguous() else 0

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
        if x.requires_grad and grad_enabled():
            return None
        # The negative bit is not asked for, which costs more than a pointer: a view that has it
        # skips every other number, and kernels take its rows without a copy only where they have
        # a single element.
        try:
            device = x.get_device()
            x_at = x.data_ptr()
            x_shape = x.shape if x.is_contiguous() else (x.shape, x.stride())
            if weight is not None:
                cls = type(weight)
                if (cls is not parameter and cls is not tensor) or not weight.is_contiguous():
                    return None
                weight_at = weight.data_ptr()
                weight_dtype = weight.dtype
                weight_shape = weight.shape
            if bias is not None:
                cls = type(bias)
                if (cls is not parameter and cls is not tensor) or not bias.is_contiguous():
                    return None
                bias_at = bias.data_ptr()
                bias_dtype = bias.dtype
                bias_shape = bias.shape
            if residual is not None:
                cls = type(residual)
                if cls is not tensor and cls is not parameter:
                    return None
                residual_at = residual.data_ptr()
                residual_dtype = residual.dtype
                residual_shape = residual.shape
                if not residual.is_contiguous():
                    residual_shape = residual_shape, residual.stride()
            if out is not None:
                if type(out) is not tensor or out.requires_grad:
                    return None
                y_at = out.data_ptr()
                y_dtype = out.dtype
                y_shape = out.shape if out.is_contiguous() else (out.shape, out.stride())
            if residual_out is not None:
                if type(residual_out) is not tensor or residual_out.requires_grad:
                    return None
                residual_out_at = residual_out.data_ptr()
                residual_out_dtype = residual_out.dtype
                residual_out_shape = residual_out.shape
                if not residual_out.is_contiguous():
                    residual_out_shape = residual_out_shape, residual_out.stride()
        except RuntimeError:  # no memory of its own, as within vmap
            return None
        if forward_ad._current_level >= 0:
            return None
        if grad_enabled():
            for array in (x, weight, bias, residual):
                if array is not None and array.requires_grad:
                    return None
        kind = (
            current_device(),
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
        stream = raw_stream(device)
        at = (stream, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, 0, 0)
        if out is not None and bound is None:
            found = kept.launches.get(at)
            if found is not None and found[1] == kind:
                try:
                    if found[0]():
                        return None
                except RuntimeError:
                    return None
                increment_version((out,) if residual_out is None else (out, residual_out))
                return out, residual_out, None, None
        if learnt is not None:
            keep(kept, kind, learnt)
            return None
        entry: Entry | None = kept.entries.get(kind)
        if entry is None:
            return None
        return entry.run(kept, kind, at, (x, residual, weight, bias, out, residual_out), bound)

    def long_way(kept: Kept, weight: Any, x: Any, out: Any, bound: Bound | None = None) -> Any:
        done = road(kept, x, None, weight, None, out, None, None, bound)
        return None if done is None else done[0]

    def first_made(kept: Kept, weight: Any, x: Any) -> Any:
        y = long_way(kept, weight, x, None)
        if y is not None and kept.out_like_x:
            if len(kept.made) >= LIMIT:
                kept.made.clear()
            kept.made[x.shape] = tuple(x.shape)
        return y

    def plain(kept: Kept, weight: Any, x: Any, out: Any) -> Any:
        cls, y = type(weight), out
        if (cls is not parameter and cls is not tensor) or forward_ad._current_level >= 0:
            return long_way(kept, weight, x, out)
        try:
            if grad_enabled() and (x.requires_grad or weight.requires_grad):
                return None
            device = x.get_device()
            current = current_device()
            shape = x.shape
            if not x.is_contiguous() or not weight.is_contiguous():
                return long_way(kept, weight, x, out)
            if out is None:
                made = kept.made.get(shape)
                if made is None or device != current:
                    return first_made(kept, weight, x)
                y = new(made, x.stride(), x.dtype)
                if y is None:
                    return long_way(kept, weight, x, out)
            elif type(out) is not tensor or out.requires_grad or not out.is_contiguous():
                return long_way(kept, weight, x, out)
            at = (raw_stream(device), x.data_ptr(), y.data_ptr(), weight.data_ptr())
        except RuntimeError:  # no memory of its own, as within vmap
            return None
        kind = (current, device, x.dtype, shape, y.dtype, y.shape, weight.dtype, weight.shape)
        found = kept.launches.get(at)
        if found is not None and found[1] == kind:
            try:
                if found[0]():
                    return None
            except RuntimeError:
                return None
            if out is not None:
                increment_version((out,))
            return y
        bound = (kept.launches, at, kind)
        if out is not None:
            return long_way(kept, weight, x, out, bound)
        allocating = (current, device, x.dtype, shape, weight.dtype, weight.shape, *8 * (None,))
        entry: Entry | None = kept.entries.get(allocating)
        if entry is None:
            return None
        stream, x_at, y_at, weight_at = at
        places = (stream, x_at, 0, weight_at, 0, y_at, 0, 0, 0)
        done = entry.run(kept, kind, places, (x, None, weight, None, y, None), bound)
        return None if done is None else done[0]

    def add(kept: Kept, weight: Any, x: Any, residual: Any, out: Any, residual_out: Any) -> bool:
        cls, bound = type(weight), None
        try:
            if (
                (cls is parameter or cls is tensor)
                and type(residual) is type(out) is type(residual_out) is tensor
                and forward_ad._current_level < 0
                and not out.requires_grad
                and not residual_out.requires_grad
                and not (
                    grad_enabled()
                    and (x.requires_grad or residual.requires_grad or weight.requires_grad)
                )
                and x.is_contiguous()
                and residual.is_contiguous()
                and weight.is_contiguous()
                and out.is_contiguous()
                and residual_out.is_contiguous()
            ):
                device = x.get_device()
                at = (
                    raw_stream(device),
                    x.data_ptr(),
                    residual.data_ptr(),
                    weight.data_ptr(),
                    out.data_ptr(),
                    residual_out.data_ptr(),
                )
                kind = (
                    current_device(),
                    device,
                    x.dtype,
                    x.shape,
                    residual.dtype,
                    residual.shape,
                    weight.dtype,
                    weight.shape,
                    out.dtype,
                    out.shape,
                    residual_out.dtype,
                    residual_out.shape,
                )
                found = kept.launches.get(at)
                if found is not None and found[1] == kind:
                    if found[0]():
                        return False
                    increment_version((out, residual_out))
                    return True
                bound = (kept.launches, at, kind)
        except RuntimeError:  # no memory of its own, as within vmap; or a launch that failed
            return False
        return road(kept, x, residual, weight, None, out, residual_out, None, bound) is not None

    def bind(kept: Kept, weight: Any) -> Short:
        return functools.partial(plain, kept, weight)

    def maker(shape: tuple[int, ...], name: str) -> Callable[[Any], Any]:
        strides, dtype = contiguous_strides(shape), getattr(torch, name)

        def make(x: Any) -> Any:
            made = new(shape, strides, dtype)
            return x.new_empty(shape, dtype=dtype) if made is None else made

        return make

    def new_at(array: Any) -> int:
        try:
            return array.data_ptr()  # type: ignore[no-any-return]
        except RuntimeError:
            return 0

    return Library(
        road=road,
        plain=plain,
        add=add,
        bind=bind,
        traced=torch.compiler.is_dynamo_compiling,
        input=input,
        strided_input=strided_input,
        strided_output=strided_output,
        strides=tensor.stride,
        maker=maker,
        new_at=new_at,
        stream=raw_stream,
        written=torch.autograd.graph.increment_version,
    )


def _public_stream(torch: Any) -> Callable[[int], int]:
    def stream(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream  # type: ignore[no-any-return]

    return stream


def _increment_version(torch: Any) -> Callable[[tuple[Any, ...]], None]:
    """torch.autograd.graph.increment_version without its Python, if that is still how it works."""
    with contextlib.suppress(AttributeError, TypeError):
        direct: Callable[[tuple[Any, ...]], None] = torch._C._increment_version
        direct((torch.empty(0),))
        return direct
    public = torch.autograd.graph.increment_version

    def increment_version(tensors: tuple[Any, ...]) -> None:
        for tensor in tensors:
            public(tensor)

    return increment_version
