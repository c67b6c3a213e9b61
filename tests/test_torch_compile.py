# SPDX-License-Identifier: Apache-2.0
"""The functions under torch.compile and torch.export: one graph, the same bits, the same
gradients."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm._check import Options

torch = pytest.importorskip("torch")

HIDDEN_SIZE = 12
PLAIN = ("rms_norm", "layer_norm")
ADDS = ("add_rms_norm", "add_layer_norm")
FUNCTIONS = (*PLAIN, *ADDS, "qk_norm")

pytestmark = [  # raised within torch
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:At pre-dispatch tracing"),  # torch 2.4
]


@pytest.fixture(autouse=True)
def device(device: str) -> Iterator[str]:
    """Where every tensor of a test lies."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    with torch.device(device):
        yield device
    torch._dynamo.reset()


class Compiler:
    """torch.compile that refuses graph breaks; it keeps the graphs that it was given."""

    def __init__(self, backend: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self._compile = lookup_backend(backend)
        self.graphs: list[Any] = []

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend=self._backend, fullgraph=True, **options)

    def _backend(self, graph: Any, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return self._compile(graph, inputs)

    def operators(self) -> list[str]:
        """The library's operators in the last graph."""
        called = [str(node.target) for node in self.graphs[-1].graph.nodes]
        return [name.split(".")[1] for name in called if name.startswith("cupy_rmsnorm.")]


@pytest.fixture
def compiler() -> Compiler:
    return Compiler("aot_eager")


def tensor(*shape: int, dtype: str = "float32", grad: bool = True) -> Any:
    return torch.randn(shape, dtype=getattr(torch, dtype)).requires_grad_(grad)


def inputs(function: str, rows: int = 5, dtype: str = "float32") -> dict[str, Any]:
    """Tensors that require grad, by name."""
    if function.startswith("qk"):
        return {
            "q": tensor(rows, 4, HIDDEN_SIZE, dtype=dtype),
            "k": tensor(rows, 2, HIDDEN_SIZE, dtype=dtype),
            "q_weight": tensor(HIDDEN_SIZE),
            "k_weight": tensor(2, HIDDEN_SIZE, dtype=dtype),
        }
    named = {"x": tensor(2, rows, HIDDEN_SIZE, dtype=dtype)}
    if function.startswith("add"):
        named["residual"] = tensor(2, rows, HIDDEN_SIZE)
    return named | {"weight": tensor(HIDDEN_SIZE), "bias": tensor(HIDDEN_SIZE, dtype=dtype)}


def detached(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() for name, value in named.items()}


def outputs(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def gradients(call: Callable[..., Any], named: dict[str, Any], **options: Any) -> list[Any]:
    """What `call` gives, and the gradients of a loss in which every element has its own share."""
    result = outputs(call(**named, **options))
    loss = sum(
        (one.double() * torch.linspace(-1, 2, one.numel()).view_as(one)).sum() for one in result
    )
    return [*result, *torch.autograd.grad(loss, list(named.values()))]


def equal(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def refused(message: str) -> Any:
    """Before 2.6 torch says of an error while it traces no more than that there was one."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return pytest.raises(
        Exception, match=message if version >= (2, 6) else f"{message}|Observed exception"
    )


# One graph, the same bits ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_training(function: str, dtype: str, compiler: Compiler) -> None:
    call, named = getattr(norms, function), inputs(function, dtype=dtype)
    equal(gradients(compiler(call), named), gradients(call, named))
    kept = function if function == "qk_norm" else f"{function}_forward"
    assert compiler.operators() == [kept]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inference(function: str, compiler: Compiler) -> None:
    call, named = getattr(norms, function), inputs(function)
    compiled = compiler(call)
    with torch.no_grad():
        equal(outputs(compiled(**named)), outputs(call(**named)))
    assert compiler.operators() == [function]  # without statistics
    with torch.inference_mode():
        equal(outputs(compiled(**detached(named))), outputs(call(**detached(named))))


OPTIONS: list[dict[str, Any]] = [
    {"eps": 0.3, "weight_offset": 1.0, "cast": "before_weight"},
    {"groups": 3},
    {"axis": (-2, -1)},
    {"axis": (-1,)},
    {"per_head": True},
    {"out_dtype": torch.float16},
    {"out_dtype": "float32"},
    {"masked": "zero", "where": True, "valid_rows": True},
    {"weight": 1.5, "bias": 2},
    {"weight": None, "bias": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("function", ["rms_norm", "add_layer_norm"])
def test_options(function: str, options: dict[str, Any], compiler: Compiler) -> None:
    call, named = getattr(norms, function), inputs(function, dtype="bfloat16")
    if "per_head" in options or ("axis" in options and len(options["axis"]) == 2):
        named["weight"] = tensor(5, HIDDEN_SIZE)
        named["bias"] = tensor(5, HIDDEN_SIZE)
    if "where" in options:
        where = torch.tensor([[True, False, True, True, False], [True] * 5])
        options = options | {"where": where, "valid_rows": torch.tensor(8)}
    if "weight" in options:
        del named["weight"], named["bias"]
    compiled = compiler(lambda **tensors: call(**tensors, **options))
    equal(gradients(compiled, named), gradients(call, named, **options))
    with torch.no_grad():
        equal(outputs(compiled(**named)), outputs(call(**named, **options)))


def test_partial_statistics(compiler: Compiler) -> None:
    named = inputs("rms_norm")
    compiled = compiler(norms.rms_norm)
    for options in ({"partial": 5}, {"partial": 2, "groups": 3}):
        equal(gradients(compiled, named, **options), gradients(norms.rms_norm, named, **options))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_dynamic_shapes_compile_once(function: str, compiler: Compiler) -> None:
    call = getattr(norms, function)
    compiled = compiler(call, dynamic=True)
    graphs = []
    for rows in (7, 64, 33):
        named = inputs(function, rows)
        equal(gradients(compiled, named), gradients(call, named))
        graphs.append(len(compiler.graphs))
    assert graphs == graphs[:1] * 3  # torch may begin anew within the first
    named = inputs(function, 1)
    equal(gradients(compiled, named), gradients(call, named))


def test_shapes_that_turn_out_to_be_dynamic(compiler: Compiler) -> None:
    compiled, weight = compiler(norms.rms_norm), tensor(HIDDEN_SIZE, grad=False)
    for rows in (7, 64, 3, 5, 100):
        x = torch.randn(rows, HIDDEN_SIZE)
        assert torch.equal(compiled(x, weight), norms.rms_norm(x, weight))
    assert len(compiler.graphs) == 2


def test_an_eps_that_changes(compiler: Compiler) -> None:
    compiled, x = compiler(lambda x, eps: norms.rms_norm(x, eps=eps)), torch.randn(4, 8)
    for eps in (1e-6, 1e-5, 0.5, 0.25):
        assert torch.equal(compiled(x, eps), norms.rms_norm(x, eps=eps))


def test_a_block_of_a_model(compiler: Compiler) -> None:
    linear = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
    bound = norms.bind_rms_norm(torch.nn.Parameter(torch.ones(HIDDEN_SIZE)))
    weight = torch.nn.Parameter(torch.linspace(-1, 2, HIDDEN_SIZE))

    def block(x: Any) -> Any:
        y, residual = norms.add_rms_norm(linear(bound(x)), x, weight)
        return norms.layer_norm(torch.relu(y) + residual)

    named = {"x": tensor(2, 5, HIDDEN_SIZE)}
    equal(gradients(compiler(block), named), gradients(block, named))
    assert compiler.operators() == [
        "rms_norm_forward",
        "add_rms_norm_forward",
        "layer_norm_forward",
    ]


def test_autocast(device: str, compiler: Compiler) -> None:
    linear = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def block(x: Any, weight: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return norms.rms_norm(linear(x), weight)

    named = {"x": tensor(5, HIDDEN_SIZE), "weight": tensor(HIDDEN_SIZE)}
    got = gradients(compiler(block), named)
    assert [one.dtype for one in got] == [torch.bfloat16, torch.float32, torch.float32]
    equal(got, gradients(block, named))


def test_strided_inputs(compiler: Compiler) -> None:
    qkv = torch.randn(5, 8, HIDDEN_SIZE)
    weight = torch.randn(2 * HIDDEN_SIZE)[::2]

    def call(qkv: Any, weight: Any) -> Any:
        return norms.qk_norm(qkv[:, :4], qkv[:, 4:6], weight, weight)

    equal(compiler(call)(qkv, weight), call(qkv, weight))


# Functions with statistics, and backward ones -------------------------------------------------


@pytest.mark.parametrize("function", [*PLAIN, *ADDS])
def test_functions_with_statistics(function: str, compiler: Compiler) -> None:
    call, named = getattr(norms, f"{function}_forward"), inputs(function)
    compiled = compiler(call)
    for options in ({}, {"groups": 3}):
        equal(compiled(**detached(named), **options), call(**detached(named), **options))
    with torch.no_grad():
        equal(compiled(**named), call(**named))
    with refused("requires grad, and this function records no gradient"):
        compiler(call)(**named)


@pytest.mark.parametrize("function", [*PLAIN, *ADDS])
def test_backward_functions(function: str, compiler: Compiler) -> None:
    named = detached(inputs(function, dtype="bfloat16"))
    results = getattr(norms, f"{function}_forward")(**named)
    call = getattr(norms, f"{function}_backward")
    options = {"bias": named["bias"], "rstd": results[-1]}
    if "layer" in function:
        options["mean"] = results[-2]
    dout = torch.randn_like(results[0])
    first = (dout, results[1], results[1]) if function in ADDS else (dout, named["x"])
    compiled = compiler(call)
    cases: list[dict[str, Any]] = [
        {},
        {"need_dx": False},
        {"need_dweight": False},
        {"dweight_dtype": torch.bfloat16},
        {"dweight_out": torch.empty(HIDDEN_SIZE), "dbias_out": torch.empty_like(named["bias"])},
    ]
    if function in ADDS:
        cases += [{"x_dtype": torch.bfloat16}]
    for case in cases:
        given = {name: value.clone() for name, value in case.items() if name.endswith("_out")}
        expected = call(*first, named["weight"], **options, **case | given)
        got = compiled(*first, named["weight"], **options, **case)
        equal(got, expected)
        for name, value in given.items():
            assert torch.equal(case[name], value)
    got = compiled(*first, **options)  # without a weight
    equal(got, call(*first, **options))
    if function in ADDS:
        assert got[0] is got[1]


# Given outputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_given_outputs(function: str, compiler: Compiler) -> None:
    call, named = getattr(norms, function), detached(inputs(function))
    names = {"qk_norm": ("q_out", "k_out")}.get(function, ("out", "residual_out"))
    expected = outputs(call(**named))
    compiled = compiler(call)
    for chosen in (names[: len(expected)], names[:1], names[1 : len(expected)]):
        given = {
            name: torch.full_like(value, torch.nan)
            for name, value in zip(names, expected, strict=False)
            if name in chosen
        }
        got = outputs(compiled(**named, **given))
        equal(got, expected)
        equal([got[names.index(name)] for name in given], given.values())
        for name, value in given.items():
            assert got[names.index(name)] is value


def test_in_place(compiler: Compiler) -> None:
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    expected = norms.add_rms_norm(x, residual, weight)

    def call(x: Any, residual: Any) -> Any:
        norms.add_rms_norm(x, residual, weight, out=x, residual_out=residual)
        return x + 1

    after = compiler(call)(x, residual)
    equal((x, residual, after), (*expected, expected[0] + 1))
    assert compiler.operators() == ["norm_out"]


def test_in_place_in_a_packed_buffer(compiler: Compiler) -> None:
    qkv = torch.randn(5, 8, HIDDEN_SIZE)
    expected = qkv.clone()

    def call(qkv: Any) -> None:
        q, k = qkv[:, :4], qkv[:, 4:6]
        norms.qk_norm(q, k, q_out=q, k_out=k)

    call(expected)
    compiler(call)(qkv)
    assert torch.equal(qkv, expected)
    assert compiler.operators() == ["qk_norm_out"]


def test_rows_that_are_left_untouched(compiler: Compiler) -> None:
    x, where = torch.randn(4, 8), torch.tensor([True, False, True, True])
    out = torch.full((4, 8), 7.0)
    assert compiler(norms.rms_norm)(x, where=where, out=out) is out
    assert torch.equal(out[1], torch.full((8,), 7.0))
    assert torch.equal(out[::2], norms.rms_norm(x)[::2])
    with refused(r"masked='keep' .* needs residual_out, got None"):
        compiler(norms.add_rms_norm)(x, x, where=where, out=out)


def test_statistics_that_are_given(compiler: Compiler) -> None:
    x, mean, rstd = torch.randn(4, 8), torch.empty(4), torch.empty(4)
    compiled = compiler(norms.layer_norm_forward)
    got = compiled(x, mean_out=mean, rstd_out=rstd)
    equal(got, norms.layer_norm_forward(x))
    equal(got[1:], (mean, rstd))


# Refusals -------------------------------------------------------------------------------------


def test_given_outputs_have_no_gradient(compiler: Compiler) -> None:
    x, out = tensor(4, 8), torch.empty(4, 8)
    with refused(r"x requires grad, .* a given out have no gradient"):
        compiler(norms.rms_norm)(x, out=out)
    with refused(r"q requires grad, .* a given q_out have no gradient"):
        compiler(norms.qk_norm)(x, x, q_out=out)
    with refused(r"masked must be 'zero' where x requires grad"):
        compiler(norms.rms_norm)(x, valid_rows=torch.tensor(3))


def test_outputs_that_require_grad_are_refused(compiler: Compiler) -> None:
    x, out = tensor(4, 8, grad=False), tensor(4, 8)
    with refused(r"out must not require grad"):
        compiler(norms.rms_norm)(x, out=out)
    with refused(r"k_out must not require grad"):
        compiler(norms.qk_norm)(x, x, k_out=out)
    with refused(r"dx_out must not require grad"):
        compiler(norms.rms_norm_backward)(x, x, dx_out=out)


def test_gradients_do_not_fit_a_given_output(compiler: Compiler) -> None:
    x, weight = tensor(1, 8, grad=False), tensor(8, grad=False)
    with refused(r"dx_out must have shape \(1, 8\) and dtype"):
        compiler(norms.rms_norm_backward)(x, x, weight, dx_out=torch.empty(4, 8))
    with refused(r"dx_out must have shape .* dtype torch\.float32"):
        compiler(norms.rms_norm_backward)(x, x, weight, dx_out=x.half())
    with refused(r"dbias_out was given, and there is no such gradient"):
        compiler(norms.rms_norm_backward)(x, x, weight, dbias_out=weight)


def test_errors_are_those_of_a_call(compiler: Compiler) -> None:
    compiled = compiler(norms.rms_norm)
    with pytest.raises(ValueError, match=r"^weight must have shape \(8,\), got \(7,\)"):
        compiled(torch.randn(4, 8), torch.randn(7))
    with pytest.raises(ValueError, match=r"^masked='keep' .* needs out, got None"):
        compiled(torch.randn(4, 8), valid_rows=torch.tensor(3))


def test_numpys_arrays_and_scalars(device: str, compiler: Compiler) -> None:
    if device != "cpu":
        pytest.skip("NumPy's arrays are beside tensors of the CPU")
    x, weight = torch.randn(4, 8), np.linspace(-1, 2, 8, dtype=np.float32)
    where = np.array([True, False, True, True])
    cases: list[Callable[..., Any]] = [
        lambda x: norms.layer_norm(x, weight, weight),
        lambda x: norms.rms_norm(x, np.float32(2.0), eps=np.float32(0.5)),
        lambda x: norms.rms_norm(x, where=where, masked="zero"),
        lambda x: norms.rms_norm(x, out_dtype=np.float16),
        lambda x: norms.rms_norm(x, out_dtype=np.dtype("float16")),
        lambda x: norms.rms_norm_backward(x, x, weight)[:2],
        lambda x: norms.qk_norm(x, x, weight, weight, eps=np.float32(0.5)),
    ]
    for case in cases:
        equal(outputs(compiler(case)(x)), outputs(case(x)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: norms.rms_norm(x, axis=[-1]), r"axis must be an int or a tuple of ints"),
        (lambda x: norms.rms_norm(x, eps=None), r"eps must be a real number, got None"),
        (lambda x: norms.rms_norm(x, eps=x[0, 0]), r"eps must be a real number, got torch.Tensor"),
        (lambda x: norms.qk_norm(x, x, eps="1"), r"eps must be a real number, got '1'"),
        (lambda x: norms.add_rms_norm(x, None), r"residual must be an array, got NoneType"),
        (lambda x: norms.rms_norm(x, valid_rows=2), r"valid_rows must be an array, got int"),
    ],
)
def test_arguments_that_no_operator_takes(call: Any, message: str, compiler: Compiler) -> None:
    x = torch.randn(4, 8)
    with pytest.raises((TypeError, ValueError), match=message):
        call(x)
    with refused(message):
        compiler(call)(x)


def test_a_weight_without_memory_is_refused(compiler: Compiler) -> None:
    from cupy_rmsnorm._torch_ops import OPERATORS

    x, weight = torch.randn(4, 8), torch.ones(8, device="meta")
    with refused(r"on the CPU or a CUDA device, got one on meta"):
        compiler(norms.rms_norm)(x, weight)
    with pytest.raises(ValueError, match=r"on the CPU or a CUDA device, got one on meta"):
        OPERATORS["rms_norm"](x, None, weight, *[None] * 5, *SCALARS)
    every = OPERATORS["rms_norm"](x.to("meta"), None, weight, *[None] * 5, *SCALARS)
    assert every.is_meta


SCALARS = 1e-6, 0.0, [-1], "once", False, "keep", 1, None, None  # of an operator


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda call, x: torch.func.vmap(call)(x),
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_an_operator_are_refused(transform: str) -> None:
    from cupy_rmsnorm._torch_ops import OPERATORS

    def call(x: Any) -> Any:
        return OPERATORS["rms_norm"](x, *[None] * 7, *SCALARS)

    with pytest.raises(TypeError, match=r"one within torch\.func"):
        TRANSFORMS[transform](call, torch.randn(3, 4, 8))
    assert call(torch.randn(3, 4, 8)).shape == (3, 4, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("function", ["rms_norm", "add_rms_norm", "qk_norm", "rms_norm_backward"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform: str, function: str, compiler: Compiler) -> None:
    def call(x: Any) -> Any:
        call = getattr(norms, function)
        return call(x) if function == "rms_norm" else call(x, x)[0]

    with refused(r"must be .* one within torch\.func"):
        compiler(lambda x: TRANSFORMS[transform](call, x))(torch.randn(3, 4, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_patched_model_is_transformed_as_the_model_itself(
    transform: str, compiler: Compiler
) -> None:
    from cupy_rmsnorm._torch_forwards import TRANSFORMS_ARE_TRACED
    from cupy_rmsnorm.torch import patch

    def compiled() -> Any:
        return compiler(lambda x: TRANSFORMS[transform](layer, x))(x)

    layer, x = Layer(), tensor(4, HIDDEN_SIZE, grad=False)
    expected = TRANSFORMS[transform](layer, x)
    compiles = TRANSFORMS_ARE_TRACED
    try:  # not every release of torch compiles its own norm within every transform
        compiles = compiles and compiled() is not None
    except Exception:
        compiles = False
    torch.compiler.reset()
    assert patch(layer).fused
    torch.testing.assert_close(TRANSFORMS[transform](layer, x), expected)
    if compiles:
        torch.testing.assert_close(compiled(), expected)


def test_double_backward_of_an_operator_is_refused() -> None:
    from cupy_rmsnorm._torch_ops import OPERATORS

    x = tensor(4, 8)
    for function in ("rms_norm", "rms_norm_forward"):
        y = outputs(OPERATORS[function](x, *[None] * 7, *SCALARS))[0]
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiable only once$"):
            gradient.sum().backward()


# Operators ------------------------------------------------------------------------------------


def test_the_options_of_the_operators_are_those_of_the_functions() -> None:
    from cupy_rmsnorm._torch_ops import OPTIONS

    assert list(OPTIONS) == [field.name for field in dataclasses.fields(Options)]


def samples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of each operator, some with gradients and some without."""
    from cupy_rmsnorm._torch_ops import BACKWARD, FORWARD, OPERATORS

    options = {
        "eps": 1e-5,
        "weight_offset": 0.5,
        "axis": [-1],
        "cast": "once",
        "per_head": False,
        "masked": "zero",
        "groups": 1,
        "partial": None,
    }
    x, weight, bias = tensor(3, 4, 8), tensor(8), tensor(8)
    masks = {"where": torch.ones(3, 4, dtype=torch.bool), "valid_rows": torch.tensor(7)}
    none = {"where": None, "valid_rows": None}
    for function, kind in FORWARD.items():
        residual = tensor(3, 4, 8) if kind.adds else None
        given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        constants = {"weight_constant": None, "bias_constant": None}
        yield function, {**given, **none, **constants, **options, "out_dtype": None}
        bare = given | {"weight": None, "bias": None}
        grouped = options | {"groups": 2, "masked": "zero"}
        yield (
            function,
            {
                **{
                    name: value if value is None else value.detach() for name, value in bare.items()
                },
                **masks,
                "weight_constant": 2.0,
                "bias_constant": 0.5,
                **grouped,
                "out_dtype": torch.float16,
            },
        )
    statistic = torch.rand(3, 4) + 1
    for function, kind in BACKWARD.items():
        for needs in ((True, True), (False, True), (True, False)):
            yield (
                function,
                {
                    "dout": torch.randn(3, 4, 8),
                    "dresidual_out": torch.randn(3, 4, 8) if kind.adds else None,
                    "x": x.detach(),
                    "weight": weight.detach(),
                    "bias": bias.detach() if all(needs) else None,
                    "mean": statistic - 1 if kind.norm == "layer" else None,
                    "rstd": statistic,
                    **none,
                    "weight_constant": None,
                    **options,
                    "need_dx": needs[0],
                    "need_dweight": needs[1],
                    "dweight_dtype": None,
                    "x_dtype": torch.float16 if kind.adds else None,
                },
            )
    heads = tensor(4, 8)
    qk = {
        "q": x,
        "k": tensor(3, 2, 8),
        "q_weight": heads,
        "k_weight": None,
        "q_constant": None,
        "k_constant": 0.5,
        "eps": 1e-5,
        "weight_offset": 0.5,
        "cast": "once",
    }
    yield "qk_norm", qk
    plain = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in qk.items()
    }
    yield "qk_norm_out", {**plain, "q_out": torch.empty(3, 4, 8), "k_out": torch.empty(3, 2, 8)}
    yield (
        "norm_out",
        {
            "function": "add_layer_norm_forward",
            "x": x.detach(),
            "residual": torch.randn(3, 4, 8),
            "weight": weight.detach(),
            "bias": None,
            **none,
            "weight_constant": None,
            "bias_constant": None,
            **options,
            "out_dtype": None,
            "out": torch.empty(3, 4, 8),
            "residual_out": torch.empty(3, 4, 8),
            "mean_out": torch.empty(3, 4),
            "rstd_out": torch.empty(3, 4),
        },
    )
    assert set(OPERATORS) == {*FORWARD, *BACKWARD, "qk_norm", "qk_norm_out", "norm_out"}


@pytest.mark.parametrize(
    "test",
    ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"],
)
def test_opcheck(test: str) -> None:
    from cupy_rmsnorm._torch_ops import OPERATORS

    for function, arguments in samples():
        torch.library.opcheck(OPERATORS[function], tuple(arguments.values()), test_utils=test)


# Export, first calls, real compilers ----------------------------------------------------------


class Module(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 2, HIDDEN_SIZE))

    def forward(self, x: Any) -> Any:
        return norms.rms_norm(x, self.weight) + 1


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    module, x = Module(), torch.randn(5, HIDDEN_SIZE)
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: rows},), strict=strict)
    names = [str(node.target) for node in exported.graph.nodes]
    assert any(name.startswith("cupy_rmsnorm.rms_norm") for name in names)
    for rows_now in (5, 9):
        x = torch.randn(rows_now, HIDDEN_SIZE)
        assert torch.equal(exported.module()(x), module(x))


