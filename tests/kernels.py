# SPDX-License-Identifier: Apache-2.0
"""THE table: one row for each class of kernel instantiations.

A row is a call: shape, dtypes, options and layout. Which kernel it takes, the library decides; a
row names that instantiation on any architecture without a GPU (`specialisation`), and makes the
call that has to run it (`run`). Compile tests, emulator, GPU tests and benchmarks walk these rows.

The full product of what may differ has millions of members. The table holds every *pair* of
levels of any two factors below, which is where published kernels have failed (a mask in a block of
several rows, a residual in a staged row, a float32 weight beside packs of eight).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_rmsnorm._cuda import ForwardKind, specialise_forward
from cupy_rmsnorm._dtypes import TABLE
from cupy_rmsnorm._kernel import Specialisation
from cupy_rmsnorm._plan import VECTOR_BYTES, Launch, Plan, choose_launch, choose_plan
from tests import calls, inputs, oracle
from tests.backends import Backend
from tests.calls import Case

SM_COUNT = 132  # of an H200; decides how many rows share a block


@dataclass(frozen=True)
class Place:
    """How long a row is, and how many there are.

    `packs` are packs of a row. Odd numbers leave lanes idle and make the last pack count; powers of
    two, with packs as wide as the architecture has, fill every lane (FULL). `row_bytes` stands for
    rows too long for registers. With enough `rows` for every SM, short rows share a block.
    """

    rows: int
    packs: int = 0
    row_bytes: int = 0

    def hidden_size(self, itemsize: int, width: int) -> int:
        """The row's length with packs of `width` elements, or fewer where they do not fit."""
        widest = VECTOR_BYTES // itemsize
        vec_size = min(width, widest)
        packs = self.packs or self.row_bytes // (vec_size * itemsize)
        if vec_size < widest:
            packs |= 1  # else a wider pack would divide the row
        return packs * vec_size


PLACES = {
    # In registers.
    "one_pack": Place(rows=26_001, packs=1),
    "three_packs": Place(rows=6_401, packs=3),
    "half_warp": Place(rows=4, packs=16),
    "warp_part": Place(rows=5, packs=23),
    "warp": Place(rows=801, packs=32),
    "two_warps": Place(rows=5, packs=64),
    "two_warps_part": Place(rows=401, packs=51),
    "two_vecs": Place(rows=401, packs=128),
    "two_vecs_part": Place(rows=5, packs=77),
    "block": Place(rows=3, packs=1024),
    "block_part": Place(rows=7, packs=999),
    "four_vecs": Place(rows=3, packs=1536),
    "longest_held": Place(rows=3, row_bytes=32_080),
    # Staged in shared memory: over one block, or a cluster where there are clusters.
    "staged": Place(rows=3, row_bytes=40 * 1024),
    "staged_part": Place(rows=3, row_bytes=40_016),
    "staged_4": Place(rows=3, row_bytes=128 * 1024),
    "staged_4_part": Place(rows=3, row_bytes=100_016),
    "staged_8": Place(rows=3, row_bytes=256 * 1024),
    "staged_8_part": Place(rows=3, row_bytes=150_032),
    # Longer than any cluster's shared memory.
    "streamed": Place(rows=3, row_bytes=2_000_016),
}

ARRAYS = ("float16", "bfloat16", "float32")

