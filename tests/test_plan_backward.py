# SPDX-License-Identifier: Apache-2.0
"""What is decided before a backward kernel runs, beyond what test_plan.py holds of its launches."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from pathlib import Path

import pytest

from cupy_rmsnorm import _kernel, _plan
from cupy_rmsnorm import _plan_backward as plans
from cupy_rmsnorm._cuda_backward import BackwardKind, specialise_backward, specialise_sum
from cupy_rmsnorm._dtypes import TABLE
from cupy_rmsnorm._kernel import Specialisation
from tests import inputs

DTYPES = ("float16", "bfloat16", "float32", "float64")
HIDDEN_SIZES = (*inputs.HIDDEN_SIZES, 5120, 7168, 40_000, 131_072, 131_073, 1_000_000)
SM_COUNTS = (1, 20, 132)


def kind_of(x: str, norm: str = "layer") -> BackwardKind:
    return BackwardKind(norm, x, x, x, x, x, weight=x, given_mean=True, given_rstd=True)


def test_a_plan_follows_from_size_dtypes_and_architecture_alone() -> None:
    assert list(inspect.signature(plans.choose_backward_plan).parameters) == [
        "hidden_size",
        "x_dtype",
        "staged_itemsize",
        "arch",
        "partial",
    ]


def test_the_sweep_measured_what_is_chosen_and_found_little_better() -> None:
    """Results scatter by a few per cent; a choice a tenth behind was read off another sweep."""
    path = Path(__file__).resolve().parents[1] / "benchmarks/results/sweep_backward.json"
    candidates = [row for row in json.loads(path.read_text())["rows"] if row["impl"] == "ours"]
    shapes = ("op", "dtype", "rows", "hidden_size")
    for shape, group in itertools.groupby(candidates, lambda row: tuple(row[i] for i in shapes)):
        op, dtype, rows, hidden_size = shape
        staged_itemsize = (3 if op.startswith("add") else 2) * TABLE[dtype].itemsize
        plan = plans.choose_backward_plan(hidden_size, dtype, staged_itemsize, 90)
        if plans.choose_few_launch(plan, hidden_size, rows, staged_itemsize, 90, 132):
            continue  # few rows take the plan of many
        launch = plans.choose_backward_launch(plan, rows, 1, staged_itemsize, 90, 132)
        chosen = dataclasses.asdict(plan) | dataclasses.asdict(launch)
        found = {tuple(row[i] for i in chosen): row["us"] for row in group}
        assert found[tuple(chosen.values())] <= 1.1 * min(found.values()), shape


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_few_rows(x: str, arch: int) -> None:
    """Every row has a block for dx, every pack of columns one for dweight, and all of them fit."""
    staged_itemsize = 2 * TABLE[x].itemsize
    for hidden_size, sm_count in itertools.product(HIDDEN_SIZES, SM_COUNTS):
        plan = plans.choose_backward_plan(hidden_size, x, staged_itemsize, arch)
        for rows in (1, 2, 7, 2 * sm_count, 2 * sm_count + 1):
            launch = plans.choose_few_launch(
                plan, hidden_size, rows, staged_itemsize, arch, sm_count
            )
            where = (hidden_size, sm_count, rows, plan, launch)
            if rows > plans.FEW_ROWS_PER_SM * sm_count or plan.kernel != "norm_backward":
                assert launch is None, where
            if launch is None:
                continue
            columns = (launch.grid - launch.parts) * plans.FEW_COLUMN_PACKS * plan.vec_size
            assert hidden_size <= columns < hidden_size + plans.FEW_COLUMN_PACKS * plan.vec_size
            held = launch.parts * launch.rows_per_block
            assert rows <= held < rows + launch.rows_per_block, where
            assert launch.block % _plan.WARP == 0, where
            limit = _plan.SHARED_LIMITS[arch] * 1024
            assert launch.shared_bytes + plans.FEW_ROOM <= limit, where


@pytest.mark.parametrize("parts", [0, 1, 64, 65, 264])
@pytest.mark.parametrize("sums", [1, 2])
def test_the_sum_of_parts_reaches_every_element(parts: int, sums: int) -> None:
    for elements in (1, 31, 32, 33, 4096, 65_537 * 128):
        launch = plans.choose_sum_launch(elements, parts, sums)
        assert launch.grid % sums == 0
        chunks = launch.grid // sums
        assert (chunks - 1) * plans.SUM_COLUMNS < elements <= chunks * plans.SUM_COLUMNS
        assert launch.block <= 1024
        assert launch.block % plans.SUM_COLUMNS == 0


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_shared_memory_follows_from_the_specialisation(arch: int) -> None:
    """A function is told once how much it may ask for."""
    seen: dict[Specialisation, int] = {}
    for x, hidden_size in itertools.product(DTYPES, HIDDEN_SIZES):
        kind = kind_of(x)
        staged_itemsize = kind.staged_itemsize
        plan = plans.choose_backward_plan(hidden_size, x, staged_itemsize, arch)
        launches = [plans.streamed_launch(plan, 5)]
        if plan.kernel == "norm_backward":
            launches = [
                plans.choose_backward_launch(plan, rows, 1, staged_itemsize, arch, sm_count)
                for rows, sm_count in itertools.product((1, 70, 5000), SM_COUNTS)
            ]
            few = plans.choose_few_launch(plan, hidden_size, 5, staged_itemsize, arch, 132)
            launches += [few] if few else []
        for launch in launches:
            specialisation = specialise_backward(
                kind, hidden_size, plan, launch, arch=arch, aligned=True, split_rows=False
            )
            before = seen.setdefault(specialisation, launch.shared_bytes)
            assert before == launch.shared_bytes, specialisation


def test_every_kernel_of_a_launch_has_a_parameter_table() -> None:
    plan = plans.choose_backward_plan(1_000_000, "float32", 8, 90)
    launches = [
        plans.streamed_launch(plan, 3),
        plans.choose_columns_launch(plan, 1_000_000, 3, 1, 132),
        plans.choose_sum_launch(1_000_000, 3, 1),
    ]
    assert {launch.kernel for launch in launches} <= set(_kernel.PARAMETERS)
    assert specialise_sum(kind_of("float32"), launches[-1]).kernel == launches[-1].kernel
