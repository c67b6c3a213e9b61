# SPDX-License-Identifier: Apache-2.0
"""Runs the library's own kernels on the CPU, one fiber a CUDA thread.

Within `installed()` the library takes genuine CuPy arrays over host memory through its own border,
checks, plans and packing; only what touches the driver is replaced.
"""

from tests.emulator.build import CompileError, EmulatorUnavailable, missing
from tests.emulator.install import installed, prefetch
from tests.emulator.launch import Function, KernelFault, LaunchError, check_parameters, launch
from tests.emulator.memory import OutOfBounds, check_guards, from_numpy, host_view, to_numpy

__all__ = [
    "CompileError",
    "EmulatorUnavailable",
    "Function",
    "KernelFault",
    "LaunchError",
    "OutOfBounds",
    "check_guards",
    "check_parameters",
    "from_numpy",
    "host_view",
    "installed",
    "launch",
    "missing",
    "prefetch",
    "to_numpy",
]
