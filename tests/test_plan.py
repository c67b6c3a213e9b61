# SPDX-License-Identifier: Apache-2.0
"""Plans, launches, row layouts and packed arguments: what is decided before a kernel runs.

No GPU: `tests.recorder` keeps what the driver would have been given.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import itertools
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_rmsnorm import _kernel, _plan, _source
from cupy_rmsnorm._call import Norm
from cupy_rmsnorm._candidates import backward_candidates, forward_candidates
from cupy_rmsnorm._cuda import ForwardKind, specialise_forward
from cupy_rmsnorm._dtypes import TABLE
from cupy_rmsnorm._kernel import Specialisation
from cupy_rmsnorm._layout import collapse_rows, is_contiguous
from cupy_rmsnorm._plan import choose_launch, choose_plan, loads_weight_early, most_spare_rows
from cupy_rmsnorm._plan_backward import choose_backward_launch, choose_backward_plan
from tests import calls, inputs, kernels, sanitizer, sweeps
from tests.backends import Backend
from tests.calls import Case
from tests.plan_classes import backward_class, candidate_class, plan_class
from tests.recorder import Launched, recorded

ARCHS = (*_plan.SHARED_LIMITS, 70, 110, 121, 130)  # known ones, older and newer
DTYPES = ("float16", "bfloat16", "float32", "float64")
LONGEST = 140_000
HIDDEN_SIZES = sorted(
    {
        *range(1, 2200),
        *range(2200, LONGEST, 61),
        *inputs.HIDDEN_SIZES,
        *(1 << power for power in range(24)),
        *(8 * odd for odd in range(1, LONGEST // 8, 250)),
        *(250_000, 262_145, 917_504, 917_505, 1_000_000, 2**31 - 1, 2**31, 2**33 + 8),
    }
)


def residuals(x: str) -> tuple[str | None, ...]:
    return (None, "float64") if x == "float64" else (None, "float16", "float32")


NORMS: tuple[Norm, ...] = ("rms", "layer")


# Plans and launches -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("x", DTYPES)
def test_every_plan_can_run(x: str, arch: int) -> None:
    for norm, residual, hidden_size in itertools.product(NORMS, residuals(x), HIDDEN_SIZES):
        plan = choose_plan(norm, hidden_size, x, residual, arch)
        where = (norm, hidden_size, x, residual, arch, plan)
        itemsize = TABLE[x].itemsize
        threads = plan.threads_per_row
        assert hidden_size % plan.vec_size == 0, where
        assert plan.vec_size * itemsize <= _plan.VECTOR_BYTES, where
        if threads < _plan.WARP:
            assert threads & (threads - 1) == 0, where  # rows of a warp are summed by halves
        else:
            assert threads % _plan.WARP == 0, where
        assert threads <= _plan.MAX_THREADS, where
        assert plan.cluster_size == 1 or arch >= 90, where
        assert plan.cluster_size in (1, 2, 4, 8), where

        packs = hidden_size // plan.vec_size
        share = -(-packs // plan.cluster_size)
        if plan.vecs_per_thread:
            capacity = threads * plan.vecs_per_thread
            assert share <= capacity, where
            # No pass over the threads is empty, and no block of a cluster.
            assert share > capacity - threads, where
            assert (plan.cluster_size - 1) * share < packs, where
        if plan.kernel == "norm_forward":
            assert plan.vecs_per_thread * plan.vec_size <= _plan.MAX_HELD_ELEMENTS, where
            assert plan.cluster_size == 1, where


@pytest.mark.parametrize("arch", [75, 80, 90, 120])
@pytest.mark.parametrize("x", DTYPES)
def test_every_launch_can_run(x: str, arch: int) -> None:
    for residual, hidden_size in itertools.product(residuals(x), HIDDEN_SIZES[::3]):
        plan = choose_plan("layer", hidden_size, x, residual, arch)
        kind = ForwardKind("layer", x, x, residual)
        for rows, sm_count in ((1, 132), (5, 1), (131, 20), (4097, 132), (2**40, 132)):
            if rows * hidden_size > 2**45:
                continue
            launch = choose_launch(plan, rows, kind.staged_itemsize, sm_count)
            where = (hidden_size, x, residual, rows, sm_count, plan, launch)
            assert launch.block % _plan.WARP == 0, where
            assert launch.block <= _plan.MAX_THREADS, where
            assert 1 <= launch.grid <= _plan.MAX_GRID, where
            # Two sums, two rows deep, over the warps of a block and the blocks of a cluster.
            slots = 4 * (launch.block // _plan.WARP + plan.cluster_size)
            static_bytes = 8 * slots if x == "float64" else 4 * slots
            limit = _plan.SHARED_LIMITS[arch] * 1024
            assert launch.shared_bytes + static_bytes <= limit, where
            if launch.shared_bytes <= _kernel.UNASKED_SHARED_BYTES:
                assert launch.shared_bytes + static_bytes <= 48 * 1024, where
            if plan.kernel == "norm_forward":
                assert launch.block == plan.threads_per_row * launch.rows_per_block, where
                assert launch.shared_bytes == 0, where
                # No block is without a row.
                assert (launch.grid - 1) * launch.rows_per_block < rows, where
            else:
                assert launch.grid == rows * plan.cluster_size, where
                assert (launch.block, launch.rows_per_block) == (plan.threads_per_row, 1), where


def test_a_plan_follows_from_size_dtypes_and_architecture_alone() -> None:
    assert list(inspect.signature(choose_plan).parameters) == [
        "norm",
        "hidden_size",
        "x_dtype",
        "residual_dtype",
        "arch",
    ]


@pytest.mark.parametrize("arch", [75, 80, 90, 120])
@pytest.mark.parametrize("x", DTYPES)
def test_every_backward_launch_can_run(x: str, arch: int) -> None:
    itemsize, double = TABLE[x].itemsize, x == "float64"
    accumulation = 8 if double else 4
    for staged_itemsize, hidden_size in itertools.product(
        (2 * itemsize, 3 * itemsize, itemsize + 8), HIDDEN_SIZES[::3]
    ):
        plan = choose_backward_plan(hidden_size, x, staged_itemsize, arch)
        threads = plan.threads_per_row
        where = (hidden_size, x, staged_itemsize, arch, plan)
        assert hidden_size % plan.vec_size == 0, where
        assert plan.vec_size * itemsize <= _plan.VECTOR_BYTES, where
        assert plan.cluster_size == 1 or arch >= 90, where
        if threads < _plan.WARP:
            assert threads & (threads - 1) == 0, where
        else:
            assert threads % _plan.WARP == 0, where
        if not plan.vecs_per_thread:
            continue
        share = -(-(hidden_size // plan.vec_size) // plan.cluster_size)
        capacity = threads * plan.vecs_per_thread
        assert capacity - threads < share <= capacity, where
        assert (plan.cluster_size - 1) * share < hidden_size // plan.vec_size, where
        for rows, heads, sm_count in ((1, 1, 132), (6, 3, 1), (131, 1, 20), (2**20, 8, 132)):
            launch = choose_backward_launch(plan, rows, heads, staged_itemsize, arch, sm_count)
            where = (*where[:5], rows, heads, sm_count, launch)
            assert launch.block % _plan.WARP == 0, where
            assert launch.block == threads * launch.rows_per_block <= _plan.MAX_THREADS, where
            assert launch.grid == launch.parts * heads * plan.cluster_size, where
            assert 1 <= launch.parts <= 2 * sm_count, where  # bounds the workspace
            # Mbarriers of the rows on their way and of the cluster's sums, and the slots of four
            # sums, two rows deep.
            mbarriers = launch.stages * launch.rows_per_block + 4
            slots = 8 * (max(1, launch.block // _plan.WARP) + plan.cluster_size)
            static_bytes = 8 * mbarriers + slots * accumulation
            limit = _plan.SHARED_LIMITS[arch] * 1024
            assert launch.shared_bytes + static_bytes <= limit, where
            if launch.shared_bytes <= _kernel.UNASKED_SHARED_BYTES:
                assert launch.shared_bytes + static_bytes <= 48 * 1024, where


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_shared_memory_follows_from_the_specialisation(arch: int) -> None:
    """A function is told once how much it may ask for."""
    seen: dict[Specialisation, int] = {}
    for x, hidden_size in itertools.product(("float16", "float32"), HIDDEN_SIZES):
        for residual in residuals(x):
            kind = ForwardKind("rms", x, x, residual)
            plan = choose_plan("rms", hidden_size, x, residual, arch)
            launch = choose_launch(plan, 3, kind.staged_itemsize, 132)
            specialisation = specialise_forward(
                kind, hidden_size, plan, launch, arch=arch, aligned=True, split_rows=False
            )
            before = seen.setdefault(specialisation, launch.shared_bytes)
            assert before == launch.shared_bytes, (hidden_size, x, residual, plan)


def test_weights_come_early_where_they_cost_no_rows() -> None:
    plan = choose_plan("rms", 8192, "bfloat16", None, 90)
    many, few = (choose_launch(plan, rows, 2, 132) for rows in (132, 131))
    assert loads_weight_early(plan, many, 2, 2)
    assert loads_weight_early(plan, many, 2, 4)  # a float32 weight, or a bias as well
    assert not loads_weight_early(plan, many, 2, 6)
    assert loads_weight_early(plan, few, 2, 6)
    shorter = choose_plan("rms", 4096, "bfloat16", None, 90)  # bytes enough, wider than the row
    assert not loads_weight_early(shorter, many, 2, 4)
    assert loads_weight_early(shorter, many, 4, 4)
    small = choose_plan("layer", 4096, "bfloat16", None, 90)
    assert loads_weight_early(small, many, 2, 4)
    assert not loads_weight_early(small, many, 2, 8)
    late = dataclasses.replace(plan, early_weight=False)
    assert not loads_weight_early(late, few, 2, 2)
    one_warp = choose_plan("layer", 1024, "bfloat16", None, 90)
    many = choose_launch(one_warp, 10**6, 2, 132)
    assert loads_weight_early(one_warp, many, 2, 4 + 4)


def test_small_calls_are_evicted_first() -> None:
    plan = choose_plan("rms", 4096, "bfloat16", None, 90)
    assert choose_launch(plan, 1024, 2, 132).evict_first
    assert not choose_launch(plan, 1025, 2, 132).evict_first
    assert not choose_launch(plan, 1024, 4, 132).evict_first  # a residual as well


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sm_count", [4, 132])
def test_blocks_have_registers_to_spare_up_to_half_of_an_sm(
    norm: Norm, dtype: str, sm_count: int
) -> None:
    itemsize = TABLE[dtype].itemsize
    for hidden_size in (64, 128, 1000, 4096, 5376, 8192, 16384):
        plan = choose_plan(norm, hidden_size, dtype, None, 90)
        most = most_spare_rows(plan, itemsize, sm_count)
        launch = choose_launch(plan, most, itemsize, sm_count)
        assert launch.spare_registers
        assert -(-launch.grid // sm_count) * launch.block <= 1024
        assert not choose_launch(plan, most + 1, itemsize, sm_count).spare_registers
        assert not choose_launch(plan, most, itemsize, sm_count, "zero").spare_registers


def test_masked_rows_that_are_looked_up_and_many_are_dealt_by_teams() -> None:
    plan = choose_plan("rms", 4096, "bfloat16", None, 90)
    assert _plan.fewest_dealt_rows(plan, 132) == 2113
    for rows, grid, teams in (
        (1, 1, 0),
        (2112, 2112, 0),
        (2113, 1056, 3),
        (16384, 1648, 16),
        (16385, 1649, 17),
        (2**40, 2**30, 2**30),
    ):
        launch = choose_launch(plan, rows, 2, 132, "keep", where=True)
        assert (launch.grid, launch.teams) == (grid, teams)
        assert launch.teams * _plan.MASKED_WINDOW >= rows or not teams
    for name, value in (("CHUNK_ROWS", 32), ("WINDOW_CHUNKS", _plan.MASKED_WINDOW // 32)):
        assert f"constexpr int {name} = {value};" in _source.load("norm_forward")


@given(st.integers(1, 2**31 - 1), st.data())
def test_a_block_finds_its_team_without_a_division(teams: int, data: st.DataObject) -> None:
    """What block_rows.cuh does in 32 bits, for any block of any grid."""
    reciprocal = -(-(2**31) // teams)
    blocks = st.integers(0, 2**31 - 2)
    multiple = st.integers(0, (2**31 - 2) // teams).map(lambda member: member * teams)
    near = st.tuples(multiple, st.integers(-1, 1)).map(sum)
    block = min(max(0, data.draw(blocks | near)), 2**31 - 2)
    assert reciprocal < 2**32
    member = (2 * block * reciprocal) >> 32
    assert member * teams < 2**32
    member -= member * teams > block
    assert member == block // teams


@pytest.mark.parametrize(
    ("teams", "resident", "walkers"), [(0, 792, 792), (0, 9999, 2736), (16, 792, 49), (684, 792, 4)]
)
def test_as_many_blocks_walk_as_fit_and_come_out_even(
    teams: int, resident: int, walkers: int
) -> None:
    launch = _plan.Launch(2736, 256, 0, 1, teams=teams)
    assert _plan.choose_walkers(launch, resident) == walkers


def test_blocks_walk_over_rows_that_valid_rows_alone_masks() -> None:
    plan = choose_plan("rms", 4096, "bfloat16", None, 90)
    for rows, grid in ((33, 33), (1056, 1056), (2048, 1056), (16384, 2048), (2**40, 2**28)):
        launch = choose_launch(plan, rows, 2, 132, "keep")
        assert (launch.grid, launch.teams) == (grid, 0)


def test_a_block_zeroes_several_short_rows() -> None:
    for hidden_size, grid in ((128, 32768), (512, 8192), (4096, 65536)):
        plan = choose_plan("rms", hidden_size, "bfloat16", None, 90)
        rows = 2**20 if hidden_size == 128 else 2**16
        for where in (True, False):
            launch = choose_launch(plan, rows, 2, 132, "zero", where)
            assert (launch.grid, launch.teams) == (grid, 0)


# The sweep ----------------------------------------------------------------------------------------

SWEEP = sweeps.swept("sweep.json")
NOT_THE_FASTEST: dict[sweeps.Shape, str] = {
    ("layer_norm", "bfloat16", 16384, 2048): "rows of one warp took 2.1 % less, and in blocks of "
    "four rows, which the library would give them, as long; rows of two warps share one of two",
}


@pytest.mark.parametrize("shape", SWEEP, ids=str)
def test_plans_are_the_fastest_of_the_sweep(shape: sweeps.Shape) -> None:
    op, dtype, rows, hidden_size = shape
    norm: Norm = "layer" if "layer" in op else "rms"
    residual = dtype if op.startswith("add") else None
    bias = dtype if norm == "layer" else None
    kind = ForwardKind(norm, dtype, dtype, residual, dtype, bias)
    plan = choose_plan(norm, hidden_size, dtype, residual, 90)
    chosen = dataclasses.asdict(plan)
    launch = choose_launch(plan, rows, kind.staged_itemsize, 132)
    if plan.kernel == "norm_forward":
        itemsizes = kind.staged_itemsize, kind.parameter_itemsize
        chosen["early_weight"] = loads_weight_early(plan, launch, *itemsizes)
    sweeps.check(shape, SWEEP[shape], chosen, launch.rows_per_block, NOT_THE_FASTEST)


def test_the_sweep_has_what_the_table_was_read_off() -> None:
    """Register rows of each length in the table, staged ones, both norms, a residual."""
    assert set(NOT_THE_FASTEST) <= set(SWEEP)
    assert {op for op, *_ in SWEEP} == {
        f"{add}{norm}_norm" for add in ("", "add_") for norm in ("rms", "layer")
    }
    packs = {
        size // _plan.vector_size(size, TABLE[dtype].itemsize)
        for op, dtype, _, size in SWEEP
        if op == "rms_norm"
    }
    bounds = [0, *(limit for limit, _ in _plan.VECS_PER_THREAD["rms"])]
    for low, high in itertools.pairwise(bounds):
        assert any(low < count <= high for count in packs), (low, high)
    assert max(packs) * _plan.VECTOR_BYTES > 2 * _plan.REGISTER_ROW_BYTES


# The table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_the_table_holds_every_class_of_plans(arch: int) -> None:
    choosable: dict[tuple[Any, ...], Any] = {}
    for norm, x, hidden_size in itertools.product(NORMS, DTYPES, HIDDEN_SIZES):
        for residual in residuals(x):
            plan = choose_plan(norm, hidden_size, x, residual, arch)
            key = plan_class(plan, hidden_size)
            choosable.setdefault(key, (hidden_size, x, residual))
    held = {plan_class(row.plan(arch), row.hidden_size) for row in kernels.FORWARD}
    missing = {key: example for key, example in choosable.items() if key not in held}
    assert not missing, f"no row of the table has these plans: {missing}"


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_the_table_holds_every_class_of_backward_plans(arch: int) -> None:
    choosable: dict[tuple[Any, ...], Any] = {}
    for x, hidden_size in itertools.product(DTYPES, HIDDEN_SIZES):
        plan = choose_backward_plan(hidden_size, x, 2 * TABLE[x].itemsize, arch)
        choosable.setdefault(backward_class(plan), (hidden_size, x))
    held = {
        backward_class(choose_backward_plan(row.hidden_size, row.x, row.staged_itemsize, arch))
        for row in kernels.BACKWARD
    }
    missing = {key: example for key, example in choosable.items() if key not in held}
    assert not missing, f"no row of the table has these plans: {missing}"


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_the_table_holds_every_class_of_candidates(arch: int) -> None:
    """What a plan file may bring has been run."""
    choosable: dict[tuple[Any, ...], Any] = {}
    sizes = sorted({*HIDDEN_SIZES[::7], *inputs.HIDDEN_SIZES, *(2**power for power in range(22))})
    for norm, x, hidden_size in itertools.product(NORMS, DTYPES, sizes):
        for residual in residuals(x):
            for plan in forward_candidates(norm, hidden_size, x, residual, arch):
                key = candidate_class(plan, hidden_size)
                choosable.setdefault(key, (norm, hidden_size, x, residual, plan))
        for staged in (2, 3):
            itemsize = staged * TABLE[x].itemsize
            for plan in backward_candidates(norm, hidden_size, x, itemsize, arch):
                key = candidate_class(plan, hidden_size)
                choosable.setdefault(key, (norm, hidden_size, x, itemsize, plan))
    held = {
        candidate_class(row.plan(arch), row.hidden_size)
        for row in (*kernels.FORWARD, *kernels.BACKWARD)
    }
    missing = {key: example for key, example in choosable.items() if key not in held}
    assert not missing, f"no row of the table has these plans: {missing}"


@pytest.mark.parametrize("x", DTYPES)
def test_a_row_ends_in_the_last_pack_of_its_threads(x: str) -> None:
    """norm_forward looks for its end nowhere else."""
    for norm, hidden_size in itertools.product(NORMS, HIDDEN_SIZES[::3]):
        for residual in residuals(x):
            for plan in forward_candidates(norm, hidden_size, x, residual, 90):
                before = plan.vec_size * (plan.vecs_per_thread - 1) * plan.threads_per_row
                assert plan.kernel != "norm_forward" or before < hidden_size, (hidden_size, plan)


def test_the_table_holds_every_backward_kernel() -> None:
    kernel_names = {name for name in _kernel.PARAMETERS if name.startswith("norm_backward")}
    for arch in (75, 90):
        found = {item.kernel for row in kernels.BACKWARD for item in row.specialisations(arch)}
        assert found == kernel_names, arch


@pytest.mark.parametrize("factors", [kernels.FACTORS, kernels.BACKWARD_FACTORS])
def test_the_table_holds_every_pair(factors: Mapping[str, Sequence[Any]]) -> None:
    """What `pairwise` promises, counted apart from it."""
    rows = kernels.pairwise(factors)
    assert rows == kernels.pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        pairs = {(row[a], row[b]) for row in rows}
        assert len(pairs) == len(factors[a]) * len(factors[b]), (a, b)


def test_names_tell_rows_apart() -> None:
    for table in (kernels.FORWARD, kernels.BACKWARD, kernels.PAIRS):
        names = [row.name for row in table]
        assert len(set(names)) == len(names)


# Up to the launch ---------------------------------------------------------------------------------


def arguments_of(launched: Launched) -> dict[str, Any]:
    """The packed arguments by name, read as the kernel reads them."""
    kernel = launched.specialisation.kernel
    double = "double" in launched.specialisation.template_arguments
    read = arguments_struct(kernel, double).from_buffer_copy(launched.packed)
    return {name: getattr(read, name) for name, _ in _kernel.PARAMETERS[kernel]}


@pytest.fixture
def launches() -> Iterator[list[Launched]]:
    """What calls with NumPy arrays would launch on an H200."""
    with recorded(90, kernels.SM_COUNT) as launches:
        yield launches


@pytest.mark.parametrize("row", kernels.FORWARD, ids=lambda row: row.name)
def test_the_library_takes_the_row_s_kernel(
    row: kernels.ForwardRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "check_forward", lambda case, got: None)
    for arch in (75, 80, 90):
        with recorded(arch, kernels.SM_COUNT) as launches, kernels.blank_inputs():
            row.run(Backend())
        (launched,), launch = launches, row.launch(arch)
        assert launched.specialisation == row.specialisation(arch)
        assert (launched.grid, launched.block) == (launch.grid, launch.block)
        assert launched.shared_bytes == launch.shared_bytes


def test_the_sanitizer_sees_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "Cupy", Backend)
    for check in ("check_forward", "check_backward"):
        monkeypatch.setattr(calls, check, lambda *_: None)
    with recorded(90, kernels.SM_COUNT) as launches, kernels.blank_inputs():
        for _, run in sanitizer.checks():
            run()
    kernel_names = {launched.specialisation.kernel for launched in launches}
    assert kernel_names == {name for name in _kernel.PARAMETERS if name.startswith("norm_")}
    clusters = {
        row.plan(90).cluster_size
        for row in kernels.FORWARD
        if row.plan(90).kernel == "norm_forward_staged"
    }
    assert clusters == {
        int(launched.specialisation.template_arguments[10])
        for launched in launches
        if launched.specialisation.kernel == "norm_forward_staged"
    }


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


LAYOUTS = {
    "contiguous": lambda v: v,
    "offset_1": lambda v: inputs.lay(v, "offset_1"),
    "row_gap_8": lambda v: inputs.lay(v, "row_gap_8"),
    "every_other": lambda v: np.repeat(v, 2, axis=0)[::2],
    "turned": lambda v: np.moveaxis(np.ascontiguousarray(np.moveaxis(v, 1, 0)), 0, 1),
    "backwards": lambda v: v[::-1],
}


@pytest.mark.parametrize(("x_layout", "y_layout"), tuple(itertools.product(LAYOUTS, LAYOUTS)))
def test_arguments_address_the_rows(launches: list[Launched], x_layout: str, y_layout: str) -> None:
    """The kernel's arithmetic on the packed arguments finds each row where NumPy has it."""
    shape = (5, 3, 24)
    x = LAYOUTS[x_layout](np.zeros(shape, np.float16))
    residual = LAYOUTS[y_layout](np.zeros(shape, np.float32))
    out = LAYOUTS[y_layout](np.zeros(shape, np.float16))
    residual_out = LAYOUTS[x_layout](np.zeros(shape, np.float32))
    case = Case(
        x=x, residual=residual, eps=0.125, weight_offset=2.0, weight=np.zeros(24, np.float32)
    )
    # The caller's own objects, so that addresses can be compared.
    names = {"x": x, "residual": residual, "y": out, "residual_out": residual_out}
    _call(case, out=out, residual_out=residual_out)
    arguments = arguments_of(launches.pop())
    assert (arguments["rows"], arguments["hidden_size"]) == (15, 24)
    assert arguments["weight"] == address(case.weight)
    assert (arguments["eps"], arguments["weight_offset"]) == (0.125, 2.0)
    for absent in ("bias", "where", "valid_rows", "mean", "rstd"):
        assert arguments[absent] == 0
    inner_rows = arguments["inner_rows.count"]
    split = inner_rows != 15
    for name, array in names.items():
        for row, index in enumerate(np.ndindex(shape[:-1])):
            outer, inner = divmod(row, inner_rows) if split else (0, row)
            offset = outer * arguments[f"{name}_strides.outer"]
            offset += inner * arguments[f"{name}_strides.inner"]
            expected = address(array[index])
            assert arguments[name] + offset * array.itemsize == expected, (name, row)


