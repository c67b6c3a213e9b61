# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: the real kernels, streams, memory, graphs, threads, devices.

Everything that holds on every backend (every hidden size, layouts, masks, errors) runs on the GPU
too, in the suites of the `backend` fixture. These tests skip, with the reason, where there is none.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm
from cupy_rmsnorm import _kernel, _plan
from cupy_rmsnorm._kernel import Specialisation
from tests import calls, compare, inputs, kernels, oracle
from tests.backends import BACKENDS, Backend, Cupy, missing
from tests.calls import Case

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 200_000_000  # about 0.1 s: far longer than a busy host needs for a call

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class Side:
    """A non-blocking stream of one library, and what tests do on it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.torch = backend.name == "torch-cuda"
        if self.torch:
            import torch

            self.stream: Any = torch.cuda.Stream()
            self.handle = self.stream.cuda_stream
        else:
            import cupy

            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.handle = self.stream.ptr
            self._spin = cupy.RawKernel(SPIN, "spin")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream current for its library."""
        if self.torch:
            import torch

            with torch.cuda.stream(self.stream):
                yield
        else:
            with self.stream:
                yield

    def spin(self, cycles: int = SPIN_CYCLES) -> None:
        """Keep the library's current stream busy."""
        if self.torch:
            import torch

            torch.cuda._sleep(cycles)
        else:
            self._spin((1,), (1,), (np.int64(cycles),))

    def copy(self, target: Any, source: Any) -> None:
        """Write `source` into `target` on the library's current stream."""
        if self.torch:
            target.copy_(source)
        else:
            target[...] = source

    def duplicate(self, array: Any) -> Any:
        """A copy, made on the library's current stream."""
        return array.clone() if self.torch else array.copy()

    def busy(self) -> bool:
        return not (self.stream.query() if self.torch else self.stream.done)

    def synchronize(self) -> None:
        self.stream.synchronize()


@pytest.fixture
def side(gpu: Backend) -> Side:
    return Side(gpu)


@dataclasses.dataclass
class Launches:
    """What the library launched: the instantiations, and the streams they went to."""

    specialisations: list[Specialisation] = dataclasses.field(default_factory=list)
    streams: list[int] = dataclasses.field(default_factory=list)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Looks over the library's shoulder."""
    seen = Launches()
    function, launch = _kernel.function, _kernel.launch

    def seen_function(specialisation: Specialisation, *arguments: Any, **options: Any) -> Any:
        seen.specialisations.append(specialisation)
        return function(specialisation, *arguments, **options)

    def seen_launch(
        function: Any, grid: int, block: int, shared_bytes: int, stream: int, packed: bytes
    ) -> None:
        seen.streams.append(stream)
        launch(function, grid, block, shared_bytes, stream, packed)

    monkeypatch.setattr(_kernel, "function", seen_function)
    monkeypatch.setattr(_kernel, "launch", seen_launch)
    return seen


def rms_reference(x: np.ndarray, weight: np.ndarray | None = None) -> oracle.Reference:
    return oracle.forward(x, weight, eps=1e-6).y


def check(got: np.ndarray, expected: oracle.Reference, what: str = "y") -> None:
    __tracebackhide__ = True
    compare.close(got, expected.value, expected.bound(got.dtype.name), what)


# The table ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> None:
    """Compile the table on all cores: one by one it takes minutes where no cache is warm.

    Processes of pytest-xdist are as many as the cores, and each compiles what its own tests take.
    """
    if missing("cupy") is not None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    properties = _kernel.device_properties(0)
    arch, sm_count = properties.arch, properties.sm_count
    wanted = {
        row.specialisation(arch, sm_count): row.launch(arch, sm_count).shared_bytes
        for row in kernels.FORWARD
    }
    for row in kernels.BACKWARD:
        for launched in row.launches(arch, sm_count):
            wanted[launched.specialisation] = launched.shared_bytes
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for specialisation, shared_bytes in wanted.items():
            # What fails here fails again in its test.
            pool.submit(_kernel.function, specialisation, 0, shared_bytes)


def run_row(row: Any, library: str = "cupy") -> None:
    """The oracle, the rounding order bit for bit, the guard zones."""
    backend = BACKENDS[library]()
    row.run(backend)
    backend.verify()


def check_launched(row: kernels.BackwardRow | kernels.PairRow, launches: Launches) -> None:
    """As above, by the kernels that the table says."""
    run_row(row)
    properties = _kernel.device_properties(0)
    expected = row.specialisations(properties.arch, properties.sm_count)
    assert launches.specialisations == list(expected)


