# SPDX-License-Identifier: Apache-2.0
"""Brings a call's arrays into the layouts that kernels take, by as few copies as it can."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ._call import Array, Rows
from ._dtypes import TABLE
from ._layout import RowLayout, collapse_rows, is_contiguous


class Operands:
    """The arrays of one call as its kernel gets them, by name.

    `rows` are arrays of rows, which keep their place if two row strides can address them; `others`
    (weights, masks, statistics, sums) must be C-contiguous. What does not fit becomes a temporary
    of the caller's library. `outputs` names what the kernel writes: `finish` writes temporaries of
    these back. An output's temporary begins as a copy, so that rows that the kernel leaves alone
    keep their values.
    """

    def __init__(
        self,
        call: Rows,
        rows: dict[str, Array | None],
        others: dict[str, Array | None],
        outputs: frozenset[str],
    ) -> None:
        self._space = call.space
        self._outputs = outputs
        self._unfinished: list[tuple[Array, Array]] = []
        self._rows = {name: array for name, array in rows.items() if array is not None}
        self._others = {name: array for name, array in others.items() if array is not None}
        layout = _as_they_lie(
            call.row_shape,
            call.per_head,
            tuple([(array.shape, array.strides) for array in self._rows.values()]),
            tuple([(array.shape, array.strides) for array in self._others.values()]),
        )
        self.layout: RowLayout = self._copy(call) if layout is None else layout

    def _copy(self, call: Rows) -> RowLayout:
        """The rows' layout once there are temporaries of what does not fit."""
        leading = len(call.row_shape)
        for name, array in self._rows.items():
            if not is_contiguous(array.shape[leading:], array.strides[leading:]):
                self._rows[name] = self._temporary(name, array)
        self._make_contiguous(self._others)
        layout = self._collapse(call)
        if layout is None:
            self._make_contiguous(self._rows)
            layout = self._collapse(call)
            assert layout is not None, "C-contiguous rows always fold"
        return layout

    def _collapse(self, call: Rows) -> RowLayout | None:
        leading = len(call.row_shape)
        strides = [array.strides[:leading] for array in self._rows.values()]
        return collapse_rows(call.row_shape, strides, keep_inner=call.per_head)

    def _make_contiguous(self, arrays: dict[str, Array]) -> None:
        for name, array in arrays.items():
            if not is_contiguous(array.shape, array.strides):
                arrays[name] = self._temporary(name, array)

    def _temporary(self, name: str, array: Array) -> Array:
        temporary = self._space.contiguous(array)
        if name in self._outputs:
            self._unfinished.append((array, temporary))
        return temporary

    def places(
        self, parameters: tuple[tuple[str, str], ...], rows: tuple[str, ...]
    ) -> dict[str, float]:
        """The addresses among a kernel's parameters, and the strides of its row arrays; 0 where the
        call has no such array."""
        found = dict(_nowhere(parameters, rows))
        strides = zip(self.layout.outer, self.layout.inner, strict=True)
        for (name, array), (outer, inner) in zip(self._rows.items(), strides, strict=True):
            found[name] = array.pointer
            found[f"{name}_strides.outer"] = outer
            found[f"{name}_strides.inner"] = inner
        for name, array in self._others.items():
            found[name] = array.pointer
        return found

    def aligned(self, vec_size: int, vector_bytes: int) -> bool:
        """Whether every pack of every array begins on the width in which it is moved."""
        strides = zip(self.layout.outer, self.layout.inner, strict=True)
        for array, (outer, inner) in zip(self._rows.values(), strides, strict=True):
            itemsize = TABLE[array.dtype].itemsize
            # Widths are powers of two: one divides all of these if it divides their union of bits.
            bits = array.pointer | outer * itemsize | inner * itemsize
            if bits % min(vector_bytes, vec_size * itemsize):
                return False
        for name in ("weight", "bias"):
            parameter = self._others.get(name)
            if parameter is not None:
                width = min(vector_bytes, vec_size * TABLE[parameter.dtype].itemsize)
                if parameter.pointer % width:
                    return False
        return True

    def finish(self) -> None:
        """Write the temporaries of outputs back; call after the launch."""
        for target, temporary in self._unfinished:
            self._space.assign(target, temporary)


Places = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # of arrays: (shape, strides)


@functools.lru_cache(maxsize=512)
def _as_they_lie(
    row_shape: tuple[int, ...], per_head: bool, rows: Places, others: Places
) -> RowLayout | None:
    """The layout of arrays that kernels can take without a copy; None if there is another one."""
    leading = len(row_shape)
    if all(is_contiguous(shape[leading:], strides[leading:]) for shape, strides in rows) and all(
        is_contiguous(shape, strides) for shape, strides in others
    ):
        return collapse_rows(row_shape, [strides[:leading] for _, strides in rows], per_head)
    return None


@functools.cache
def _nowhere(parameters: tuple[tuple[str, str], ...], rows: tuple[str, ...]) -> Mapping[str, float]:
    """What `places` says of arrays that a call has not."""
    pointers: dict[str, float] = {name: 0 for name, kind in parameters if kind == "pointer"}
    return pointers | {f"{name}_strides.{part}": 0 for name in rows for part in ("outer", "inner")}
