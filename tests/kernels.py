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

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import numpy as np

import cupy_rmsnorm
from cupy_rmsnorm import _cuda, _cuda_backward
from cupy_rmsnorm._call import Norm
from cupy_rmsnorm._candidates import (
    backward_candidates,
    backward_fault,
    forward_candidates,
    forward_fault,
)
from cupy_rmsnorm._cuda import ForwardKind, specialise_forward
from cupy_rmsnorm._dtypes import TABLE
from cupy_rmsnorm._kernel import Specialisation
from cupy_rmsnorm._plan import (
    MASKED_WINDOW,
    VECTOR_BYTES,
    Launch,
    Plan,
    choose_launch,
    choose_plan,
)
from cupy_rmsnorm._plan_backward import BackwardLaunch, choose_backward_plan
from tests import calls, inputs, oracle
from tests.backends import Backend
from tests.calls import Case, Gradient
from tests.plan_classes import candidate_class
from tests.recorder import Launched, recorded

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
    "one_pack": Place(rows=34_001, packs=1),
    "three_packs": Place(rows=6_401, packs=3),
    "packs_8": Place(rows=9, packs=8),
    "half_warp": Place(rows=4, packs=16),
    "warp_part": Place(rows=5, packs=23),
    "warp": Place(rows=801, packs=32),
    "packs_33": Place(rows=5, packs=33),
    "packs_64": Place(rows=5, packs=64),
    "packs_51": Place(rows=401, packs=51),
    "packs_128": Place(rows=401, packs=128),
    "packs_77": Place(rows=5, packs=77),
    "packs_131": Place(rows=5, packs=131),
    "packs_192": Place(rows=301, packs=192),
    "packs_1024": Place(rows=3, packs=1024),
    "packs_999": Place(rows=7, packs=999),
    "packs_1536": Place(rows=3, packs=1536),
    "packs_4000": Place(rows=3, packs=4000),
    "odd_long": Place(rows=3, row_bytes=16_400),
    "longest_held": Place(rows=3, row_bytes=64_160),
    # Staged in shared memory: over one block, or a cluster where there are clusters.
    "staged": Place(rows=3, row_bytes=128 * 1024),
    "staged_part": Place(rows=3, row_bytes=70_016),
    "staged_4": Place(rows=3, row_bytes=256 * 1024),
    "staged_4_part": Place(rows=3, row_bytes=150_032),
    "staged_8": Place(rows=3, row_bytes=512 * 1024),
    "staged_8_part": Place(rows=3, row_bytes=300_032),
    # Longer than any cluster's shared memory.
    "streamed": Place(rows=3, row_bytes=2_000_016),
}
# More of them, for plans that only a plan file brings.
TUNED_PLACES = {
    "packs_15": Place(rows=5, packs=15),
    "packs_29": Place(rows=5, packs=29),
    "packs_32": Place(rows=5, packs=32),
    "packs_2048": Place(rows=3, packs=2048),
    "packs_2100": Place(rows=3, packs=2100),
}
EVERY_PLACE = PLACES | TUNED_PLACES

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


