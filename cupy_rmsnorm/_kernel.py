# SPDX-License-Identifier: Apache-2.0
"""From a kernel's name and template arguments to a launched function."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _build, _enqueue, _source
from ._enqueue import Function, Launched

OPTIONS = ("-std=c++17",)
# Dynamic shared memory that fits beside a kernel's static part into the 48 KB of every block; the
# driver has to be asked for more.
UNASKED_SHARED_BYTES = 32 * 1024

# Parameter tables: (name, kind) in the order of the C++ struct or parameter list. Arguments are
# packed by them, and a test holds them against the C++ text. "accumulation" is float or double.
FORWARD_PARAMETERS = (
    ("y", "pointer"),
    ("residual_out", "pointer"),
    ("mean", "pointer"),
    ("rstd", "pointer"),
    ("x", "pointer"),
    ("residual", "pointer"),
    ("weight", "pointer"),
    ("bias", "pointer"),
    ("rows", "int64"),
    ("hidden_size", "int64"),
    ("next_early", "int64"),
    ("x_strides.outer", "int64"),
    ("x_strides.inner", "int64"),
    ("y_strides.outer", "int64"),
    ("y_strides.inner", "int64"),
    ("eps", "accumulation"),
    ("weight_offset", "accumulation"),
    ("weight_constant", "accumulation"),
    ("bias_constant", "accumulation"),
    ("residual_out_strides.outer", "int64"),
    ("residual_out_strides.inner", "int64"),
    ("residual_strides.outer", "int64"),
    ("residual_strides.inner", "int64"),
    ("inner_rows.count", "int64"),
    ("inner_rows.reciprocal", "int64"),
    ("weight_stride", "int64"),
    ("bias_stride", "int64"),
    ("partial", "int64"),
    ("where", "pointer"),
    ("valid_rows", "pointer"),
    ("teams", "uint32"),
    ("team_reciprocal", "uint32"),
    ("members", "uint32"),
    ("walkers", "uint32"),
    ("mask_rows.count", "int64"),
    ("mask_rows.reciprocal", "int64"),
)

# `call` goes as int64: it is a mark, not a number.
BACKWARD_PARAMETERS = (
    ("dx", "pointer"),
    ("dresidual", "pointer"),
    ("dweight", "pointer"),
    ("dbias", "pointer"),
    ("dweight_parts", "pointer"),
    ("dbias_parts", "pointer"),
    ("mean_out", "pointer"),
    ("rstd_out", "pointer"),
    ("dout", "pointer"),
    ("x", "pointer"),
    ("dresidual_out", "pointer"),
    ("weight", "pointer"),
    ("mean", "pointer"),
    ("rstd", "pointer"),
    ("where", "pointer"),
    ("valid_rows", "pointer"),
    ("rows", "int64"),
    ("hidden_size", "int64"),
    ("partial", "int64"),
    ("inner_rows", "int64"),
    ("mask_rows.count", "int64"),
    ("mask_rows.reciprocal", "int64"),
    ("heads", "int64"),
    ("parts", "int64"),
    ("dx_strides.outer", "int64"),
    ("dx_strides.inner", "int64"),
    ("dresidual_strides.outer", "int64"),
    ("dresidual_strides.inner", "int64"),
    ("dout_strides.outer", "int64"),
    ("dout_strides.inner", "int64"),
    ("x_strides.outer", "int64"),
    ("x_strides.inner", "int64"),
    ("dresidual_out_strides.outer", "int64"),
    ("dresidual_out_strides.inner", "int64"),
    ("eps", "accumulation"),
    ("weight_offset", "accumulation"),
    ("weight_constant", "accumulation"),
)

PAIR_PARAMETERS = (
    *((f"{half}.{name}", kind) for half in "qk" for name, kind in FORWARD_PARAMETERS),
    ("k_share", "int64"),
)

SUM_PARAMETERS = (
    ("dweight", "pointer"),
    ("dbias", "pointer"),
    ("dweight_parts", "pointer"),
    ("dbias_parts", "pointer"),
    ("elements", "int64"),
    ("parts", "int64"),
)

# The study kernels, one table a source file.
STUDY_PARAMETERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "study_rms_norm": (("y", "pointer"), ("x", "pointer"), ("eps", "float32"), ("g", "float32")),
    "study_layer_norm": (
        ("y", "pointer"),
        ("x", "pointer"),
        ("eps", "float32"),
        ("g", "float32"),
        ("b", "float32"),
    ),
    "study_vector_weight": (
        ("y", "pointer"),
        ("x", "pointer"),
        ("weight", "pointer"),
        ("hidden_size", "int64"),
        ("eps", "float32"),
    ),
    "study_layer_norm_vector": (
        ("y", "pointer"),
        ("x", "pointer"),
        ("weight", "pointer"),
        ("bias", "pointer"),
        ("hidden_size", "int64"),
        ("eps", "float32"),
    ),
    "study_reduction": (("y", "pointer"), ("x", "pointer"), ("eps", "float32"), ("g", "float32")),
    "study_schedule": (
        ("y", "pointer"),
        ("x", "pointer"),
        ("rows", "int64"),
        ("eps", "float32"),
        ("g", "float32"),
    ),
    "study_cooperative_groups": (
        ("y", "pointer"),
        ("x", "pointer"),
        ("eps", "float32"),
        ("g", "float32"),
    ),
}

PARAMETERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "norm_forward": FORWARD_PARAMETERS,
    "norm_forward_pair": PAIR_PARAMETERS,
    "norm_forward_staged": FORWARD_PARAMETERS,
    "norm_forward_streamed": FORWARD_PARAMETERS,
    "norm_backward": BACKWARD_PARAMETERS,
    "norm_backward_few": BACKWARD_PARAMETERS,
    "norm_backward_streamed": BACKWARD_PARAMETERS,
    "norm_backward_columns": BACKWARD_PARAMETERS,
    "norm_backward_sum": SUM_PARAMETERS,
    **STUDY_PARAMETERS,
}

_FORMATS = {
    "pointer": "Q",
    "int64": "q",
    "int32": "i",
    "uint32": "I",
    "float32": "f",
    "float64": "d",
}


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What plans and launches need to know of a GPU."""

    arch: int  # 10 * major + minor
    sm_count: int
    name: str = ""  # of the model: plan files are for one


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One instantiation of a kernel template."""

    kernel: str
    template_arguments: tuple[str, ...]

    @property
    def name_expression(self) -> str:
        return f"{self.kernel}<{', '.join(self.template_arguments)}>"


def offset(kernel: str, accumulation: str, name: str) -> int:
    """Where the pointer `name` lies among the packed arguments."""
    codes = ""
    for known, kind in PARAMETERS[kernel]:
        codes += _FORMATS[accumulation if kind == "accumulation" else kind]
        if known == name:
            break
    return struct.calcsize(f"@{codes}") - struct.calcsize("@Q")


@functools.cache
def _packer(kernel: str, accumulation: str) -> struct.Struct:
    kinds = (kind for _, kind in PARAMETERS[kernel])
    codes = (_FORMATS[accumulation if kind == "accumulation" else kind] for kind in kinds)
    # One struct is padded to its alignment; a list of parameters ends with the last one.
    end = "" if kernel in STUDY_PARAMETERS else "0Q"
    return struct.Struct(f"@{''.join(codes)}{end}")


@functools.cache
def _values(kernel: str) -> Callable[[Mapping[str, float]], tuple[float, ...]]:
    """What takes the kernel's arguments, of which there are several, out of a mapping in order."""
    return operator.itemgetter(*[name for name, _ in PARAMETERS[kernel]])


