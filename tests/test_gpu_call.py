# SPDX-License-Identifier: Apache-2.0
"""What surrounds a kernel on a GPU: the short road, the compile cache, the environment."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _fast, _kernel
from tests import compare, inputs, oracle
from tests.backends import BACKENDS, Backend, missing, skip_without
from tests.test_gpu import Side, count_allocations

pytestmark = pytest.mark.gpu

CHECKOUT = Path(__file__).parent.parent
FUNCTIONS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams of launches that took the general road."""
    streams: list[int] = []
    launch = _kernel.launch

    def seen(
        function: Any, grid: int, block: int, shared_bytes: int, stream: int, packed: bytes
    ) -> Any:
        streams.append(stream)
        return launch(function, grid, block, shared_bytes, stream, packed)

    monkeypatch.setattr(_kernel, "launch", seen)
    return streams


# The short road -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_size", [4096, 40_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("function", [*FUNCTIONS, *(f"{name}_forward" for name in FUNCTIONS)])
def test_both_roads_give_the_same_bits(
    gpu: Backend, general: list[int], function: str, dtype: str, hidden_size: int
) -> None:
    shape = (3, hidden_size)
    adds = function.startswith("add_")
    x, residual = (gpu.input(inputs.array(shape, dtype, seed=seed)) for seed in (0, 1))
    weight = gpu.input(inputs.weight(hidden_size, dtype))
    arrays = (x, residual) if adds else (x,)
    results = []
    for road in ("general", "short", "general"):
        if road == "general":
            _fast.forget()
        before = len(general)
        made = getattr(norms, function)(*arrays, weight)
        assert len(general) - before == (road == "general")
        results.append(
            [gpu.numpy(array) for array in (made if isinstance(made, tuple) else (made,))]
        )
    for one, other, again in zip(*results, strict=True):
        compare.equal(other, one, "short road")
        compare.equal(again, one, "general road")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_place(gpu: Backend, general: list[int], function: str) -> None:
    shape = (5, 1024)
    values = [inputs.array(shape, "float16", seed=seed) for seed in (0, 1)]
    adds = function.startswith("add_")
    results = []
    for _ in range(2):
        x, residual = (gpu.output(value.copy()) for value in values)
        if adds:
            getattr(norms, function)(x, residual, out=x, residual_out=residual)
        else:
            getattr(norms, function)(x, out=x)
        results.append((gpu.numpy(x), gpu.numpy(residual)))
    assert len(general) == 1
    for short, first in zip(results[1], results[0], strict=True):
        compare.equal(short, first, "in place")


def test_nothing_is_allocated(gpu: Backend, general: list[int]) -> None:
    shape = (4, 4096)
    x, residual = (gpu.input(inputs.array(shape, "float16", seed=seed)) for seed in (0, 1))
    weight = gpu.input(inputs.weight(4096, "float32"))
    out, residual_out = gpu.empty(shape, "float16"), gpu.empty(shape, "float16")
    bound = norms.bind_rms_norm(weight)

    def run() -> None:
        norms.rms_norm(x, weight, out=out)
        bound(x, out)
        norms.add_rms_norm(x, residual, weight, out=out, residual_out=residual_out)

    run()
    general.clear()
    assert count_allocations(gpu, run) == 0
    assert general == []
    assert count_allocations(gpu, lambda: norms.rms_norm(x, weight)) == 1


def test_the_current_stream(gpu: Backend, general: list[int]) -> None:
    """A short call behind a busy stream sees what that stream wrote; the host does not wait."""
    side = Side(gpu)
    shape = (64, 4096)
    old, new = (inputs.array(shape, "float16", seed=seed) for seed in (0, 1))
    x, out = gpu.output(old.copy()), gpu.empty(shape, "float16")
    before, after = gpu.input(old), gpu.input(new)
    norms.rms_norm(x, out=out)  # learnt on the default stream
    general.clear()
    expected = oracle.forward(new, None, eps=1e-6).y
    for repeat in range(4):
        side.copy(x, before)
        gpu.synchronize()
        with side.current():
            side.spin()
            side.copy(x, after)
            norms.rms_norm(x, out=out)
            assert repeat == 0 or side.busy(), "the call waited for the GPU"
        side.synchronize()
        got = gpu.numpy(out)
        compare.close(got, expected.value, expected.bound("float16"), "y")
    assert general == []