def _call(case: Case, **outputs: np.ndarray) -> Any:
    import cupy_rmsnorm

    options = {"eps": case.eps, "weight_offset": case.weight_offset}
    if case.residual is not None:
        return cupy_rmsnorm.add_rms_norm(case.x, case.residual, case.weight, **options, **outputs)
    return cupy_rmsnorm.rms_norm(case.x, case.weight, **options, **outputs)


def test_no_launch_for_no_rows(launches: list[Launched]) -> None:
    _call(Case(x=np.zeros((0, 8), np.float32)))
    _call(Case(x=np.zeros((3, 0, 8), np.float32), residual=np.zeros((3, 0, 8), np.float32)))
    assert not launches


@pytest.mark.parametrize("hidden_size", [1, 24, 1000, 1024, 20_000, 20_001, 2_000_000])
def test_rows_places_and_masks_change_how_bytes_move_alone(
    launches: list[Launched], hidden_size: int
) -> None:
    """The order of a row's sum, fixed by these template arguments, stays."""

    def order(launched: Launched) -> tuple[str, ...]:
        arguments = launched.specialisation.template_arguments
        count = {"norm_forward_streamed": 3, "norm_forward_staged": 4}
        # vec_size, vecs_per_thread, threads a row (and the cluster's size)
        return arguments[7 : 7 + count.get(launched.specialisation.kernel, 3)]

    weight = np.zeros(hidden_size, np.float32)
    wide = np.zeros((2, 3, hidden_size + 8), np.float16)
    _call(Case(x=np.zeros((1, hidden_size), np.float16), weight=weight))
    expected = order(launches.pop())
    for x in (
        wide[:1, :1, :hidden_size],
        wide[0, :, 1 : hidden_size + 1],
        wide[:, :2, 3 : hidden_size + 3],
        np.zeros((hidden_size, 3), np.float16).T,
    ):
        _call(Case(x=x, weight=weight))
        assert order(launches.pop()) == expected
    if hidden_size < 100:
        _call(Case(x=np.zeros((30_000, hidden_size), np.float16), weight=weight))
        assert order(launches.pop()) == expected


