# SPDX-License-Identifier: Apache-2.0
"""Aligned arrays take the kernels with wide loads, however they came, and no others do. No GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _source
from cupy_rmsnorm._kernel import Specialisation
from tests.recorder import recorded

WIDTH = 8  # float16 elements of a 16-byte load
HIDDEN_SIZES = (1024, 40_000, 1_000_000)  # held in registers, staged in shared memory, streamed
ROOM = 3


def is_aligned(specialisation: Specialisation) -> bool:
    """The template argument ALIGNED, which the C++ text places."""
    kernel = specialisation.kernel
    text = re.sub(r"//.*", "", _source.load(kernel))
    before = text[: re.search(rf"__global__[^;{{]*?\b{kernel}\(", text).start()]  # type: ignore[union-attr]
    parameters = before[before.rindex("template <") + len("template <") :]
    names = re.findall(r"(\w+)\s*[,>]", parameters)
    assert len(names) == len(specialisation.template_arguments)
    value = specialisation.template_arguments[names.index("ALIGNED")]
    assert value in ("true", "false")
    return value == "true"


def aligned(call: Callable[[], Any]) -> set[bool]:
    """Whether the kernels over rows that a call launches are those for aligned rows."""
    with recorded(90, 132) as launches:
        call()
    found = [one.specialisation for one in launches]
    kernels = [one for one in found if one.kernel != "norm_backward_sum"]
    assert kernels, "nothing was launched"
    return {is_aligned(one) for one in kernels}


def buffer(rows: int, hidden_size: int) -> np.ndarray:
    """Elements whose first lies at a multiple of 64 bytes."""
    size = rows * (hidden_size + WIDTH) + 4 * WIDTH
    room = np.zeros(size + 32, np.float16)
    start = -room.ctypes.data % 64 // room.itemsize
    return room[start : start + size]


def view(offset: int, rows: int, hidden_size: int, gap: int = 0) -> np.ndarray:
    """Rows that begin `offset` elements behind an aligned address, `gap` apart."""
    part = buffer(rows, hidden_size)[offset : offset + rows * (hidden_size + gap)]
    return part.reshape(rows, hidden_size + gap)[:, :hidden_size]


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    """Makes NumPy views into either library's arrays over the same memory."""
    if request.param == "numpy":
        return lambda array: array
    from_numpy: Callable[[np.ndarray], Any] = pytest.importorskip("torch").from_numpy
    return from_numpy


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize(
    ("offset", "gap", "expected"),
    [
        (0, 0, True),
        (WIDTH, 0, True),
        (3 * WIDTH, 0, True),
        (0, WIDTH, True),
        (1, 0, False),
        (WIDTH // 2, 0, False),
        (WIDTH - 1, 0, False),
        (0, 1, False),
        (0, WIDTH // 2, False),
    ],
)
def test_views_at_an_offset(
    library: Callable[[np.ndarray], Any], offset: int, gap: int, expected: bool, hidden_size: int
) -> None:
    shape = (ROOM, hidden_size)
    x, good = library(view(offset, *shape, gap)), library(view(0, *shape))
    weight, out = library(view(0, 1, hidden_size)[0]), library(view(0, *shape))
    residual_out = library(view(0, *shape))
    rstd = library(np.ones(ROOM, np.float32))
    outputs = {"out": out, "residual_out": residual_out}
    for call in (
        lambda: norms.rms_norm(x, weight, out=out),
        lambda: norms.rms_norm(good, weight, out=x),
        lambda: norms.layer_norm(x, weight, weight, out=out),
        lambda: norms.add_rms_norm(x, good, weight, **outputs),
        lambda: norms.add_rms_norm(good, x, weight, **outputs),
        lambda: norms.rms_norm_backward(good, x, weight, dx_out=out),
        lambda: norms.rms_norm_backward(x, good, weight, rstd, dx_out=out),
        lambda: norms.rms_norm_backward(good, good, weight, dx_out=x),
    ):
        assert aligned(call) == {expected}


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize(("offset", "expected"), [(0, True), (WIDTH, True), (1, False)])
def test_a_weight_at_an_offset(
    library: Callable[[np.ndarray], Any], offset: int, expected: bool, hidden_size: int
) -> None:
    x, out = (library(view(0, ROOM, hidden_size)) for _ in range(2))
    weight = library(view(offset, 1, hidden_size)[0])
    assert aligned(lambda: norms.rms_norm(x, weight, out=out)) == {expected}
    assert aligned(lambda: norms.layer_norm(x, None, weight, out=out)) == {expected}


class Exporter:
    """Speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1024), (1, 1, 1024), (3, 1, 1024)])
def test_strides_of_axes_of_one_element(shape: tuple[int, ...], offset: int) -> None:
    """Some torch versions export them as 1, which is no stride of whole vectors."""
    rows = int(np.prod(shape[:-1]))
    values = view(offset, rows, shape[-1]).reshape(shape)
    itemsize = values.itemsize
    strides = tuple(
        itemsize if size == 1 else stride
        for size, stride in zip(shape, values.strides, strict=True)
    )
    degenerate = np.lib.stride_tricks.as_strided(values, strides=strides)
    out = view(0, rows, shape[-1]).reshape(shape)
    arrays: list[Any] = [values, degenerate, Exporter(degenerate)]
    for x in arrays:
        assert aligned(lambda x=x: norms.rms_norm(x, out=out)) == {offset == 0}
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(values)
    tensor = tensor.as_strided(shape, [stride // itemsize for stride in strides])
    assert tensor.stride() == tuple(stride // itemsize for stride in strides)
    assert aligned(lambda: norms.rms_norm(tensor, out=torch.from_numpy(out))) == {offset == 0}
    assert aligned(lambda: norms.rms_norm(Exporter(tensor), out=out)) == {offset == 0}
