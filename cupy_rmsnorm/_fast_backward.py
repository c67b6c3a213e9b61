# SPDX-License-Identifier: Apache-2.0
"""The short road of a backward call: by the rules of `_fast`, for rows that blocks hold.

Such a call takes one launch, or two: the second sums the parts of dweight and dbias that the first
left in the call's workspace.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from . import _device, _fast, _fast_learn
from ._call import Backward
from ._dtypes import TABLE
from ._fast import ALIGNMENT, Kept, Library, Prepared, reach

if TYPE_CHECKING:
    from ._cuda_backward import Launches

Done = tuple[Any, Any, Any, Any]  # dx, dresidual, dweight and dbias
# The inputs in the order of _INPUTS; dx_out, dweight_out and dbias_out; need_dx and need_dweight.
Arguments = tuple[Any, ...]
# Launches with all their arguments, what they are of, and the buffers where the arguments lie.
Series = tuple[list[Callable[[], object]], object, object]

_INPUTS = ("dout", "x", "dresidual_out", "weight", "mean", "rstd", "bias")  # bias last
_OUTPUTS = ("dx", "dresidual", "dweight", "dbias")
_WORKSPACE = ("dweight_parts", "dbias_parts")
_ARRAYS = (*_INPUTS, *_OUTPUTS, *_WORKSPACE)
_X, _BIAS, _DX = map(_ARRAYS.index, ("x", "bias", "dx"))
# What the kernels know: no bias is read.
_ROWS_ADDRESSES = (*_ARRAYS[:_BIAS], *_ARRAYS[_DX:])
_SUM_ADDRESSES = (*_OUTPUTS[2:], *_WORKSPACE)


class BackwardEntry:
    """The launches of a backward call, ready but for stream and addresses."""

    def __init__(
        self, library: Library, call: Backward, made: Launches, given: Arguments, epoch: int
    ) -> None:
        self.epoch = epoch
        self._library = library
        self._device = call.x.device.index
        accumulation = TABLE[call.x.dtype].accumulation or ""
        (kernel, launched), *rest = made.launched
        self._rows = Prepared(kernel, accumulation, _ROWS_ADDRESSES, launched)
        self._sums = [
            Prepared(kernel, accumulation, _SUM_ADDRESSES, launched) for kernel, launched in rest
        ]
        outputs = {name: getattr(call, name) for name in _OUTPUTS} | made.workspace
        dx, dweight, dbias = given
        there = {"dx": dx, "dweight": dweight, "dbias": dbias}
        self._new = [  # what a call like this makes, by place
            (place, library.maker(array.shape, array.dtype))
            for place, name in enumerate(_ARRAYS)
            if there.get(name) is None and (array := outputs.get(name)) is not None
        ]
        self._dresidual_apart = call.dresidual is not None
        # Place and extent of what is read or given, for the look at whether they overlap.
        self._given = [place for place, name in enumerate(_ARRAYS) if there.get(name) is not None]
        alike = {"bias": "dbias"}  # a call has no bias, but what is like it
        self._extents = [
            (place, reach(getattr(call, alike.get(name, name))))
            for place, name in enumerate(_ARRAYS)
            if place < _DX or place in self._given
        ]
        self.qualifies = _fast.lay_so(
            [
                outputs[name] if name in outputs else getattr(call, name, None)
                for name in _ROWS_ADDRESSES
            ],
            self._rows.was_at(),
        )

    def run(self, kept: Kept, x: Any, at: list[int], given: list[Any]) -> Done | None:
        """Launch it, or return None where that failed.

        `at` are the addresses of the inputs; `given` are dx, dweight and dbias, or None for each.
        """
        library = self._library
        dx, dweight, dbias = given
        arrays = [dx, None, dweight, dbias, None, None]
        for place, make in self._new:
            arrays[place - _DX] = array = make(x)
            at[place] = library.new_at(array)
        stream = library.stream(self._device)
        key = (stream, *at)
        found: Series | None = kept.series.get(key)
        if found is None or found[1] is not self:
            if not self._fits(at, arrays):
                return None
            rows_at, sum_at = (*at[:_BIAS], *at[_DX:]), at[_DX + 2 :]
            bound = [self._rows.bind(stream, rows_at)]
            bound += [sums.bind(stream, sum_at) for sums in self._sums]
            found = [launch for launch, _ in bound], self, bound
            _fast.keep_launch(kept.series, key, found, self.epoch)
        try:
            for launch in found[0]:
                if launch():
                    return None
        except RuntimeError:  # as in a thread without a context: the general road tells why
            return None
        if library.written is not None:
            for array in given:
                if array is not None:
                    library.written(array)
        dx, dresidual, dweight, dbias = arrays[:4]
        return dx, dresidual if self._dresidual_apart else dx, dweight, dbias

    def _fits(self, at: list[int], arrays: list[Any]) -> bool:
        """Whether all arrays are aligned and on the device, and given ones overlap no other."""
        if functools.reduce(operator.or_, at) % ALIGNMENT:
            return False
        look = self._library.strided_output
        if not all(array is None or look(array, self._device) for array in arrays):
            return False
        return not any(
            at[output] < at[place] + extent and at[place] < at[output] + own
            for output, own in self._extents
            if output in self._given
            for place, extent in self._extents
            # dx may replace x, as it did where the general road checked such a call.
            if place != output and not (output == _DX and place == _X and at[_X] == at[_DX])
        )


def backward(kept: Kept, arguments: Arguments, learnt: BackwardEntry | None = None) -> Done | None:
    """The gradients, or None: the call has to take the general road; as `_fast.forward`."""
    dout, x, dresidual_out, weight, mean, rstd, bias, *given, need_dx, need_dweight = arguments
    dx_out, dweight_out, dbias_out = given
    library = _fast.libraries.get(type(x))
    if library is None or type(need_dx) is not bool or type(need_dweight) is not bool:
        return None
    device = _device.ready()
    at = []
    kind: list[Hashable] = [device, need_dx, need_dweight]
    strides = library.strides
    for look, arrays in (
        (library.strided_input, (dout, x, dresidual_out)),
        (library.input, (weight, mean, rstd, bias)),
    ):
        for array in arrays:
            if array is None:
                at.append(0)
                kind.append(None)
            else:
                address = look(array, device)
                if not address:
                    return None
                at.append(address)
                kind += (array.dtype, array.shape, strides(array))
    at += (0, 0, 0, 0, 0, 0)
    if not dx_out is dweight_out is dbias_out is None:
        for place, array in zip((_DX, _DX + 2, _DX + 3), given, strict=True):
            if array is not None:
                at[place] = library.strided_output(array, device)
                if not at[place]:
                    return None
                kind += (place, array.dtype, array.shape, strides(array))
        kind.append(at[_X] == at[_DX])  # other kernels run where dx replaces x
    what = tuple(kind)
    if learnt is not None:
        _fast.keep(kept, what, learnt)
        return None
    entry = kept.entries.get(what)
    return None if entry is None else entry.run(kept, x, at, given)


def remember(
    kept: Kept, arguments: Arguments, checked: Backward, made: Launches, began: int
) -> None:
    """Keep what the general road launched, if the call qualifies for the short one."""
    library = _fast_learn.known_library(type(arguments[1]))
    if library is None or checked.hidden_size == checked.groups:  # may have torch's negative bit
        return
    if _device.ready() != checked.x.device.index:
        return
    learnt = BackwardEntry(library, checked, made, arguments[7:10], began)
    if learnt.qualifies:
        backward(kept, arguments, learnt)
