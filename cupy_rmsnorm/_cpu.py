# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend: rows in tiles that stay in the cache, over a small pool of threads.

Rows are seen as (steps, heads, hidden_size); heads is 1 unless the weight is per head. A tile is a
range of each axis. What a row gives depends on hidden_size and dtypes alone: sums run over groups
of GROUP elements and then over the groups, however the rows are cut into tiles.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ._call import Array, Backward, Forward, Rows
from ._cpu_cast import CODED, decode, encode
from ._cpu_pool import run, threads
from ._dtypes import TABLE, numpy_dtype

NDArray: TypeAlias = "np.ndarray[Any, Any]"

# Of one operand's tile in the accumulation dtype: small enough for 2 MiB of buffers a thread. A
# large tile takes the interpreter lock less often; RMSNorm's needs few buffers, or only y itself.
TILE_BYTES = 3 * 2**17
CAST_TILE_BYTES = 2**19
BARE_TILE_BYTES = 2**20
WIDER = {"float32": np.float64, "float64": np.longdouble}
GROUP = 512  # elements summed at once
FOLD = 32  # tiles that are added up before they join a range's total: long sums stay exact
PARTIAL_BYTES = 2**17  # about what the weight gradients of all ranges of steps may take
MIN_RANGES, MAX_RANGES = 2, 64  # of steps; fixed, so that the number of threads does not show
PARALLEL_SIZE = 2**18  # elements from which threads pay
UNBUFFERED_SIZE = 512  # columns from which NumPy broadcasts faster if it may not copy them first


Item = TypeVar("Item")


class Tile(NamedTuple):
    """A range of steps, of heads and of columns."""

    start: int
    stop: int
    head: int
    head_stop: int
    column: int
    column_stop: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.stop - self.start, self.head_stop - self.head, self.column_stop - self.column

    def cut_steps(self, count: int) -> list[Tile]:
        """This tile in tiles of at most `count` steps."""
        return [
            self._replace(start=start, stop=min(start + count, self.stop))
            for start in range(self.start, self.stop, count)
        ]

    def cut_columns(self, width: int) -> list[Tile]:
        """This tile in tiles of at most `width` columns."""
        return [
            self._replace(column=column, column_stop=min(column + width, self.column_stop))
            for column in range(self.column, self.column_stop, width)
        ]

    def row_values(self) -> Tile:
        """The same rows of an array that has one value a row."""
        return self._replace(column=0, column_stop=1)


class Scratch:
    """One thread's buffers by name: allocated at first use, reused from tile to tile."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._buffers: dict[str, NDArray] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> NDArray:
        dtype = np.dtype(dtype or self._dtype)
        size = math.prod(shape) * dtype.itemsize
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, np.uint8)
        buffer: NDArray = self._buffers[name][:size].view(dtype).reshape(shape)
        return buffer


def _joined(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with neighbouring axes joined where one stride walks both."""
    axes: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = (axes[-1][0] * length, stride)
        else:
            axes.append((length, stride))
    return tuple(length for length, _ in axes) or (1,)


