# SPDX-License-Identifier: Apache-2.0
"""New torch tensors without torch's dispatch, which takes longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# (shape, strides, dtype) -> a new tensor on the current device. None: torch has to make it, as
# where a mode would see it done. Shape and strides have to be plain tuples.
New = Callable[[tuple[int, ...], tuple[int, ...], Any], Any]


@functools.cache
def new(torch: Any) -> New:
    """The way in which code that torch.compile made allocates, if it is still there."""
    try:
        empty_strided = torch._C._dynamo.guards._empty_strided_cuda
        modes = torch._C._len_torch_dispatch_stack
        empty_strided((0,), (1,), torch.float16)
        modes()
    except (AttributeError, RuntimeError, TypeError):
        return lambda shape, strides, dtype: None

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        return None if modes() else empty_strided(shape, strides, dtype)

    return allocate
