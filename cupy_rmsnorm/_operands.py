# SPDX-License-Identifier: Apache-2.0
"""Brings a call's arrays into the layouts that kernels take, by as few copies as it can."""

from __future__ import annotations

from collections.abc import Iterable

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
        self.layout: RowLayout = layout
        self._index = {name: index for index, name in enumerate(self._rows)}

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

    def pointer(self, name: str) -> int:
        """The address, or 0 where the call has no such array."""
        array = self._rows.get(name) or self._others.get(name)
        return 0 if array is None else array.pointer

    def strides(self, name: str) -> tuple[int, int]:
        """(outer, inner) strides between rows, in elements."""
        if name not in self._index:
            return 0, 0
        index = self._index[name]
        return self.layout.outer[index], self.layout.inner[index]

    def places(
        self, parameters: Iterable[tuple[str, str]], rows: Iterable[str]
    ) -> dict[str, float]:
        """The addresses among a kernel's parameters, and the strides of its row arrays."""
        found: dict[str, float] = {
            name: self.pointer(name) for name, kind in parameters if kind == "pointer"
        }
        for name in rows:
            found[f"{name}_strides.outer"], found[f"{name}_strides.inner"] = self.strides(name)
        return found

    def aligned(self, vec_size: int, vector_bytes: int) -> bool:
        """Whether every pack of every array begins on the width in which it is moved."""
        for name, array in (self._rows | self._others).items():
            itemsize = TABLE[array.dtype].itemsize
            width = min(vector_bytes, vec_size * itemsize)
            places = (array.pointer, *(stride * itemsize for stride in self.strides(name)))
            vectors = name in self._rows or name in ("weight", "bias")
            if vectors and any(place % width for place in places):
                return False
        return True

    def finish(self) -> None:
        """Write the temporaries of outputs back; call after the launch."""
        for target, temporary in self._unfinished:
            self._space.assign(target, temporary)
