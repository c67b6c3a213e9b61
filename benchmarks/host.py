# SPDX-License-Identifier: Apache-2.0
"""What a call costs on the host, where the kernel is shorter than the call: 4 rows of 4096.

    python -m benchmarks.host [--rounds 15] [--json benchmarks/results/host.json]

A figure is the median over rounds of the microseconds from the begin of one call to that of the
next, with the GPU far from busy. All candidates take turns within one run, forwards and backwards.
Needs a GPU and torch; peers that cannot be imported take no part, nor an extension for torch
(half a minute to build) where nothing can build it. "launch" is the driver's launch with arguments
packed beforehand: of the very kernel and arguments that `rms_norm` launches, which is what ours is
held against, and of one that does nothing; "RawKernel" is CuPy's call of the latter with six
arguments. At the end, and under "bars" in the file: which bars hold in this run.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cupy
import numpy as np
import torch
from torch.nn import functional

import cupy_rmsnorm as cr
from benchmarks import race
from cupy_rmsnorm import _enqueue, _fast, _kernel

ROWS, HIDDEN_SIZE, DTYPE = 4, 4096, "float16"
EPS = 1e-6
CALLS = 200  # a figure; fewer than the driver queues before it makes the host wait
RESULTS = Path(__file__).parent / "results" / "host.json"
NOTHING = r"""
extern "C" __global__ void nothing(void* y, const void* x, const void* weight, long long rows,
                                   long long hidden_size, float eps) {}
"""
# What an extension compiled for torch does around such a kernel: the arguments, the checks that it
# cannot do without, the current stream, the launch.
EXTENSION = r"""
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>

void launch_into(int64_t function, const at::Tensor& x, const at::Tensor& weight, double eps,
                 const at::Tensor& y) {
    TORCH_CHECK(x.is_cuda() && weight.is_cuda() && y.is_cuda(), "tensors must be on a GPU");
    TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && y.is_contiguous(), "contiguous");
    TORCH_CHECK(y.sizes() == x.sizes() && weight.numel() == x.size(-1), "shapes");
    TORCH_CHECK(y.scalar_type() == x.scalar_type() && weight.scalar_type() == x.scalar_type());
    const c10::cuda::CUDAGuard guard(x.device());
    void* pointers[] = {y.data_ptr(), x.data_ptr(), weight.data_ptr()};
    long long hidden_size = x.size(-1), rows = x.numel() / hidden_size;
    float epsilon = static_cast<float>(eps);
    void* arguments[] = {&pointers[0], &pointers[1], &pointers[2], &rows, &hidden_size, &epsilon};
    const CUresult status = cuLaunchKernel(
        reinterpret_cast<CUfunction>(function), static_cast<unsigned>(rows), 1, 1, 256, 1, 1, 0,
        c10::cuda::getCurrentCUDAStream(), arguments, nullptr);
    TORCH_CHECK(status == CUDA_SUCCESS, "cuLaunchKernel failed");
}