def test_torch_captures_it() -> None:
    skip_without("torch-cuda")
    import torch

    gpu = BACKENDS["torch-cuda"]()
    x = gpu.output(inputs.array((8, 4096), "float16"))
    out = gpu.empty((8, 4096), "float16")
    norms.rms_norm(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms.rms_norm(x, out=out)
    for seed in (1, 2):
        x.copy_(gpu.input(inputs.array((8, 4096), "float16", seed=seed)))
        graph.replay()
        torch.cuda.synchronize()
        replayed = gpu.numpy(out)
        norms.rms_norm(x, out=out)
        compare.equal(replayed, gpu.numpy(out), "replay")


def test_sixteen_threads(gpu: Backend) -> None:
    """First and later calls at once, each thread on a stream of its own."""
    threads, shape = 16, (3, 2048)
    values = [inputs.array(shape, "float16", seed=seed) for seed in range(threads)]
    xs = [gpu.input(value) for value in values]
    outs = [gpu.empty(shape, "float16") for _ in values]
    gpu.synchronize()
    start = threading.Barrier(threads)
    failures: list[BaseException] = []

    def work(x: Any, out: Any) -> None:
        try:
            side = Side(gpu)
            start.wait()
            with side.current():
                for _ in range(200):
                    norms.layer_norm(x, out=out)
            side.synchronize()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(xs, outs, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    for value, out in zip(values, outs, strict=True):
        expected = oracle.forward(value, None, eps=1e-5, norm="layer").y
        compare.close(gpu.numpy(out), expected.value, expected.bound("float16"), "y")


# The compile cache --------------------------------------------------------------------------------


CALL = """
    import time
    import cupy, numpy as np
    import cupy_rmsnorm
    x = cupy.asarray(np.linspace(-1, 1, 3 * 1000, dtype=np.float16).reshape(3, 1000))
    cupy.cuda.runtime.deviceSynchronize()
    {before}
    begin = time.perf_counter()
    y = cupy_rmsnorm.rms_norm(x)
    print(time.perf_counter() - begin)
    print(y.get().tobytes().hex()[:64])
"""
NO_COMPILER = """
    def refuse(*arguments):
        raise AssertionError("compiled anew")
    from cupy.cuda import compiler
    compiler._compile_using_nvrtc_no_warning = refuse
"""


def run(folder: Path, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The call in a process of its own whose cache is `folder`."""
    code = textwrap.dedent(CALL).replace("{before}", textwrap.dedent(before))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        env=os.environ | {"CUPY_CACHE_DIR": os.fspath(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("cupy")
def test_a_second_process_does_not_compile(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    second = run(tmp_path, NO_COMPILER)
    assert second.returncode == 0, second.stderr
    assert second.stdout.split()[1] == first.stdout.split()[1]
    assert run(tmp_path / "another", NO_COMPILER).returncode != 0


@pytest.mark.usefixtures("cupy")
def test_a_first_call_is_quick_where_the_cache_is_warm(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 0
    seconds = min(float(run(tmp_path).stdout.split()[0]) for _ in range(3))
    assert seconds <= 0.150


PROCESSES = 8
# The processes wait for one another, so that they compile at once.
MEET = """
    import os, pathlib
    (pathlib.Path({place!r}) / str(os.getpid())).touch()
    limit = time.monotonic() + 30
    while len(os.listdir({place!r})) < {processes} and time.monotonic() < limit:
        time.sleep(0.001)
"""


@pytest.mark.usefixtures("cupy")
def test_eight_processes_on_one_empty_cache(tmp_path: Path) -> None:
    cache, place = tmp_path / "cache", tmp_path / "met"
    place.mkdir()
    meet = MEET.format(place=os.fspath(place), processes=PROCESSES)
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        done = list(pool.map(run, [cache] * PROCESSES, [meet] * PROCESSES))
    for one in done:
        assert one.returncode == 0, one.stderr
    assert len(os.listdir(place)) == PROCESSES
    after = run(cache, NO_COMPILER)
    assert after.returncode == 0, after.stderr
    assert {one.stdout.split()[1] for one in (*done, after)} == {after.stdout.split()[1]}


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("left", [0, 0.5], ids=["empty", "half"])
def test_truncated_cache_files(tmp_path: Path, left: float) -> None:
    first = run(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    second = run(tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout.split()[1] == first.stdout.split()[1]


@pytest.mark.usefixtures("cupy")
def test_a_cache_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    gone = f"import shutil; shutil.rmtree({os.fspath(folder)!r})"
    failed = run(folder, gone)
    assert failed.returncode != 0
    assert "RuntimeError: CuPy cannot keep compiled kernels in" in failed.stderr
    assert "set CUPY_CACHE_DIR" in failed.stderr
    shutil.rmtree(folder, ignore_errors=True)
    assert run(folder, gone, CUPY_CACHE_IN_MEMORY="1").returncode == 0


FULL = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
"""


@pytest.mark.usefixtures("cupy")
@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on files")
def test_a_full_disk(tmp_path: Path) -> None:
    """No file takes more than 512 bytes, which is less than a compiled kernel."""
    full = run(tmp_path, FULL)
    assert full.returncode != 0
    last = full.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: CuPy cannot keep compiled kernels in"), full.stderr
    assert "set CUPY_CACHE_DIR" in last
    kept = run(tmp_path, FULL, CUPY_CACHE_IN_MEMORY="1")
    assert kept.returncode == 0, kept.stderr
    # What was left of the attempt is in nobody's way.
    after = run(tmp_path)
    assert after.returncode == 0, after.stderr
    assert after.stdout.split()[1] == kept.stdout.split()[1]


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_ptx_for_a_gpu_that_nvrtc_does_not_know(monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
    from cupy.cuda import nvrtc

    gpu = BACKENDS["cupy"]()
    values = inputs.array((7, 1000), "float16")
    x = gpu.input(values)
    call = getattr(norms, f"{norm}_norm")
    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: (75,))
    monkeypatch.setattr(_kernel, "_functions", {})
    got = gpu.numpy(call(x, eps=1e-5))
    expected = oracle.forward(values, None, eps=1e-5, norm=norm).y
    compare.close(got, expected.value, expected.bound("float16"), "y")


NOBODY = 65534
FOREIGN = """
    import cupy_rmsnorm
    try:
        import cupy
        x = cupy.ones((3, 1000), "float16")
    except Exception:  # then torch, if it is here, still has arrays on the GPU
        import torch
        x = torch.ones(3, 1000, device="cuda").half()
    y = cupy_rmsnorm.rms_norm(x)
    assert abs(float(y[0, 0]) - 1) < 1e-3
"""


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("home", ["missing", "foreign"])
def test_a_home_that_cannot_be_written_to(tmp_path: Path, home: str) -> None:
    """The call works, or one error names the variable that helps."""
    with tempfile.TemporaryDirectory() as folder:  # which others may enter, unlike tmp_path
        os.chmod(folder, 0o755)
        place = folder if home == "foreign" else "/proc/missing"  # not even root can make this
        environment = {"HOME": place, "CUPY_CACHE_DIR": os.path.join(place, "cache")}
        user = NOBODY if home == "foreign" and os.geteuid() == 0 else None
        if home == "foreign" and user is None:
            pytest.skip("only root can run a process as another user")
        done = subprocess.run(
            [sys.executable, "-B", "-c", textwrap.dedent(FOREIGN)],
            cwd=CHECKOUT,
            env=os.environ | environment,
            user=user,
            capture_output=True,
            text=True,
            check=False,
        )
    if "Permission denied" in done.stderr and "CUPY_CACHE_DIR" not in done.stderr:
        pytest.skip("another user may not read this environment")
    assert done.returncode == 0 or "CUPY_CACHE_DIR" in done.stderr.splitlines()[-1], done.stderr


# Cold calls inside a capture ----------------------------------------------------------------------


COLD = """
    import cupy, torch
    import cupy_rmsnorm
    torch.set_grad_enabled(False)
    x = torch.linspace(-1, 1, 3 * 1000, device="cuda").half().reshape(3, 1000)
    out, expected = torch.empty_like(x), torch.nn.functional.rms_norm(x, (1000,), eps=1e-6)
    view, made = cupy.from_dlpack(x), cupy.from_dlpack(out)
    torch.cuda.synchronize()
    try:
        {capture}
        replay()
    except RuntimeError as error:
        assert "call warmup, or make the call once, before the capture" in str(error), error
        print("refused")
    else:
        torch.cuda.synchronize()
        assert torch.allclose(out, expected, atol=2e-3), "replay"
        print("captured")
    {again}  # the stream is of use afterwards
    torch.cuda.synchronize()
    assert torch.allclose(out, expected, atol=2e-3), "afterwards"
"""
TORCHS_CAPTURE = """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cupy_rmsnorm.rms_norm(x, out=out)
        replay = graph.replay
"""
CUPYS_CAPTURE = """
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            try:
                cupy_rmsnorm.rms_norm(view, out=made)
            finally:
                graph = stream.end_capture()
        replay = graph.launch
"""


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_cold_call_inside_a_capture(tmp_path: Path, library: str) -> None:
    """With an empty cache, in a process of its own: it is captured, or a sentence names warmup."""
    if missing("torch-cuda") is not None:
        pytest.skip("needs torch and a GPU")
    capture, again = {
        "torch": (TORCHS_CAPTURE, "cupy_rmsnorm.rms_norm(x, out=out)"),
        "cupy": (CUPYS_CAPTURE, "cupy_rmsnorm.rms_norm(view, out=made)"),
    }[library]
    code = COLD.replace("        {capture}\n", capture.lstrip("\n")).replace("{again}", again)
    done = in_process(code, CUPY_CACHE_DIR=os.fspath(tmp_path))
    assert done.returncode == 0, done.stderr
    print(done.stdout)


TORCHS = """
    import torch
    torch.set_grad_enabled(False)

    def array(values):
        return torch.from_numpy(values).cuda()

    def capture(call):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        return made, graph.replay

    def values(array):
        return array.cpu().numpy()

    def spoil(array):
        array.fill_(float("nan"))
"""
CUPYS = """
    import cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    # A capture forbids CUDA's allocator: what it allocates must lie in its stream's pool before.
    room = cupy.empty(1 << 28, "int8")
    del room
    array, values = cupy.asarray, cupy.asnumpy

    def capture(call):
        cupy.cuda.runtime.deviceSynchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        made = call()
        graph = stream.end_capture()
        return made, lambda: graph.launch(stream)

    def spoil(array):
        array.fill(float("nan"))
"""
WARM = """
    import numpy
    import cupy_rmsnorm as norms
    forward = [a + n + f for a in ("", "add_") for n in ("rms_norm", "layer_norm")
               for f in ("", "_forward")]
    backward = [a + n + "_backward" for a in ("", "add_") for n in ("rms_norm", "layer_norm")]
    sizes = (96, 4096, 40_000, 300_000)
    dtypes = dict(dtype="float16", weight_dtype="float16")
    without = [dict(need_dx=False), dict(need_dweight=False)]
    norms.warmup(calls=[
        *(dict(op=op, hidden_size=n, **dtypes) for op in (*forward, *backward) for n in sizes),
        *(dict(op=op, hidden_size=4096, **needs, **dtypes) for op in backward for needs in without),
        dict(op="qk_norm", hidden_size=96, **dtypes),
    ])
    random = numpy.random.default_rng(0)

    def draw(*shape):
        return array(random.standard_normal(shape, "float32").astype("float16"))

    for n in sizes:
        x, r, w = draw(5, n), draw(5, n), draw(n)
        cases = [(op, (x, r, w) if op.startswith("add_") else (x, w), {}) for op in forward]
        for op in backward:
            arrays = (x, r, x, w) if op.startswith("add_") else (r, x, w)
            cases += [(op, arrays, needs) for needs in ({}, *(without if n == 4096 else ()))]
            if op.startswith("add_"):
                cases.append((op, (x, None, x, w), {}))
        if n == 96:
            cases.append(("qk_norm", (draw(5, 4, n), draw(5, 2, n), w, w), {}))
        for op, arrays, needs in cases:
            call = lambda: getattr(norms, op)(*arrays, **needs)
            captured, replay = capture(call)
            pairs = []
            for made in captured if isinstance(captured, tuple) else (captured,):
                if made is not None:
                    spoil(made)
            replay()
            for made in (captured, call()):
                made = made if isinstance(made, tuple) else (made,)
                pairs.append([None if one is None else values(one).tobytes() for one in made])
            assert pairs[0] == pairs[1], (op, n, needs)
            print(op, n, needs)
"""


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_each_call_is_captured_cold_after_warmup(tmp_path: Path, library: str) -> None:
    skip_without("torch-cuda" if library == "torch" else library)
    code = (TORCHS if library == "torch" else CUPYS) + WARM
    done = in_process(code, CUPY_CACHE_DIR=os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    # Of each size; what leaves a gradient out; qk_norm.
    assert len(done.stdout.splitlines()) == (12 + 2) * 4 + 2 * 4 + 1


# The environment ----------------------------------------------------------------------------------


FAILING = """
    import cupy
    import cupy_rmsnorm
    memory = cupy.cuda.UnownedMemory(1 << 20, 1 << 20, None, 0)
    x = cupy.ndarray((4, 1024), "float16", cupy.cuda.MemoryPointer(memory, 0))
    out = cupy.empty_like(x)
    cupy_rmsnorm.rms_norm(x, out=out)
"""
CAPTURED = """
    import cupy
    import cupy_rmsnorm
    x = cupy.ones((4, 1024), "float16")
    out = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        cupy_rmsnorm.rms_norm(x, out=out)
        stream.begin_capture()
        cupy_rmsnorm.rms_norm(x, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (out == 1).all()
"""


FORKED = """
    import os, signal, sys, warnings
    import numpy as np
    import cupy_rmsnorm as norms
    {arrays}
    bound, with_bias = norms.bind_rms_norm(weight), norms.bind_layer_norm(weight, weight)
    calls = [
        lambda: norms.rms_norm(x, weight, out=out),
        lambda: norms.add_rms_norm(x, x, weight, out=out, residual_out=other),
        lambda: norms.layer_norm_forward(x),
        lambda: norms.rms_norm_backward(x, x, weight, dx_out=out),
        lambda: bound(x, out),
        lambda: bound(x),
        lambda: with_bias(x, out),
    ]
    repeated = calls[:{repeated}]
    for call in repeated + repeated:
        call()
    synchronize()
    warnings.simplefilter("ignore")  # Python 3.12 warns of threads at a fork
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends what hangs
        try:
            for call in calls:
                try:
                    call()
                    print("no error", flush=True)
                except Exception as error:
                    print(type(error).__name__, *str(error).split(), flush=True)
            print(float(norms.rms_norm(np.ones((2, 8), np.float32), eps=0.0).sum()), flush=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    norms.rms_norm(x, weight, eps=0.0, out=out)  # the parent goes on
    assert abs(float(out[0, 0]) - 1) < 1e-3
    sys.exit(os.waitstatus_to_exitcode(status))
"""
CUPYS_ARRAYS = """
    import cupy
    x, weight = cupy.ones((4, 1024), "float16"), cupy.ones(1024, "float16")
    out, other = cupy.empty_like(x), cupy.empty_like(x)
    synchronize = cupy.cuda.runtime.deviceSynchronize
"""
TORCHS_ARRAYS = """
    import torch
    torch.set_grad_enabled(False)
    x, weight = torch.ones(4, 1024, device="cuda").half(), torch.ones(1024, device="cuda").half()
    out, other = torch.empty_like(x), torch.empty_like(x)
    synchronize = torch.cuda.synchronize
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("repeated", [0, 7], ids=["cold", "warm"])
@pytest.mark.parametrize("library", ["cupy", "torch-cuda"])
def test_a_fork_of_a_process_that_used_the_gpu(library: str, repeated: int) -> None:
    """Its GPU calls raise a sentence that names the way out, and it has the NumPy backend."""
    skip_without(library)
    arrays = (CUPYS_ARRAYS if library == "cupy" else TORCHS_ARRAYS).strip()
    code = FORKED.replace("{arrays}", arrays).replace("{repeated}", str(repeated))
    done = in_process(code)
    assert done.returncode == 0, done.stdout + done.stderr
    *errors, total = done.stdout.splitlines()
    assert float(total) == 16
    assert len(errors) == 7
    for error in errors:
        assert error.startswith("RuntimeError"), done.stdout
        assert "'spawn'" in error, done.stdout


def in_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=CHECKOUT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("cupy")
def test_debug_names_the_call_that_failed() -> None:
    failed = in_process(FAILING, CUPY_RMSNORM_DEBUG="1")
    assert failed.returncode != 0
    assert "RuntimeError: rms_norm on cuda:0 with x float16[4, 1024], y float16" in failed.stderr
    assert "by Plan(kernel='norm_forward'" in failed.stderr
    assert "illegal" in failed.stderr or "misaligned" in failed.stderr


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("variable", ["CUPY_RMSNORM_DEBUG", "CUPY_RMSNORM_NVTX"])
def test_watched_calls_are_captured(variable: str) -> None:
    done = in_process(CAPTURED, **{variable: "1"})
    assert done.returncode == 0, done.stderr