@pytest.mark.usefixtures("built", "cupy")
@pytest.mark.parametrize("row", kernels.FORWARD, ids=lambda row: row.name)
def test_kernel(row: kernels.ForwardRow, launches: Launches) -> None:
    """Every class of kernels."""
    run_row(row)
    properties = _kernel.device_properties(0)
    expected = row.specialisation(properties.arch, properties.sm_count)
    assert launches.specialisations == [expected]


@pytest.mark.usefixtures("built", "cupy")
@pytest.mark.parametrize("row", kernels.BACKWARD, ids=lambda row: row.name)
def test_backward_kernels(row: kernels.BackwardRow, launches: Launches) -> None:
    check_launched(row, launches)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("row", kernels.PAIRS, ids=lambda row: row.name)
def test_pairs(row: kernels.PairRow, launches: Launches) -> None:
    check_launched(row, launches)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    "row", [*kernels.FORWARD[::9], *kernels.BACKWARD[::9]], ids=lambda row: row.name
)
def test_kernels_on_torch_tensors(row: kernels.ForwardRow | kernels.BackwardRow) -> None:
    run_row(row, "torch-cuda")


def test_the_gpu_grants_the_shared_memory_of_its_plans(cupy: ModuleType) -> None:
    runtime = cupy.cuda.runtime
    granted = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)
    arch = _kernel.device_properties(0).arch
    assert _plan.shared_limit(arch) + _plan.SHARED_RESERVE <= granted


# Exactly at and around the sizes where shared memory needs asking for.
@pytest.mark.parametrize("hidden_size", [12287, 12288, 12289, 16384, 16385, 57344, 65536])
def test_long_rows_of_an_added_residual(gpu: Backend, hidden_size: int) -> None:
    shape = (3, hidden_size)
    case = Case(
        x=inputs.lay(inputs.array(shape, "float32", "row_tagged")),
        residual=inputs.lay(inputs.array(shape, "float32", seed=1)),
        weight=inputs.lay(inputs.weight(hidden_size, "float32")),
    )
    calls.check_forward(case, calls.forward(gpu, case, statistics=True))


@pytest.mark.parametrize(
    ("rows", "hidden_size"),
    [(65535, 8), (65536, 8), (65537, 8), (131073, 8), (65536, 64), (65537, 64), (131073, 64)],
)
def test_more_rows_than_a_grid_s_y_axis(gpu: Backend, rows: int, hidden_size: int) -> None:
    case = Case(x=inputs.array((rows, hidden_size), "float32", "row_tagged"))
    calls.check_forward(case, calls.forward(gpu, case, statistics=True))


@pytest.mark.parametrize(("tokens", "heads"), [(65537, 1), (1, 65537)])
def test_more_heads_than_a_grid_s_y_axis(gpu: Backend, tokens: int, heads: int) -> None:
    q = inputs.array((tokens, heads, 64), "float16", "row_tagged")
    k = inputs.array((tokens, 1, 64), "float16")
    weight = inputs.weight(64, "float16")
    got_q, got_k = cupy_rmsnorm.qk_norm(
        gpu.input(q), gpu.input(k), gpu.input(weight), gpu.input(weight)
    )
    check(gpu.numpy(got_q), rms_reference(q, weight), "q_out")
    check(gpu.numpy(got_k), rms_reference(k, weight), "k_out")


# The same bits ------------------------------------------------------------------------------------

SAME_BITS = [
    (place, ("rms", "layer")[index % 2], ("float16", "float32", "bfloat16")[index % 3])
    for index, place in enumerate(kernels.PLACES)
]


