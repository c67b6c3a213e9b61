# SPDX-License-Identifier: Apache-2.0
"""The whole table under the emulator: every kernel class on real CuPy arrays, without a GPU.

Each access to memory is held against the arrays that exist, and each pair of accesses against the
barriers between them, so a right result alone is not enough to pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import emulator, kernels
from tests.backends import Cupy

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

ARCH = 90


class EmulatorBackend(Cupy):
    """CuPy arrays over host memory; only inside `emulator.installed()`."""

    name = "emulator"
    gpu = False

    def _upload(self, data: np.ndarray) -> Any:
        return emulator.from_numpy(data)

    def numpy(self, native: Any) -> np.ndarray:
        import cupy

        assert type(native) is cupy.ndarray, f"expected a cupy.ndarray, got {type(native)}"
        return emulator.to_numpy(native)

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module")
def compiled() -> None:
    emulator.prefetch(row.specialisation(ARCH) for row in kernels.FORWARD)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("row", kernels.FORWARD, ids=lambda row: row.name)
def test_forward(row: kernels.ForwardRow) -> None:
    launches: list[Any] = []
    with emulator.installed(arch=ARCH, sm_count=kernels.SM_COUNT, launches=launches):
        backend = EmulatorBackend()
        row.run(backend)
        backend.verify()
    assert [launch[0] for launch in launches] == [row.specialisation(ARCH).name_expression]