at::Tensor launch(int64_t function, const at::Tensor& x, const at::Tensor& weight, double eps) {
    at::Tensor y = at::empty_like(x);
    launch_into(function, x, weight, eps, y);
    return y;
}
"""
Call = Callable[[], object]


class Case(NamedTuple):
    """What one candidate is."""

    op: str
    impl: str
    case: str


class Bar(NamedTuple):
    """`what` may take `share` of `of`, and `more` microseconds."""

    what: Case
    share: float
    of: Case
    more: float = 0.0

    def __str__(self) -> str:
        share = "" if self.share == 1.0 else f"{self.share:.2f} of "
        more = f" + {self.more:g} us" if self.more else ""
        return f"{' '.join(self.what)}: at most {share}{' '.join(self.of)}{more}"

    def verdict(self, times: Mapping[Case, float]) -> dict[str, Any]:
        """What came of it; one without both numbers does not hold."""
        got, of = times.get(self.what, math.nan), times.get(self.of, math.nan)
        most = self.share * of + self.more
        numbers = {"us": got, "of_us": of, "most_us": most, "ratio": got / of}
        rounded = {
            name: None if math.isnan(value) else round(value, 3) for name, value in numbers.items()
        }
        return {"bar": str(self), "holds": got <= most, **rounded}


RECORDED = "torch recorded"  # cases that begin so run with gradients on
FORWARD, BOTH = f"{RECORDED} forward", f"{RECORDED} forward and backward"
IN_A_ROW = 10
LAUNCH = Case("launch", "driver", "packed, the kernel of rms_norm")
RAW = Case("launch", "RawKernel", "cupy allocating")
TORCH = Case("rms_norm", "torch", "torch allocating")
TORCH_LAYER = Case("layer_norm", "torch", "torch allocating")
OUT = Case("rms_norm", "ours", "torch out=")
CUPY_OUT = Case("rms_norm", "ours", "cupy out=")
BARS = (
    Bar(OUT, 0.70, TORCH),
    Bar(Case("rms_norm", "ours", "torch allocating"), 0.85, TORCH),
    Bar(Case("rms_norm", "ours", "torch bound out="), 0.60, TORCH),
    Bar(Case("rms_norm", "ours", "torch out=, float32 weight"), 0.70, TORCH),
    Bar(Case("layer_norm", "ours", "torch out="), 0.70, TORCH_LAYER),
    Bar(CUPY_OUT, 1.5, LAUNCH),
    Bar(Case("rms_norm", "ours", "cupy bound out="), 1.3, LAUNCH),
    Bar(Case("rms_norm", "ours", "cupy allocating"), 1.0, RAW),
    Bar(Case("add_rms_norm", "ours", "torch out="), 1.0, OUT, more=1.0),
    Bar(Case("add_rms_norm", "ours", "cupy out="), 1.0, CUPY_OUT, more=1.0),
    *(
        Bar(
            Case("qk_norm", "ours", f"{library} in place"),
            1.0,
            Case("qk_norm", "ours", f"{library} in place, two calls"),
        )
        for library in ("torch", "cupy")
    ),
)


def launches() -> Iterator[tuple[Case, Call]]:
    """The floor: a kernel that does nothing."""
    x, y, weight = cupy_arrays()
    kernel = cupy.RawKernel(NOTHING, "nothing")
    arguments = (weight, np.int64(ROWS), np.int64(HIDDEN_SIZE), np.float32(EPS))
    grid, block = (ROWS,), (256,)
    kernel(grid, block, (y, x, *arguments))
    yield Case("launch", "RawKernel", "cupy out="), lambda: kernel(grid, block, (y, x, *arguments))
    yield RAW, lambda: kernel(grid, block, (cupy.empty_like(x), x, *arguments))

    values = struct.pack("@QQQqqf", y.data.ptr, x.data.ptr, weight.data.ptr, ROWS, HIDDEN_SIZE, EPS)
    packed = ctypes.create_string_buffer(values, len(values))
    begin = ctypes.addressof(packed)
    parameters = (ctypes.c_void_p * 6)(*(begin + 8 * i for i in range(6)))
    handle, address = kernel.kernel.ptr, ctypes.addressof(parameters)
    stream, launch = cupy.cuda.get_current_stream().ptr, cupy.cuda.driver.launchKernel

    def call(keep: object = (packed, parameters)) -> None:
        launch(handle, ROWS, 1, 1, 256, 1, 1, 0, stream, address, 0)

    yield Case("launch", "driver", "packed"), call
    yield LAUNCH, launch_of_rms_norm()


def launch_of_rms_norm() -> Call:
    """The driver's launch of what `rms_norm` launches, without this library."""
    x, y, weight = cupy_arrays()
    launched = []

    def keep(*arguments: Any) -> None:
        launched.append(arguments[:6])

    cr.rms_norm(x, weight, eps=EPS, out=y)  # compiled; the next one is looked at
    _fast.forget()
    with mock.patch.object(_kernel, "launch", keep):
        cr.rms_norm(x, weight, eps=EPS, out=y)
    (function, grid, block, shared_bytes, stream, values) = launched[0]
    packed = ctypes.create_string_buffer(values, len(values))
    parameters = ctypes.c_void_p(ctypes.addressof(packed))
    handle, address, launch = function.ptr, ctypes.addressof(parameters), _enqueue.launcher()

    def call(kept: object = (x, y, weight, function, packed, parameters)) -> None:
        launch(handle, grid, 1, 1, block, 1, 1, shared_bytes, stream, address, 0)

    return call