@pytest.mark.parametrize(("place", "norm", "dtype"), SAME_BITS)
def test_a_row_s_bits_are_its_own(gpu: Backend, place: str, norm: str, dtype: str) -> None:
    """Not of the batch, the alignment, the strides, the masks, nor of what else is asked for."""
    itemsize = oracle.DTYPES[dtype].itemsize
    hidden_size = kernels.PLACES[place].hidden_size(itemsize, 8)
    rows = 6
    shape = (rows, hidden_size)
    x = inputs.array(shape, dtype)
    case = Case(
        x=inputs.lay(x),
        norm=norm,
        weight=inputs.lay(inputs.weight(hidden_size, "float32")),
        bias=inputs.lay(inputs.bias(hidden_size, dtype)),
    )
    expected = calls.forward(gpu, case, statistics=True)

    def same(what: str, case: Case, chosen: Any = slice(None), **outputs: Any) -> None:
        got = calls.forward(gpu, case, statistics=True, **outputs)
        for name, values in expected.items():
            compare.equal(got[name], values[chosen], f"{name}, {what}")

    for row in (0, rows - 1):
        same("alone", case.but(x=inputs.lay(x[row : row + 1])), slice(row, row + 1))
    many = 20_000 if hidden_size < 300 else 300 if hidden_size < 3000 else 40
    index = np.arange(many) % rows
    same("in a large batch", case.but(x=inputs.lay(x[index])), index)
    for layout in ("offset_1", "offset_4", "row_gap_8", "row_gap_3", "inner_2", "transposed"):
        same(layout, case.but(x=inputs.lay(x, layout)))
    out = gpu.empty(shape, dtype, "offset_1")
    same("a misaligned output", case, y=out)
    shifted = case.but(weight=inputs.lay(np.array(case.weight), "offset_1"))
    same("a misaligned weight", shifted)
    where = np.arange(rows) % 2 == 0
    got = calls.forward(gpu, case.but(where=where), statistics=True)
    for name, values in expected.items():
        compare.equal(got[name][where], values[where], f"{name}, masked")
    compare.equal(calls.forward(gpu, case)["y"], expected["y"], "y without statistics")

    in_place = inputs.lay(x)
    native = gpu.output(in_place)
    function = getattr(cupy_rmsnorm, f"{norm}_norm")
    weight, bias = gpu.input(case.weight), gpu.input(case.bias)
    assert function(native, weight, bias, eps=case.eps, out=native) is native
    compare.equal(gpu.numpy(native), expected["y"], "y in place")


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("hidden_size", [769, 4096, 20_001, 40_000, 1_000_008])
def test_fifty_repeats(gpu: Backend, norm: str, hidden_size: int) -> None:
    rows = 7 if hidden_size < 100_000 else 2
    case = Case(
        x=inputs.lay(inputs.array((rows, hidden_size), "float16", "row_tagged")),
        weight=inputs.weight(hidden_size, "float16"),
        norm=norm,
    )
    outputs = {
        name: gpu.empty(case.shape(name), dtype)
        for name, dtype in case.outputs(statistics=True).items()
    }
    first = calls.forward(gpu, case, statistics=True, **outputs)
    calls.check_forward(case, first)
    function = getattr(cupy_rmsnorm, f"{norm}_norm_forward")
    x, weight = gpu.input(case.x), gpu.input(case.weight)
    keywords = {calls.PARAMETERS[name]: native for name, native in outputs.items()}
    for _ in range(50):
        function(x, weight, eps=case.eps, **keywords)
        for name, native in outputs.items():
            compare.equal(gpu.numpy(native), first[name], name)


# 64-bit offsets -----------------------------------------------------------------------------------


def need_memory(cupy: ModuleType, nbytes: int) -> None:
    """Skip where the GPU has less than this free."""
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.empty_cache()
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < nbytes + 2**30:
        pytest.skip(f"needs {nbytes / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} are free")


def blocks_of_rows(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + 2**16, rows)) for start in range(0, rows, 2**16))


@pytest.mark.large
@pytest.mark.parametrize("rows", [524_289, 1_048_577], ids=["2**31", "2**32"])
def test_more_elements_than_32_bits_count(cupy: ModuleType, rows: int) -> None:
    hidden_size = 4096
    need_memory(cupy, 2 * 2 * rows * hidden_size)
    x = cupy.empty((rows, hidden_size), np.float16)
    y = cupy.empty((rows, hidden_size), np.float16)
    try:
        for part in blocks_of_rows(rows):
            x[part] = 1
            y[part] = np.nan
        x[-1] = -1
        cupy_rmsnorm.rms_norm(x, eps=0.0, out=y)
        for part in blocks_of_rows(rows - 1):
            assert bool((y[part] == 1).all()), part
        assert bool((y[-1] == -1).all())

        # Three rows, 2**31 elements apart in the larger case.
        apart = (rows - 1) // 2
        y[::apart] = np.nan
        x[0] = 3
        cupy_rmsnorm.rms_norm(x[::apart], 2.0, eps=0.0, out=y[::apart])
        for row, value in ((0, 2), (apart, 2), (rows - 1, -2), (1, 1), (apart + 1, 1)):
            assert bool((y[row] == value).all()), row
    finally:
        del x, y
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.large
@pytest.mark.parametrize("rows", [524_289, 1_048_577], ids=["2**31", "2**32"])
def test_more_gradients_than_32_bits_count(cupy: ModuleType, rows: int) -> None:
    hidden_size = 4096
    need_memory(cupy, 3 * 2 * rows * hidden_size)
    x, dout, dx = (cupy.empty((rows, hidden_size), np.float16) for _ in range(3))
    try:
        for part in blocks_of_rows(rows):
            x[part] = 1
            dout[part, ::2] = 1
            dout[part, 1::2] = -1
            dx[part] = np.nan
        dout[-1] *= 2
        # xhat is 1 and the mean of dout * xhat is 0, so dx is dout.
        cupy_rmsnorm.rms_norm_backward(dout, x, eps=0.0, dx_out=dx)
        for part in blocks_of_rows(rows):
            assert bool((dx[part] == dout[part]).all()), part
    finally:
        del x, dout, dx
        cupy.get_default_memory_pool().free_all_blocks()


