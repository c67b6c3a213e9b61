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

from . import _cuda
from ._call import Array, Backward, Forward
from ._cuda import ForwardKind
from ._cuda_backward import BackwardKind, backward_plan
from ._device import current_device, runtime
from ._plan import Plan

DEBUG = os.environ.get("CUPY_RMSNORM_DEBUG") == "1"
NVTX = os.environ.get("CUPY_RMSNORM_NVTX") == "1"


def forward(call: Forward) -> None:
    """`_cuda.forward`, watched."""
    with _watched(call):
        _cuda.forward(call)


def forward_pair(q: Forward, k: Forward) -> None:
    """`_cuda.forward_pair`, watched."""
    with _watched(q, k):
        _cuda.forward_pair(q, k)


def backward(call: Backward) -> None:
    """`_cuda.backward`, watched."""
    with _watched(call):
        _cuda.backward(call)


@contextlib.contextmanager
def _watched(call: Forward | Backward, *others: Forward) -> Iterator[None]:
    """Of calls that are one of the caller's: function, device, stream and plan are the same."""
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
            raise RuntimeError(f"{_describe(call, *others)}: {error}") from error


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    from cupy.cuda import nvtx

    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()


def _describe(call: Forward | Backward, *others: Forward) -> str:
    """Function, device, arrays and plan of a call."""
    arrays = ", ".join(array for each in (call, *others) for array in _arrays(each))
    return f"{call.function} on {call.space.device} with {arrays} by {_plan(call)}"


def _arrays(call: Forward | Backward) -> Iterator[str]:
    """The arrays of a call, by the names that the public function has for them."""
    x = call.x.name  # also q, k and residual_out
    names = {"x": x}
    if call.function == "qk_norm":
        names |= {"weight": f"{x}_weight", "y": f"{x}_out"}
    for field in type(call).__dataclass_fields__:
        value = getattr(call, field)
        if isinstance(value, Array):
            yield f"{names.get(field, field)} {value.dtype}{list(value.shape)}"


def _plan(call: Forward | Backward) -> Plan:
    device = call.space.device.index
    if isinstance(call, Backward):
        return backward_plan(BackwardKind.of(call), call.hidden_size, device)
    return _cuda.forward_plan(ForwardKind.of(call), call.hidden_size, device)