@dataclass(frozen=True)
class Forced:
    """A launch that the library would choose for far more rows, or on another GPU.

    It changes no bit; so a few rows can go through all the code that moves bytes.
    """

    rows_per_block: int = 1
    grid: int = 0  # blocks, of each team; 0: one for each of its rows. With fewer, they walk
    early_weight: bool = True
    evict_first: bool = False
    teams: int = 0  # that deal rows, of as many blocks each
    walkers: int = 0  # blocks of a team that take more than one turn; 0: all of them

    def plan(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, early_weight=self.early_weight)

    def launch(self, plan: Plan, rows: int) -> Launch:
        assert plan.kernel == "norm_forward", "other kernels have one launch alone"
        assert rows <= MASKED_WINDOW * self.teams or not self.teams
        grid = self.grid or -(-rows // self.rows_per_block)
        block = plan.threads_per_row * self.rows_per_block
        return Launch(
            grid * max(1, self.teams),
            block,
            0,
            self.rows_per_block,
            evict_first=self.evict_first,
            teams=self.teams,
            walkers=self.walkers or grid,
        )


SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where the rows of a call lie, and which of them are computed. Dtypes by name."""

    place: str
    x: str
    width: int
    norm: str
    weight: str | None
    bias: str | None
    cast: str
    weight_offset: float
    mask: str | None
    layout: str
    groups: int = 1
    part: float | None = None  # of a row's columns: what its statistic comes from

    @property
    def hidden_size(self) -> int:
        return EVERY_PLACE[self.place].hidden_size(TABLE[self.x].itemsize, self.width)

    @property
    def vec_size(self) -> int:
        """The elements of a pack, as every architecture has them."""
        return min(self.width, VECTOR_BYTES // TABLE[self.x].itemsize)

    @property
    def partial(self) -> int | None:
        return None if self.part is None else max(1, int(self.part * self.hidden_size))

    @property
    def row_shape(self) -> tuple[int, ...]:
        rows = -(-EVERY_PLACE[self.place].rows // self.groups)
        if self.layout == "split":
            return 2, -(-rows // 2)
        if self.layout == "heads":
            return -(-rows // 3), 3
        return (rows,)

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        return self.row_shape if self.groups == 1 else (*self.row_shape, self.groups)

    @property
    def rows(self) -> int:
        """How many rows a kernel sees."""
        return math.prod(self.statistic_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.row_shape, self.groups * self.hidden_size)

    @property
    def splits_rows(self) -> bool:
        return self.layout in ("split", "heads") or self.groups > 1

    @property
    def _option_names(self) -> list[str]:
        """What the row's name says of its options."""
        parts = ["cast_before"] if self.cast == "before_weight" else []
        parts += ["offset"] if self.weight_offset else []
        parts += [f"groups_{self.groups}"] if self.groups > 1 else []
        parts += ["partial"] if self.part is not None else []
        return parts + [part for part in (self.mask, self.layout) if part]

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        return self.shape[-2:] if self.layout == "heads" else self.shape[-1:]

    def _case(self, **more: Any) -> Case:
        """The arguments that every call has, between guard zones."""
        where, valid_rows = self._masks()
        return Case(
            x=self._laid(inputs.array(self.shape, self.x, "row_tagged")),
            norm=self.norm,
            weight=self._parameter(inputs.weight, self.weight, -1.5),
            bias=self._parameter(inputs.bias, self.bias, 0.3),
            weight_offset=self.weight_offset,
            cast=self.cast,
            per_head=self.layout == "heads",
            where=where,
            valid_rows=valid_rows,
            masked="keep" if self.mask in ("keep_where", "keep_valid") else "zero",
            groups=self.groups,
            partial=self.partial,
            **more,
        )

    def _parameter(self, make: Any, level: str | None, constant: float) -> Any:
        """A weight or bias of this level: None, a number, or an array of this dtype."""
        if level is None:
            return None
        if level == "constant":
            return constant
        layout = "offset_1" if self.layout == "misaligned" else "contiguous"
        return inputs.lay(make(self.parameter_shape, level), layout)

    def _masks(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`where` and `valid_rows`; each leaves some rows out, in blocks that it shares."""
        rows = math.prod(self.row_shape)
        places = np.arange(rows).reshape(self.row_shape)
        where = (places % 3 != 1) | (places // 32 % 3 == 1)
        if self.layout == "misaligned":
            where = inputs.lay(where, "offset_1")
        valid_rows = rows - 1
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

    def _output(self, backend: Backend, dtype: str) -> Any:
        """An output full of NaN in the row's layout."""
        return backend.output(self._laid(np.full(self.shape, np.nan, oracle.DTYPES[dtype])))


@dataclass(frozen=True, kw_only=True)
class ForwardRow(Row):
    """A forward call with statistics."""

    y: str
    residual: str | None
    forced: Forced | None = None
    tuned: Plan | None = None  # from a plan file, where the architecture has room for it

    @classmethod
    def of(cls, levels: Mapping[str, Any]) -> ForwardRow:
        """The row of these levels, made consistent."""
        levels = dict(levels)
        if levels["bias"] == "constant":
            levels["weight"] = "constant"
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
        parts = [self.place, self.norm, f"{SHORT[self.x]}x{self.vec_size}", f"y_{SHORT[self.y]}"]
        for name in ("weight", "bias", "residual"):
            level = getattr(self, name)
            if level is not None:
                parts.append(f"{name}_{SHORT.get(level, level)}")
        parts += self._option_names
        if self.forced is not None:
            forced = self.forced
            parts.append(f"rows_{forced.rows_per_block}-grid_{forced.grid}")
            parts += [] if forced.early_weight else ["late_weight"]
        parts += _tuned_name(self.tuned)
        return "-".join(parts)

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
            per_head=self.layout == "heads" or self.groups > 1,
            partial=self.partial is not None,
        )

    def plan(self, arch: int) -> Plan:
        row = (self.hidden_size, self.x, self.residual, arch)
        plan = choose_plan(self.norm, *row)
        if self.tuned is not None and not forward_fault(self.tuned, *row):
            plan = self.tuned
        return plan if self.forced is None else self.forced.plan(plan)

    def candidates(self, arch: int) -> tuple[Plan, ...]:
        """What a plan file may bring for this row."""
        row = (self.hidden_size, self.x, self.residual, arch)
        return forward_candidates(self.norm, *row)  # type: ignore[arg-type]

    def launch(self, arch: int, sm_count: int = SM_COUNT) -> Launch:
        plan, staged_itemsize = self.plan(arch), self.kind.staged_itemsize
        if self.forced is not None:
            return self.forced.launch(plan, self.rows)
        where = self.mask in ("keep_where", "zero_both")
        return choose_launch(plan, self.rows, staged_itemsize, sm_count, self.kind.masked, where)

    def specialisation(self, arch: int, sm_count: int = SM_COUNT) -> Specialisation:
        """The instantiation that the library has to take on `arch`."""
        return specialise_forward(
            self.kind,
            self.hidden_size,
            self.plan(arch),
            self.launch(arch, sm_count),
            arch=arch,
            aligned=self.layout != "misaligned" or self.vec_size == 1,
            split_rows=self.splits_rows,
        )

    # The call ---------------------------------------------------------------------------------

    def case(self) -> Case:
        """The arguments, between guard zones."""
        residual = None
        if self.residual is not None:
            residual = self._laid(inputs.array(self.shape, self.residual, seed=1))
        return self._case(residual=residual, out_dtype=self.y)

    def run(self, backend: Backend) -> dict[str, np.ndarray]:
        """Make the call into outputs full of NaN between guard zones, and check its results.

        Against the oracle within promise 6, and bit for bit given the statistics it returned. What
        lies around the arrays the backend's `verify` checks.
        """
        case = self.case()
        outputs = {
            output: backend.empty(self.statistic_shape, dtype)
            if output in ("mean", "rstd")
            else self._output(backend, dtype)
            for output, dtype in case.outputs(statistics=True).items()
        }
        with self._choices():
            got = calls.forward(backend, case, statistics=True, **outputs)
        calls.check_forward(case, got)
        return got

    @contextlib.contextmanager
    def _choices(self) -> Iterator[None]:
        """Let the backend choose what is forced or tuned."""
        forced = self.forced
        if forced is None and self.tuned is None:
            yield
            return

        def plan(norm: Norm, hidden_size: int, x: str, residual: str | None, arch: int) -> Plan:
            return self.plan(arch)

        def launch(plan: Plan, rows: int, *others: int) -> Launch:
            return (
                choose_launch(plan, rows, *others) if forced is None else forced.launch(plan, rows)
            )

        with (
            mock.patch.object(_cuda, "choose_plan", plan),
            mock.patch.object(_cuda, "choose_launch", launch),
        ):
            yield


def _plain(index: int, place: str, x: str, width: int) -> dict[str, Any]:
    """What most calls are: one dtype and a weight; in turn a bias, or in a short row a residual."""
    levels = {name: FACTORS[name][0] for name in FACTORS}
    layer, added = (index + index // 4) % 2 == 1, index % 3 == 1 and EVERY_PLACE[place].packs > 0
    levels |= {"place": place, "norm": "layer" if layer else "rms", "width": width}
    levels |= {"x": x, "y": x, "weight": x}
    return levels | {"bias": x if layer else None, "residual": x if added else None}


# Here every dtype fills every lane once.
FULL_PLACES = (
    *("three_packs", "half_warp", "warp", "packs_64", "packs_128", "packs_192", "packs_1024"),
    *("packs_1536", "staged", "staged_4", "staged_8"),
)
PLAIN = (
    *itertools.product(FULL_PLACES, FACTORS["x"], (8,)),
    # Small enough for the shared memory of a block without a cluster.
    *itertools.product(("staged_part",), ("float32",), (1, 2)),
    *itertools.product(("staged_part",), ("float16",), (2, 4)),
)

# A row of one or two warps is spread in another way for each norm.
EDGES = (
    *itertools.product(("packs_33",), ("float16",), (1, 2, 8), FACTORS["norm"]),
    *itertools.product(("packs_8", "packs_64"), FACTORS["x"], (8,), FACTORS["norm"]),
)

# (place, x, the launch, what differs from one dtype and a weight)
FORCED: tuple[tuple[str, str, Forced, dict[str, Any]], ...] = (
    # Blocks that walk over rows: the reduction's slots are used again.
    ("warp", "float16", Forced(4, grid=3), {"mask": "keep_where"}),
    ("packs_128", "bfloat16", Forced(4, grid=7), {"norm": "layer", "mask": "zero_both"}),
    ("packs_51", "float32", Forced(3, grid=2), {"residual": "bfloat16"}),
    ("packs_1024", "float32", Forced(grid=1), {"norm": "layer", "layout": "heads"}),
    ("packs_1536", "bfloat16", Forced(grid=8), {"layout": "misaligned", "mask": "zero_valid"}),
    # Of these blocks some take a row each, and the others walk on from there.
    ("packs_192", "float32", Forced(grid=24), {"layout": "heads", "mask": "keep_valid"}),
    ("packs_192", "float16", Forced(grid=4, walkers=3), {"mask": "keep_valid"}),
    ("packs_51", "bfloat16", Forced(3, grid=2, walkers=1), {"mask": "keep_valid"}),
    ("packs_51", "float32", Forced(2, grid=30), {"mask": "keep_valid", "groups": 3}),
    # Teams that deal what a mask leaves of their windows.
    ("packs_128", "float16", Forced(grid=8, teams=1, walkers=3), {"mask": "keep_where"}),
    ("packs_128", "bfloat16", Forced(4, grid=5, teams=2), {"norm": "layer", "mask": "keep_where"}),
    ("packs_192", "float16", Forced(teams=3, grid=7, walkers=2), {"mask": "keep_where"}),
    ("packs_51", "float32", Forced(2, grid=9, teams=5, walkers=1), {"mask": "keep_where"}),
    (
        "packs_192",
        "bfloat16",
        Forced(grid=9, teams=1, walkers=4),
        {"residual": "bfloat16", "mask": "keep_where"},
    ),
    ("packs_1024", "float32", Forced(grid=2, teams=1), {"norm": "layer", "mask": "keep_where"}),
    ("warp", "bfloat16", Forced(2, grid=20, teams=1), {"layout": "heads", "mask": "keep_where"}),
    ("warp", "float32", Forced(2, grid=49, teams=2, walkers=2), {"mask": "keep_where"}),
    ("three_packs", "float16", Forced(32, grid=9, teams=7), {"mask": "keep_where"}),
    ("one_pack", "float32", Forced(128, grid=4, teams=34, walkers=1), {"mask": "keep_where"}),
    ("packs_51", "float16", Forced(2, grid=30, teams=2), {"mask": "keep_where", "groups": 3}),
    ("packs_128", "float16", Forced(4, teams=1), {"layout": "misaligned", "mask": "keep_where"}),
    ("half_warp", "bfloat16", Forced(8, teams=40), {"mask": "keep_where", "groups": 3}),
    ("packs_51", "bfloat16", Forced(2, grid=5), {"mask": "zero_both"}),
    ("packs_51", "float32", Forced(3, grid=2), {"layout": "split", "mask": "keep_valid"}),
    # Weights that are loaded once the sum is known.
    ("three_packs", "float16", Forced(32, early_weight=False), {"layout": "heads"}),
    ("packs_77", "float32", Forced(2, early_weight=False), {"norm": "layer"}),
    ("packs_1024", "bfloat16", Forced(early_weight=False), {"residual": "bfloat16"}),
    ("longest_held", "float16", Forced(grid=2, early_weight=False), {"width": 1}),
    # Rows that leave the L2 first and have no registers to spare.
    ("packs_192", "float16", Forced(evict_first=True), {"residual": "float16"}),
    ("packs_128", "bfloat16", Forced(evict_first=True), {"norm": "layer", "bias": "bfloat16"}),
)


def _forced(place: str, x: str, forced: Forced, changes: dict[str, Any]) -> ForwardRow:
    levels = {name: FACTORS[name][0] for name in FACTORS}
    row = ForwardRow.of(levels | {"place": place, "x": x, "y": x, "weight": x} | changes)
    return dataclasses.replace(row, forced=forced)


# (place, x, what differs from one dtype and a weight)
Odd = tuple[str, str, dict[str, Any]]
GROUPED: tuple[Odd, ...] = (
    ("half_warp", "bfloat16", {"groups": 4}),
    ("packs_8", "float16", {"groups": 7, "mask": "keep_valid", "residual": "float16"}),
    ("warp_part", "float32", {"groups": 3, "norm": "layer", "mask": "zero_both"}),
    ("packs_131", "bfloat16", {"groups": 2, "mask": "keep_where", "layout": "misaligned"}),
    ("packs_51", "float16", {"groups": 5, "norm": "layer", "layout": "split"}),
    ("staged_part", "float32", {"groups": 2, "mask": "zero_valid", "layout": "gap"}),
    ("streamed", "float16", {"groups": 2, "norm": "layer", "mask": "zero_both"}),
)
PARTIAL: tuple[Odd, ...] = (
    ("packs_8", "float32", {"part": 0.7, "width": 1}),
    ("half_warp", "float16", {"part": 0.4, "cast": "before_weight"}),
    ("warp_part", "bfloat16", {"part": 0.01, "layout": "heads"}),
    ("packs_131", "bfloat16", {"part": 0.6, "residual": "float32", "bias": "float32"}),
    ("packs_192", "float64", {"part": 0.9, "mask": "zero_both"}),
    ("packs_1536", "bfloat16", {"part": 0.3, "groups": 3}),
    ("staged_part", "float32", {"part": 0.5, "layout": "misaligned"}),
    ("staged_8_part", "float16", {"part": 0.2, "residual": "float16"}),
    ("streamed", "bfloat16", {"part": 0.7, "mask": "keep_valid"}),
)
# LayerNorm stages a row that it would hold in registers, did no residual come with it.
ADDED: tuple[Odd, ...] = (
    ("longest_held", "float16", {"norm": "layer", "residual": "float16", "bias": "float16"}),
    ("longest_held", "float32", {"norm": "layer", "residual": "float32", "mask": "zero_both"}),
    ("longest_held", "bfloat16", {"norm": "layer", "residual": "bfloat16", "layout": "gap"}),
)


def _odd(place: str, x: str, changes: dict[str, Any]) -> ForwardRow:
    levels = {name: FACTORS[name][0] for name in FACTORS}
    return ForwardRow.of(levels | {"place": place, "x": x, "y": x, "weight": x} | changes)


UNTUNED_FORWARD = (
    *dict.fromkeys(
        ForwardRow.of(levels)
        for levels in (
            *pairwise(FACTORS),
            *(_plain(index, *which) for index, which in enumerate(PLAIN)),
            *(_plain(0, place, x, width) | {"norm": norm} for place, x, width, norm in EDGES),
        )
    ),
    *itertools.starmap(_forced, FORCED),
    *itertools.starmap(_odd, (*GROUPED, *PARTIAL, *ADDED)),
)


RowT = TypeVar("RowT", "ForwardRow", "BackwardRow")


def tuned_rows(rows: Sequence[RowT], make: Callable[..., RowT]) -> Iterator[RowT]:
    """The cheapest row for each class of candidates that `rows` lack on some architecture.

    `make` has a row of one dtype, by place, dtype, width, norm and whether it is an add.
    """
    spots = itertools.product(EVERY_PLACE, FACTORS["x"], FACTORS["width"])
    made = [
        make(*spot, norm=FACTORS["norm"][(index + index // 4) % 2], adds=index % 3 == 1)
        for index, spot in enumerate(spots)
    ]
    made.sort(key=lambda row: row.rows * row.hidden_size)
    for arch in (90, 75):
        rows = tuple(rows)
        held = {candidate_class(row.plan(arch), row.hidden_size) for row in rows}
        for row in made:
            for plan in row.candidates(arch):
                kind = candidate_class(plan, row.hidden_size)
                if kind not in held:
                    held.add(kind)
                    found = dataclasses.replace(row, tuned=plan)
                    rows += (found,)
                    yield found


def _tuned_name(plan: Plan | None) -> list[str]:
    if plan is None:
        return []
    counts = (plan.threads_per_row, plan.vecs_per_thread, plan.cluster_size)
    return [f"tuned_{plan.kernel.rpartition('_')[2]}_{'_'.join(map(str, counts))}"]


def _tuned_forward(place: str, x: str, width: int, norm: str, adds: bool) -> ForwardRow:
    levels = _plain(0, place, x, width) | {"norm": norm, "residual": x if adds else None}
    return ForwardRow.of(levels | {"bias": x if norm == "layer" else None})


FORWARD = (*UNTUNED_FORWARD, *tuned_rows(UNTUNED_FORWARD, _tuned_forward))


# Backward -----------------------------------------------------------------------------------------

BACKWARD_FACTORS: Mapping[str, Sequence[Any]] = {
    "place": tuple(PLACES),
    "x": (*ARRAYS, "float64"),
    "width": (8, 4, 2, 1),
    "norm": ("rms", "layer"),
    "dout": ARRAYS,
    "weight": ("float16", "float32", "bfloat16", "constant", None),
    "dweight": ("weight", *ARRAYS, None),  # "weight": of the weight's dtype
    "bias": (None, *ARRAYS),
    "dx": ("x", *ARRAYS, None),  # of x's dtype; of another where x is residual_out; not wanted
    "dresidual_out": (None, *ARRAYS),
    "statistics": ("given", "recomputed"),
    "cast": ("once", "before_weight"),
    "weight_offset": (0.0, 1.0),
    "mask": (None, "zero_where", "zero_both", "keep_valid"),  # keep: as zero, in int32
    "layout": ("contiguous", "misaligned", "gap", "split", "heads"),
}


@dataclass(frozen=True)
class ForcedBackward:
    """A launch of norm_backward that the library would choose for far more rows."""

    parts: int
    stages: int
    rows_per_block: int = 1
    bulk: bool = True  # where the architecture has it

    def launch(
        self, plan: Plan, rows: int, heads: int, staged_itemsize: int, arch: int
    ) -> BackwardLaunch:
        block = plan.threads_per_row * self.rows_per_block
        stages = self.stages if arch >= 80 else 1
        packs = stages * block * plan.vecs_per_thread
        return BackwardLaunch(
            "norm_backward",
            self.parts * heads * plan.cluster_size,
            block,
            packs * plan.vec_size * staged_itemsize,
            self.rows_per_block,
            stages,
            self.parts,
            bulk=self.bulk and arch >= 90,
        )


@dataclass(frozen=True, kw_only=True)
class BackwardRow(Row):
    """A backward call; of an add_* function where dx may differ from x, which is then the sum."""

    dout: str
    dweight: str | None
    dx: str | None
    dresidual_out: str | None
    statistics: str
    forced: ForcedBackward | None = None
    tuned: Plan | None = None  # from a plan file, where the architecture has room for it

    @classmethod
    def of(cls, levels: Mapping[str, Any]) -> BackwardRow:
        """The row of these levels, made consistent."""
        levels = dict(levels)
        if levels["x"] == "float64":
            for name in ("dout", "weight", "dweight", "bias", "dx", "dresidual_out"):
                if levels[name] in ARRAYS:
                    levels[name] = "float64"
        if levels["weight"] in (None, "constant"):
            levels["dweight"] = None
        if levels["weight"] is None:
            levels["weight_offset"] = 0.0
        for name, whose in (("dweight", "weight"), ("dx", "x")):
            if levels[name] == whose:
                levels[name] = levels[whose]
        if levels["dweight"] is levels["bias"] is levels["dx"] is None:
            levels["dx"] = levels["x"]
        if levels["dx"] is None:
            levels["dresidual_out"] = None
        return cls(**levels)

    @property
    def name(self) -> str:
        """What pytest calls the row."""
        parts = [self.place, self.norm, f"{SHORT[self.x]}x{self.vec_size}", self.statistics]
        for name in ("dout", "weight", "bias", "dx", "dweight", "dresidual_out"):
            level = getattr(self, name)
            parts += [] if level is None else [f"{name}_{SHORT.get(level, level)}"]
        parts += self._option_names
        if self.forced is not None:
            forced = self.forced
            parts.append(f"rows_{forced.rows_per_block}-parts_{forced.parts}")
            parts.append(f"stages_{forced.stages}")
        parts += _tuned_name(self.tuned)
        return "-".join(parts)

    @property
    def added(self) -> bool:
        return self.dresidual_out is not None or self.dx not in (None, self.x)

    @property
    def staged_itemsize(self) -> int:
        """Bytes of one element of what a block holds of a row."""
        return sum(TABLE[d].itemsize for d in (self.x, self.dout, self.dresidual_out) if d)

    def plan(self, arch: int) -> Plan:
        row = (self.hidden_size, self.x, self.staged_itemsize, arch)
        if self.tuned is not None and not backward_fault(self.tuned, *row):
            return self.tuned
        return choose_backward_plan(*row, self.partial is not None)

    def candidates(self, arch: int) -> tuple[Plan, ...]:
        """What a plan file may bring for this row."""
        row = (self.hidden_size, self.x, self.staged_itemsize, arch)
        return backward_candidates(self.norm, *row)  # type: ignore[arg-type]

    def launches(self, arch: int, sm_count: int = SM_COUNT) -> tuple[Launched, ...]:
        """What the library launches on `arch`; nothing runs."""
        with recorded(arch, sm_count) as launches, blank_inputs():
            self._call(Backend(), *self._arguments(blank=True))
        return tuple(launches)

    def specialisations(self, arch: int, sm_count: int = SM_COUNT) -> tuple[Specialisation, ...]:
        """The instantiations that the library takes on `arch`, in the order of their launches."""
        return tuple(launched.specialisation for launched in self.launches(arch, sm_count))

    def run(self, backend: Backend) -> dict[str, np.ndarray | None]:
        """Make the call into outputs full of NaN between guard zones, and check its results."""
        case, given = self._arguments()
        got = self._call(backend, case, given)
        calls.check_backward(case, given, got)
        return got

    def _arguments(self, blank: bool = False) -> tuple[Case, Gradient]:
        case = self._case()
        mean = rstd = None
        if self.statistics == "given":
            shape, dtype = self.statistic_shape, oracle.accumulation(case.x)
            mean, rstd = np.zeros(shape, dtype), np.ones(shape, dtype)
            if not blank:
                x = case.by_heads().x if case.groups > 1 else case.x
                forward = oracle.forward(x, norm=self.norm, eps=case.eps, partial=case.partial)
                mean, rstd = (part.value.astype(dtype) for part in (forward.mean, forward.rstd))
        dresidual_out = None
        if self.dresidual_out is not None:
            dresidual_out = self._laid(inputs.array(self.shape, self.dresidual_out, seed=3))
        return case, Gradient(
            dout=self._laid(inputs.array(self.shape, self.dout, seed=2)),
            added=self.added,
            dresidual_out=dresidual_out,
            mean=None if mean is None or self.norm == "rms" else inputs.lay(mean),
            rstd=None if rstd is None else inputs.lay(rstd),
            need_dx=self.dx is not None,
            need_dweight=self.dweight is not None,
            dweight_dtype=self.dweight,
            x_dtype=self.dx if self.added else None,
        )

    def _call(self, backend: Backend, case: Case, given: Gradient) -> dict[str, np.ndarray | None]:
        outputs = {}
        if self.dx is not None:
            outputs["dx"] = self._output(backend, self.dx)
        for name, dtype in (("dweight", self.dweight), ("dbias", self.bias)):
            if dtype is not None:
                outputs[name] = backend.empty(self.parameter_shape, dtype)
        with self._choices():
            return calls.backward(backend, case, given, **outputs)

    @contextlib.contextmanager
    def _choices(self) -> Iterator[None]:
        """Let the backend choose what is forced or tuned."""
        forced = self.forced

        def plan(size: int, x: str, staged_itemsize: int, arch: int, partial: bool) -> Plan:
            return self.plan(arch)

        def launch(*arguments: Any) -> BackwardLaunch:
            assert forced is not None
            return forced.launch(*arguments[:-1])  # whatever the number of SMs

        with contextlib.ExitStack() as stack:
            if self.tuned is not None:
                stack.enter_context(mock.patch.object(_cuda_backward, "choose_backward_plan", plan))
            if forced is not None:
                for name, chosen in (
                    ("choose_backward_launch", launch),
                    ("choose_few_launch", lambda *arguments: None),
                ):
                    stack.enter_context(mock.patch.object(_cuda_backward, name, chosen))
            yield


@contextlib.contextmanager
def blank_inputs() -> Iterator[None]:
    """Zeros for inputs, where values play no part and long rows would cost seconds."""

    def zeros(shape: int | tuple[int, ...], dtype: str, *_: Any, **__: Any) -> np.ndarray:
        return np.zeros(shape, oracle.DTYPES[dtype])

    with contextlib.ExitStack() as stack:
        for name in ("array", "weight", "bias"):
            stack.enter_context(mock.patch.object(inputs, name, zeros))
        yield


# A ring just below 48 KB: static shared memory takes it above what a block has unasked.
MOST_STATIC = {name: levels[0] for name, levels in BACKWARD_FACTORS.items()}
MOST_STATIC |= {"place": "one_pack", "width": 4, "norm": "layer", "weight": "float32"}
MOST_STATIC |= {"dout": "float32", "bias": "float32", "dresidual_out": "float32"}

# Blocks that go several times around their ring: (place, x, the launch, what differs from one
# dtype and a weight).
ROUND: tuple[tuple[str, str, ForcedBackward, dict[str, Any]], ...] = (
    ("half_warp", "bfloat16", ForcedBackward(1, 2, 4), {"norm": "layer"}),
    ("warp", "float16", ForcedBackward(3, 2, 4), {"mask": "zero_where"}),
    ("warp_part", "float32", ForcedBackward(1, 2, 4), {"dresidual_out": "float32"}),
    ("packs_128", "bfloat16", ForcedBackward(7, 3), {"norm": "layer", "mask": "zero_both"}),
    ("packs_192", "float16", ForcedBackward(5, 2, 2), {"statistics": "recomputed"}),
    ("packs_192", "bfloat16", ForcedBackward(5, 2, 2, bulk=False), {"norm": "layer"}),
    ("packs_131", "bfloat16", ForcedBackward(2, 2), {"dresidual_out": "bfloat16"}),
    ("packs_131", "float64", ForcedBackward(1, 2), {"dresidual_out": "float64", "norm": "layer"}),
    ("packs_999", "float64", ForcedBackward(1, 3), {"dresidual_out": "float64"}),
    ("packs_1536", "bfloat16", ForcedBackward(1, 2), {"norm": "layer", "mask": "keep_valid"}),
    ("staged_part", "float32", ForcedBackward(1, 2), {"norm": "layer", "statistics": "recomputed"}),
    ("staged", "bfloat16", ForcedBackward(1, 3), {"dresidual_out": "bfloat16"}),
    ("staged", "float16", ForcedBackward(1, 2, bulk=False), {"norm": "layer"}),
    ("staged_4", "bfloat16", ForcedBackward(1, 2), {}),
)


def _odd_backward(place: str, x: str, changes: dict[str, Any], index: int) -> BackwardRow:
    """Of an odd forward row; statistics are in turn given and recomputed."""
    levels = {name: levels[0] for name, levels in BACKWARD_FACTORS.items()}
    levels |= {"place": place, "x": x, "dout": x, "weight": x, "bias": changes.get("bias")}
    levels |= {
        name: changes[name] for name in ("width", "norm", "cast", "layout") if name in changes
    }
    levels |= {"groups": changes.get("groups", 1), "part": changes.get("part")}
    levels["mask"] = changes.get("mask") and (
        "keep_valid" if "valid" in changes["mask"] else "zero_both"
    )
    levels["dresidual_out"] = changes.get("residual")
    levels["statistics"] = ("given", "recomputed")[index % 2]
    return BackwardRow.of(levels)


def _round(place: str, x: str, forced: ForcedBackward, changes: dict[str, Any]) -> BackwardRow:
    levels = {name: levels[0] for name, levels in BACKWARD_FACTORS.items()}
    levels |= {"place": place, "x": x, "dout": x, "weight": x}
    levels["bias"] = x if changes.get("norm") == "layer" else None
    return dataclasses.replace(BackwardRow.of(levels | changes), forced=forced)


# An odd row that takes a cluster in backward.
ODD_LONG = MOST_STATIC | {"place": "odd_long", "x": "float16", "dout": "float16", "width": 1}

UNTUNED_BACKWARD = (
    *dict.fromkeys(
        BackwardRow.of(levels) for levels in (*pairwise(BACKWARD_FACTORS), MOST_STATIC, ODD_LONG)
    ),
    *itertools.starmap(_round, ROUND),
    *(_odd_backward(*odd, index) for index, odd in enumerate((*GROUPED, *PARTIAL))),
)


def _tuned_backward(place: str, x: str, width: int, norm: str, adds: bool) -> BackwardRow:
    levels = {name: levels[0] for name, levels in BACKWARD_FACTORS.items()}
    levels |= {"place": place, "x": x, "width": width, "norm": norm, "dout": x, "weight": x}
    levels |= {"bias": x if norm == "layer" else None, "dresidual_out": x if adds else None}
    return BackwardRow.of(levels | {"statistics": "recomputed"})  # by norm_backward


TUNED_BACKWARD = tuple(tuned_rows(UNTUNED_BACKWARD, _tuned_backward))
BACKWARD = (
    *UNTUNED_BACKWARD,
    *TUNED_BACKWARD,
    *(dataclasses.replace(row, statistics="given") for row in TUNED_BACKWARD[::3]),
)


# q and k together ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """A call of qk_norm; the weights are "shared" by the heads, "per_head" or None."""

    x: str
    head_size: int
    heads: tuple[int, int]
    tokens: int = 37
    weights: tuple[str | None, str | None] = ("shared", "shared")
    weight: str = "x"  # dtype
    layout: str = "packed"  # in place in one buffer of q, k and v; or arrays of their own
    cast: str = "once"

    @property
    def name(self) -> str:
        """What pytest calls the row."""
        heads = "_".join(map(str, self.heads))
        weights = "_".join(str(weight) for weight in self.weights)
        parts = (SHORT[self.x], f"{self.tokens}x{heads}x{self.head_size}", weights, self.weight)
        return "-".join(("pair", *parts, self.layout, self.cast))

    @property
    def hidden_size(self) -> int:
        return self.head_size

    @property
    def rows(self) -> int:
        return self.tokens * sum(self.heads)

    def launches(self, arch: int, sm_count: int = SM_COUNT) -> tuple[Launched, ...]:
        """What the library launches on `arch`; nothing runs."""
        with recorded(arch, sm_count) as launches:
            self._call(Backend(), *self._halves())
        return tuple(launches)

    def specialisations(self, arch: int, sm_count: int = SM_COUNT) -> tuple[Specialisation, ...]:
        """The instantiations that the library takes on `arch`."""
        return tuple(launched.specialisation for launched in self.launches(arch, sm_count))

    def run(self, backend: Backend) -> None:
        """Make the call between guard zones and check its results."""
        halves = self._halves()
        for case, result in zip(halves, self._call(backend, *halves), strict=True):
            calls.check_forward(case, {"y": backend.numpy(result)})

    def _halves(self) -> tuple[Case, Case]:
        first = self.heads[0]
        # Rows of q, k and v, which none may read or write.
        shape = (self.tokens, first + 2 * self.heads[1], self.head_size)
        packed = inputs.array(shape, self.x, "row_tagged")
        if self.layout == "packed":
            packed = inputs.lay(packed)
        elif self.layout == "misaligned":
            packed = inputs.lay(packed, "offset_1")
        arrays = [packed[:, :first], packed[:, first : sum(self.heads)]]
        if self.layout == "apart":
            arrays = [inputs.lay(array) for array in arrays]
        q, k = (
            Case(
                x=x,
                weight=self._weight(which, x.shape[1]),
                per_head=which == "per_head",
                eps=1e-5,
                cast=self.cast,
            )
            for which, x in zip(self.weights, arrays, strict=True)
        )
        return q, k

    def _weight(self, which: str | None, heads: int) -> np.ndarray | None:
        if which is None:
            return None
        shape = (heads, self.head_size) if which == "per_head" else (self.head_size,)
        layout = "offset_1" if self.layout == "misaligned" else "contiguous"
        dtype = self.x if self.weight == "x" else self.weight
        return inputs.lay(inputs.weight(shape, dtype), layout)

    def _call(self, backend: Backend, q: Case, k: Case) -> tuple[Any, Any]:
        outputs = {}
        if self.layout != "apart":
            outputs = {"q_out": backend.output(q.x), "k_out": backend.output(k.x)}
        arrays = (backend.input(array) for array in (q.x, k.x, q.weight, k.weight))
        results: tuple[Any, Any] = cupy_rmsnorm.qk_norm(
            *arrays, eps=q.eps, cast=self.cast, **outputs
        )
        return results


PAIRS = (
    PairRow(x="bfloat16", head_size=128, heads=(32, 8)),
    PairRow(x="bfloat16", head_size=64, heads=(5, 1), tokens=1),
    PairRow(x="float16", head_size=80, heads=(6, 2), weights=("per_head", "per_head")),
    PairRow(x="float16", head_size=96, heads=(3, 3), weights=("shared", "per_head")),
    PairRow(x="float32", head_size=256, heads=(4, 1), layout="apart", cast="before_weight"),
    PairRow(x="bfloat16", head_size=128, heads=(7, 3), weight="float32", layout="misaligned"),
    PairRow(x="float16", head_size=256, heads=(2, 2), weights=(None, None), cast="before_weight"),
    PairRow(x="bfloat16", head_size=96, heads=(12, 1), layout="apart", tokens=401),
    PairRow(x="float64", head_size=80, heads=(2, 1), weights=("per_head", "shared")),
    PairRow(x="float16", head_size=128, heads=(1, 3), tokens=401),
    # These take two launches.
    PairRow(x="float16", head_size=64, heads=(2, 2), weights=("shared", None)),
    PairRow(x="bfloat16", head_size=40_000, heads=(2, 1), tokens=1),
)


# What is compiled together ------------------------------------------------------------------------


def units(specialisations: Iterable[Specialisation], size: int) -> list[list[Specialisation]]:
    """Each of them once, up to `size` of one kernel a unit."""
    families: dict[str, list[Specialisation]] = {}
    for item in dict.fromkeys(specialisations):
        families.setdefault(item.kernel, []).append(item)
    return [
        family[start : start + size]
        for family in families.values()
        for start in range(0, len(family), size)
    ]