# Streams ------------------------------------------------------------------------------------------


def stream_arrays(backend: Backend) -> tuple[Any, Any, Any, Any, oracle.Reference]:
    """x, its old and new values, a weight, and what the new values give."""
    old = inputs.array((64, 4096), "float16", seed=1)
    new = inputs.array((64, 4096), "float16", seed=2)
    weight = inputs.weight(4096, "float16")
    x = backend.output(old.copy())
    natives = [backend.input(array) for array in (old, new, weight)]
    return x, *natives, rms_reference(new, weight)  # type: ignore[return-value]


@pytest.mark.parametrize("given", [True, False], ids=["out", "new"])
def test_the_current_stream(side: Side, launches: Launches, given: bool) -> None:
    """A call behind a busy stream sees what that stream wrote, and the host does not wait."""
    x, old, new, weight, expected = stream_arrays(side.backend)
    out = side.backend.empty((64, 4096), "float16") if given else None
    for repeat in range(6):
        side.copy(x, old)
        side.backend.synchronize()
        with side.current():
            side.spin()
            side.copy(x, new)
            y = cupy_rmsnorm.rms_norm(x, weight, out=out)
            copied = side.duplicate(y)
            # The first two rounds compile, and fill the pool.
            assert repeat < 2 or side.busy(), "the call waited for the GPU"
        side.synchronize()
        check(side.backend.numpy(copied), expected)
        assert launches.streams[-1] == side.handle


def test_the_stream_of_x_s_library(cupy: ModuleType, torch: ModuleType, launches: Launches) -> None:
    """torch's stream for tensors and CuPy's for arrays, whatever the other library is on."""
    ours, theirs = Side(BACKENDS["cupy"]()), Side(BACKENDS["torch-cuda"]())
    for here, there in ((ours, theirs), (theirs, ours)):
        x, old, new, weight, expected = stream_arrays(here.backend)
        for _ in range(3):
            here.copy(x, old)
            here.backend.synchronize()
            with there.current(), here.current():
                here.spin()
                here.copy(x, new)
                y = here.duplicate(cupy_rmsnorm.rms_norm(x, weight))
            here.synchronize()
            check(here.backend.numpy(y), expected)
            assert launches.streams[-1] == here.handle


@pytest.mark.parametrize("hidden_size", [96, 4096, 1_000_008])
def test_backward_on_the_current_stream(side: Side, launches: Launches, hidden_size: int) -> None:
    """Its workspace too is of that stream: kernels of two streams never share it."""
    rows = 300 if hidden_size < 10_000 else 3
    case = Case(
        x=inputs.array((rows, hidden_size), "float16"),
        weight=inputs.weight(hidden_size, "float32"),
        eps=1e-6,
    )
    gradients = [
        calls.Gradient(dout=inputs.array((rows, hidden_size), "float16", seed=seed))
        for seed in (1, 2)
    ]
    x, weight = side.backend.input(case.x), side.backend.input(case.weight)
    old, new = (side.backend.input(gradient.dout) for gradient in gradients)
    dout = side.backend.output(gradients[0].dout.copy())
    names = ("dx", "dweight", "dbias")
    for repeat in range(4):
        side.copy(dout, old)
        side.backend.synchronize()
        with side.current():
            side.spin()
            side.copy(dout, new)
            results = cupy_rmsnorm.rms_norm_backward(dout, x, weight, eps=case.eps)
            assert repeat < 2 or side.busy(), "the call waited for the GPU"
        side.backend.poison(4 * rows * hidden_size)
        # On the default stream at the same time, with the same shapes.
        meanwhile = cupy_rmsnorm.rms_norm_backward(old, x, weight, eps=case.eps)
        side.synchronize()
        side.backend.synchronize()
        for got, gradient in ((results, gradients[1]), (meanwhile, gradients[0])):
            arrays = {
                name: None if array is None else side.backend.numpy(array)
                for name, array in zip(names, got, strict=True)
            }
            calls.check_backward(case, gradient, arrays)
    assert set(launches.streams) == {0, side.handle}


def test_the_null_stream(gpu: Backend, launches: Launches) -> None:
    case = Case(x=inputs.array((3, 64), "float32"))
    calls.check_forward(case, calls.forward(gpu, case))
    assert launches.streams == [0]


