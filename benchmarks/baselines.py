# SPDX-License-Identifier: Apache-2.0
"""What is compared: this library and others, each called as its documentation says, on one data.

All take the same torch tensors: eps, weight and bias in x's dtype, statistics given to backward,
one rounding at the end where there is a choice. Outputs rotate through the ring like inputs: those
of functions that allocate are kept, and given back just before the next one of their placement.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import cupy_rmsnorm as cr
from benchmarks.race import Candidate, Make, Wrong, reason
from benchmarks.shapes import COMPILED, HEAD_SIZE, KV_HEADS, MASKED_ROWS, Q_HEADS, Shape
from cupy_rmsnorm._bench import Call

EPS = 1e-6
BLOCK_ROWS = 512  # rows that differ; they repeat from there on
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}  # of the largest value
CHUNK = 1 << 24  # elements that the reference of a weight's gradient takes at once
QUACK_PATIENCE = 60.0  # seconds for a kernel from its compile workers
MODULES = {
    "quack": "quack.rmsnorm",  # first: its workers compile while the others are imported
    "liger": "liger_kernel.ops.rms_norm",
    "flashinfer": "flashinfer",
}

Tensors = list[Tensor]
Makes = Mapping[str, Make]


@contextlib.contextmanager
def peers(shapes: Iterable[Shape]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The peers that can be imported, and why others cannot; QuACK compiles for `shapes`."""
    present, missing = [], {}
    for name, module in MODULES.items():
        try:
            importlib.import_module(module)
            if name == "quack":
                _start_quack(shapes)
            present.append(name)
        except Exception as error:
            missing[name] = reason(error)
            print(f"{name} takes no part: {missing[name]}", flush=True)
    try:
        yield present, missing
    finally:
        if "quack" in present:
            _stop_quack()


# Data ------------------------------------------------------------------------------------------


