# SPDX-License-Identifier: Apache-2.0
"""The emulator's own tests: a planted fault is found and named, its clean twin is not."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cupy_rmsnorm import _source
from tests import agreement, kernels
from tests.backends import Emulator
from tests.emulator import build, mutate
from tests.emulator.launch import (
    Function,
    KernelFault,
    LaunchError,
    check_parameters,
    launch,
)
from tests.emulator.memory import OutOfBounds, _Allocation

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

SCHEDULES = ("ahead", "reverse", 1, 2)
WIDTH, ROWS, THREADS = 512, 3, 128

# One row a block: y = x / sqrt(mean(x^2) + eps) + mean(x), by two reductions through one array.
ROW = """
struct alignas(16) Pack { float data[4]; };

__device__ float sum_row(float value, float* slots) {
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
    __syncthreads();  // sums written
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += slots[warp];
    return sum;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) row(float* y, const float* x, int width, float eps) {
    __shared__ float slots[THREADS / 32];
    extern __shared__ float held[];
    const Pack* packs = reinterpret_cast<const Pack*>(x + blockIdx.x * width);
    float squares = 0, total = 0;
    for (int i = threadIdx.x; i < width / 4; i += THREADS) {
        const Pack pack = packs[i];
        for (int j = 0; j < 4; ++j) {
            held[i * 4 + j] = pack.data[j];
            squares += pack.data[j] * pack.data[j];
            total += pack.data[j];
        }
    }
    const float mean_square = sum_row(squares, slots) / width;
    __syncthreads();  // slots free again
    const float mean = sum_row(total, slots) / width;
    const float rstd = rsqrtf(mean_square + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        y[blockIdx.x * width + i] = held[i] * rstd + mean;
    }
}
"""

# The same by an asynchronous copy into shared memory; each thread reads its neighbour's share.
COPY = """
template <int THREADS>
__global__ void copied(float* y, const float* x, int width, float eps) {
    extern __shared__ __align__(16) float held[];
    for (int i = threadIdx.x * 4; i < width; i += THREADS * 4) {
        emulator_copy_async(held + i, x + blockIdx.x * width + i, 16);
    }
    emulator_copy_async_commit();
    emulator_copy_async_wait(0);
    __syncthreads();  // everybody's copies have arrived
    for (int i = threadIdx.x; i < width; i += THREADS) {
        y[blockIdx.x * width + i] = held[width - 1 - i] + eps;
    }
}
"""

# Rows in a ring of two stages, filled by bulk copies.
RING = """
template <int THREADS>
__global__ void ring(float* y, const float* x, int width, float eps) {
    extern __shared__ __align__(16) float held[];
    __shared__ unsigned long long full[2];
    const int rows = 3;
    if (threadIdx.x == 0) {
        emulator_mbarrier_init(&full[0], 1);
        emulator_mbarrier_init(&full[1], 1);
    }
    __syncthreads();  // barriers initialised
    auto fill = [&](int row) {
        emulator_mbarrier_arrive_expect(&full[row % 2], width * 4);
        emulator_bulk_copy(held + row % 2 * width, x + row * width, width * 4, &full[row % 2]);
    };
    if (threadIdx.x == 0) {
        fill(0);
        fill(1);
    }
    for (int row = 0; row < rows; ++row) {
        emulator_mbarrier_wait(&full[row % 2], row / 2 % 2);
        for (int i = threadIdx.x; i < width; i += THREADS) {
            y[row * width + i] = held[row % 2 * width + i] + eps;
        }
        __syncthreads();  // stage read by all
        if (threadIdx.x == 0 && row + 2 < rows) fill(row + 2);
    }
}
"""

# Every block of a cluster adds up what all of them have written into it.
CLUSTER = """
#define CLUSTER_DIMS(n)
template <int THREADS, int CLUSTER_SIZE>
__global__ void __launch_bounds__(THREADS) CLUSTER_DIMS(CLUSTER_SIZE)
    cluster(float* y, const float* x, int width, float eps) {
    __shared__ float slots[CLUSTER_SIZE];
    const unsigned rank = emulator_cluster_rank();
    if (threadIdx.x < CLUSTER_SIZE) {
        float* there = static_cast<float*>(emulator_cluster_map(slots + rank, threadIdx.x));
        *there = x[blockIdx.x];
    }
    emulator_cluster_arrive_wait();  // all have written
    float sum = eps;
    for (int i = 0; i < CLUSTER_SIZE; ++i) {
        sum += *static_cast<float*>(emulator_cluster_map(slots + i, (rank + 1) % CLUSTER_SIZE));
    }
    emulator_cluster_arrive_wait();  // nobody reads any more
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""

# The last block to finish adds up the partial sums of all.
LAST = """
__device__ unsigned finished = 0;
template <int THREADS>
__global__ void last(float* y, float* partial, unsigned* counter, const float* x, int width) {
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = x[blockIdx.x * width];
        __threadfence();  // partial before counter
        is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();  // is_last
    if (!is_last) return;
    float sum = 0;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += partial[block];
    if (threadIdx.x == 0) y[0] = sum;
}
"""


def _array(values: np.ndarray) -> tuple[_Allocation, np.ndarray]:
    allocation = _Allocation(values.nbytes)
    start = allocation.pointer - allocation._bytes.ctypes.data
    view = allocation._bytes[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    view[...] = values
    return allocation, view


@dataclass
class Run:
    """One kernel of this file with its launch; `run` gives the output."""

    code: str
    expression: str
    grid: int = ROWS
    block: int = THREADS
    shared_bytes: int = WIDTH * 4
    width: int = WIDTH
    eps: float = 1.0
    x_offset: int = 0
    allowed: dict[str, int] = field(default_factory=dict)

    def run(self, schedule: str | int = "ahead", checked: bool = True) -> np.ndarray:
        name = self.expression.split("<")[0]
        text = f'#line 1 "{name}.cu"\n{self.code}'
        library = build.build(text, (self.expression,), (), checked)
        function = Function(library, self.expression, library.kernels[self.expression])
        x, _ = _array(x_values())
        y, result = _array(np.full((ROWS, WIDTH), np.nan, np.float32))
        pointers = [y.pointer, x.pointer + 4 * self.x_offset]
        scalars = struct.pack("@if", self.width, self.eps)
        if name == "last":
            partial, _ = _array(np.full(self.grid, np.nan, np.float32))
            counter, _ = _array(np.zeros(1, np.uint32))
            pointers = [y.pointer, partial.pointer, counter.pointer, x.pointer]
            scalars = struct.pack("@i", self.width)
        packed = struct.pack(f"@{len(pointers)}Q", *pointers) + scalars
        launch(
            function,
            self.grid,
            self.block,
            self.shared_bytes,
            packed,
            schedule=schedule,
            checked=checked,
        )
        for array in (x, y):
            array.check()
        return result.copy()


def x_values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def row_reference() -> np.ndarray:
    x = x_values().astype(np.float64)
    mean_square = (x**2).mean(axis=1, keepdims=True)
    return x / np.sqrt(mean_square + 1.0) + x.mean(axis=1, keepdims=True)


CLEAN = {
    "row": Run(ROW, "row<128>"),
    "copied": Run(COPY, "copied<128>"),
    "ring": Run(RING, "ring<128>", grid=1, shared_bytes=2 * WIDTH * 4),
    "cluster": Run(CLUSTER, "cluster<64, 4>", grid=8, block=64, shared_bytes=0),
    "last": Run(LAST, "last<64>", block=64, shared_bytes=0),
}


def expected(name: str) -> np.ndarray:
    x = x_values()
    if name == "row":
        return row_reference()
    if name == "copied":
        return x[:, ::-1] + np.float32(1)
    if name == "ring":
        return x + np.float32(1)
    result = np.full((ROWS, WIDTH), np.nan)
    if name == "last":
        result[0, 0] = x[:, 0].sum()
    else:
        result.reshape(-1)[:8] = np.repeat(x.reshape(-1)[:8].reshape(2, 4).sum(axis=1) + 1, 4)
    return result


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "plain"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CLEAN)
def test_clean_kernel_is_right_and_raises_nothing(
    name: str, schedule: str | int, checked: bool
) -> None:
    np.testing.assert_allclose(
        CLEAN[name].run(schedule, checked), expected(name), rtol=2e-6, atol=1e-6
    )


@dataclass
class Fault:
    """A planted fault: in kernel `name` the text `old` becomes `new`; `message` names the fault."""

    name: str
    old: str
    new: str
    message: str


FAULTS = {
    "missing barrier": Fault(
        "row",
        "    __syncthreads();  // sums written\n",
        "\n",
        r"at row\.cu:\d+.*: (reads shared memory that nobody has written|race: )",
    ),
    "missing barrier between two reductions through one array": Fault(
        "row",
        "    __syncthreads();  // slots free again\n",
        "\n",
        r"race: writes shared memory that block .* thread .* read at row\.cu:\d+",
    ),
    "wrong mask: caller not in it": Fault(
        "row", "0xffffffffu", "0xfffffffeu", r"wrong mask: lane 0 calls __shfl_xor_sync"
    ),
    "wrong mask: lanes disagree": Fault(
        "row",
        "0xffffffffu",
        "threadIdx.x % 32 < 16 ? 0xffffu : 0xffffffffu",
        r"wrong mask: lane \d+ (calls|reads)",
    ),
    "lane gone before a full shuffle": Fault(
        "row",
        "    const float mean_square",
        "    if (threadIdx.x == 77) return;\n    const float mean_square",
        r"lane 13 has left the kernel but is in the mask 0xffffffff of __shfl_xor_sync",
    ),
    "read out of bounds by one": Fault(
        "row",
        "packs[i];",
        "packs[i + 1];",
        r"block \(2, 0, 0\) thread \(127, 0, 0\) at row\.cu:\d+: reads 16 bytes out of bounds: 0 "
        r"bytes behind the end of an array of 6144 bytes",
    ),
    "write out of bounds by one": Fault(
        "row",
        "y[blockIdx.x * width + i] = held",
        "y[blockIdx.x * width + i + 1] = held",
        r"block \((0|1|2), 0, 0\) thread .* at row\.cu:\d+: (race: )?writes",
    ),
    "static shared memory out of bounds by one": Fault(
        "row",
        "float slots[THREADS / 32]",
        "float slots[THREADS / 32 - 1]",
        r"at row\.cu:8.*: writes 4 bytes at byte 12 of the shared variable slots, which has 12",
    ),
    "misaligned 16-byte access": Fault(
        "row", "(x + blockIdx.x * width)", "(x + 1)", r"at row\.cu:\d+: misaligned access to .*Pack"
    ),
    "32-bit overflow": Fault(
        "row",
        "blockIdx.x * width);",
        "int(blockIdx.x + 1) * width * 0x400000 % 2);",
        r"at row\.cu:\d+: overflow of 'int' in the product",
    ),
    "shared memory too small": Fault(
        "row",
        "held[i * 4 + j] =",
        "held[i * 4 + j + 1] =",
        r"writes 4 bytes at byte 2048 of dynamic shared memory, which has 2048 bytes",
    ),
    "barrier in a branch": Fault(
        "row",
        "    float squares = 0",
        "    if (threadIdx.x < 64) __syncthreads();\n    float squares = 0",
        r"meets block \(0, 0, 0\) thread \(0, 0, 0\) at another __syncthreads: row\.cu:\d+",
    ),
    "thread gone before a barrier": Fault(
        "copied",
        "    __syncthreads();  // everybody's copies have arrived\n",
        "    if (threadIdx.x == 5) return;\n    __syncthreads();\n",
        r"deadlock: 127 threads from block \(0, 0, 0\) thread \(0, 0, 0\) wait for __syncthreads "
        r"at copied\.cu:\d+; 1 of 128 threads have left the kernel",
    ),
    "missing copy wait": Fault(
        "copied",
        "emulator_copy_async_wait(0);",
        "emulator_copy_async_wait(1);",
        r"at copied\.cu:\d+: reads shared memory before its copy has been waited for",
    ),
    "missing barrier after a copy wait": Fault(
        "copied",
        "    __syncthreads();  // everybody's copies have arrived\n",
        "\n",
        r"at copied\.cu:\d+: (reads shared memory that nobody|race: reads shared memory that)",
    ),
    "copy never waited for": Fault(
        "copied",
        "y[blockIdx.x * width + i] = held[width - 1 - i] + eps;",
        "emulator_copy_async(held + i * 4 % width, x, 16);",
        r"leaves with a copy never waited for|race: writes shared memory",
    ),
    "misaligned asynchronous copy": Fault(
        "copied", "x + blockIdx.x * width + i, 16", "x + 1 + i, 16", r"misaligned asynchronous copy"
    ),
    "missing mbarrier wait": Fault(
        "ring",
        "        emulator_mbarrier_wait(&full[row % 2], row / 2 % 2);\n",
        "\n",
        r"at ring\.cu:\d+: reads shared memory (that nobody has written|before its copy has)",
    ),
    "wrong mbarrier parity": Fault(
        "ring",
        "row / 2 % 2);",
        "0);",
        r"at ring\.cu:\d+: reads shared memory before its copy has been waited for",
    ),
    "stage filled while it is read": Fault(
        "ring",
        "        __syncthreads();  // stage read by all\n",
        "\n",
        r"(race: writes shared memory that block .* read at|deadlock: .* an mbarrier)",
    ),
    "mbarrier expects too few bytes": Fault(
        "ring",
        "&full[row % 2], width * 4);\n        emulator_bulk",
        "&full[row % 2], width * 4 - 16);\n        emulator_bulk",
        r"an mbarrier expects 2032 bytes and 2048 arrive",
    ),
    "mbarrier expects too many bytes": Fault(
        "ring",
        "&full[row % 2], width * 4);\n        emulator_bulk",
        "&full[row % 2], width * 4 + 16);\n        emulator_bulk",
        r"deadlock: .* wait for an mbarrier's parity 0 at ring\.cu:\d+",
    ),
    "mbarrier used before a barrier": Fault(
        "ring",
        "    __syncthreads();  // barriers initialised\n",
        "\n",
        r"(nobody has initialised|race: reads shared memory)",
    ),
    "missing cluster barrier": Fault(
        "cluster",
        "    emulator_cluster_arrive_wait();  // all have written\n",
        "\n",
        r"at cluster\.cu:\d+: (reads shared memory that nobody has written|race: )",
    ),
    "block leaves its cluster too early": Fault(
        "cluster",
        "    emulator_cluster_arrive_wait();  // nobody reads any more\n",
        "\n",
        r"reaches into the shared memory of block \d of the cluster, which has left",
    ),
    "missing fence before a counter": Fault(
        "last",
        "        __threadfence();  // partial before counter\n",
        "\n",
        r"race: reads global memory that thread \d+ of cluster 0",
    ),
    "two blocks write one element": Fault(
        "row",
        "y[blockIdx.x * width + i] = held",
        "y[i] = held",
        r"race: writes global memory that thread \d+ of cluster 0",
    ),
    "global memory before the wait for earlier kernels": Fault(
        "row",
        "    const float mean_square =",
        "    emulator_wait_for_earlier_kernels();\n    const float mean_square =",
        r"at row\.cu:\d+: global memory was accessed before this wait for earlier kernels",
    ),
    "stack overflow": Fault(
        "row",
        "    float squares = 0",
        "    volatile char room[300000];\n    room[0] = 1;\n    float squares = 0",
        r"at row\.cu:\d+: segmentation fault",
    ),
}


@pytest.mark.parametrize("title", FAULTS)
def test_planted_fault_is_found_and_named(title: str) -> None:
    fault = FAULTS[title]
    clean = CLEAN[fault.name]
    assert clean.code.count(fault.old) >= 1
    planted = Run(**{**vars(clean), "code": clean.code.replace(fault.old, fault.new)})
    with pytest.raises(KernelFault, match=fault.message) as caught:
        planted.run()
    # It names the kernel, and a block and thread or a wait.
    text = str(caught.value)
    assert text.startswith(planted.expression)
    assert re.search(r"block \(\d+, 0, 0\) thread \(\d+, 0, 0\)", text)


def test_overlapping_reductions_are_wrong_in_every_row_when_a_warp_runs_ahead() -> None:
    fault = FAULTS["missing barrier between two reductions through one array"]
    planted = Run(**{**vars(CLEAN["row"]), "code": ROW.replace(fault.old, fault.new)})
    right = np.isclose(planted.run("ahead", checked=False), row_reference(), rtol=2e-6, atol=1e-6)
    assert not right.all(axis=1).any()


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    code = """
    __global__ void fresh(float* y, const float* x, int width, float eps) {
        __shared__ float kept[64];
        extern __shared__ float more[];
        y[(blockIdx.x * 64 + threadIdx.x) * 2] = kept[threadIdx.x];
        y[(blockIdx.x * 64 + threadIdx.x) * 2 + 1] = more[threadIdx.x];
        kept[threadIdx.x] = more[threadIdx.x] = eps;
    }
    """
    y = Run(code, "fresh", block=64, shared_bytes=256).run(checked=False).reshape(-1)
    assert np.isnan(y[: ROWS * 128]).all()


def test_write_behind_shared_memory_is_found_without_instrumentation() -> None:
    with pytest.raises(KernelFault, match="dynamic shared memory of 2044 bytes was written at"):
        Run(**{**vars(CLEAN["row"]), "shared_bytes": WIDTH * 4 - 4}).run(checked=False)


def test_write_beside_an_array_is_found_without_instrumentation() -> None:
    code = ROW.replace(
        "y[blockIdx.x * width + i] = held", "y[int(blockIdx.x * width) + i - 1] = held"
    )
    with pytest.raises(OutOfBounds, match="wrote 4 bytes before the begin of an array"):
        Run(code, "row<128>").run(checked=False)


def test_subnormals_are_flushed_during_a_launch_and_not_after() -> None:
    code = """
    __global__ void flush(float* y, const float* x, int width, float eps) {
        y[0] = eps * 0.5f;  // a subnormal result
        y[1] = __fmul_rn(__int_as_float(width), 1e30f);  // a subnormal operand
        y[2] = __half2float(__float2half_rn(1e-7f));  // float16 keeps its subnormals
    }
    """
    smallest = float(np.finfo(np.float32).tiny)
    y = Run(code, "flush", grid=1, block=1, width=1, eps=smallest).run().reshape(-1)
    assert y[0] == 0
    assert y[1] == 0
    assert y[2] == np.float32(np.float16(1e-7)) != 0
    assert np.float32(smallest) * np.float32(0.5) != 0


def test_sixteen_bit_and_eight_bit_types_round_as_the_toolkit_says() -> None:
    code = """
    __global__ void types(float* y, const float* x, int width, float eps) {
        y[0] = __bfloat162float(__float2bfloat16_rn(eps));
        y[1] = __half2float(__float2half_rn(eps));
        y[2] = float(__nv_fp8_e4m3(eps));
        y[3] = float(__nv_fp8_e5m2(eps));
    }
    """
    import ml_dtypes

    value = np.float32(1.171875)
    y = Run(code, "types", grid=1, block=1, eps=float(value)).run().reshape(-1)
    names = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    assert y[:4].tolist() == [float(value.astype(dtype)) for dtype in names]


def test_shuffles_votes_and_named_barriers() -> None:
    code = """
    __global__ void words(float* y, const float* x, int width, float eps) {
        const int lane = threadIdx.x;
        y[lane] = __shfl_up_sync(~0u, lane, 3, 8);
        y[32 + lane] = __shfl_down_sync(~0u, lane, 3, 8);
        y[64 + lane] = __shfl_sync(~0u, lane, 5, 8);
        y[96 + lane] = __shfl_xor_sync(~0u, lane, 9, 16);
        if (lane < 16) y[128 + lane] = __shfl_xor_sync(0xffffu, lane, 1);
        y[160 + lane] = __ballot_sync(~0u, lane % 3 == 0) == 0x49249249u;
        y[192 + lane] = __any_sync(~0u, lane == 7) + 2 * __all_sync(~0u, lane < 31);
        y[224 + lane] = __syncthreads_count(lane < 11);
        emulator_named_barrier(1, 32, true, __FILE__, __LINE__);
    }
    """
    y = Run(code, "words", grid=1, block=32).run().reshape(-1)
    lane = np.arange(32)
    segment = lane // 8 * 8
    assert (y[:32] == np.where(lane - 3 >= segment, lane - 3, lane)).all()
    assert (y[32:64] == np.where(lane + 3 < segment + 8, lane + 3, lane)).all()
    assert (y[64:96] == segment + 5).all()
    assert (y[96:128] == (lane ^ 9)).all()
    assert (y[128:144] == (lane[:16] ^ 1)).all()
    assert (y[160:192] == 1).all()
    assert (y[192:224] == 1).all()
    assert (y[224:256] == 11).all()


def _function(code: str, expression: str, fields: tuple[str, ...] = ()) -> Function:
    library = build.build(code, (expression,), fields)
    return Function(library, expression, library.kernels[expression])


def test_python_float_as_argument_is_found() -> None:
    function = _function('#line 1 "row.cu"\n' + ROW, "row<128>")
    table = [("y", "pointer"), ("x", "pointer"), ("width", "int32"), ("eps", "float32")]
    check_parameters(function, table)
    table[3] = ("eps", "float64")
    with pytest.raises(
        LaunchError, match="eps is packed as float64, the signature has kind 'f' of 4"
    ):
        check_parameters(function, table)
    packed = struct.pack("@QQid", 0, 0, 1, 1.0)
    with pytest.raises(LaunchError, match="32 bytes of arguments, the signature has 24"):
        launch(function, 1, 128, 0, packed)


def test_members_of_a_struct_are_held_against_the_table() -> None:
    code = """
    struct Inner { long long outer, inner; };
    struct Arguments { float* y; Inner strides; float eps; };
    __global__ void one(const Arguments arguments) {}
    """
    table = [
        ("y", "pointer"),
        ("strides.outer", "int64"),
        ("strides.inner", "int64"),
        ("eps", "float32"),
    ]
    function = _function(code, "one", tuple(name for name, _ in table))
    check_parameters(function, table)
    swapped = [table[0], table[2], table[1], table[3]]
    with pytest.raises(LaunchError, match=r"strides.inner is packed at byte 8, .* at byte 16"):
        check_parameters(_function(code, "one", tuple(name for name, _ in swapped)), swapped)
    with pytest.raises(LaunchError, match="the table describes 24 bytes, the signature has 32"):
        check_parameters(_function(code, "one", tuple(name for name, _ in table[:3])), table[:3])


def test_launches_that_a_driver_refuses() -> None:
    function = _function('#line 1 "row.cu"\n' + ROW, "row<128>")
    packed = struct.pack("@QQif", 0, 0, 1, 1.0)
    with pytest.raises(LaunchError, match="a block of 256 threads, __launch_bounds__ says 128"):
        launch(function, 1, 256, 0, packed)
    with pytest.raises(LaunchError, match=r"grid \(0, 1, 1\)"):
        launch(function, 0, 128, 0, packed)
    with pytest.raises(LaunchError, match=r"grid \(1, 65536, 1\) is larger"):
        launch(function, (1, 65536), 128, 0, packed)
    with pytest.raises(LaunchError, match="60000 bytes of dynamic shared memory, 49152 allowed"):
        launch(function, 1, 128, 60000, packed)
    cluster = _function(CLUSTER, "cluster<64, 4>")
    with pytest.raises(LaunchError, match="a grid of 6 blocks in clusters of 4"):
        launch(cluster, 6, 64, 0, packed)


def test_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(build.CompileError, match=r"broken\.cu:2:\d+: error"):
        build.build('#line 1 "broken.cu"\n__global__ void broken(int a) {\nb = a; }', ("broken",))


def test_recorded_mutants_are_killed_or_explained() -> None:
    recorded = json.loads(mutate.RESULTS.read_text())["rows"]
    verdicts = [row["verdict"] for row in recorded]
    killed, survived = verdicts.count("killed"), verdicts.count("survived")
    assert killed >= 0.9 * (killed + survived) > 0
    assert all(row["why"] not in ("", "no row fails") for row in recorded)


def test_a_mutants_trials_hold_every_kernel() -> None:
    every = mutate.trials("backward.cuh")
    few = mutate.limited(every, 10)
    assert few[:10] == every[:10]
    assert len(few) < 30
    assert set().union(*(t.sources for t in few)) == set().union(*(t.sources for t in every))


def test_a_mutant_is_made_and_killed() -> None:
    text = (_source.directory() / "reduce.cuh").read_text("ascii")
    mutant = next(m for m in mutate.mutants("reduce.cuh", text) if m.what == "wrong mask")
    row = next(row for row in kernels.FORWARD if row.place == "packs_64")
    verdict, why = mutate.run_one(mutant, [mutate.Trial(row, 2)])
    assert verdict == "killed"
    assert "wrong mask" in why


def test_agreement_counts_a_row_a_group(tmp_path: Path) -> None:
    row = next(row for row in kernels.FORWARD if row.groups > 1 and not row.mask)
    file = tmp_path / "kept.npz"
    agreement.emulate(file, [row])
    tallies: dict[str, agreement.Tally] = {}
    with agreement.emulated():
        assert agreement.compare_with(dict(np.load(file)), row, Emulator(), tallies) == []
    assert {tally.rows for tally in tallies.values()} == {row.rows}


def test_agreement_counts_what_differs(tmp_path: Path) -> None:
    row = next(row for row in kernels.FORWARD if row.place == "packs_64" and row.residual)
    file = tmp_path / "kept.npz"
    agreement.emulate(file, [row])
    kept = dict(np.load(file))
    tallies: dict[str, agreement.Tally] = {}
    with agreement.emulated():
        assert agreement.compare_with(kept, row, Emulator(), tallies) == []
        assert tallies.keys() >= {"forward y", "forward residual_out", "forward rstd"}
        for tally in tallies.values():
            assert tally == agreement.Tally(1, 1, row.rows, row.rows, 0.0)
        kept[f"{row.name}/y/checksums"][1] += 1
        kept[f"{row.name}/rstd/checksums"][0] += 1
        kept[f"{row.name}/rstd/values"][0] += 3  # the largest
        tallies.clear()
        assert agreement.compare_with(kept, row, Emulator(), tallies) == [f"{row.name}: y"]
    assert tallies["forward y"] == agreement.Tally(1, 0, row.rows, row.rows - 1, 0.0)
    assert tallies["forward rstd"] == agreement.Tally(1, 0, row.rows, row.rows - 1, 3.0)
    given = agreement.Tally(1, 0, row.rows - 1, row.rows - 2, 0.0)
    assert tallies["forward y where statistics are equal"] == given
    kept[f"{row.name}/rstd/checksums"][1] += 1
    with agreement.emulated():
        assert agreement.compare_with(kept, row, Emulator(), {}) == []
