# SPDX-License-Identifier: Apache-2.0
"""The short road of torch tensors; `_fast` says which calls take it.

`road` describes the tensors of any such call. The calls that a model makes most are found by
addresses alone, and torch tells in one go whether tensors like these lay there: to read each of
their attributes would cost more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

from . import _device, _torch_memory
from ._fast import LIMIT, At, Bound, BoundNorm, Done, Entry, Kept, Library, keep
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
    alike = _alike(torch)
    compiled = torch.compiler.is_dynamo_compiling
    # A launch is nothing that a mode or torch.jit.trace would see. `alike` finds no tensor like the
    # others within the latter, so that it is asked for where nothing was found alone.
    jit_traces, modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack
    new = _torch_memory.new(torch)

    def traced() -> bool:
        return bool(compiled() or jit_traces() or modes())

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
            current, device = current_device(), x.get_device()
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
        except RuntimeError:  # no memory of its own, as within vmap; or a fork without CUDA
            return None
        if forward_ad._current_level >= 0 or modes() or jit_traces():
            return None
        if grad_enabled():
            for array in (x, weight, bias, residual):
                if array is not None and array.requires_grad:
                    return None
        kind = (
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
        stream = raw_stream(device)
        at = (stream, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, 0, 0)
        if out is not None and bound is None:
            found = kept.launches.get(at)
            if found is not None and found[2] == kind:
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
        if (
            (cls is not parameter and cls is not tensor)
            or forward_ad._current_level >= 0
            or modes()
        ):
            return long_way(kept, weight, x, out)
        try:
            device = current_device()
            if grad_enabled() and (x.requires_grad or weight.requires_grad):
                return None
            if out is None:
                made = kept.made.get(x.shape)
                if made is None or x.get_device() != device or not x.is_contiguous():
                    return first_made(kept, weight, x)
                y = new(made, x.stride(), x.dtype)
                if y is None:
                    return long_way(kept, weight, x, out)
            at = (device, raw_stream(device), x.data_ptr(), y.data_ptr(), weight.data_ptr())
            found = kept.launches.get(at)
            if found is not None and found[2](x, weight) and found[3](y):
                if found[0]():
                    return None
                if out is not None:
                    increment_version((out,))
                return y
        except AttributeError:  # an output that is no tensor
            return None
        except RuntimeError:  # as in `road`; or a launch that failed
            return None
        bound = new_place(kept, at, (x, weight), (y,))
        if out is not None or bound is None:
            return long_way(kept, weight, x, out, bound)
        kind = (device, device, x.dtype, x.shape, weight.dtype, weight.shape, *8 * (None,))
        entry: Entry | None = kept.entries.get(kind)
        if entry is None or not weight.is_contiguous():
            return None
        _, stream, x_at, y_at, weight_at = at
        places = (stream, x_at, 0, weight_at, 0, y_at, 0, 0, 0)
        done = entry.run(kept, kind, places, (x, None, weight, None, y, None), bound)
        return None if done is None else done[0]

    def add(kept: Kept, weight: Any, x: Any, residual: Any, out: Any, residual_out: Any) -> bool:
        bound = None
        if forward_ad._current_level < 0 and not modes():
            device = current_device()
            try:
                if grad_enabled() and (
                    x.requires_grad or residual.requires_grad or weight.requires_grad
                ):
                    return False
                at = (
                    device,
                    raw_stream(device),
                    x.data_ptr(),
                    residual.data_ptr(),
                    weight.data_ptr(),
                    out.data_ptr(),
                    residual_out.data_ptr(),
                )
                found = kept.launches.get(at)
                if (
                    found is not None
                    and found[2](x, residual, weight)
                    and found[3](out, residual_out)
                ):
                    if found[0]():
                        return False
                    increment_version((out, residual_out))
                    return True
                bound = new_place(kept, at, (x, residual, weight), (out, residual_out))
            except AttributeError:  # not all of them are tensors
                pass
            except RuntimeError:  # no memory of its own, as within vmap; or a launch that failed
                return False
        return road(kept, x, residual, weight, None, out, residual_out, None, bound) is not None

    def new_place(
        kept: Kept, at: At, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
    ) -> Bound | None:
        """Where a launch is kept, with what knows inputs and outputs like these."""
        if any(type(array) not in (tensor, parameter) for array in (*inputs, *outputs)):
            return None
        if jit_traces():
            return None
        if len(set(map(id, inputs))) < len(inputs):  # which torch never calls alike
            return None
        return kept.launches, at, (alike(*inputs), alike(*outputs))

    def bind(kept: Kept, weight: Any, general: BoundNorm) -> BoundNorm:
        def bound(x: Any, out: Any = None) -> Any:
            if type(x) is tensor and not compiled():
                y = plain(kept, weight, x, out)
                if y is not None:
                    return y
            return general(x, out)

        return bound

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
        compiled=compiled,
        traced=traced,
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


def _alike(torch: Any) -> Callable[..., Callable[..., bool]]:
    """tensors -> what tells of others whether each is like its counterpart, but for its address.

    It is what torch.compile asks before it runs compiled code, if that is still there: a single
    call that costs less than the few attributes that it stands for.
    """
    with contextlib.suppress(AttributeError, TypeError):
        guards, some = torch._C._dynamo.guards.TensorGuards, torch.empty(0)

        def guarded(*tensors: Any) -> Callable[..., bool]:
            check: Callable[..., bool] = guards(
                *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
            ).check
            return check

        if guarded(some)(some):
            return guarded

    def describe(tensors: tuple[Any, ...]) -> list[Hashable]:
        return [
            (
                type(tensor),
                tensor.dtype,
                tensor.get_device(),
                tensor.shape,
                tensor.stride(),
                tensor.requires_grad,
            )
            for tensor in tensors
        ]

    def alike(*tensors: Any) -> Callable[..., bool]:
        known = describe(tensors)
        return lambda *others: not torch._C._is_tracing() and describe(others) == known

    return alike