def test_temporaries_outlive_their_kernel(side: Side) -> None:
    """Memory of a copy that the call made is not handed to another stream too early."""
    values = inputs.array((64, 8192), "float16")
    base = side.backend.input(values)
    expected = rms_reference(values[:, ::2])
    nbytes = values.nbytes // 2
    for _ in range(10):
        with side.current():
            side.spin(SPIN_CYCLES // 8)
            y = cupy_rmsnorm.rms_norm(base[:, ::2])
        side.backend.poison(nbytes)  # on the default stream, while the kernel waits
        side.synchronize()
        check(side.backend.numpy(y), expected)


# Memory, device -----------------------------------------------------------------------------------


def count_allocations(backend: Backend, run: Callable[[], Any]) -> int:
    """How many allocations of the library's pool `run` makes."""
    if backend.name == "torch-cuda":
        import torch

        key = "allocation.all.allocated"
        before = torch.cuda.memory_stats()[key]
        run()
        return int(torch.cuda.memory_stats()[key] - before)
    import cupy

    class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "count"
        count = 0

        def malloc_preprocess(self, **kwargs: Any) -> None:
            self.count += 1

    hook = Hook()
    with hook:
        run()
    return hook.count


@pytest.mark.parametrize("hidden_size", [64, 4096, 20_000, 1_000_008])
def test_with_outputs_given_nothing_is_allocated(gpu: Backend, hidden_size: int) -> None:
    shape = (4, hidden_size)
    x = gpu.input(inputs.array(shape, "float16"))
    residual = gpu.input(inputs.array(shape, "float16", seed=1))
    weight = gpu.input(inputs.weight(hidden_size, "float32"))
    out, residual_out = gpu.empty(shape, "float16"), gpu.empty(shape, "float16")
    mean, rstd = gpu.empty((4,), "float32"), gpu.empty((4,), "float32")

    def run() -> None:
        cupy_rmsnorm.rms_norm(x, weight, out=out)
        cupy_rmsnorm.layer_norm_forward(x, weight, out=out, mean_out=mean, rstd_out=rstd)
        cupy_rmsnorm.add_rms_norm(x, residual, weight, out=out, residual_out=residual_out)

    run()
    assert count_allocations(gpu, run) == 0
    # That the counting counts:
    assert count_allocations(gpu, lambda: cupy_rmsnorm.rms_norm(x, weight)) == 1
    assert count_allocations(gpu, lambda: cupy_rmsnorm.rms_norm_forward(x, weight)) == 2


def test_an_inner_stride_costs_one_temporary(gpu: Backend) -> None:
    x = gpu.input(inputs.lay(inputs.array((4, 512), "float16"), "inner_2"))
    out = gpu.empty((4, 512), "float16")

    def run() -> None:
        cupy_rmsnorm.rms_norm(x, out=out)

    run()
    assert count_allocations(gpu, run) == 1


def test_errors_come_before_the_launch(gpu: Backend, launches: Launches) -> None:
    """They leave the device usable, and current what was."""
    from cupy.cuda import runtime

    x = inputs.array((4, 64), "float16")
    native = gpu.input(x)
    for arguments, options, error in (
        ((native, gpu.input(inputs.weight(63, "float16"))), {}, ValueError),
        ((native, gpu.input(np.ones(64, np.int32))), {}, TypeError),
        ((native, np.ones(64, np.float16)), {}, ValueError),
        ((native,), {"eps": -1.0}, ValueError),
        ((native,), {"axis": 0}, ValueError),
        ((native,), {"out": gpu.output(np.ones((4, 63), np.float16))}, ValueError),
    ):
        before = runtime.getDevice()
        with pytest.raises(error):
            cupy_rmsnorm.rms_norm(*arguments, **options)
        assert runtime.getDevice() == before
        assert not launches.streams
    gpu.synchronize()
    check(gpu.numpy(cupy_rmsnorm.rms_norm(native)), rms_reference(x))
    for shape in ((0, 64), (3, 0, 64)):
        empty = cupy_rmsnorm.rms_norm(gpu.input(inputs.lay(np.zeros(shape, np.float16))))
        assert gpu.numpy(empty).shape == shape
    gpu.synchronize()
    check(gpu.numpy(cupy_rmsnorm.rms_norm(native)), rms_reference(x))


# Compilation --------------------------------------------------------------------------------------


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Specialisation]:
    """What is built from here on, with nothing loaded at first."""
    built: list[Specialisation] = []
    build = _kernel.build

    def counted(specialisation: Specialisation, *arguments: Any, **options: Any) -> Any:
        built.append(specialisation)
        return build(specialisation, *arguments, **options)

    monkeypatch.setattr(_kernel, "build", counted)
    monkeypatch.setattr(_kernel, "_functions", {})
    monkeypatch.setattr(_kernel, "_locks", {})
    return built