def pack(kernel: str, accumulation: str, arguments: Mapping[str, float]) -> bytes:
    """The kernel's arguments as the driver wants them: one buffer in the C ABI's layout."""
    return _packer(kernel, accumulation).pack(*_values(kernel)(arguments))


def row_count(name: str, count: int) -> dict[str, float]:
    """The members of a RowCount parameter."""
    return {f"{name}.count": count, f"{name}.reciprocal": -(-(2**62) // count)}


@functools.cache
def device_properties(device: int) -> DeviceProperties:
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(device)
    return DeviceProperties(
        10 * properties["major"] + properties["minor"],
        properties["multiProcessorCount"],
        properties["name"].decode(),
    )


def devices() -> list[DeviceProperties]:
    """Those that this process sees, in their order."""
    from cupy.cuda import runtime

    return [device_properties(index) for index in range(runtime.getDeviceCount())]


_functions: dict[tuple[Specialisation, int], Any] = {}
_locks: dict[tuple[Specialisation, int], threading.Lock] = {}


def function(specialisation: Specialisation, device: int, shared_bytes: int = 0) -> Any:
    """The loaded function, built at the first call for each (specialisation, device).

    The current device must be `device`. `shared_bytes` must not depend on anything that the
    specialisation does not fix.
    """
    key = (specialisation, device)
    try:
        return _functions[key]
    except KeyError:
        pass
    with _locks.setdefault(key, threading.Lock()):
        if key not in _functions:
            _functions[key] = build(specialisation, shared_bytes)
        return _functions[key]


def build(specialisation: Specialisation, shared_bytes: int) -> Function:
    """Compile and load one specialisation on the current device."""
    from cupy.cuda import runtime

    arch = device_properties(runtime.getDevice()).arch
    source = _source.load(specialisation.kernel)
    kernel = _build.load(source, OPTIONS, specialisation.name_expression, arch)
    if shared_bytes > UNASKED_SHARED_BYTES:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return Function(kernel.kernel, kernel.kernel.ptr, _enqueue.may_overlap(arch))


@functools.cache
def resident_blocks(function: Function, block: int, device: int) -> int:
    """How many blocks of a kernel without dynamic shared memory the device holds at once."""
    from cupy.cuda import driver

    per_sm: int = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, block, 0)
    return per_sm * device_properties(device).sm_count


def launch(
    function: Any, grid: int, block: int, shared_bytes: int, stream: int, packed_args: bytes
) -> Launched | None:
    """Enqueue one launch. The driver has copied `packed_args` when it returns.

    None comes from stand-ins, whose launches cannot be repeated without them.
    """
    size = ctypes.c_size_t(len(packed_args))
    address = ctypes.cast(ctypes.c_char_p(packed_args), ctypes.c_void_p).value
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
    extra = (ctypes.c_void_p * 5)(1, address, 2, ctypes.addressof(size), 0)
    status = _enqueue.prepare(
        function, grid, block, shared_bytes, stream, 0, ctypes.addressof(extra)
    )()
    if status:
        raise RuntimeError(f"a launch failed: {_enqueue.error_name(status)}")
    return Launched(function, grid, block, shared_bytes, packed_args)