def cupy_arrays() -> tuple[Any, Any, Any]:
    """x, y and a weight."""
    x = cupy.asarray(np.random.default_rng(0).standard_normal((ROWS, HIDDEN_SIZE)).astype(DTYPE))
    return x, cupy.empty_like(x), cupy.ones(HIDDEN_SIZE, DTYPE)


def ours_on_cupy() -> Iterator[tuple[Case, Call]]:
    """This library with CuPy arrays."""
    (x, y, weight), (residual, residual_out, _) = cupy_arrays(), cupy_arrays()
    bound = cr.bind_rms_norm(weight, eps=EPS)
    for op, case, call in (
        ("rms_norm", "cupy out=", lambda: cr.rms_norm(x, weight, eps=EPS, out=y)),
        ("rms_norm", "cupy allocating", lambda: cr.rms_norm(x, weight, eps=EPS)),
        ("rms_norm", "cupy bound out=", lambda: bound(x, y)),
        ("layer_norm", "cupy out=", lambda: cr.layer_norm(x, weight, weight, eps=EPS, out=y)),
        (
            "add_rms_norm",
            "cupy out=",
            lambda: cr.add_rms_norm(x, residual, weight, eps=EPS, out=y, residual_out=residual_out),
        ),
    ):
        yield Case(op, "ours", case), call


def torch_tensors() -> tuple[Any, Any, Any]:
    """x, y and a weight."""
    x = torch.randn(ROWS, HIDDEN_SIZE, device="cuda").to(getattr(torch, DTYPE))
    weight = torch.nn.Parameter(torch.ones(HIDDEN_SIZE, device="cuda", dtype=x.dtype))
    return x, torch.empty_like(x), weight


def ours_on_torch() -> Iterator[tuple[Case, Call]]:
    """This library with torch tensors."""
    (x, y, weight), (residual, residual_out, _) = torch_tensors(), torch_tensors()
    wide = torch.nn.Parameter(weight.float())
    bound = cr.bind_rms_norm(weight, eps=EPS)
    strided = torch.empty((ROWS, 2 * HIDDEN_SIZE), device="cuda", dtype=x.dtype)[:, :HIDDEN_SIZE]
    for op, case, call in (
        ("rms_norm", "torch out=", lambda: cr.rms_norm(x, weight, eps=EPS, out=y)),
        ("rms_norm", "torch allocating", lambda: cr.rms_norm(x, weight, eps=EPS)),
        ("rms_norm", "torch bound out=", lambda: bound(x, y)),
        ("rms_norm", "torch out=, float32 weight", lambda: cr.rms_norm(x, wide, eps=EPS, out=y)),
        ("rms_norm", "torch strided", lambda: cr.rms_norm(strided, weight, eps=EPS, out=y)),
        ("layer_norm", "torch out=", lambda: cr.layer_norm(x, weight, weight, eps=EPS, out=y)),
        ("layer_norm", "torch allocating", lambda: cr.layer_norm(x, weight, weight, eps=EPS)),
        (
            "add_rms_norm",
            "torch out=",
            lambda: cr.add_rms_norm(x, residual, weight, eps=EPS, out=y, residual_out=residual_out),
        ),
    ):
        yield Case(op, "ours", case), call


def qk_pairs() -> Iterator[tuple[Case, Call]]:
    """q and k in place in a packed buffer: by qk_norm, and by two calls."""
    for library in ("torch", "cupy"):
        qkv = torch.randn(ROWS, 48, 128, device="cuda").to(getattr(torch, DTYPE))
        weight = torch.ones(128, device="cuda", dtype=qkv.dtype)
        if library == "cupy":
            qkv, weight = cupy.from_dlpack(qkv), cupy.from_dlpack(weight)
        q, k = qkv[:, :32], qkv[:, 32:40]

        def one(q: Any = q, k: Any = k, weight: Any = weight) -> None:
            cr.qk_norm(q, k, weight, weight, eps=EPS, q_out=q, k_out=k)

        def two(q: Any = q, k: Any = k, weight: Any = weight) -> None:
            cr.rms_norm(q, weight, eps=EPS, out=q)
            cr.rms_norm(k, weight, eps=EPS, out=k)

        yield Case("qk_norm", "ours", f"{library} in place"), one
        yield Case("qk_norm", "ours", f"{library} in place, two calls"), two


