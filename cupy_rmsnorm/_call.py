# SPDX-License-Identifier: Apache-2.0
"""The records that one call hands down from the border to a backend. Data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

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


@dataclass(slots=True)
class Rows:
    """What every operation shares: the rows, the options, the mask."""

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
    """A call that `warmup` prepares: what chooses its kernels. Dtypes by name."""

    op: str  # a public function's name
    hidden_size: int
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