def test_one_build_a_specialisation(gpu: Backend, builds: list[Specialisation]) -> None:
    def run(rows: int, hidden_size: int) -> None:
        x, weight = (
            inputs.array((rows, hidden_size), "float32"),
            inputs.weight(hidden_size, "float32"),
        )
        got = cupy_rmsnorm.rms_norm(gpu.input(x), gpu.input(weight))
        check(gpu.numpy(got), rms_reference(x, weight))

    for _ in range(3):
        run(3, 331)
        run(5, 333)  # the same threads and vectors
    assert len(builds) == 1
    run(3, 4096)
    assert len(builds) == 2


def test_sixteen_threads_build_once(gpu: Backend, builds: list[Specialisation]) -> None:
    x = inputs.array((5, 1000), "bfloat16")
    native, expected = gpu.input(x), rms_reference(x)
    together = threading.Barrier(16)

    def work() -> list[Any]:
        together.wait()
        return [cupy_rmsnorm.rms_norm(native) for _ in range(3)]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(work) for _ in range(16)]
        results = [result for future in futures for result in future.result()]
    gpu.synchronize()
    assert len(results) == 48
    for result in results:
        check(gpu.numpy(result), expected)
    assert len(builds) == 1


def test_a_new_thread_launches_what_another_built(gpu: Backend) -> None:
    """Nothing before the launch may have given the thread a CUDA context."""
    x = inputs.array((5, 1000), "float16")
    native, out = gpu.input(x), gpu.empty((5, 1000), "float16")
    cupy_rmsnorm.rms_norm(native, out=out)
    gpu.synchronize()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(cupy_rmsnorm.rms_norm, native, out=out).result()
    gpu.synchronize()
    check(gpu.numpy(out), rms_reference(x))


def test_a_fork_of_an_importing_process_has_its_gpu(cupy: ModuleType) -> None:
    """The import must not touch CUDA: a child of a process that did could not."""
    script = """
        import os, sys
        import cupy_rmsnorm

        child = os.fork()
        if child == 0:
            import cupy
            y = cupy_rmsnorm.rms_norm(cupy.full((3, 64), 2, cupy.float32), eps=0.0)
            os._exit(0 if bool((y == 1).all()) else 1)
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# Graphs -------------------------------------------------------------------------------------------


def graph_call(backend: Backend, hidden_size: int) -> tuple[Any, Any, Callable[[], None]]:
    """(x, out, a call that reads the one and writes the other)."""
    shape = (9, hidden_size)
    x = backend.output(inputs.array(shape, "float16"))
    residual = backend.input(inputs.array(shape, "float16", seed=1))
    weight = backend.input(inputs.weight(hidden_size, "float32"))
    out, residual_out = backend.empty(shape, "float16"), backend.empty(shape, "float16")

    def call() -> None:
        cupy_rmsnorm.add_rms_norm(x, residual, weight, out=out, residual_out=residual_out)
        cupy_rmsnorm.layer_norm(residual_out, weight, out=out)

    return x, out, call


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("hidden_size", [96, 4096, 40_000])
def test_torch_captures_backward(torch: ModuleType, rows: int, hidden_size: int) -> None:
    """The parts of dweight lie in the graph's own memory, which each replay must fill anew."""
    backend = BACKENDS["torch-cuda"]()
    x = backend.output(inputs.array((rows, hidden_size), "float16"))
    dout = backend.input(inputs.array((rows, hidden_size), "float16", seed=1))
    weight = backend.input(inputs.weight(hidden_size, "float32"))

    def call() -> Any:
        return cupy_rmsnorm.rms_norm_backward(dout, x, weight)[:2]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for repeat in range(3):
        x.copy_(backend.input(inputs.array((rows, hidden_size), "float16", seed=10 + repeat)))
        for gradient in captured:
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for name, got, expected in zip(("dx", "dweight"), captured, call(), strict=True):
            compare.equal(backend.numpy(got), backend.numpy(expected), f"{name}, replay {repeat}")


@pytest.mark.parametrize("hidden_size", [96, 4096, 40_000, 1_000_008])
def test_cupy_captures_a_graph(cupy: ModuleType, hidden_size: int) -> None:
    backend = Cupy()
    stream = cupy.cuda.Stream(non_blocking=True)
    x, out, call = graph_call(backend, hidden_size)
    backend.synchronize()
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        call()
        graph = stream.end_capture()
        for repeat in range(3):
            x[...] = cupy.asarray(inputs.array(x.shape, "float16", seed=10 + repeat))
            out[...] = np.nan
            graph.launch(stream)
            stream.synchronize()
            replayed = backend.numpy(out)
            call()
            stream.synchronize()
            compare.equal(replayed, backend.numpy(out), f"replay {repeat}")
    backend.verify()