def test_what_the_layout_cannot_say_goes_through_a_temporary(launches: list[Launched]) -> None:
    """One for each array that needs it; an output's is written back."""
    base = np.arange(48, dtype=np.float32)
    x = base.reshape(8, 6).T  # inner stride 6
    out = np.full((8, 6), 7, np.float32).T
    _call(Case(x=x), out=out)
    arguments = arguments_of(launches.pop())
    assert arguments["x"] != address(x)
    assert arguments["y"] != address(out)
    assert (arguments["x_strides.inner"], arguments["y_strides.inner"]) == (8, 8)
    assert (out == 7).all()  # the temporary began as a copy, and no kernel ran

    # Three leading axes of which none folds.
    deep = np.zeros((4, 6, 8, 16), np.float32)[::2, ::3, ::4]
    straight = np.zeros((2, 2, 2, 16), np.float32)
    _call(Case(x=deep), out=straight)
    arguments = arguments_of(launches.pop())
    assert arguments["x"] != address(deep)
    assert arguments["y"] == address(straight)


# Row layouts --------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> list[np.ndarray]:
    """Views of equal shape with any strides: gaps, turned axes, negative steps, broadcasts."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from((1, 1, 1, 2, -1))) for _ in shape]
        broadcast = [draw(st.sampled_from((False, False, False, True))) for _ in shape]
        lengths = [
            1 if flat else size * abs(step)
            for size, step, flat in zip(shape, steps, broadcast, strict=True)
        ]
        base = np.arange(math.prod(lengths)).reshape([lengths[axis] for axis in order])
        base = base.transpose(np.argsort(order)) if shape else base
        index = tuple(
            slice(None) if flat else slice(None, None, step)
            for step, flat in zip(steps, broadcast, strict=True)
        )
        arrays.append(np.broadcast_to(base[index], shape))
    return arrays


@given(views(), st.booleans())
def test_folded_rows_lie_where_numpy_has_them(arrays: list[np.ndarray], keep_inner: bool) -> None:
    shape = arrays[0].shape
    keep_inner = keep_inner and bool(shape)
    strides = [tuple(s // a.itemsize for s in a.strides) for a in arrays]
    layout = collapse_rows(shape, strides, keep_inner)
    if layout is None:
        assert sum(size > 1 for size in shape) > 2
        return
    if keep_inner:
        assert layout.inner_rows == shape[-1]
    for i in range(len(arrays)):
        for row, index in enumerate(np.ndindex(shape)):
            outer, inner = divmod(row, layout.inner_rows)
            offset = outer * layout.outer[i] + inner * layout.inner[i]
            assert offset == sum(n * stride for n, stride in zip(index, strides[i], strict=True))


@given(st.lists(st.integers(1, 5), max_size=5).map(tuple), st.booleans())
def test_contiguous_rows_always_fold(shape: tuple[int, ...], keep_inner: bool) -> None:
    strides = tuple(math.prod(shape[axis + 1 :]) * 7 for axis in range(len(shape)))
    layout = collapse_rows(shape, [strides], keep_inner and bool(shape))
    assert layout is not None
    if not keep_inner or not shape:
        assert layout.inner_rows == math.prod(shape)


@given(views())
def test_is_contiguous(arrays: list[np.ndarray]) -> None:
    for array in arrays:
        strides = tuple(s // array.itemsize for s in array.strides)
        assert is_contiguous(array.shape, strides) == array.flags.c_contiguous


# Packed arguments ---------------------------------------------------------------------------------

_KINDS: dict[str, Any] = {
    "long long": "int64",
    "unsigned long long": "int64",
    "int": "int32",
    "unsigned": "uint32",
    "float": "float32",
    "double": "float64",
    "A": "accumulation",
}
_CTYPES: dict[str, Any] = {
    "pointer": ctypes.c_size_t,
    "int64": ctypes.c_longlong,
    "int32": ctypes.c_int,
    "uint32": ctypes.c_uint,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


def cpp_fields(text: str, declaration: str) -> Iterator[tuple[str, str]]:
    """(name, kind) of a parameter or member; of a struct, those of its members."""
    *type_words, name = declaration.replace("*", "* ").split()
    cpp_type = " ".join(word for word in type_words if word != "const")
    if cpp_type.endswith("*"):
        yield name, "pointer"
    elif cpp_type in _KINDS:
        yield name, _KINDS[cpp_type]
    else:
        struct_name = cpp_type.partition("<")[0]
        body = re.search(rf"struct {struct_name} {{(.*?)\n}};", text, re.DOTALL)
        assert body is not None, f"{declaration}: what kind is {cpp_type}?"
        # The arguments of a kernel go by their own names, what is inside them by both.
        prefix = "" if name == "arguments" else f"{name}."
        for member in body[1].split(";"):
            if member.strip() and member.split()[0] != "using":
                for inner, kind in cpp_fields(text, member):
                    yield prefix + inner, kind


def cpp_parameters(source: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """What each kernel of a source file takes, read from the C++ text."""
    text = re.sub(r"//.*", "", _source.load(source))
    found = {}
    for signature in re.finditer(r"__global__([^;{]*?)\b(\w+)\(([^()]*)\)\s*{", text):
        # Template arguments hold commas of their own.
        parameters = re.sub(r"<[^<>]*>", "", signature[3]).split(",")
        found[signature[2]] = tuple(
            itertools.chain.from_iterable(cpp_fields(text, one) for one in parameters)
        )
    return found


def arguments_struct(kernel: str, double: bool) -> Any:
    """The kernel's struct in the C ABI's layout, made from the C++ text."""
    kinds = _CTYPES | {"accumulation": ctypes.c_double if double else ctypes.c_float}
    parameters = next(iter(cpp_parameters(kernel).values()))
    fields = [(name, kinds[kind]) for name, kind in parameters]
    return type(kernel, (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("kernel", _kernel.PARAMETERS)
def test_parameters_are_those_of_the_kernel(kernel: str) -> None:
    """Of every kernel in a source file: they share one table."""
    found = cpp_parameters(kernel)
    assert found, f"no kernel in {kernel}.cu"
    for name, parameters in found.items():
        assert _kernel.PARAMETERS[kernel] == parameters, name


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kernel", _kernel.PARAMETERS)
def test_packed_arguments_are_the_struct(kernel: str, double: bool) -> None:
    values = {
        name: index if kind in ("pointer", "int64", "int32", "uint32") else index + 0.5
        for index, (name, kind) in enumerate(_kernel.PARAMETERS[kernel], start=1)
    }
    packed = _kernel.pack(kernel, "float64" if double else "float32", values)
    layout = arguments_struct(kernel, double)
    last = getattr(layout, _kernel.PARAMETERS[kernel][-1][0])
    # A struct is padded to its alignment; the study kernels take their arguments one by one.
    study = kernel in _kernel.STUDY_PARAMETERS
    assert len(packed) == (last.offset + last.size if study else ctypes.sizeof(layout))
    read = layout.from_buffer_copy(packed + bytes(ctypes.sizeof(layout) - len(packed)))
    assert {name: getattr(read, name) for name in values} == values


def test_numbers_are_packed_by_kind_or_not_at_all() -> None:
    values = {name: 0 for name, _ in _kernel.FORWARD_PARAMETERS}
    with pytest.raises(struct.error):
        _kernel.pack("norm_forward", "float32", values | {"rows": 1.5})