def _slabs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Basic indices that cover the flat positions start..stop of `shape`, with their lengths."""
    inner = math.prod(shape[1:])
    while start < stop:
        first, offset = divmod(start, inner)
        if offset == 0 and stop - start >= inner:
            count = (stop - start) // inner
            yield (slice(first, first + count),), count * inner
            start += count * inner
        else:
            end = min(stop, (first + 1) * inner)
            for index, length in _slabs(shape[1:], offset, offset + end - start):
                yield (first, *index), length
            start = end


class Operand:
    """An array of any strides as rows of the accumulation dtype."""

    def __init__(
        self, dtype: str, data: NDArray, row_ndim: int, per_head: bool, accumulation: str
    ) -> None:
        self.dtype = dtype
        self.coded = self.dtype in CODED and accumulation == "float32"
        if self.coded:
            data = data.view(np.int16)
        steps = row_ndim - per_head
        self._rows = _joined(data.shape[:steps], data.strides[:steps])
        heads = data.shape[steps] if per_head else 1
        normalized = _joined(data.shape[row_ndim:], data.strides[row_ndim:])
        self._normalized_ndim = len(normalized)
        self.flat = len(normalized) == 1
        self._view = data.reshape(*self._rows, heads, *normalized)
        self.direct = (
            self.flat
            and len(self._rows) == 1
            and self.dtype == accumulation
            and data.flags.aligned
            and (normalized == (1,) or self._view.strides[-1] == data.itemsize)
        )

    def view(self, tile: Tile) -> NDArray:
        """The tile itself, of a direct operand."""
        steps, heads = slice(tile.start, tile.stop), slice(tile.head, tile.head_stop)
        view: NDArray = self._view[steps, heads, tile.column : tile.column_stop]
        return view

    def holds(self, values: NDArray) -> bool:
        """Whether `values` are a view of this operand, not of a buffer."""
        return self.direct and np.may_share_memory(self._view, values)

    def _pieces(self, tile: Tile) -> Iterator[tuple[NDArray, slice]]:
        """Views that together are the tile, and the steps of the tile that each one is."""
        columns = (slice(tile.column, tile.column_stop),) if self.flat else ()
        at = 0
        for index, length in _slabs(self._rows, tile.start, tile.stop):
            rest = (slice(None),) * (len(self._rows) - len(index))
            heads = slice(tile.head, tile.head_stop)
            place = (*index, *rest, heads, *columns)
            piece = self._view[place]
            yield piece, slice(at, at + length)
            at += length

    def read(self, tile: Tile, buffer: NDArray) -> NDArray:
        """The tile's values: a view of a direct operand, else copied into `buffer`."""
        if self.direct:
            return self.view(tile)
        target = buffer.view(np.int32) if self.coded else buffer
        for piece, steps in self._pieces(tile):
            np.copyto(target[steps].reshape(piece.shape), piece, casting="same_kind")
        if self.coded:
            decode(self.dtype, buffer)
        return buffer

    def write(self, tile: Tile, values: NDArray, where: NDArray | None, scratch: Scratch) -> None:
        """Round `values` once into the tile; only into the rows of `where` if that is given."""
        if self.coded:
            code, spare = scratch("code", values.shape), scratch("spare", values.shape)
            values = encode(self.dtype, values, code, spare)
        for piece, steps in self._pieces(tile):
            mask: Any = True
            if where is not None:
                rows = piece.shape[: piece.ndim - self._normalized_ndim]
                mask = where[steps].reshape(*rows, *((1,) * self._normalized_ndim))
            np.copyto(piece, values[steps].reshape(piece.shape), casting="unsafe", where=mask)


if hasattr(np, "vecdot"):
    _vecdot: Callable[[NDArray, NDArray], NDArray] = np.vecdot
else:  # NumPy 1

    def _vecdot(left: NDArray, right: NDArray) -> NDArray:
        sums: NDArray = np.einsum("...i,...i->...", left, right)
        return sums


def _group_sums(left: NDArray, right: NDArray | None = None) -> NDArray:
    """Sums of ``left * right`` (of `left` without `right`) over groups of the last axis.

    The dot product is NumPy's fastest sum, with ones too, and within a group it adds few numbers
    to each of its lanes.
    """
    whole = left.shape[-1] - left.shape[-1] % GROUP
    sums = []
    for part in (slice(0, whole), slice(whole, left.shape[-1])):
        values = left[..., part]
        if not (width := min(GROUP, values.shape[-1])):
            continue
        values = values.reshape(*left.shape[:-1], -1, width)
        other = np.ones(width, left.dtype)
        if right is not None:
            other = values if right is left else right[..., part].reshape(values.shape)
        sums.append(_vecdot(values, other))
    return sums[0] if len(sums) == 1 else np.concatenate(sums, -1)