@pytest.mark.parametrize("hidden_size", [96, 4096, 40_000, 1_000_008])
def test_torch_captures_a_graph(torch: ModuleType, hidden_size: int) -> None:
    backend = BACKENDS["torch-cuda"]()
    x, out, call = graph_call(backend, hidden_size)
    call()
    cupy_rmsnorm.rms_norm(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        new = cupy_rmsnorm.rms_norm(x)  # allocated from the graph's own pool
    for repeat in range(3):
        values = inputs.array(tuple(x.shape), "float16", seed=10 + repeat)
        x.copy_(backend.input(values))
        out.fill_(float("nan"))
        new.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = backend.numpy(out)
        check(backend.numpy(new), rms_reference(values), f"new array, replay {repeat}")
        call()
        compare.equal(replayed, backend.numpy(out), f"replay {repeat}")
    backend.verify()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("hidden_size", [96, 4096, 40_000])
def test_a_captured_graph_serves_any_length(
    cupy: ModuleType, hidden_size: int, groups: int
) -> None:
    backend, rows = Cupy(), 21
    values = inputs.array((rows, hidden_size), "float16", "row_tagged")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, out = backend.input(values), backend.empty(values.shape, "float16")
        count = cupy.array([rows], "int32")

        def call() -> None:
            cupy_rmsnorm.rms_norm(x, groups=groups, valid_rows=count, masked="zero", out=out)

        call()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        call()
        graph = stream.end_capture()
        for valid in (0, 1, 13, rows, rows + 5):
            count[...] = valid
            graph.launch(stream)
            stream.synchronize()
            case = Case(x=values, eps=1e-6, groups=groups, valid_rows=np.array(valid))
            calls.check_forward(case, {"y": backend.numpy(out)})
    backend.verify()


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 300])
def test_qk_norm_has_the_bits_of_two_calls(gpu: Backend, head_size: int, tokens: int) -> None:
    qkv = inputs.lay(inputs.array((tokens, 12, head_size), "bfloat16", "row_tagged"))
    q, k = qkv[:, :8], qkv[:, 8:10]
    weights = inputs.weight(head_size, "bfloat16"), inputs.weight((2, head_size), "bfloat16", 1)
    arrays = [gpu.input(array) for array in (q, k, *weights)]
    expected = (
        cupy_rmsnorm.rms_norm(arrays[0], arrays[2]),
        cupy_rmsnorm.rms_norm(arrays[1], arrays[3], per_head=True),
    )
    for _ in range(2):  # by the general road, by the short one
        for name, got, want in zip("qk", cupy_rmsnorm.qk_norm(*arrays), expected, strict=True):
            compare.equal(gpu.numpy(got), gpu.numpy(want), name)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("hidden_size", [24, 4096, 80_000])
def test_groups_have_the_bits_of_heads(gpu: Backend, norm: str, hidden_size: int) -> None:
    x = inputs.array((7, hidden_size), "float16", "row_tagged")
    weight = inputs.weight(hidden_size, "float32")
    heads = Case(x=x.reshape(7, 4, -1), norm=norm, weight=weight.reshape(4, -1), per_head=True)
    expected = calls.forward(gpu, heads, statistics=True)
    case = Case(x=x, norm=norm, weight=weight, groups=4)
    for _ in range(2):  # by the general road, by the short one
        got = calls.forward(gpu, case, statistics=True)
        for output, result in got.items():
            compare.equal(result.reshape(expected[output].shape), expected[output], output)


# Arrays of other kinds ----------------------------------------------------------------------------


def test_parameters_of_torch(torch: ModuleType) -> None:
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.linspace(-1, 2, 256, device="cuda"))
    with torch.no_grad():
        got = cupy_rmsnorm.rms_norm(x, weight)
        expected = cupy_rmsnorm.rms_norm(x, weight.detach())
        learned = cupy_rmsnorm.rms_norm(x.clone().requires_grad_(), weight)
    assert type(got) is torch.Tensor
    assert not got.requires_grad
    assert torch.equal(got, expected)
    assert torch.equal(learned, expected)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        cupy_rmsnorm.rms_norm_forward(x, weight)