# float64 goes throughout: with it as x every other array is float64 too.
FACTORS: Mapping[str, Sequence[Any]] = {
    "place": tuple(PLACES),
    "x": (*ARRAYS, "float64"),
    "width": (8, 4, 2, 1),
    "norm": ("rms", "layer"),
    "y": ARRAYS,
    "weight": (None, "constant", *ARRAYS),
    "bias": (None, "constant", *ARRAYS),
    "residual": (None, *ARRAYS),
    "cast": ("once", "before_weight"),
    "weight_offset": (0.0, 1.0),
    "mask": (None, "keep_where", "keep_valid", "zero_both", "zero_valid"),
    "layout": ("contiguous", "misaligned", "gap", "split", "heads"),
}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations that hold every pair of levels of any two factors, by a greedy choice.

    The same list in every run: which rows exist must not be a matter of luck.
    """
    names = tuple(factors)

    def pair(a: str, a_level: Any, b: str, b_level: Any) -> frozenset[tuple[str, Any]]:
        return frozenset(((a, a_level), (b, b_level)))

    missing = {
        pair(a, a_level, b, b_level): None  # a dictionary keeps the order
        for a, b in itertools.combinations(names, 2)
        for a_level, b_level in itertools.product(factors[a], factors[b])
    }
    chosen: list[dict[str, Any]] = []
    while missing:
        row = dict(next(iter(missing)))
        for name in names:
            if name in row:
                continue
            # Ties go to another level each time, so that levels come about equally often.
            levels = factors[name]
            start = len(chosen) % len(levels)
            row[name] = max(
                (*levels[start:], *levels[:start]),
                key=lambda level: sum(
                    pair(name, level, other, row[other]) in missing for other in row
                ),
            )
        for a, b in itertools.combinations(names, 2):
            missing.pop(pair(a, row[a], b, row[b]), None)
        chosen.append({name: row[name] for name in names})
    return chosen


@dataclass(frozen=True, kw_only=True)
class ForwardRow:
    """A forward call with statistics. Dtypes by name."""

    place: str
    x: str
    width: int
    norm: str
    y: str
    weight: str | None
    bias: str | None
    residual: str | None
    cast: str
    weight_offset: float
    mask: str | None
    layout: str

    @classmethod
    def of(cls, levels: Mapping[str, Any]) -> ForwardRow:
        """The row of these levels, made consistent."""
        levels = dict(levels)
        if levels["x"] == "float64":
            for name in ("y", "weight", "bias", "residual"):
                if levels[name] in ARRAYS:
                    levels[name] = "float64"
        if levels["weight"] is None:
            levels["weight_offset"] = 0.0
        return cls(**levels)

    @property
    def name(self) -> str:
        """What pytest calls the row."""
        short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
        parts = [self.place, self.norm, f"{short[self.x]}x{self.vec_size}", f"y_{short[self.y]}"]
        for name in ("weight", "bias", "residual"):
            level = getattr(self, name)
            if level is not None:
                parts.append(f"{name}_{short.get(level, level)}")
        if self.cast == "before_weight":
            parts.append("cast_before")
        if self.weight_offset:
            parts.append("offset")
        parts += [part for part in (self.mask, self.layout) if part]
        return "-".join(parts)

    @property
    def hidden_size(self) -> int:
        return PLACES[self.place].hidden_size(TABLE[self.x].itemsize, self.width)

    @property
    def vec_size(self) -> int:
        """The elements of a pack, as every architecture has them."""
        return min(self.width, VECTOR_BYTES // TABLE[self.x].itemsize)

    @property
    def row_shape(self) -> tuple[int, ...]:
        rows = PLACES[self.place].rows
        if self.layout == "split":
            return 2, -(-rows // 2)
        if self.layout == "heads":
            return -(-rows // 3), 3
        return (rows,)

    @property
    def rows(self) -> int:
        return math.prod(self.row_shape)

    # What the library chooses -----------------------------------------------------------------

    @property
    def kind(self) -> ForwardKind:
        """The kinds of operands, as the backend tells them apart."""
        masked = None if self.mask is None else self.mask.partition("_")[0]
        return ForwardKind(
            norm=self.norm,  # type: ignore[arg-type]
            y=self.y,
            x=self.x,
            residual=self.residual,
            weight=None if self.weight == "constant" else self.weight,
            bias=self.bias,
            valid_rows="int32" if self.mask == "keep_valid" else "int64",
            cast=self.cast,  # type: ignore[arg-type]
            masked=masked,
            per_head=self.layout == "heads",
        )

    def plan(self, arch: int) -> Plan:
        return choose_plan(self.hidden_size, self.x, self.residual, arch)

    def launch(self, arch: int, sm_count: int = SM_COUNT) -> Launch:
        return choose_launch(self.plan(arch), self.rows, self.kind.staged_itemsize, sm_count)

    def specialisation(self, arch: int, sm_count: int = SM_COUNT) -> Specialisation:
        """The instantiation that the library has to take on `arch`."""
        return specialise_forward(
            self.kind,
            self.hidden_size,
            self.plan(arch),
            self.launch(arch, sm_count),
            arch=arch,
            aligned=self.layout != "misaligned" or self.vec_size == 1,
            split_rows=self.layout in ("split", "heads"),
        )

    # The call ---------------------------------------------------------------------------------

    def case(self) -> Case:
        """The arguments, between guard zones."""
        shape = (*self.row_shape, self.hidden_size)
        parameter_shape = shape[-2:] if self.layout == "heads" else shape[-1:]
        parameter_layout = "offset_1" if self.layout == "misaligned" else "contiguous"
        residual = None
        if self.residual is not None:
            residual = self._laid(inputs.array(shape, self.residual, seed=1))
        where, valid_rows = self._masks()
        return Case(
            x=self._laid(inputs.array(shape, self.x, "row_tagged")),
            norm=self.norm,
            weight=_parameter(inputs.weight, self.weight, -1.5, parameter_shape, parameter_layout),
            bias=_parameter(inputs.bias, self.bias, 0.3, parameter_shape, parameter_layout),
            residual=residual,
            weight_offset=self.weight_offset,
            cast=self.cast,
            per_head=self.layout == "heads",
            where=where,
            valid_rows=valid_rows,
            masked=self.kind.masked or "zero",
            out_dtype=self.y,
        )

    def run(self, backend: Backend) -> dict[str, np.ndarray]:
        """Make the call into outputs full of NaN between guard zones, and check its results.

        Against the oracle within promise 6, and bit for bit given the statistics it returned. What
        lies around the arrays the backend's `verify` checks.
        """
        case = self.case()
        outputs: dict[str, Any] = {}
        for output, dtype in case.outputs(statistics=True).items():
            values = np.full(case.shape(output), np.nan, oracle.DTYPES[dtype])
            rowwise = output in ("mean", "rstd")
            outputs[output] = backend.output(inputs.lay(values) if rowwise else self._laid(values))
        got = calls.forward(backend, case, statistics=True, **outputs)
        calls.check_forward(case, got)
        return got

    def _masks(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`where` and `valid_rows`; each leaves some rows out, in blocks that it shares."""
        where = np.arange(self.rows).reshape(self.row_shape) % 3 != 1
        valid_rows = self.rows - 1
        if self.mask is None:
            return None, None
        if self.mask == "keep_where":
            return where, None
        if self.mask == "keep_valid":
            return None, np.array([valid_rows], np.int32)
        if self.mask == "zero_valid":
            return None, np.array(valid_rows, np.int64)
        return where, np.array([valid_rows], np.int64)

    def _laid(self, values: np.ndarray) -> np.ndarray:
        """A view with these values in the row's layout."""
        if self.layout == "misaligned":
            return inputs.lay(values, "offset_1")
        if self.layout == "gap":
            return inputs.lay(values, "row_gap_8")
        if self.layout != "split":
            return inputs.lay(values)
        first, second, size = values.shape
        view = inputs.lay(np.full((first, second + 1, size), np.nan, values.dtype))[:, :second]
        view[...] = values
        return view