def ring(shape: Shape, count: int, device: str) -> Tensors:
    """`count` tensors in one allocation, each at an address that is a multiple of 512 bytes."""
    dtype = getattr(torch, shape.dtype)
    size = shape.rows * shape.hidden_size
    pitch = -(-size // 512) * 512
    storage = torch.empty((count, pitch), dtype=dtype, device=device)
    return [row[:size].view(shape.rows, shape.hidden_size) for row in storage.unbind(0)]


class Data:
    """The inputs of one race on every placement, and the rows that are checked."""

    def __init__(self, shape: Shape, count: int, device: str = "cuda") -> None:
        self.shape, self.count, self.device = shape, count, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.dtype = getattr(torch, shape.dtype)
        self.weight = (1 + 0.3 * self.normal(shape.hidden_size)).to(self.dtype)
        self.bias = (0.3 * self.normal(shape.hidden_size)).to(self.dtype) if shape.layer else None
        self.x = self.random_ring()
        self.at = torch.tensor([0, shape.rows // 2, shape.rows - 1], device=device)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device)

    def empty_ring(self) -> Tensors:
        return ring(self.shape, self.count, self.device)

    def random_ring(self) -> Tensors:
        """The same normal values on every placement."""
        made = self.empty_ring()
        rows = self.shape.rows
        block = self.normal(min(rows, BLOCK_ROWS), self.shape.hidden_size).to(self.dtype)
        for first in range(0, rows, len(block)):
            made[0][first : first + len(block)] = block[: rows - first]
        return self.copies(made[0], made)

    def copies(self, source: Tensor, made: Tensors | None = None) -> Tensors:
        """A ring in which every placement holds `source`."""
        made = self.empty_ring() if made is None else made
        for target in made:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        return made

    def close(self, name: str, got: Tensor, expected: Tensor) -> None:
        """Raise `Wrong` where they differ by more than rounding explains."""
        error = float((got.double() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE[self.shape.dtype]:
            raise Wrong(f"{name} is off by {error:.1e} of its largest value")


def keeping(function: Callable[..., Any], rings: tuple[Tensors, ...], outputs: int) -> Call:
    """A call of `function` on a placement's tensors, whose outputs live until the next one there.

    The first `outputs` things that it returns are new tensors of the inputs' size.
    """
    kept: list[Any] = [tuple(torch.empty_like(x) for _ in range(outputs)) for x in rings[0]]

    def call(i: int) -> Any:
        kept[i] = None  # before the call, which then takes the same memory
        kept[i] = function(*(tensors[i] for tensors in rings))
        return kept[i]

    return call


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile's, specialised on one shape."""
    torch._dynamo.reset()  # else it stops compiling after eight shapes
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return made


# Forward ---------------------------------------------------------------------------------------


class ForwardData(Data):
    """x, residual, and the rings of outputs that can be given."""

    def __init__(self, shape: Shape, count: int, device: str = "cuda") -> None:
        super().__init__(shape, count, device)
        self.y = self.empty_ring()
        self.residual = self.random_ring() if shape.adds else None
        self.residual_out = self.empty_ring() if shape.adds else None

    def outputs(self) -> tuple[Tensors, ...]:
        return (self.y,) if self.residual_out is None else (self.y, self.residual_out)

    def inputs(self) -> tuple[Tensors, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def poison(self) -> None:
        for tensors in self.outputs():
            tensors[0].fill_(float("nan"))

    def expected(self) -> list[Tensor]:
        """The checked rows of every output, in float64."""
        x = self.x[0][self.at].double()
        if self.residual is not None:
            x = x + self.residual[0][self.at].double()
        centred = x - x.mean(-1, keepdim=True) if self.shape.layer else x
        y = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + EPS)
        y = y * self.weight.double()
        if self.bias is not None:
            y = y + self.bias.double()
        return [y, x][: len(self.outputs())]

    def check(self, outputs: tuple[Tensor, ...]) -> None:
        for name, got, expected in zip(
            ("y", "residual_out")[: len(self.outputs())], outputs, self.expected(), strict=True
        ):
            self.close(name, got[self.at], expected)


def forward(data: ForwardData, names: Iterable[str]) -> dict[str, Candidate]:
    """This library, torch, torch.compile where it is wanted, and the named peers."""
    makes: dict[str, Make] = {
        "ours": lambda: ours_forward(data),
        "torch": lambda: _torch_forward(data),
    }
    if data.shape in COMPILED:
        makes["compile"] = lambda: _torch_forward(data, compiled)
    wanted = {
        "liger": lambda: _liger_forward(data),
        "quack": lambda: _await_quack(_quack_forward(data)),
        "flashinfer": lambda: _flashinfer_forward(data),
    }
    makes |= {name: wanted[name] for name in names}
    return _candidates(data, makes)


def _candidates(data: Any, makes: Makes) -> dict[str, Candidate]:
    return {
        name: Candidate(make, data.check, name, data.shape.dtype) for name, make in makes.items()
    }


def ours_forward(data: ForwardData, **options: Any) -> Call:
    """This library into given outputs, without statistics."""
    data.poison()
    function = getattr(cr, data.shape.op)
    x, y, residual, residual_out = data.x, data.y, data.residual, data.residual_out
    parameters = {"weight": data.weight, "bias": data.bias, "eps": EPS, **options}

    def call(i: int) -> tuple[Tensor, ...]:
        return (function(x[i], out=y[i], **parameters),)

    def call_add(i: int) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = function(
            x[i], residual[i], out=y[i], residual_out=residual_out[i], **parameters
        )
        return outputs

    return call_add if data.shape.adds else call


def qk_norm(shape: Shape, count: int, device: str = "cuda") -> dict[str, Candidate]:
    """q and k in place in a packed buffer of q, k and v: by qk_norm, and by two calls."""
    tokens, heads = shape.rows // (Q_HEADS + KV_HEADS), Q_HEADS + 2 * KV_HEADS
    data = Data(shape._replace(rows=tokens * heads), count, device)
    first = data.x[0].clone()
    buffers = [x.view(tokens, heads, HEAD_SIZE) for x in data.x]
    q = [buffer[:, :Q_HEADS] for buffer in buffers]
    k = [buffer[:, Q_HEADS : Q_HEADS + KV_HEADS] for buffer in buffers]
    weight, k_weight = data.weight, data.weight.flip(0)

    def one_launch(i: int) -> Any:
        return cr.qk_norm(q[i], k[i], weight, k_weight, eps=EPS, q_out=q[i], k_out=k[i])

    def two_calls(i: int) -> Any:
        return (
            cr.rms_norm(q[i], weight, eps=EPS, out=q[i]),
            cr.rms_norm(k[i], k_weight, eps=EPS, out=k[i]),
        )

    def make(call: Call) -> Make:
        def made() -> Call:
            data.x[0].copy_(first)
            return call

        return made

    def check(outputs: tuple[Tensor, Tensor]) -> None:
        before = first.view(tokens, heads, HEAD_SIZE)[-1].double()
        expected = before * torch.rsqrt((before * before).mean(-1, keepdim=True) + EPS)
        data.close("q", outputs[0][-1], expected[:Q_HEADS] * weight.double())
        rest = expected[Q_HEADS : Q_HEADS + KV_HEADS] * k_weight.double()
        data.close("k", outputs[1][-1], rest)

    return {
        name: Candidate(make(call), check, "ours", shape.dtype, name)
        for name, call in (("one launch", one_launch), ("two calls", two_calls))
    }


def masked(shape: Shape, count: int, device: str = "cuda") -> dict[str, Candidate]:
    """The rows of `shape` among MASKED_ROWS: in front or scattered, by either mask; and a copy of
    them that is told where they are, which no look-up of a mask can be faster than."""
    data = ForwardData(shape._replace(rows=MASKED_ROWS), count, device)
    generator = torch.Generator(device).manual_seed(1)
    order = torch.randperm(MASKED_ROWS, generator=generator, device=device)
    front = torch.arange(MASKED_ROWS, device=device) < shape.rows
    scattered = torch.zeros_like(front)
    scattered[order[: shape.rows]] = True
    valid_rows = torch.tensor(shape.rows, device=device)
    cases: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "valid_rows": (front, {"valid_rows": valid_rows}),
        "where, in front": (front, {"where": front}),
        "where, scattered": (scattered, {"where": scattered}),
    }

    def candidate(case: str, computed: Tensor, options: dict[str, Any]) -> Candidate:
        def check(outputs: tuple[Tensor, ...]) -> None:
            data.at = computed.nonzero()[[0, shape.rows // 2, -1], 0]
            data.check(outputs)

        return Candidate(lambda: ours_forward(data, **options), check, "ours", shape.dtype, case)

    def copy(case: str, computed: Tensor) -> Candidate:
        places = computed.nonzero()[:, 0]  # a graph that was captured with it does not keep it

        def check(outputs: tuple[Tensor, ...]) -> None:
            if not torch.equal(outputs[0][computed], data.x[0][computed]):
                raise Wrong("y is not the rows of x")

        return Candidate(
            lambda: _copy_of_rows(data, places), check, "copy of rows", shape.dtype, case
        )

    found = {case: candidate(case, *values) for case, values in cases.items()}
    copies = {"copy, in front": front, "copy, scattered": scattered}
    return found | {case: copy(case, computed) for case, computed in copies.items()}


_COPY_OF_ROWS = """
extern "C" __global__ void __launch_bounds__(256)
copy_of_rows(uint4* y, const uint4* x, const long long* places, int vectors) {
    const long long begin = places[blockIdx.x] * vectors;
    for (int first = threadIdx.x; first < vectors; first += 2 * 256) {
        const bool second = first + 256 < vectors;
        const uint4 a = x[begin + first];
        const uint4 b = second ? x[begin + first + 256] : a;
        y[begin + first] = a;
        if (second) y[begin + first + 256] = b;
    }
}
"""


def _copy_of_rows(data: ForwardData, places: Tensor) -> Call:
    """A copy of the rows there, to the same places, by a block for each."""
    data.poison()

    def by_torch(i: int) -> tuple[Tensor, ...]:
        data.y[i][places] = data.x[i][places]
        return (data.y[i],)

    if not places.is_cuda:
        return by_torch
    import cupy

    kernel = cupy.RawKernel(_COPY_OF_ROWS, "copy_of_rows")
    row_bytes = data.x[0].element_size() * data.x[0].shape[1]

    def call(i: int) -> tuple[Tensor, ...]:
        y, x = data.y[i].data_ptr(), data.x[i].data_ptr()
        vectors = cupy.int32(row_bytes // 16)
        kernel((len(places),), (256,), (y, x, places.data_ptr(), vectors))
        return (data.y[i],)

    return call


def _torch_forward(data: ForwardData, wrap: Callable[..., Any] = lambda function: function) -> Call:
    functional, shape = torch.nn.functional, (data.shape.hidden_size,)
    weight, bias = data.weight, data.bias

    def rms_norm(x: Tensor) -> tuple[Tensor, ...]:
        return (functional.rms_norm(x, shape, weight, EPS),)

    def layer_norm(x: Tensor) -> tuple[Tensor, ...]:
        return (functional.layer_norm(x, shape, weight, bias, EPS),)

    def add_rms_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return functional.rms_norm(total, shape, weight, EPS), total

    found = {"rms_norm": rms_norm, "layer_norm": layer_norm, "add_rms_norm": add_rms_norm}
    return keeping(wrap(found[data.shape.op]), data.inputs(), len(data.outputs()))


def _liger_forward(data: ForwardData) -> Call:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.layer_norm import layer_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    weight, bias = data.weight, data.bias

    def rms_norm(x: Tensor) -> tuple[Tensor, ...]:
        return rms_norm_forward(x, weight, EPS, 0.0, "gemma", False)[:1]

    def layer_norm(x: Tensor) -> tuple[Tensor, ...]:
        return layer_norm_forward(x, weight, bias, EPS)[:1]

    def add_rms_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return fused_add_rms_norm_forward(x, residual, weight, EPS, 0.0, "gemma")[:2]

    found = {"rms_norm": rms_norm, "layer_norm": layer_norm, "add_rms_norm": add_rms_norm}
    return keeping(found[data.shape.op], data.inputs(), len(data.outputs()))


def _quack_forward(data: ForwardData) -> Call:
    from quack.rmsnorm import _rmsnorm_fwd

    # What its rmsnorm_fwd and layernorm_fwd call, which would also demand float32 weights.
    data.poison()
    x, y, weight, bias = data.x, data.y, data.weight, data.bias
    nothing: list[None] = [None] * data.count
    residual, residual_out = data.residual or nothing, data.residual_out or nothing
    layer = data.shape.layer

    def call(i: int) -> tuple[Any, ...]:
        _rmsnorm_fwd(x[i], weight, y[i], bias, None, None, residual[i], residual_out[i], EPS, layer)
        return tuple(tensors[i] for tensors in data.outputs())

    return call


def _flashinfer_forward(data: ForwardData) -> Call:
    from flashinfer.norm import fused_add_rmsnorm, rmsnorm

    if data.shape.layer:
        raise NotImplementedError("its LayerNorm takes other dtypes")
    if not data.shape.adds:
        data.poison()
        return lambda i: (rmsnorm(data.x[i], data.weight, EPS, out=data.y[i]),)
    assert data.residual is not None
    x, residual = data.copies(data.x[0]), data.copies(data.residual[0])  # it works in place

    def call(i: int) -> tuple[Tensor, ...]:
        fused_add_rmsnorm(x[i], residual[i], data.weight, EPS)
        return x[i], residual[i]

    return call


# Backward --------------------------------------------------------------------------------------


class BackwardData(Data):
    """x (the sum of both inputs for add_*), dout, statistics and the outputs that can be given."""

    def __init__(self, shape: Shape, count: int, device: str = "cuda") -> None:
        super().__init__(shape, count, device)
        self.dout = self.random_ring()
        self.dresidual_out = self.random_ring() if shape.adds else None
        self.dx = self.empty_ring()
        self.dweight = torch.empty_like(self.weight)
        self.dbias = None if self.bias is None else torch.empty_like(self.bias)
        # Rows repeat, so that their statistics do.
        block = self.x[0][:BLOCK_ROWS].float()
        mean = block.mean(-1)
        centred = block - mean[:, None] if shape.layer else block
        rstd = torch.rsqrt((centred * centred).mean(-1) + EPS)
        repeats = -(-shape.rows // len(block))
        self.mean, self.rstd = (s.repeat(repeats)[: shape.rows] for s in (mean, rstd))
        self._expected: list[Tensor] | None = None

    def poison(self) -> None:
        self.dx[0].fill_(float("nan"))
        self.dweight.fill_(float("nan"))
        if self.dbias is not None:
            self.dbias.fill_(float("nan"))

    def _gradients(self, rows: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x, dout = self.x[0][rows].to(dtype), self.dout[0][rows].to(dtype)
        rstd = self.rstd[rows].to(dtype)[:, None]
        xhat = (x - self.mean[rows].to(dtype)[:, None] if self.shape.layer else x) * rstd
        scaled = dout * self.weight.to(dtype)
        dx = scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)
        if self.shape.layer:
            dx = dx - scaled.mean(-1, keepdim=True)
        dx = dx * rstd
        if self.dresidual_out is not None:
            dx = dx + self.dresidual_out[0][rows].to(dtype)
        return dx, dout * xhat, dout

    def expected(self) -> list[Tensor]:
        """The checked rows of dx, dweight and dbias, in float64; summed once for all peers."""
        if self._expected is None:
            sums = torch.zeros((2, self.shape.hidden_size), dtype=torch.float64, device=self.device)
            step = max(1, CHUNK // self.shape.hidden_size)
            for first in range(0, self.shape.rows, step):
                rows = slice(first, first + step)
                _, dweight, dbias = self._gradients(rows, torch.float32)
                sums[0] += dweight.sum(0, dtype=torch.float64)
                sums[1] += dbias.sum(0, dtype=torch.float64)
            self._expected = [self._gradients(self.at, torch.float64)[0], *sums]
        return self._expected[: 3 if self.shape.layer else 2]

    def check(self, outputs: tuple[Tensor, ...]) -> None:
        count = 3 if self.shape.layer else 2
        for name, got, expected in zip(
            ("dx", "dweight", "dbias")[:count], outputs, self.expected(), strict=True
        ):
            self.close(name, got[self.at] if name == "dx" else got, expected)


def backward(data: BackwardData, names: Iterable[str]) -> dict[str, Candidate]:
    """This library, torch, torch.compile where it is wanted, and the named peers."""
    makes: dict[str, Make] = {
        "ours": lambda: ours_backward(data),
        "torch": lambda: _torch_backward(data),
    }
    if data.shape in COMPILED:
        makes["compile"] = lambda: _compiled_backward(data)
    wanted = {
        "liger": lambda: _liger_backward(data),
        "quack": lambda: _await_quack(_quack_backward(data)),
    }
    makes |= {name: wanted[name] for name in names if name in wanted}
    return _candidates(data, makes)


def ours_backward(data: BackwardData) -> Call:
    data.poison()
    function = getattr(cr, data.shape.op)
    x, dout, dx, dresidual_out = data.x, data.dout, data.dx, data.dresidual_out
    options = {"eps": EPS, "bias": data.bias, "dweight_out": data.dweight, "dbias_out": data.dbias}
    statistics = (data.mean, data.rstd) if data.shape.layer else (data.rstd,)
    weight = data.weight

    def call(i: int) -> tuple[Any, ...]:
        gradients = function(dout[i], x[i], weight, *statistics, dx_out=dx[i], **options)
        return tuple(gradient for gradient in gradients if gradient is not None)

    def call_add(i: int) -> tuple[Any, ...]:
        gradients = function(
            dout[i], dresidual_out[i], x[i], weight, *statistics, dx_out=dx[i], **options
        )
        return gradients[0], *(gradient for gradient in gradients[2:] if gradient is not None)

    return call_add if data.shape.adds else call


def _torch_backward(data: BackwardData) -> Call:
    """The kernels that its autograd runs."""
    aten, shape = torch.ops.aten, [data.shape.hidden_size]
    weight, bias = data.weight, data.bias
    rstd, mean = data.rstd[:, None], data.mean[:, None]

    def rms_norm(dout: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = aten._fused_rms_norm_backward(
            dout, x, shape, rstd, weight, [True, True]
        )
        return gradients

    def layer_norm(dout: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = aten.native_layer_norm_backward(
            dout, x, shape, mean, rstd, weight, bias, [True, True, True]
        )
        return gradients

    def add_rms_norm(dout: Tensor, x: Tensor, dresidual_out: Tensor) -> tuple[Tensor, ...]:
        dx, dweight = rms_norm(dout, x)
        return dx.add_(dresidual_out), dweight

    found = {"rms_norm": rms_norm, "layer_norm": layer_norm, "add_rms_norm": add_rms_norm}
    return keeping(found[_forward_op(data.shape)], _backward_rings(data), 1)


def _compiled_backward(data: BackwardData) -> Call:
    """The formula, of which torch.compile makes the kernels that it makes of its own backward."""
    weight, bias = data.weight, data.bias
    rstd, mean = data.rstd[:, None], data.mean[:, None]

    def gradients(
        dout: Tensor, x: Tensor, dresidual_out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        wide = dout.float()
        xhat = (x.float() if bias is None else x.float() - mean) * rstd
        scaled = wide * weight.float()
        dx = scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)
        if bias is not None:
            dx = dx - scaled.mean(-1, keepdim=True)
        dx = dx * rstd
        if dresidual_out is not None:
            dx = dx + dresidual_out.float()
        dweight = (wide * xhat).sum(0).to(weight.dtype)
        if bias is None:
            return dx.to(x.dtype), dweight
        return dx.to(x.dtype), dweight, wide.sum(0).to(bias.dtype)

    return keeping(compiled(gradients), _backward_rings(data), 1)


def _liger_backward(data: BackwardData) -> Call:
    from liger_kernel.ops.fused_add_rms_norm import (
        fused_add_rms_norm_backward,
        fused_add_rms_norm_forward,
    )
    from liger_kernel.ops.layer_norm import layer_norm_backward
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    weight, bias, mean, rstd = data.weight, data.bias, data.mean, data.rstd
    if data.shape.layer:

        def layer_norm(dout: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            gradients: tuple[Tensor, ...] = layer_norm_backward(dout, x, weight, bias, mean, rstd)
            return gradients

        return keeping(layer_norm, _backward_rings(data), 1)

    # In place, as its modules do by default: otherwise it first fills dx with zeros.
    dout = data.copies(data.dout[0])
    one = data.x[0][:1]
    if data.shape.adds:
        *_, block, warps, stages, mode = fused_add_rms_norm_forward(
            one, one, weight, EPS, 0.0, "gemma"
        )
        dresidual_out = data.dresidual_out
        assert dresidual_out is not None

        def add_rms_norm(i: int) -> tuple[Tensor, ...]:
            dx, _, dweight = fused_add_rms_norm_backward(
                *(dout[i], dresidual_out[i], data.x[i], weight, rstd),
                *(0.0, mode, block, warps, stages, True),
            )
            return dx, dweight

        return add_rms_norm
    *_, block, warps, mode = rms_norm_forward(one, weight, EPS, 0.0, "gemma", False)

    def rms_norm(i: int) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = rms_norm_backward(
            dout[i], data.x[i], weight, rstd, 0.0, mode, block, warps, True, False
        )
        return gradients

    return rms_norm


def _quack_backward(data: BackwardData) -> Call:
    from quack.rmsnorm import _rmsnorm_bwd
    from quack.rmsnorm_config import get_sm_count

    # What its rmsnorm_bwd and layernorm_bwd do, with dx given.
    data.poison()
    layer, weight = data.shape.layer, data.weight
    mean = data.mean if layer else None
    blocks = get_sm_count(data.shape.hidden_size, weight.device)
    size = (blocks, data.shape.hidden_size)
    dresidual_out = data.dresidual_out or [None] * data.count

    def call(i: int) -> tuple[Tensor, ...]:
        parts = [
            torch.empty(size, device=weight.device, dtype=torch.float32) for _ in range(1 + layer)
        ]
        _rmsnorm_bwd(
            *(data.x[i], weight, data.dout[i], data.rstd, data.dx[i], parts[0]),
            *(parts[1] if layer else None, dresidual_out[i], None, blocks),
            mean=mean,
            is_layernorm=layer,
        )
        return data.dx[i], *(part.sum(dim=0).to(weight.dtype) for part in parts)

    return call


def _forward_op(shape: Shape) -> str:
    return shape.op.removesuffix("_backward")


def _backward_rings(data: BackwardData) -> tuple[Tensors, ...]:
    rings = (data.dout, data.x)
    return rings if data.dresidual_out is None else (*rings, data.dresidual_out)


# QuACK's compile workers -----------------------------------------------------------------------


def _start_quack(shapes: Iterable[Shape]) -> None:
    """Have QuACK compile for all shapes in other processes: one by one it takes seconds a shape."""
    from quack.cache import async_compile

    async_compile.activate(max(1, min(12, (os.cpu_count() or 2) - 4)))
    begun = set()
    for shape in shapes:
        # Its forward kernels take any number of rows, its backward ones up to a power of two.
        rows = 1 << (shape.rows - 1).bit_length() if shape.backward else 1
        kind = Shape(shape.op, shape.dtype, rows, shape.hidden_size)
        if kind in begun:
            continue
        begun.add(kind)
        try:
            if shape.backward:
                _quack_backward(BackwardData(kind, 1))(0)
            else:
                _quack_forward(ForwardData(kind, 1))(0)
        except (async_compile.CompilePending, Exception):
            continue  # what is wrong shows when its turn comes


def _stop_quack() -> None:
    """End the workers."""
    from quack.cache import async_compile

    async_compile.deactivate()


def _await_quack(call: Call) -> Call:
    """`call` with its kernel there; compiled here if the workers take too long."""
    from quack.cache import async_compile

    begin = time.perf_counter()
    while True:
        try:
            call(0)
            return call
        except async_compile.CompilePending:
            if time.perf_counter() - begin > QUACK_PATIENCE:
                async_compile.deactivate()
            time.sleep(0.02)