# torch.jit.trace, make_fx and modes ------------------------------------------------------------


def into_out(x: Any) -> Any:
    out = torch.empty_like(x)
    norms.rms_norm(x, out=out)
    return out + 1


def module_of(kind: str) -> Any:
    from cupy_rmsnorm.torch import LayerNorm, RMSNorm, patch

    module: Any = Module()
    if kind == "ours":
        module = torch.nn.Sequential(RMSNorm(HIDDEN_SIZE), LayerNorm(HIDDEN_SIZE))
    if kind == "patched":
        module = torch.nn.Sequential(torch.nn.Linear(HIDDEN_SIZE, 4), torch.nn.LayerNorm(4))
        patch(module)
    return module


RECORDED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rms_norm": lambda: (norms.rms_norm, torch.randn(5, HIDDEN_SIZE)),
    "out": lambda: (into_out, torch.randn(5, HIDDEN_SIZE)),
    "add_layer_norm": lambda: (norms.add_layer_norm, *torch.randn(2, 5, HIDDEN_SIZE)),
    "qk_norm": lambda: (norms.qk_norm, torch.randn(5, 4, 8), torch.randn(5, 2, 8)),
    "statistics": lambda: (norms.layer_norm_forward, torch.randn(5, HIDDEN_SIZE)),
    "backward": lambda: (
        lambda dout, x: norms.rms_norm_backward(dout, x)[0],
        *torch.randn(2, 5, HIDDEN_SIZE),
    ),
    "bound": lambda: (norms.bind_rms_norm(torch.ones(HIDDEN_SIZE)), torch.randn(5, HIDDEN_SIZE)),
    "module": lambda: (module_of("module"), torch.randn(5, HIDDEN_SIZE)),
    "modules": lambda: (module_of("ours"), torch.randn(5, HIDDEN_SIZE)),
    "patched": lambda: (module_of("patched"), torch.randn(5, HIDDEN_SIZE)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_jit_trace(name: str, grad: bool) -> None:
    call, *given = RECORDED[name]()
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(call, tuple(given))
    graph = traced.inlined_graph if hasattr(traced, "inlined_graph") else traced.graph
    assert "cupy_rmsnorm::" in str(graph)
    others = [torch.randn_like(value) for value in given]
    equal(outputs(traced(*others)), outputs(call(*others)))


@pytest.mark.filterwarnings("ignore:`torch.jit.")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of shapes that are compared
@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_of_a_fused_layer(grad: bool) -> None:
    from cupy_rmsnorm.torch import patch

    layer = Layer()
    assert patch(layer).fused
    traced = torch.jit.trace(layer, torch.randn(5, HIDDEN_SIZE).requires_grad_(grad))
    x = torch.randn(5, HIDDEN_SIZE)
    torch.testing.assert_close(traced(x), layer(x))


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.RMSNorm(HIDDEN_SIZE) for _ in range(2))

    def forward(self, x: Any) -> Any:
        residual = x
        x = self.first(x)
        x = residual + x
        residual = x
        x = self.second(x)
        return residual + x


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", RECORDED)
def test_make_fx(name: str, mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    call, *given = RECORDED[name]()
    with torch.no_grad():
        trace = make_fx(lambda *xs: call(*xs), tracing_mode=mode, _allow_non_fake_inputs=True)
        graph = trace(*given)
    assert "cupy_rmsnorm" in graph.code
    others = [torch.randn_like(value) for value in given]
    equal(outputs(graph(*others)), outputs(call(*others)))


def test_modes_see_an_operator_and_its_gradient() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    call, named = norms.add_rms_norm, inputs("add_rms_norm")
    expected = gradients(call, named)
    with Mode():
        equal(gradients(call, named), expected)
    ours = [name.split(".")[1] for name in seen if name.startswith("cupy_rmsnorm.")]
    assert ours == ["add_rms_norm_forward", "add_rms_norm_backward"]


FIRST = """
import torch, cupy_rmsnorm as norms
compiled = torch.compile(norms.rms_norm, backend="aot_eager", fullgraph=True)
x = torch.randn(3, 8, device="{device}")
assert torch.equal(compiled(x), norms.rms_norm(x))
"""


def test_the_first_call_of_a_process_may_be_compiled(device: str) -> None:
    program = [sys.executable, "-c", FIRST.format(device=device)]
    subprocess.run(program, cwd=Path(__file__).parents[1], check=True)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one is
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("inductor compiles C++ for a CPU, which takes half a minute")

    def block(x: Any, residual: Any, weight: Any) -> Any:
        y, residual_out = norms.add_rms_norm(x * 2, residual, weight)
        return torch.sin(y), residual_out

    weight = tensor(256)
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for rows in (64, 64, 64, 7):
        named = {"x": tensor(rows, 256), "residual": tensor(rows, 256), "weight": weight}
        got = [one.clone() for one in gradients(compiled, named)]
        for one, other in zip(got, gradients(block, named), strict=True):
            torch.testing.assert_close(one, other)