def _total(parts: list[NDArray]) -> NDArray:
    """The sum over the last axis, kept as an axis of length 1, of group sums in their order."""
    sums = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
    while sums.shape[-1] > 1:
        sums = _group_sums(sums)
    return sums


def _fold(values: NDArray, buffer: NDArray) -> NDArray:
    """The sum over the first axis, by halves, without a change to `values`."""
    while (count := len(values)) > 1:
        half = count // 2
        odd = values[-1] if count % 2 else None
        values = np.add(values[:half], values[half : 2 * half], out=buffer[:half])
        if odd is not None:
            np.add(values[0], odd, out=values[0])
    total: NDArray = values[0]
    return total


class _Job:
    """What forward and backward share: the axes, the tiles, the mask, the constants."""

    keep = False  # leave rows that are not computed as they are, instead of zeroing them
    least_steps = 2  # of a tile; rows that do not allow it are cut

    def __init__(self, call: Rows) -> None:
        self.call = call
        self.accumulation = TABLE[call.x.dtype].accumulation or "float32"
        self.dtype = numpy_dtype(self.accumulation)
        self.layer = call.norm == "layer"
        self.hidden_size = call.hidden_size
        self.heads = call.row_shape[-1] if call.per_head else 1
        self.steps = call.rows // self.heads
        self.tile_size = TILE_BYTES // self.dtype.itemsize
        self._operands: list[Operand] = []
        self._weight = self.constant(call.weight)
        self._where = None if call.where is None else self._mask(call.where)
        self._valid_rows = call.rows
        if call.valid_rows is not None:
            self._valid_rows = int(call.valid_rows.numpy.reshape(())) * call.mask_rows
        self._masked = call.where is not None or self._valid_rows < call.rows
        # The columns that RMSNorm's statistic comes from.
        self.partial = call.partial or self.hidden_size

    def _operand(self, array: Array, data: NDArray, row_ndim: int) -> Operand:
        operand = Operand(array.dtype, data, row_ndim, self.call.per_head, self.accumulation)
        self._operands.append(operand)
        return operand

    def rows_of(self, array: Array) -> Operand:
        """An array of x's shape."""
        return self._operand(array, array.numpy, len(self.call.row_shape))

    def column_of(self, array: Array) -> Operand:
        """An array with one value a row."""
        return self._operand(array, array.numpy[..., None], len(self.call.row_shape))

    def _mask(self, where: Array) -> Operand:
        """`where`, with the same element for all rows that share one."""
        data = where.numpy
        if self.call.mask_rows > 1:
            data = np.broadcast_to(data[..., None], self.call.row_shape)
        return self._operand(where, data[..., None], len(self.call.row_shape))

    def constant(self, value: Array | float | None) -> Any:
        """A weight or a bias: one step of it, or a scalar."""
        if isinstance(value, Array):
            return self._operand(value, value.numpy, int(self.call.per_head))
        return None if value is None else self.dtype.type(value)

    def constant_values(self, constant: Any, tile: Tile) -> Any:
        """The values of a weight or a bias for the tile's heads and columns."""
        if not isinstance(constant, Operand):
            return constant
        tile = tile._replace(start=0, stop=1)
        return constant.read(tile, np.empty(tile.shape, self.dtype))[0]

    def weight(self, tile: Tile) -> Any:
        """weight + weight_offset for the tile, or None for a factor of 1."""
        weight = self.constant_values(self._weight, tile)
        if self.call.weight_offset != 0:
            weight = weight + self.dtype.type(self.call.weight_offset)
        return None if np.ndim(weight) == 0 and weight == 1 else weight

    @property
    def long(self) -> bool:
        """Whether a row is cut. One whose normalised axes do not join into one is taken whole."""
        return self.hidden_size > self.tile_size // self.least_steps and all(
            o.flat for o in self._operands
        )

    def head_groups(self) -> list[Tile]:
        """All steps, and as many heads as leave a tile its least steps."""
        heads = self.tile_size // self.least_steps // self.hidden_size
        heads = max(1, min(self.heads, heads))
        return [
            Tile(0, self.steps, head, min(head + heads, self.heads), 0, self.hidden_size)
            for head in range(0, self.heads, heads)
        ]

    def tile_steps(self, tile: Tile) -> int:
        """How many steps to cut `tile` into, for tiles of about the usual size."""
        steps, heads, width = tile.shape
        count = max(1, self.tile_size // (heads * width))
        return math.ceil(steps / math.ceil(steps / count))

    def run(self, work: Callable[[Item, Scratch], None], items: list[Item]) -> None:
        """`work` over all items, in as many threads as pay."""
        large = self.call.rows * self.hidden_size >= PARALLEL_SIZE

        def worker(items: Iterable[Item]) -> None:
            scratch = Scratch(self.dtype)
            with _quiet(self.hidden_size):
                for item in items:
                    work(item, scratch)

        run(items, worker, threads() - 1 if large else 0)

    def computed(self, tile: Tile, scratch: Scratch) -> NDArray | None:
        """Which rows of the tile the masks leave, or None for all of them."""
        if not self._masked:
            return None
        steps = np.arange(tile.start, tile.stop)[:, None, None]
        heads = np.arange(tile.head, tile.head_stop)[:, None]
        computed: NDArray = steps * self.heads + heads < self._valid_rows
        if self._where is not None:
            computed &= self._where.read(tile.row_values(), np.empty(computed.shape, np.bool_))
        return None if computed.all() else computed

    def average(self, sums: list[NDArray], count: int | None = None) -> NDArray:
        """Means over the rows, or over `count` of their columns, from their group sums."""
        total = _total(sums)
        means: NDArray = np.divide(total, total.dtype.type(count or self.hidden_size))
        return means.astype(self.dtype, copy=False)

    def squares(self, x: NDArray, column: int = 0) -> list[NDArray]:
        """Group sums of squares of the columns from `column` on that the statistic comes from."""
        counted = x[..., : max(0, self.partial - column)]
        return [_group_sums(counted, counted)] if counted.shape[-1] else []

    def wide_sums(self, x: NDArray, scratch: Scratch) -> NDArray:
        """Group sums for LayerNorm's mean, in a wider dtype; overwrites the buffer "code".

        y near zero is as exact as the mean, and the mean of a row may be far smaller than its
        elements: a plain sum leaves an error that is small beside these alone.
        """
        steps, heads, columns = x.shape
        count = max(1, self.tile_size // 2 // (heads * columns))
        sums = []
        for start in range(0, steps, count):
            values = x[start : start + count]
            wide = scratch("code", values.shape, WIDER[self.accumulation])
            np.copyto(wide, values)
            sums.append(_group_sums(wide))
        return np.concatenate(sums)

    def rstd(self, squares: list[NDArray]) -> NDArray:
        shifted = self.average(squares, self.partial) + self.dtype.type(self.call.eps)
        rstd: NDArray = np.reciprocal(np.sqrt(shifted))
        return rstd

    def round_to_x(self, values: NDArray, scratch: Scratch) -> NDArray:
        """`values`, rounded to x's dtype (in the buffer "code") if that comes before the weight."""
        dtype = self.call.x.dtype
        if self.call.cast == "once" or dtype not in CODED:
            return values
        code, spare = scratch("code", values.shape), scratch("rounding", values.shape)
        encode(dtype, values, code, spare)
        decode(dtype, code)
        return code

    def place(
        self, operand: Operand, tile: Tile, computed: NDArray | None, buffer: NDArray
    ) -> NDArray:
        """Where the values of an output are worked out: in the output itself if it allows that."""
        return operand.view(tile) if operand.direct and not self._keeps(computed) else buffer

    def write(
        self,
        operand: Operand,
        tile: Tile,
        values: NDArray,
        computed: NDArray | None,
        scratch: Scratch,
    ) -> None:
        """Write `values`, which may be what `place` gave; keep or zero rows not computed."""
        if computed is not None and not self.keep:
            np.copyto(values, 0, where=~computed)
        if not operand.holds(values):
            operand.write(tile, values, computed if self.keep else None, scratch)

    def _keeps(self, computed: NDArray | None) -> bool:
        return self.keep and computed is not None


@contextlib.contextmanager
def _quiet(hidden_size: int) -> Iterator[None]:
    """No floating-point warnings, and NumPy's buffer size that suits the rows."""
    before = np.getbufsize()
    with np.errstate(all="ignore"):
        if hidden_size >= UNBUFFERED_SIZE:
            np.setbufsize(16)
        try:
            yield
        finally:
            np.setbufsize(before)


class _Forward(_Job):
    def __init__(self, call: Forward) -> None:
        super().__init__(call)
        self.keep = call.masked == "keep"
        self.x, self.y = self.rows_of(call.x), self.rows_of(call.y)
        self.residual = None if call.residual is None else self.rows_of(call.residual)
        self.residual_out = None if call.residual_out is None else self.rows_of(call.residual_out)
        self.mean_out = None if call.mean is None else self.column_of(call.mean)
        self.rstd_out = None if call.rstd is None else self.column_of(call.rstd)
        self._bias = self.constant(call.bias)
        if not self.layer and self.residual is None and call.cast == "once":
            bare = self.x.direct and self.y.direct
            self.tile_size = (BARE_TILE_BYTES if bare else CAST_TILE_BYTES) // self.dtype.itemsize

    def __call__(self) -> None:
        for group in self.head_groups():
            if self.long:
                self.run(self.long_row, group.cut_steps(1))
            else:
                tile = functools.partial(self.tile, self.weight(group), self.bias(group))
                self.run(tile, group.cut_steps(self.tile_steps(group)))

    def bias(self, tile: Tile) -> Any:
        return self.constant_values(self._bias, tile)

    def tile(self, weight: Any, bias: Any, tile: Tile, scratch: Scratch) -> None:
        """A tile of whole rows."""
        computed = self.computed(tile, scratch)
        if computed is not None and self.keep and not computed.any():
            return
        mean = None
        x = self.load(tile, scratch)
        if self.residual_out is not None:
            self.write(self.residual_out, tile, x, computed, scratch)
        if self.layer:
            mean = self.average([self.wide_sums(x, scratch)])
            x = np.subtract(x, mean, out=self.target(tile, computed, scratch))
        rstd = self.rstd(self.squares(x))
        self.finish(tile, x, rstd, weight, bias, computed, scratch)
        self.write_statistics(tile, mean, rstd, computed, scratch)

    def long_row(self, tile: Tile, scratch: Scratch) -> None:
        """One row in parts, read once for each sum and once for the result."""
        computed = self.computed(tile, scratch)
        if self._keeps(computed):
            return
        mean = None
        parts = tile.cut_columns(self.tile_size // 2)
        if self.layer:
            mean = self.average(
                [self.wide_sums(self.load(part, scratch), scratch) for part in parts]
            )
        squares = []
        for part in parts:
            x = self.centered(part, mean, self.load(part, scratch), scratch)
            squares += self.squares(x, part.column)
        rstd = self.rstd(squares)
        for part in parts:
            x = self.load(part, scratch)
            if self.residual_out is not None:
                self.write(self.residual_out, part, x, computed, scratch)
            x = self.centered(part, mean, x, scratch)
            self.finish(part, x, rstd, self.weight(part), self.bias(part), computed, scratch)
        self.write_statistics(tile, mean, rstd, computed, scratch)

    def load(self, tile: Tile, scratch: Scratch) -> NDArray:
        """x, or the sum of x and residual in the buffer "x"."""
        x = self.x.read(tile, scratch("x", tile.shape))
        if self.residual is None:
            return x
        residual = self.residual.read(tile, scratch("code", tile.shape))
        return np.add(x, residual, out=scratch("x", tile.shape))

    @staticmethod
    def centered(tile: Tile, mean: NDArray | None, x: NDArray, scratch: Scratch) -> NDArray:
        return x if mean is None else np.subtract(x, mean, out=scratch("x", tile.shape))

    def target(self, tile: Tile, computed: NDArray | None, scratch: Scratch) -> NDArray:
        return self.place(self.y, tile, computed, scratch("x", tile.shape))

    def finish(
        self,
        tile: Tile,
        x: NDArray,
        rstd: NDArray,
        weight: Any,
        bias: Any,
        computed: NDArray | None,
        scratch: Scratch,
    ) -> None:
        """y from the centred x."""
        target = self.target(tile, computed, scratch)
        y = self.round_to_x(np.multiply(x, rstd, out=target), scratch)
        if weight is not None:
            y = np.multiply(y, weight, out=target)
        if bias is not None:
            y = np.add(y, bias, out=target)
        if y is not target:
            np.copyto(target, y)
        self.write(self.y, tile, target, computed, scratch)

    def write_statistics(
        self,
        tile: Tile,
        mean: NDArray | None,
        rstd: NDArray,
        computed: NDArray | None,
        scratch: Scratch,
    ) -> None:
        tile = tile.row_values()
        if self.mean_out is not None and mean is not None:
            self.write(self.mean_out, tile, mean, computed, scratch)
        if self.rstd_out is not None:
            self.write(self.rstd_out, tile, rstd, computed, scratch)


class _StepSum:
    """The sum over the steps of a range, from its tiles in their order."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._total = np.zeros(shape, dtype)
        self._recent: NDArray | None = None
        self._count = 0

    def add(self, values: NDArray, buffer: NDArray) -> None:
        """Add the sum of `values` over its steps; `buffer` may be `values`."""
        if self._recent is None:
            self._recent = np.zeros_like(self._total)
        self._recent += _fold(values, buffer)
        self._count += 1
        if self._count % FOLD == 0:
            self.total()

    def total(self) -> NDArray:
        if self._recent is not None:
            self._total += self._recent
            self._recent = None
        return self._total


class _Backward(_Job):
    """Works in the buffers "dout" and "spare"; the latter is free again when dx is written."""

    least_steps = 4  # and with it rows so short that the sums of some ranges of steps are small

    def __init__(self, call: Backward) -> None:
        super().__init__(call)
        self.x, self.dout = self.rows_of(call.x), self.rows_of(call.dout)
        arriving = call.dresidual_out
        self.dresidual_out = None if arriving is None else self.rows_of(arriving)
        self.mean_in = None if call.mean is None else self.column_of(call.mean)
        self.rstd_in = None if call.rstd is None else self.column_of(call.rstd)
        self.outputs = [
            self.rows_of(array) for array in (call.dx, call.dresidual) if array is not None
        ]
        self.dweight = self.constant(call.dweight)
        self.dbias = self.constant(call.dbias)

    def __call__(self) -> None:
        for group in self.head_groups():
            if self.long:
                self.long_rows(group)
            else:
                self.short_rows(group)

    def short_rows(self, group: Tile) -> None:
        """Whole rows. Ranges of steps have sums of their own, which are added at the end."""
        steps = self.tile_steps(group)
        bytes_ = math.prod(group.shape[1:]) * self.dtype.itemsize
        count = max(MIN_RANGES, min(MAX_RANGES, PARTIAL_BYTES // bytes_))
        ranges = group.cut_steps(steps * math.ceil(self.steps / (steps * count)))
        sums = [_Sums(self, group) for _ in ranges]
        weight = self.weight(group)

        def work(item: tuple[Tile, _Sums], scratch: Scratch) -> None:
            for tile in item[0].cut_steps(steps):
                self.tile(weight, tile, item[1], scratch)
            item[1].close()

        self.run(work, list(zip(ranges, sums, strict=True)))
        for other in sums[1:]:
            sums[0].join(other)
        sums[0].write()

    def tile(self, weight: Any, tile: Tile, sums: _Sums, scratch: Scratch) -> None:
        """A tile of whole rows."""
        computed = self.computed(tile, scratch)
        x = self.x.read(tile, scratch("spare", tile.shape))
        mean = self.given(self.mean_in, tile)
        if self.layer and mean is None:
            mean = self.average([self.wide_sums(x, scratch)])
        x = self.centered(x, mean, scratch)
        rstd = self.given(self.rstd_in, tile)
        if rstd is None:
            rstd = self.rstd(self.squares(x))
        xhat = np.multiply(x, rstd, out=scratch("spare", tile.shape))
        dout = self.dout.read(tile, scratch("dout", tile.shape))
        sums.add(dout, xhat, computed, scratch)
        if not self.outputs:
            return
        scaled = self.scaled(dout, weight, scratch)
        projection = self.average([_group_sums(scaled, xhat)], self.partial)
        shift = self.average([_group_sums(scaled)]) if self.layer else None
        self.finish(tile, scaled, xhat, _Coefficients(rstd, projection, shift), computed, scratch)

    def long_rows(self, group: Tile) -> None:
        """Rows in parts: first what dx needs of each row, then strips of columns over all rows."""
        means = np.zeros((self.steps, 1, 1), self.dtype)
        rstds, projections, shifts = (np.empty_like(means) for _ in range(3))

        def row(tile: Tile, scratch: Scratch) -> None:
            parts = tile.cut_columns(self.tile_size // 2)
            mean, rstd = self.given(self.mean_in, tile), self.given(self.rstd_in, tile)
            if self.layer and mean is None:
                mean = self.average(
                    [self.wide_sums(self.load(part, scratch), scratch) for part in parts]
                )
            if rstd is None:
                squares = []
                for part in parts:
                    x = self.centered(self.load(part, scratch), mean, scratch)
                    squares += self.squares(x, part.column)
                rstd = self.rstd(squares)
            products, sums = [], []
            for part in parts:
                x = self.centered(self.load(part, scratch), mean, scratch)
                xhat = np.multiply(x, rstd, out=scratch("spare", part.shape))
                dout = self.dout.read(part, scratch("dout", part.shape))
                scaled = self.scaled(dout, self.weight(part), scratch)
                products.append(_group_sums(scaled, xhat))
                sums.append(_group_sums(scaled))
            steps = slice(tile.start, tile.stop)
            if mean is not None:
                means[steps] = mean
            rstds[steps] = rstd
            projections[steps] = self.average(products, self.partial)
            shifts[steps] = self.average(sums)

        def strip(strip: Tile, scratch: Scratch) -> None:
            sums, weight = _Sums(self, strip), self.weight(strip)
            for tile in strip.cut_steps(self.tile_size // strip.shape[2]):
                steps = slice(tile.start, tile.stop)
                computed = self.computed(tile, scratch)
                mean = means[steps] if self.layer else None
                x = self.centered(self.load(tile, scratch), mean, scratch)
                xhat = np.multiply(x, rstds[steps], out=scratch("spare", tile.shape))
                dout = self.dout.read(tile, scratch("dout", tile.shape))
                sums.add(dout, xhat, computed, scratch)
                if self.outputs:
                    row = _Coefficients(
                        rstds[steps], projections[steps], shifts[steps] if self.layer else None
                    )
                    scaled = self.scaled(dout, weight, scratch)
                    self.finish(tile, scaled, xhat, row, computed, scratch)
            sums.write()

        self.run(row, group.cut_steps(1))
        self.run(strip, group.cut_columns(self.tile_size // 8))

    def given(self, statistic: Operand | None, tile: Tile) -> NDArray | None:
        if statistic is None:
            return None
        tile = tile.row_values()
        return statistic.read(tile, np.empty(tile.shape, self.dtype))

    def load(self, tile: Tile, scratch: Scratch) -> NDArray:
        return self.x.read(tile, scratch("spare", tile.shape))

    @staticmethod
    def centered(x: NDArray, mean: NDArray | None, scratch: Scratch) -> NDArray:
        return x if mean is None else np.subtract(x, mean, out=scratch("spare", x.shape))

    @staticmethod
    def scaled(dout: NDArray, weight: Any, scratch: Scratch) -> NDArray:
        """The gradient of xhat."""
        return (
            dout if weight is None else np.multiply(dout, weight, out=scratch("dout", dout.shape))
        )

    def finish(
        self,
        tile: Tile,
        scaled: NDArray,
        xhat: NDArray,
        row: _Coefficients,
        computed: NDArray | None,
        scratch: Scratch,
    ) -> None:
        """dx from the gradient of xhat; both arguments may be overwritten."""
        dx = scratch("dout", tile.shape)
        target = dx
        if len(self.outputs) == 1:
            target = self.place(self.outputs[0], tile, computed, dx)
        np.multiply(xhat, row.projection, out=xhat)
        xhat[..., max(0, self.partial - tile.column) :] = 0  # the statistic does not see them
        np.subtract(scaled, xhat, out=dx)
        if row.shift is not None:
            np.subtract(dx, row.shift, out=dx)
        if self.dresidual_out is None:
            np.multiply(dx, row.rstd, out=target)
        else:
            np.multiply(dx, row.rstd, out=dx)
            np.add(dx, self.dresidual_out.read(tile, scratch("spare", tile.shape)), out=target)
        for output in self.outputs:
            self.write(output, tile, target, computed, scratch)


class _Coefficients(NamedTuple):
    """What dx needs of each row."""

    rstd: NDArray
    projection: NDArray  # the mean of dout * weight * xhat
    shift: NDArray | None  # LayerNorm: the mean of dout * weight


class _Sums:
    """dweight and dbias of the heads and columns of a tile, over some of its steps."""

    def __init__(self, job: _Backward, tile: Tile) -> None:
        self._job, self._tile = job, tile._replace(start=0, stop=1)
        self._dweight = _StepSum(tile.shape[1:], job.dtype) if job.dweight else None
        self._dbias = _StepSum(tile.shape[1:], job.dtype) if job.dbias else None

    def add(self, dout: NDArray, xhat: NDArray, computed: NDArray | None, scratch: Scratch) -> None:
        buffer = scratch("code", dout.shape)
        if self._dweight is not None:
            products = np.multiply(dout, self._job.round_to_x(xhat, scratch), out=buffer)
            if computed is not None:
                np.copyto(products, 0, where=~computed)
            self._dweight.add(products, buffer)
        if self._dbias is not None:
            if computed is not None:
                np.copyto(buffer, dout)
                np.copyto(buffer, 0, where=~computed)
                dout = buffer
            self._dbias.add(dout, buffer)

    def close(self) -> None:
        """Keep no more than the sums."""
        for values in (self._dweight, self._dbias):
            if values is not None:
                values.total()

    def join(self, other: _Sums) -> None:
        for mine, its in ((self._dweight, other._dweight), (self._dbias, other._dbias)):
            if mine is not None and its is not None:
                mine.total()[...] += its.total()

    def write(self) -> None:
        for output, values in (
            (self._job.dweight, self._dweight),
            (self._job.dbias, self._dbias),
        ):
            if values is not None:
                output.write(self._tile, values.total()[None], None, Scratch(self._job.dtype))


def forward(call: Forward) -> None:
    """Compute a checked forward call into its outputs."""
    if call.rows:
        with np.errstate(all="ignore"):  # weights and their offset are added here
            _Forward(call)()


def forward_pair(q: Forward, k: Forward) -> None:
    """Compute both halves of qk_norm."""
    forward(q)
    forward(k)


def backward(call: Backward) -> None:
    """Compute a checked backward call into its outputs."""
    if call.rows:
        with np.errstate(all="ignore"):  # the sums of all threads are joined and rounded here
            _Backward(call)()
        return
    for gradient in (call.dweight, call.dbias):
        if gradient is not None:
            gradient.numpy[...] = 0
