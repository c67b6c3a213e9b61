# SPDX-License-Identifier: Apache-2.0
"""The short road of qk_norm: by the rules of `_fast`, for calls that take one launch.

q, k and their outputs may have any strides that count upwards. In a buffer with other arrays a
given output is apart from them if it lies where it did in the call that the general road checked.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from . import _device, _fast, _fast_learn
from ._call import Forward
from ._fast import ALIGNMENT, LIMIT, At, Entry, Kept, Launch, Launches, Library, reach

if TYPE_CHECKING:
    from ._enqueue import Launched


def _distances(q: int, k: int, q_out: int, k_out: int) -> tuple[int, int, int]:
    return k - q, q_out and q_out - q, k_out and k_out - k


class PairEntry(Entry):
    """One launch of both halves, ready but for addresses and stream."""

    kernel = "norm_forward_pair"
    addresses = ("q.x", "k.x", "q.weight", "k.weight", "q.y", "k.y")

    def __init__(
        self,
        library: Library,
        q: Forward,
        k: Forward,
        launched: Launched,
        epoch: int,
        outputs: tuple[int, int],
    ) -> None:
        super().__init__(library, q, launched, epoch)
        self.new_k = library.maker(k.y.shape, k.y.dtype)
        self.launches: Launches = {}  # by stream and addresses
        self._before = _distances(q.x.pointer, k.x.pointer, *outputs)
        self._q, self._k, self._q_out, self._k_out = map(reach, (q.x, k.x, q.y, k.y))
        self._q_weight, self._k_weight = reach(q.weight), reach(k.weight)

    def bound(self, stream: int, at: At) -> Launch:
        """The launch with these addresses, in the order of `addresses`; it is kept."""
        launch, buffer = self.bind(stream, at)
        found, place = (launch, buffer), (stream, *at)
        if len(self.launches) >= LIMIT:
            self.launches.clear()
        self.launches[place] = found
        return found

    def apart(self, q: int, k: int, q_weight: int, k_weight: int, q_out: int, k_out: int) -> bool:
        """Whether the given outputs overlap nothing that they may not."""
        q_end, k_end = q_out + self._q_out, k_out + self._k_out
        q_weight_end, k_weight_end = q_weight + self._q_weight, k_weight + self._k_weight
        if q_out and (
            (q_out < q_weight_end and q_weight < q_end)
            or (q_out < k_weight_end and k_weight < q_end)
        ):
            return False
        if k_out and (
            (k_out < q_weight_end and q_weight < k_end)
            or (k_out < k_weight_end and k_weight < k_end)
        ):
            return False
        now = _distances(q, k, q_out, k_out)
        if now == self._before:
            return True
        # What lies elsewhere lies apart, but for an output that is its own input, as before.
        arrays = [(q, q + self._q), (k, k + self._k)]
        for index, (output, end) in enumerate(((q_out, q_end), (k_out, k_end))):
            if not output:
                continue
            in_place = now[1 + index] == self._before[1 + index] == 0
            for other, (start, stop) in enumerate(arrays):
                if output < stop and start < end and not (in_place and other == index):
                    return False
            arrays.append((output, end))
        return True


def forward(
    kept: Kept,
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    q_out: Any,
    k_out: Any,
    learnt: PairEntry | None = None,
) -> tuple[Any, Any] | None:
    """q_out and k_out, or None: the call has to take the general road; as `_fast.forward`."""
    library = _fast.libraries.get(type(q))
    if library is None:
        return None
    device = _device.ready()
    strides, look, look_at_output = library.strides, library.strided_input, library.strided_output
    q_kind, k_kind = (q.dtype, q.shape, strides(q)), (k.dtype, k.shape, strides(k))
    q_weight_at = k_weight_at = q_out_at = k_out_at = 0
    q_weight_kind: Hashable = None
    k_weight_kind: Hashable = None
    q_out_kind: Hashable = None
    k_out_kind: Hashable = None
    if q_out is q:
        q_at = q_out_at = look_at_output(q, device)
        q_out_kind = True
    else:
        q_at = look(q, device)
        if q_out is not None:
            q_out_at = look_at_output(q_out, device)
            q_out_kind = (q_out.dtype, q_out.shape, strides(q_out))
            if not q_out_at:
                return None
    if k_out is k:
        k_at = k_out_at = look_at_output(k, device)
        k_out_kind = True
    else:
        k_at = look(k, device)
        if k_out is not None:
            k_out_at = look_at_output(k_out, device)
            k_out_kind = (k_out.dtype, k_out.shape, strides(k_out))
            if not k_out_at:
                return None
    if not q_at or not k_at:
        return None
    if q_weight is not None:
        q_weight_at = library.input(q_weight, device)
        if not q_weight_at:
            return None
        q_weight_kind = q_weight.dtype, q_weight.shape
    if k_weight is not None:
        k_weight_at = library.input(k_weight, device)
        if not k_weight_at:
            return None
        k_weight_kind = k_weight.dtype, k_weight.shape
    if (q_at | k_at | q_weight_at | k_weight_at | q_out_at | k_out_at) % ALIGNMENT:
        return None
    kind = (device, q_kind, k_kind, q_weight_kind, k_weight_kind, q_out_kind, k_out_kind)
    if learnt is not None:
        _fast.keep(kept, kind, learnt)
        return None
    entry = kept.entries.get(kind)
    if entry is None:
        return None
    assert isinstance(entry, PairEntry)
    q_made, k_made = q_out, k_out
    q_made_at, k_made_at = q_out_at, k_out_at
    if q_out is None:
        q_made = entry.new_y(q)
        q_made_at = library.strided_output(q_made, device)
    if k_out is None:
        k_made = entry.new_k(k)
        k_made_at = library.strided_output(k_made, device)
    if not q_made_at or not k_made_at or (q_made_at | k_made_at) % ALIGNMENT:
        return None
    at = (q_at, k_at, q_weight_at, k_weight_at, q_made_at, k_made_at)
    stream = library.stream(device)
    found = entry.launches.get((stream, *at))
    if found is None:
        if not entry.apart(q_at, k_at, q_weight_at, k_weight_at, q_out_at, k_out_at):
            return None
        found = entry.bound(stream, at)
    try:
        if found[0]():
            return None
    except RuntimeError:
        return None
    if library.written is not None:
        if q_out is not None:
            library.written(q_out)
        if k_out is not None:
            library.written(k_out)
    return q_made, k_made


def remember(
    kept: Kept,
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    q_out: Any,
    k_out: Any,
    q_call: Forward,
    k_call: Forward,
    launched: Launched,
    began: int,
) -> None:
    """Keep what the general road launched, if the call qualifies for the short one."""
    library = _fast_learn.known_library(type(q))
    arrays = q_call.x, k_call.x, q_call.y, k_call.y
    if library is None or any(
        array.pointer % ALIGNMENT or array.strides[-1] != 1 or min(array.strides) < 0
        for array in arrays
    ):
        return
    if q_call.hidden_size == 1:  # may have torch's negative bit
        return
    outputs = (
        0 if q_out is None else q_call.y.pointer,
        0 if k_out is None else k_call.y.pointer,
    )
    learnt = PairEntry(library, q_call, k_call, launched, began, outputs)
    forward(kept, q, k, q_weight, k_weight, q_out, k_out, learnt)
