# SPDX-License-Identifier: Apache-2.0
"""A function returns its input's type. mypy checks the assertions (pyproject.toml names this
file), and running them shows that they tell the truth."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

import cupy_rmsnorm as cr

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing import Any

    def assert_type(value: Any, expected: Any) -> Any:
        return value


Array = npt.NDArray[np.float32]


class Tensor:
    """Any other library's array."""


def test_numpy() -> None:
    x: Array = np.ones((2, 4), np.float32)
    assert isinstance(assert_type(cr.rms_norm(x), Array), np.ndarray)
    assert isinstance(assert_type(cr.layer_norm(x, 2.0, out=x), Array), np.ndarray)
    y, total = assert_type(cr.add_rms_norm(x, x), tuple[Array, Array])
    assert isinstance(y, np.ndarray)
    assert isinstance(total, np.ndarray)
    q, k = assert_type(cr.qk_norm(x, x), tuple[Array, Array])
    assert isinstance(q, np.ndarray)
    assert isinstance(k, np.ndarray)
    assert_type(cr.is_available(), bool)


def any_library(x: Tensor) -> None:
    """Never run: for the type checker alone."""
    assert_type(cr.rms_norm(x, x), Tensor)
    assert_type(cr.layer_norm(x, out=x), Tensor)
    assert_type(cr.add_layer_norm(x, x), tuple[Tensor, Tensor])
    assert_type(cr.rms_norm_forward(x), tuple[Tensor, Tensor])
    assert_type(cr.layer_norm_forward(x), tuple[Tensor, Tensor, Tensor])