def _parameter(
    make: Any, level: str | None, constant: float, shape: tuple[int, ...], layout: str
) -> Any:
    """A weight or bias of this level: None, a number, or an array of this dtype."""
    if level is None:
        return None
    return constant if level == "constant" else inputs.lay(make(shape, level), layout)


def _plain(index: int, place: str, x: str, width: int) -> dict[str, Any]:
    """What most calls are: one dtype and a weight; in turn a residual or a bias."""
    levels = {name: FACTORS[name][0] for name in FACTORS}
    layer, added = (index + index // 4) % 2 == 1, index % 3 == 1
    levels |= {"place": place, "norm": "layer" if layer else "rms", "width": width}
    levels |= {"x": x, "y": x, "weight": x}
    return levels | {"bias": x if layer else None, "residual": x if added else None}


# Here every dtype fills every lane once.
FULL_PLACES = (
    *("three_packs", "warp", "two_warps", "two_vecs", "block", "four_vecs"),
    *("staged", "staged_4", "staged_8"),
)
PLAIN = (
    *itertools.product(FULL_PLACES, FACTORS["x"], (8,)),
    # Small enough for the shared memory of a block without a cluster.
    *itertools.product(("staged_part",), ("float16",), (1, 2, 4)),
)

FORWARD = tuple(
    dict.fromkeys(
        ForwardRow.of(levels)
        for levels in (
            *pairwise(FACTORS),
            *(_plain(index, *which) for index, which in enumerate(PLAIN)),
        )
    )
)