def recorded() -> Iterator[tuple[Case, Call]]:
    """Calls that autograd follows, and what a training step pays beside them.

    Each backward wakes autograd's own thread; a row of norms has a single one, as a model has.
    """
    (x, dout, weight), (residual, _, bias) = torch_tensors(), torch_tensors()
    for tensor in (x, residual):
        tensor.requires_grad_()
    rstd, shape = torch.ones(ROWS, device="cuda"), (HIDDEN_SIZE,)

    def added(x: Any) -> Any:
        sums = x + residual
        return functional.rms_norm(sums, shape, weight, EPS), sums

    for op, inputs, norms in (
        (
            "rms_norm",
            (x, weight),
            {
                "ours": lambda x: cr.rms_norm(x, weight, eps=EPS),
                "torch": lambda x: functional.rms_norm(x, shape, weight, EPS),
            },
        ),
        (
            "layer_norm",
            (x, weight, bias),
            {
                "ours": lambda x: cr.layer_norm(x, weight, bias, eps=EPS),
                "torch": lambda x: functional.layer_norm(x, shape, weight, bias, EPS),
            },
        ),
        (
            "add_rms_norm",
            (x, residual, weight),
            {"ours": lambda x: cr.add_rms_norm(x, residual, weight, eps=EPS), "torch": added},
        ),
    ):
        for impl, norm in norms.items():
            forward: Call = functools.partial(norm, x)
            yield Case(op, impl, FORWARD), forward

            def both(forward: Call = forward, inputs: Any = inputs) -> Any:
                made: Any = forward()
                outputs = made if isinstance(made, tuple) else (made,)
                return torch.autograd.grad(outputs, inputs, len(outputs) * (dout,))

            def row(norm: Any = norm, inputs: Any = inputs) -> Any:
                y = x
                for _ in range(IN_A_ROW):
                    y = norm(y)
                return torch.autograd.grad(y, inputs, dout)

            yield Case(op, impl, BOTH), both
            if op != "add_rms_norm":
                yield Case(op, impl, f"{BOTH}, {IN_A_ROW} in a row"), row
    plain, fixed = x.detach(), weight.detach()
    yield (
        Case("rms_norm_backward", "ours", "torch allocating"),
        lambda: cr.rms_norm_backward(dout, plain, fixed, rstd, eps=EPS),
    )
    yield (
        Case("layer_norm_backward", "ours", "torch allocating"),
        lambda: cr.layer_norm_backward(dout, plain, fixed, rstd, rstd, bias=fixed, eps=EPS),
    )


def torch_itself() -> Iterator[tuple[Case, Call]]:
    """torch's own functions."""
    x, _, weight = torch_tensors()
    wide = torch.nn.Parameter(weight.float())
    shape = (HIDDEN_SIZE,)
    yield TORCH, lambda: functional.rms_norm(x, shape, weight, EPS)
    mixed = Case("rms_norm", "torch", "torch allocating, float32 weight")
    yield mixed, lambda: functional.rms_norm(x, shape, wide, EPS)
    yield TORCH_LAYER, lambda: functional.layer_norm(x, shape, weight, weight, EPS)


def compiled() -> Iterator[tuple[Case, Call]]:
    """torch.compile."""
    x, _, weight = torch_tensors()

    def rms_norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (HIDDEN_SIZE,), weight, EPS)

    made = torch.compile(rms_norm, fullgraph=True, dynamic=False)
    yield Case("rms_norm", "compile", "torch allocating"), lambda: made(x, weight)


