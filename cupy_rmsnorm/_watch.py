# SPDX-License-Identifier: Apache-2.0
"""Looks over the GPU backend's shoulder, if the environment asks for it before the import.

``CUPY_RMSNORM_DEBUG=1`` waits for each call, so that an error on the GPU is raised by the call that
made it and says which that was; while a stream is captured into a graph, nothing waits.
``CUPY_RMSNORM_NVTX=1`` puts each call into an NVTX range with its function's name. Neither changes
a result. Calls that are watched take no short road.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from . import _cuda, _kernel
from ._call import Array, Backward, Forward
from ._cuda_backward import BackwardKind
from ._device import current_device, runtime
from ._plan import Plan, choose_plan
from ._plan_backward import choose_backward_plan

DEBUG = os.environ.get("CUPY_RMSNORM_DEBUG") == "1"
NVTX = os.environ.get("CUPY_RMSNORM_NVTX") == "1"


def forward(call: Forward) -> None:
    """`_cuda.forward`, watched."""
    with _watched(call):
        _cuda.forward(call)


def backward(call: Backward) -> None:
    """`_cuda.backward`, watched."""
    with _watched(call):
        _cuda.backward(call)


@contextlib.contextmanager
def _watched(call: Forward | Backward) -> Iterator[None]:
    with _range(call.function) if NVTX else contextlib.nullcontext():
        if not DEBUG:
            yield
            return
        try:
            yield
            with current_device(call.space.device.index):
                if not runtime().streamIsCapturing(call.space.stream):
                    runtime().streamSynchronize(call.space.stream)
        except Exception as error:
            raise RuntimeError(f"{_describe(call)}: {error}") from error


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    from cupy.cuda import nvtx

    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()


def _describe(call: Forward | Backward) -> str:
    """Function, device, arrays and plan of a call."""
    values = ((name, getattr(call, name)) for name in type(call).__dataclass_fields__)
    arrays = ", ".join(
        f"{name} {value.dtype}{list(value.shape)}"
        for name, value in values
        if isinstance(value, Array)
    )
    return f"{call.function} on {call.space.device} with {arrays} by {_plan(call)}"


def _plan(call: Forward | Backward) -> Plan:
    arch = _kernel.device_properties(call.space.device.index).arch
    if isinstance(call, Backward):
        staged_itemsize = BackwardKind.of(call).staged_itemsize
        return choose_backward_plan(call.hidden_size, call.x.dtype, staged_itemsize, arch)
    residual_dtype = call.residual.dtype if call.residual is not None else None
    return choose_plan(call.norm, call.hidden_size, call.x.dtype, residual_dtype, arch)
