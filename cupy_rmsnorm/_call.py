# SPDX-License-Identifier: Apache-2.0
"""The records that one call hands down from the border to a backend. Data only."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

Norm = Literal["rms", "layer"]
Cast = Literal["once", "before_weight"]
Masked = Literal["keep", "zero"]


class Device(NamedTuple):
    """Where an array lies: ``("cpu", 0)`` or ``("cuda", index)``."""

    kind: Literal["cpu", "cuda"]
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Array:
    """One array as a backend sees it.

    `strides` count elements. `native` is the object of the caller's library (returned to the
    caller when the array is an output); it keeps the memory alive. `numpy` is an ndarray over the
    same memory for arrays on the CPU and None for arrays on a GPU.
    """

    name: str
    native: Any
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    numpy: Any = None
    readonly: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Space(Protocol):
    """The caller's library on one device: where a backend gets memory, and on which stream.

    `stream` is the raw handle of the stream that is current for the caller's library (0 on the
    CPU). Everything a Space allocates or copies is ordered on that stream.
    """

    device: Device
    stream: int

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """A new C-contiguous array of the caller's library."""

    def contiguous(self, array: Array) -> Array:
        """A C-contiguous copy of `array` on this space's stream."""

    def assign(self, target: Array, source: Array) -> None:
        """Write ``target[...] = source`` (equal shape and dtype) on this space's stream."""


RowsT = TypeVar("RowsT", bound="Rows")
ONE_A_ROW = ("where", "valid_rows", "mean", "rstd")  # the other arrays end with the hidden axis


@dataclass(slots=True)
class Rows:
    """What every operation shares: the rows, the options, the mask.

    A checked call has the caller's shapes; backends get it as `by_heads` makes it.
    """

    function: str  # the public function's name, for messages
    norm: Norm
    space: Space
    x: Array  # backward of add_*: the saved residual_out
    normalized_ndim: int  # how many trailing axes are normalised
    weight: Array | float  # a float is a constant; no weight is the constant 1.0
    weight_offset: float
    eps: float
    cast: Cast
    per_head: bool
    where: Array | None
    valid_rows: Array | None
    masked: Masked
    # The hidden axis in so many parts, each normalised apart: `by_heads` makes it 1.
    groups: int = dataclasses.field(default=1, kw_only=True)
    # How many of a row's first columns the statistic comes from; None: all.
    partial: int | None = dataclasses.field(default=None, kw_only=True)
    # How many neighbouring rows share an element of the masks.
    mask_rows: int = dataclasses.field(default=1, kw_only=True)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The leading axes, one row each."""
        return self.x.shape[: len(self.x.shape) - self.normalized_ndim]

    @property
    def rows(self) -> int:
        return math.prod(self.row_shape)

    @property
    def hidden_size(self) -> int:
        return math.prod(self.x.shape[len(self.x.shape) - self.normalized_ndim :])

    def by_heads(self: RowsT) -> RowsT:
        """The same call with its groups as heads: views in which each group is a row."""
        if self.groups == 1:
            return self
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ONE_A_ROW
        }
        views = {
            name: _split(value, self.groups)
            for name, value in values.items()
            if isinstance(value, Array)
        }
        changes = {"groups": 1, "mask_rows": self.groups, "per_head": True}
        return dataclasses.replace(self, **changes, **views)  # type: ignore[arg-type]


def _split(array: Array, groups: int) -> Array:
    """A view with the last axis as two: groups, and the elements of one."""
    *leading, size = array.shape
    part, stride = size // groups, array.strides[-1]
    shape = (*leading, groups, part)
    return dataclasses.replace(
        array,
        native=None if array.native is None else array.native.reshape(shape),
        shape=shape,
        strides=(*array.strides[:-1], part * stride, stride),
        numpy=None if array.numpy is None else array.numpy.reshape(shape),
    )


@dataclass(slots=True)
class Forward(Rows):
    """A checked forward call; every output is allocated."""

    residual: Array | None
    bias: Array | float | None
    y: Array
    residual_out: Array | None  # given if and only if residual is
    mean: Array | None  # None: the statistic is not asked for
    rstd: Array | None


@dataclass(slots=True)
class Backward(Rows):
    """A checked backward call; every output that is asked for is allocated."""

    dout: Array
    dresidual_out: Array | None  # gradient that arrives at residual_out, added after the Jacobian
    mean: Array | None  # None: recompute from x
    rstd: Array | None
    dx: Array | None
    dresidual: Array | None  # only where its dtype differs from dx's; else the caller gets dx
    dweight: Array | None
    dbias: Array | None


@dataclass(frozen=True, slots=True)
class WarmupCall:
    """A call that `warmup` prepares, as `by_heads` makes it: what chooses its kernels."""

    op: str  # a public function's name
    hidden_size: int  # of a group
    dtype: str  # of x; backward of add_*: of residual_out
    weight_dtype: str | None  # None: no weight, or a constant
    bias_dtype: str | None  # None: no bias
    residual_dtype: str | None  # given if and only if the op is a forward function with a residual
    out_dtype: str  # forward: of y; backward: of dx
    dout_dtype: str | None  # given if and only if the op is a backward function
    dweight_dtype: str | None  # None: no dweight
    cast: Cast
    per_head: bool
    masked: Masked | None  # None: no mask
    groups: int = 1  # if there are several: the heads
    partial: int | None = None
    need_dx: bool = True  # of a backward function