def liger() -> Iterator[tuple[Case, Call]]:
    """Liger's Triton kernel through its own operator."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, _, weight = torch_tensors()
    apply = LigerRMSNormFunction.apply
    yield Case("rms_norm", "liger", "torch allocating"), lambda: apply(x, weight, EPS)


def quack() -> Iterator[tuple[Case, Call]]:
    """QuACK's forward."""
    from quack.rmsnorm import rmsnorm_fwd

    x, _, weight = torch_tensors()
    wide = weight.detach().float()
    case = Case("rms_norm", "quack", "torch allocating, float32 weight")
    yield case, lambda: rmsnorm_fwd(x, wide, eps=EPS)


def extension() -> Iterator[tuple[Case, Call]]:
    """An extension compiled for torch, around the kernel that does nothing."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory() as folder:
        built = cpp_extension.load_inline(
            "host_extension",
            [EXTENSION],
            functions=["launch", "launch_into"],
            extra_ldflags=["-l:libcuda.so.1"],
            extra_cflags=["-O2"],
            build_directory=folder,
            with_cuda=True,
        )
    kernel = cupy.RawKernel(NOTHING, "nothing")
    function = kernel.kernel.ptr
    x, y, weight = torch_tensors()

    def call_into(keep: object = kernel) -> None:
        built.launch_into(function, x, weight, EPS, y)

    yield Case("rms_norm", "extension", "torch out="), call_into
    allocating = Case("rms_norm", "extension", "torch allocating")
    yield allocating, lambda: built.launch(function, x, weight, EPS)


OURS = (launches, ours_on_cupy, ours_on_torch, qk_pairs, recorded, torch_itself)
GROUPS = (*OURS, compiled, liger, quack, extension)


def candidates() -> tuple[dict[Case, Call], dict[str, str]]:
    """What takes part, each called once, and why others do not."""
    found, missing = {}, {}
    for group in GROUPS:
        try:
            made = dict(group())
            for case, call in made.items():
                with gradients(case):
                    call()
            torch.cuda.synchronize()
            found |= made
        except Exception as error:
            if group in OURS:
                raise
            missing[group.__name__] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            print(f"{group.__name__} takes no part: {missing[group.__name__]}", flush=True)
    return found, missing


def gradients(case: Case) -> Any:
    """Gradients on, for a case that is recorded."""
    return torch.set_grad_enabled(case.case.startswith(RECORDED))


def measure(calls: dict[Case, Call], rounds: int) -> dict[Case, float]:
    """Median microseconds of each."""
    times: dict[Case, list[float]] = {case: [] for case in calls}
    for number in range(rounds):
        for case in list(calls)[:: -1 if number % 2 else 1]:
            call = calls[case]
            with gradients(case):
                for _ in range(10):
                    call()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times[case].append((time.perf_counter() - begin) / CALLS * 1e6)
            torch.cuda.synchronize()
    return {case: statistics.median(figures) for case, figures in times.items()}


def show_bars(bars: Sequence[Mapping[str, Any]]) -> None:
    """Which bars hold."""
    for bar in bars:
        measured = "not measured"
        if bar["ratio"] is not None:
            measured = f"{bar['us']:.2f} of {bar['of_us']:.2f} us, {bar['ratio']:.2f}"
        print(f"{'holds' if bar['holds'] else 'FAILS'}  {bar['bar']} ({measured})")
    print(f"{sum(bar['holds'] for bar in bars)} of {len(bars)} bars hold")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="Host microseconds of each path of a call.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of what is measured, where git cannot say")
    options = parser.parse_args(arguments)
    race.need_gpu()
    begin = time.perf_counter()
    with torch.no_grad():
        calls, missing = candidates()
        times = measure(calls, options.rounds)
    rows = [
        {
            "op": case.op,
            "dtype": DTYPE,
            "rows": ROWS,
            "hidden_size": HIDDEN_SIZE,
            "impl": case.impl,
            "case": case.case,
            "us": round(us, 3),
        }
        for case, us in times.items()
    ]
    for row in sorted(rows, key=lambda row: (row["op"], row["us"])):
        print(f"{row['us']:8.2f} us  {row['op']:13} {row['impl']:10} {row['case']}")
    bars = [bar.verdict(times) for bar in BARS]
    show_bars(bars)
    meta = race.meta(options.rounds, options.commit) | {"missing": missing}
    options.json.write_text(race.dumps({"meta": meta, "rows": rows, "bars": bars}))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
