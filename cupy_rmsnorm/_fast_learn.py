# SPDX-License-Identifier: Apache-2.0
"""What the general road launched, kept for the short one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import _device, _fast
from ._call import Forward
from ._fast import Entry, Kept, Library

if TYPE_CHECKING:
    from ._enqueue import Launched


def remember(
    kept: Kept,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual_out: Any,
    checked: Forward,
    launched: Launched,
    began: int,
) -> None:
    """Keep what the general road launched, if the call qualifies for the short one.

    `began` is the `epoch` before the call's plan was chosen.
    """
    library = known_library(type(x))
    if library is None or checked.hidden_size == checked.groups:  # may have torch's negative bit
        return
    if _device.ready() != checked.x.device.index:
        return
    learnt = Entry(library, checked, launched, began)
    if learnt.launched_on(checked):
        library.road(kept, x, residual, weight, bias, out, residual_out, learnt)


def library_of_parameter(array: Any) -> type | None:
    """The type of x beside this weight, if the short road knows such arrays."""
    torch = sys.modules.get("torch")
    if torch is not None and type(array) in (torch.Tensor, torch.nn.Parameter):
        # To know torch wakes its CUDA, which one that stays on the CPU is not to do.
        cls = torch.Tensor if array.get_device() >= 0 else None
    else:
        cls = type(array)
    return cls if cls is not None and known_library(cls) is not None else None


def known_library(cls: type) -> Library | None:
    """The library of arrays that are exactly of `cls`; the caller has imported it."""
    if cls not in _fast.libraries:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and cls is torch.Tensor:
            from . import _fast_torch

            _fast.libraries[cls] = _fast_torch.library(torch)
        elif cupy is not None and cls is cupy.ndarray and hasattr(cls, "_c_contiguous"):
            from . import _fast_cupy

            _fast.libraries[cls] = _fast_cupy.library(cupy)
    return _fast.libraries.get(cls)