class Exporter:
    """Speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_array_that_only_exports(cupy: ModuleType, launches: Launches, dtype: str) -> None:
    values = inputs.array((4, 320), dtype)
    weight = inputs.weight(320, dtype)
    x = Exporter(cupy.asarray(values))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        got = cupy_rmsnorm.rms_norm(x, Exporter(cupy.asarray(weight)))
    stream.synchronize()
    check(Cupy().numpy(got), rms_reference(values, weight))
    assert x.streams[-1] == stream.ptr
    assert launches.streams == [stream.ptr]


def test_a_tensor_that_only_exports(torch: ModuleType, cupy: ModuleType) -> None:
    values = inputs.array((4, 320), "bfloat16")
    backend = BACKENDS["torch-cuda"]()
    got = cupy_rmsnorm.rms_norm(Exporter(backend.input(values)))
    check(Cupy().numpy(got), rms_reference(values))


class Interface:
    """Has `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: Any, stream: int | None) -> None:
        self.array = array  # keeps the memory
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {"stream": stream}


def test_the_stream_of_an_interface_is_awaited_by_an_event(cupy: ModuleType) -> None:
    producer, consumer = Side(Cupy()), Side(Cupy())
    x, old, new, weight, expected = stream_arrays(producer.backend)
    shown = Interface(x, producer.handle)
    for repeat in range(4):
        x[...] = old
        cupy.cuda.runtime.deviceSynchronize()
        with producer.current():
            producer.spin()
            x[...] = new
        with consumer.current():
            y = cupy_rmsnorm.rms_norm(shown, weight)
        assert repeat == 0 or producer.busy(), "the host waited"
        consumer.synchronize()
        check(Cupy().numpy(y), expected)


def test_an_array_of_numba(cupy: ModuleType) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="numba is not installed")
    values = inputs.array((4, 320), "float32")
    got = cupy_rmsnorm.rms_norm(cuda.to_device(values))
    check(Cupy().numpy(got), rms_reference(values))


def test_an_array_of_jax(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.devices()[0].platform != "gpu":
        pytest.skip("jax has no GPU")
    values = inputs.array((4, 320), "float32")
    got = cupy_rmsnorm.rms_norm(jax.numpy.asarray(values))
    assert isinstance(got, jax.Array)
    check(np.asarray(got), rms_reference(values))


# Two GPUs -----------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(cupy: ModuleType) -> ModuleType:
    """CuPy's runtime, where there are two GPUs."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs, this machine shows one")
    return cupy.cuda.runtime


def on_gpu(library: str, index: int, values: np.ndarray) -> Any:
    """`values` as an array of the library on this GPU."""
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(index):
            return cupy.asarray(values)
    import torch

    return torch.from_numpy(values).to(f"cuda:{index}")


def current_gpu(library: str) -> int:
    """The calling thread's, which the library and CUDA's runtime agree on."""
    import cupy

    index = cupy.cuda.runtime.getDevice()
    if library == "torch-cuda":
        import torch

        assert torch.cuda.current_device() == index
    return int(index)


def index_of(library: str, array: Any) -> int:
    return int(array.data.device_id if library == "cupy" else array.device.index)


@pytest.mark.parametrize("library", ["cupy", "torch-cuda"])
@pytest.mark.parametrize("hidden_size", [96, 4096, 40_000, 1_000_008])
def test_another_gpu_than_the_current(
    two_gpus: ModuleType, library: str, hidden_size: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("torch" if library == "torch-cuda" else "cupy")
    values = inputs.array((5, hidden_size), "float16")
    weight = inputs.weight(hidden_size, "float16")
    expected = rms_reference(values, weight)
    two_gpus.setDevice(0)
    for index in (1, 0, 1):
        x, w = on_gpu(library, index, values), on_gpu(library, index, weight)
        for _ in range(5):
            y = cupy_rmsnorm.rms_norm(x, w)
            assert two_gpus.getDevice() == 0
            assert index_of(library, y) == index
            check(BACKENDS[library]().numpy(y), expected)
        other = on_gpu(library, 1 - index, weight)
        with pytest.raises(ValueError, match=f"cuda:{index}.*cuda:{1 - index}"):
            cupy_rmsnorm.rms_norm(x, other)
        assert two_gpus.getDevice() == 0


@pytest.mark.parametrize("library", ["cupy", "torch-cuda"])
def test_threads_on_two_gpus(
    two_gpus: ModuleType, library: str, request: pytest.FixtureRequest
) -> None:
    """Both libraries' current device stays the thread's own, after calls that fail as well."""
    request.getfixturevalue("torch" if library == "torch-cuda" else "cupy")
    values = inputs.array((5, 4096), "float16")
    expected = rms_reference(values)
    arrays = [on_gpu(library, index, values) for index in (0, 1)]
    weights = [on_gpu(library, index, inputs.weight(4096, "float16")) for index in (0, 1)]

    def work(current: int) -> None:
        two_gpus.setDevice(current)
        for turn in range(50):
            index = turn % 2
            y = cupy_rmsnorm.rms_norm(arrays[index])
            assert current_gpu(library) == current
            assert index_of(library, y) == index
            check(BACKENDS[library]().numpy(y), expected)
            assert current_gpu(library) == current
            with pytest.raises(ValueError, match=f"cuda:{index}.*cuda:{1 - index}"):
                cupy_rmsnorm.rms_norm(arrays[index], weights[1 - index])
            assert current_gpu(library) == current

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, index % 2) for index in range(4)]:
            future.result()
