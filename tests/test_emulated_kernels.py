# SPDX-License-Identifier: Apache-2.0
"""The whole table under the emulator: every kernel class on real CuPy arrays, without a GPU.

Each access to memory is held against the arrays that exist, and each pair of accesses against the
barriers between them, so a right result alone is not enough to pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_rmsnorm._dtypes import TABLE
from tests import emulator, kernels
from tests.backends import Emulator
from tests.emulator import build

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

ARCH = 90


def _run(row: Any, arch: int, sm_count: int = kernels.SM_COUNT, **options: Any) -> list[str]:
    """Make the row's call and check it; the expressions that were launched."""
    launches: list[Any] = []
    with emulator.installed(arch=arch, sm_count=sm_count, launches=launches, **options):
        backend = Emulator()
        row.run(backend)
        backend.verify()
    return [launch[0] for launch in launches]


@pytest.fixture(scope="module")
def forward_compiled() -> None:
    emulator.prefetch(row.specialisation(ARCH) for row in kernels.FORWARD)


@pytest.mark.usefixtures("forward_compiled")
@pytest.mark.parametrize("row", kernels.FORWARD, ids=lambda row: row.name)
def test_forward(row: kernels.ForwardRow) -> None:
    assert _run(row, ARCH) == [row.specialisation(ARCH).name_expression]


WALKS = [row for row in kernels.FORWARD if row.forced is not None]


@pytest.mark.usefixtures("forward_compiled")
@pytest.mark.parametrize("row", WALKS, ids=lambda row: row.name)
def test_each_computed_row_is_asked_for_once_and_no_other(row: kernels.ForwardRow) -> None:
    """If a mask leaves the others; those that a block takes first, if it has to look them up."""
    runtime = build.runtime()
    with emulator.installed(arch=ARCH):
        backend = Emulator()
        runtime.emulator_prefetched()
        got = row.run(backend)
    launch = row.launch(ARCH)
    turn, at_first = launch.members * launch.rows_per_block, 0
    rows = 0
    if launch.teams or row.mask == "keep_valid":
        rows = int((~np.isnan(got["rstd"])).sum())
    if not launch.teams:
        rows -= min(rows, turn)
    elif launch.rows_per_block > 32:  # by its first warp
        at_first = launch.grid * (launch.rows_per_block - 32)
    itemsizes = [TABLE[kind].itemsize for kind in (row.x, row.residual) if kind]
    whole = sum(size for size in itemsizes if size * row.vec_size % 16 == 0)
    row_bytes = 0 if row.layout == "misaligned" else row.hidden_size * whole
    asked = runtime.emulator_prefetched()
    assert (rows - at_first) * row_bytes <= asked <= rows * row_bytes


@pytest.fixture(scope="module")
def backward_compiled() -> None:
    emulator.prefetch(
        specialisation for row in kernels.BACKWARD for specialisation in row.specialisations(ARCH)
    )


@pytest.mark.usefixtures("backward_compiled")
@pytest.mark.parametrize("row", kernels.BACKWARD, ids=lambda row: row.name)
def test_backward(row: kernels.BackwardRow) -> None:
    expected = [item.name_expression for item in row.specialisations(ARCH)]
    assert _run(row, ARCH) == expected


@pytest.mark.parametrize("row", kernels.PAIRS, ids=lambda row: row.name)
def test_pair(row: kernels.PairRow) -> None:
    expected = [item.name_expression for item in row.specialisations(ARCH)]
    assert _run(row, ARCH) == expected


def test_pairs_are_launched_together() -> None:
    counts = [len(row.specialisations(ARCH)) for row in kernels.PAIRS]
    assert counts == [1] * 10 + [2] * 2


# Without clusters, and without asynchronous copies either; in other orders of blocks and warps.
@pytest.mark.parametrize("schedule", ["reverse", 1])
@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize(
    "row", [*kernels.FORWARD[::9], *kernels.BACKWARD[::13]], ids=lambda row: row.name
)
def test_older_architectures_and_other_schedules(row: Any, arch: int, schedule: str | int) -> None:
    _run(row, arch, schedule=schedule)


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in (*kernels.FORWARD[::6], *kernels.BACKWARD[::2])
        if row.rows > 50 and row.rows * row.hidden_size < 300_000
    ],
    ids=lambda row: row.name,
)
def test_blocks_that_walk_over_many_rows(row: Any) -> None:
    """On two multiprocessors: every ring is filled again and again, every slot used again."""
    _run(row, ARCH, sm_count=2, schedule="ahead")
