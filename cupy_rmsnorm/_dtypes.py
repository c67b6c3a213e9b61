# SPDX-License-Identifier: Apache-2.0
"""The one table of dtypes: name, C++ name, size, accumulation type and NumPy dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """What the library knows of one dtype."""

    name: str
    cpp: str
    itemsize: int
    accumulation: str | None  # dtype in which rows of this dtype are summed; None: not a row dtype


TABLE = {
    dtype.name: dtype
    for dtype in (
        DType("float16", "__half", 2, "float32"),
        DType("bfloat16", "__nv_bfloat16", 2, "float32"),
        DType("float32", "float", 4, "float32"),
        DType("float64", "double", 8, "float64"),
        DType("bool", "bool", 1, None),
        DType("int32", "int", 4, None),
        DType("int64", "long long", 8, None),
    )
}

ROW_DTYPES = tuple(name for name, dtype in TABLE.items() if dtype.accumulation is not None)


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype called `name`; imports ml_dtypes for bfloat16 and for nothing else."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
