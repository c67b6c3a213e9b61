# SPDX-License-Identifier: Apache-2.0
"""Every instantiation of the table through the real `cupy.RawModule` compile, without a GPU.

Two architectures take the whole table and the others a share of it, each another one, and others
again under another NVRTC; all of it for all of them is in benchmarks/results/resources.json.
"""

from __future__ import annotations

import functools
import importlib.util
import re

import pytest

from cupy_rmsnorm import _source
from cupy_rmsnorm._dtypes import TABLE
from cupy_rmsnorm._kernel import Specialisation
from cupy_rmsnorm._plan import SHARED_RESERVE, VECTOR_BYTES, shared_limit
from tests import compiled, kernels
from tests.compiled import ARCHS, Resources, Use

REGISTERS = 64 * 1024  # of a multiprocessor; more than a block of them cannot be launched
# Bytes that an instantiation may spill: a long row in registers with several operands does.
SPILL_BUDGET = 512
# NVRTC's major version -> architecture -> every n-th row; another one in each architecture.
SHARES = {12: {90: 1, 75: 1}, 13: {120: 3, 100: 6}}
SHARE = 12


def _missing() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "needs CuPy with NVRTC: pip install cupy-rmsnorm[cuda12]"
    if compiled.disassembler() is None:
        return "needs nvdisasm: pip install nvidia-cuda-nvdisasm"
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


def _share(arch: int) -> tuple[int, int]:
    """(every, first): which rows of the table this architecture takes."""
    major = int(compiled.versions()["nvrtc"].split(".")[0])
    every = SHARES[major].get(arch, SHARE)
    return every, (ARCHS.index(arch) + major) % every


def _uses(arch: int) -> tuple[Use, ...]:
    return compiled.uses(arch, *_share(arch))


@functools.cache
def _found(arch: int) -> dict[Specialisation, Resources]:
    return compiled.compile_kernels((use.specialisation for use in _uses(arch)), arch)


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def arch(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def _allocated(registers: int) -> int:
    """What a thread is given: registers come in eights."""
    return -(-registers // 8) * 8


def test_registers_spills_and_shared_memory_are_within_budget(arch: int) -> None:
    faults = []
    for use in _uses(arch):
        resources = _found(arch)[use.specialisation]
        shared = resources.shared_bytes + use.shared_bytes
        if _allocated(resources.registers) * use.block > REGISTERS:
            faults.append(f"{use}: {resources.registers} registers")
        if resources.spill_bytes > SPILL_BUDGET:
            faults.append(f"{use}: {resources.spill_bytes} bytes of spills")
        if shared > shared_limit(arch) + SHARED_RESERVE and not use.forced:
            faults.append(f"{use}: {shared} bytes of shared memory")
    assert not faults, "\n".join(faults)


def test_packs_cross_memory_in_words_as_wide_as_the_plan_says(arch: int) -> None:
    faults = []
    every, first = _share(arch)
    for row in kernels.FORWARD[first::every]:
        resources, plan = _found(arch)[row.specialisation(arch)], row.plan(arch)
        itemsizes = TABLE[row.x].itemsize, TABLE[row.y].itemsize
        copied = sum(resources.asynchronous.values())
        if row.layout == "misaligned" and row.vec_size > 1:
            # 8 bytes: sizes and strides that come by pointer.
            if max(resources.loads) > max(8, itemsizes[0]) or copied:
                faults.append(f"{row.name}: wide loads {resources.loads} from misaligned rows")
            continue
        # A thread's packs are unrolled, except in streamed rows and where staged ones are written.
        packs = max(plan.vecs_per_thread, 1)
        written = min(packs, 2) if plan.kernel == "norm_forward_staged" else packs
        words = [_words(row.vec_size * itemsize) for itemsize in itemsizes]
        (x_width, x_words), (y_width, y_words) = words
        loads = resources.loads.get(x_width, 0) + resources.asynchronous.get(x_width, 0)
        if loads < packs * x_words and not resources.asynchronous.get(0):
            faults.append(f"{row.name}: {resources.loads}, expected {packs * x_words} x {x_width}")
        if resources.stores.get(y_width, 0) < written * y_words:
            expected = f"expected {written * y_words} x {y_width}"
            faults.append(f"{row.name}: {resources.stores}, {expected}")
    assert not faults, "\n".join(faults)


def _words(pack_bytes: int) -> tuple[int, int]:
    """(bytes of a word, words) of a pack."""
    width = min(pack_bytes, VECTOR_BYTES)
    return width, pack_bytes // width


def test_no_kernel_takes_more_registers_than_recorded(arch: int) -> None:
    meta, recorded = compiled.recorded()
    if meta.get("nvrtc") != compiled.versions()["nvrtc"]:
        pytest.skip(f"recorded with NVRTC {meta.get('nvrtc')}")
    faults = []
    for item, resources in _found(arch).items():
        before = recorded.get(item.name_expression, {}).get(f"sm_{arch}")
        if before is not None and _allocated(resources.registers) > _allocated(before[0]):
            faults.append(f"{item.name_expression}: {resources.registers}, recorded {before[0]}")
    assert not faults, "\n".join([*faults, "if it is worth it: python -m tests.compiled"])


@pytest.mark.parametrize("kernel", sorted({row.plan(90).kernel for row in kernels.FORWARD}))
def test_ptx_for_the_newest_architecture_compiles(kernel: str) -> None:
    from cupy.cuda import nvrtc

    newest = max(nvrtc.getSupportedArchs())
    row = next(row for row in kernels.FORWARD if row.plan(90).kernel == kernel)
    ptx, name = compiled.compile_ptx(row.specialisation(newest), newest)
    assert f".target sm_{newest}" in ptx
    assert f".entry {name}(" in ptx


def test_a_pack_without_alignment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing tells wide loads from narrow ones, else the tests above could not fail."""
    row = next(row for row in kernels.FORWARD if row.layout == "contiguous" and row.vec_size == 8)
    item = row.specialisation(90)
    before = compiled.compile_kernels([item], 90)[item]
    code = _source.load(item.kernel)
    narrow = re.sub(r"struct alignas\(\w+\(.*?\)\) Pack", "struct Pack", code)
    narrow = narrow.replace("bytes < 16 ? bytes : 16", "bytes < 2 ? bytes : 2")
    assert narrow != code
    monkeypatch.setattr(_source, "load", lambda kernel: narrow)
    after = compiled.compile_kernels([item], 90)[item]
    assert before.loads.get(16, 0) > 0
    assert after.loads.get(16, 0) == 0
