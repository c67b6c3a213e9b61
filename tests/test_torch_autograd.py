# SPDX-License-Identifier: Apache-2.0
"""The plain functions under torch's autograd: every gradient, in its dtype, or a clear refusal."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _run
from tests.recorder import recorded

torch = pytest.importorskip("torch")

ROWS, HIDDEN_SIZE = (2, 5), 12
PLAIN = ("rms_norm", "layer_norm")
ADDS = ("add_rms_norm", "add_layer_norm")
TORCHS_OWN = "ignore:`torch.jit.script` is deprecated"  # raised by forward_ad's first use


@pytest.fixture(autouse=True)
def device(device: str) -> Iterator[str]:
    """Where every tensor of a test lies."""
    torch.manual_seed(7)
    with torch.device(device):
        yield device


def tensor(*shape: int, dtype: str = "float32", grad: bool = True) -> Any:
    """Values of either sign, none of them alike."""
    return torch.randn(shape, dtype=getattr(torch, dtype)).requires_grad_(grad)


def inputs(function: str, dtype: str = "float32", weight: str | None = None) -> dict[str, Any]:
    """Tensors that require grad, of different shapes and dtypes, by name."""
    weight = weight or dtype
    if function == "qk_norm":
        return {
            "q": tensor(3, 4, HIDDEN_SIZE, dtype=dtype),
            "k": tensor(3, 2, HIDDEN_SIZE, dtype=dtype),
            "q_weight": tensor(HIDDEN_SIZE, dtype=weight),
            "k_weight": tensor(2, HIDDEN_SIZE, dtype=weight),
        }
    named = {"x": tensor(*ROWS, HIDDEN_SIZE, dtype=dtype)}
    if function in ADDS:
        residual_dtype = "float64" if dtype == "float64" else "float32"
        named["residual"] = tensor(*ROWS, HIDDEN_SIZE, dtype=residual_dtype)
    return named | {"weight": tensor(HIDDEN_SIZE, dtype=weight), "bias": tensor(HIDDEN_SIZE)}


def total(result: Any) -> Any:
    """A loss to which each element of each output gives a share of its own."""
    outputs = result if isinstance(result, tuple) else (result,)
    return sum(
        (output.double() * torch.linspace(-1, 2, output.numel()).view_as(output)).sum()
        for output in outputs
    )


# Right gradients ------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"eps": 0.3, "weight_offset": 1.0},
    {"cast": "before_weight"},
    {"groups": 3},
    {"axis": (-2, -1)},
    {"per_head": True},
    {"masked": "zero", "where": True, "valid_rows": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize("function", PLAIN + ADDS)
def test_gradcheck(function: str, options: dict[str, Any]) -> None:
    named = inputs(function, "float64")
    shape = named["x"].shape
    parameter = shape[-2:] if "per_head" in options or "axis" in options else shape[-1:]
    named["weight"] = tensor(*parameter, dtype="float64")
    named["bias"] = tensor(*parameter, dtype="float64")
    if "where" in options:
        where = torch.tensor([[True, False, True, True, False], [True] * 5])
        options = options | {"where": where, "valid_rows": torch.tensor(8)}
    check_gradients(function, named, options)


@pytest.mark.parametrize("function", ["rms_norm", "add_rms_norm"])
def test_gradcheck_of_partial_statistics(function: str) -> None:
    named = inputs(function, "float64") | {"bias": tensor(HIDDEN_SIZE, dtype="float64")}
    check_gradients(function, named, {"partial": 5})
    check_gradients(function, named, {"partial": 2, "groups": 3})


def test_gradcheck_of_qk_norm() -> None:
    for options in ({}, {"eps": 0.3, "weight_offset": 1.0, "cast": "before_weight"}):
        check_gradients("qk_norm", inputs("qk_norm", "float64"), options)


@pytest.mark.parametrize("function", PLAIN + ADDS)
def test_gradcheck_without_parameters_and_with_constants(function: str) -> None:
    named = inputs(function, "float64")
    del named["weight"], named["bias"]
    check_gradients(function, named, {})
    check_gradients(function, named, {"weight": 1.5, "bias": np.float32(0.25)})


def check_gradients(function: str, named: dict[str, Any], options: dict[str, Any]) -> None:
    def call(*tensors: Any) -> Any:
        return getattr(norms, function)(**dict(zip(named, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(call, tuple(named.values()))


@pytest.mark.parametrize("weight", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("function", PLAIN + ADDS)
def test_gradients_are_those_of_the_backward_function(
    function: str, dtype: str, weight: str
) -> None:
    named = inputs(function, dtype, weight)
    result = getattr(norms, function)(**named)
    outputs = result if function in ADDS else (result,)
    douts = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, douts)

    x, weight_, bias = (named[name].detach() for name in ("x", "weight", "bias"))
    others = {"residual": named["residual"].detach()} if function in ADDS else {}
    plain = getattr(norms, f"{function}_forward")(x, weight=weight_, bias=bias, **others)
    for output, expected in zip(outputs, plain[: len(outputs)], strict=True):
        assert torch.equal(output, expected)
    statistics: dict[str, Any] = {"rstd": plain[-1]}
    if "layer" in function:
        statistics["mean"] = plain[-2]
    backward = getattr(norms, f"{function}_backward")
    if function in ADDS:
        dx, dresidual, dweight, dbias = backward(
            *douts, plain[1], weight_, bias=bias, x_dtype=x.dtype, **statistics
        )
        assert named["residual"].grad.dtype == named["residual"].dtype
        assert torch.equal(named["residual"].grad, dresidual)
    else:
        dx, dweight, dbias = backward(*douts, x, weight_, bias=bias, **statistics)
    for name, expected in (("x", dx), ("weight", dweight), ("bias", dbias)):
        assert named[name].grad.dtype == named[name].dtype
        assert torch.equal(named[name].grad, expected), name


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Every choice of some names."""
    return [
        tuple(name for bit, name in enumerate(names) if number >> bit & 1)
        for number in range(1, 2 ** len(names))
    ]


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_what_asks_for_no_gradient_gets_none_and_costs_none(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = inputs(function)
    total(getattr(norms, function)(**named)).backward()
    expected = {name: value.grad for name, value in named.items()}
    asked: list[dict[str, Any]] = []
    backward = _run.backward

    def spy(
        name: str, norm: Any, dout: Any, x: Any, weight: Any, bias: Any, *options: Any, **rest: Any
    ) -> Any:
        asked.append({"bias": bias is not None, **rest})
        return backward(name, norm, dout, x, weight, bias, *options, **rest)

    monkeypatch.setattr(_run, "backward", spy)
    for chosen in subsets(list(named)):
        asked.clear()
        some = {
            name: value.detach().requires_grad_(name in chosen) for name, value in named.items()
        }
        total(getattr(norms, function)(**some)).backward()
        for name, value in some.items():
            if name in chosen:
                torch.testing.assert_close(value.grad, expected[name])
            else:
                assert value.grad is None
        if function == "qk_norm":
            assert len(asked) == len({name[0] for name in chosen})
            continue
        (call,) = asked
        assert call["need_dx"] == bool({"x", "residual"} & set(chosen))
        assert call["need_dweight"] == ("weight" in chosen)
        assert call["bias"] == ("bias" in chosen)


@pytest.mark.parametrize("function", ADDS)
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_alone_is_used(function: str, used: int) -> None:
    named = inputs(function)
    result = getattr(norms, function)(**named)
    result[used].backward(torch.ones_like(result[used]))
    both = {name: value.detach().requires_grad_() for name, value in named.items()}
    result = getattr(norms, function)(**both)
    sent = [torch.zeros_like(result[0]), torch.zeros_like(result[1])]
    sent[used] += 1
    torch.autograd.backward(result, sent)
    for name, value in named.items():
        assert torch.equal(value.grad, both[name].grad), name


@pytest.mark.parametrize("layout", ["expanded", "transposed", "every other", "one for all rows"])
def test_gradients_of_any_strides(layout: str) -> None:
    x, weight = tensor(6, 8), tensor(8)
    dout = {
        "expanded": lambda: torch.tensor(0.7).expand(6, 8),
        "transposed": lambda: torch.randn(8, 6).T,
        "every other": lambda: torch.randn(6, 16)[:, ::2],
        "one for all rows": lambda: torch.randn(8).expand(6, 8),
    }[layout]()
    norms.rms_norm(x, weight).backward(dout)
    strided = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    norms.rms_norm(x, weight).backward(dout.contiguous())
    assert torch.equal(strided[0], x.grad)
    assert torch.equal(strided[1], weight.grad)


def test_inputs_of_any_strides() -> None:
    base, weight = tensor(8, 6), tensor(16)
    norms.rms_norm(base.T, weight[::2]).square().sum().backward()
    got = base.grad.clone(), weight.grad.clone()
    base.grad = weight.grad = None
    norms.rms_norm(base.T.contiguous(), weight[::2].contiguous()).square().sum().backward()
    torch.testing.assert_close(got[0], base.grad)
    torch.testing.assert_close(got[1], weight.grad)


def test_rows_of_zero_elements() -> None:
    x, weight = tensor(0, 8), tensor(8)
    norms.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(8))


def test_a_weight_that_is_shared_and_a_graph_that_is_kept() -> None:
    x, weight = tensor(4, 8), tensor(8)
    y = norms.rms_norm(norms.layer_norm(x, weight), weight).square().sum()
    y.backward(retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once[0])
    torch.testing.assert_close(weight.grad, 2 * once[1])


def test_masked_rows_have_no_gradient() -> None:
    x, weight = tensor(4, 8), tensor(8)
    where = torch.tensor([True, False, True, True])
    y = norms.rms_norm(x, weight, where=where, valid_rows=torch.tensor([3]), masked="zero")
    y.backward(torch.ones_like(y))
    assert torch.equal(y[1::2], torch.zeros(2, 8))
    assert torch.equal(x.grad[1::2], torch.zeros(2, 8))
    assert (x.grad[::2] != 0).all()
    got = weight.grad.clone()
    weight.grad = None
    norms.rms_norm(x[::2], weight).sum().backward()
    torch.testing.assert_close(got, weight.grad)


def test_bound_norms_are_differentiable() -> None:
    x, weight = tensor(4, 8), torch.nn.Parameter(tensor(8, grad=False))
    norms.bind_layer_norm(weight)(x).square().sum().backward()
    got = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    norms.layer_norm(x, weight).square().sum().backward()
    assert torch.equal(got[0], x.grad)
    assert torch.equal(got[1], weight.grad)


def test_out_dtype() -> None:
    x, weight = tensor(4, 8, dtype="bfloat16"), tensor(8)
    y = norms.rms_norm(x, weight, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_parameters_of_another_library_are_constants(device: str) -> None:
    x = tensor(4, 8)
    weight = values = np.linspace(-1, 2, 8, dtype=np.float32)
    if device == "cuda":
        weight = pytest.importorskip("cupy").asarray(values)
    norms.rms_norm(x, weight).square().sum().backward()
    got = x.grad.clone()
    x.grad = None
    norms.rms_norm(x, torch.from_numpy(values).to(device)).square().sum().backward()
    assert torch.equal(got, x.grad)


# How autograd sees it -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_autocast_changes_no_dtype(function: str, dtype: str, device: str) -> None:
    named = inputs(function, dtype, "float32")
    with torch.autocast(device, dtype=getattr(torch, dtype)):
        result = getattr(norms, function)(**named)
    first = result if function in PLAIN else result[0]
    assert first.dtype == getattr(torch, dtype)
    total(result).backward()
    for value in named.values():
        assert value.grad.dtype == value.dtype
    once = {name: value.grad.clone() for name, value in named.items()}
    for value in named.values():
        value.grad = None
    total(getattr(norms, function)(**named)).backward()
    for name, value in named.items():
        assert torch.equal(value.grad, once[name])


def test_autocast_between_layers_of_float32(device: str) -> None:
    linear = torch.nn.Linear(8, 8, bias=False)
    weight = torch.nn.Parameter(torch.ones(8))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = linear(norms.rms_norm(linear(torch.randn(4, 8)), weight))
    y.float().sum().backward()
    assert weight.grad.dtype == linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_autocast_adds_no_launch(function: str, device: str) -> None:
    """Neither does a float32 weight, beside what a linear layer gives in bfloat16."""
    if device != "cpu":
        pytest.skip("launches of tensors of the CPU are recorded")
    linear = torch.nn.Linear(64, 64, bias=False)
    weight, x = torch.nn.Parameter(torch.ones(64)), torch.randn(4, 64)
    with recorded(90, 132) as launches, torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = linear(x)
        hidden.retain_grad()
        given = (hidden, hidden) if function in ADDS else (hidden,)
        if function == "qk_norm":
            given = hidden.view(4, 1, 64), hidden.view(4, 1, 64), weight
        result = getattr(norms, function)(*given, weight)
        assert len(launches) == 1
        y = result if function in PLAIN else result[0]
        assert y.dtype == torch.bfloat16
        types = launches[0].specialisation.template_arguments
        assert {"__nv_bfloat16", "float"} <= set(types)
        total(result).backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == linear.weight.grad.dtype == torch.float32


SAVED = {
    "rms_norm": {"x", "weight", "bias", "rstd"},
    "layer_norm": {"x", "weight", "bias", "rstd", "mean"},
    "add_rms_norm": {"residual_out", "weight", "bias", "rstd"},
    "add_layer_norm": {"residual_out", "weight", "bias", "rstd", "mean"},
    "qk_norm": {"q", "k", "q_weight", "k_weight"},
}


@pytest.mark.parametrize("function", SAVED)
def test_nothing_is_saved_that_backward_does_not_read(function: str) -> None:
    named = inputs(function)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept), lambda _: None):
        result = getattr(norms, function)(**named)
    known = {value.data_ptr(): name for name, value in named.items()}
    if function in ADDS:
        known[result[1].data_ptr()] = "residual_out"
    statistics = ["mean", "rstd"] if "layer" in function else ["rstd"]
    names = set()
    for value in saved:
        name = known.get(value.data_ptr())
        names.add(name or statistics.pop())
        assert name or (value.shape == ROWS and value.dtype == torch.float32)
    assert names == SAVED[function]
    assert len(saved) == len(names)


def test_a_bias_without_gradient_is_not_saved() -> None:
    saved: list[Any] = []
    bias = tensor(8, grad=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept), lambda _: None):
        norms.rms_norm(tensor(4, 8), None, bias)
    assert bias.data_ptr() not in [value.data_ptr() for value in saved]


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast")  # raised within torch 2.4
def test_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = tensor(4, 8), tensor(8)
    norms.rms_norm(x.sin(), weight).square().sum().backward()
    expected = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    call: Callable[[Any], Any] = lambda x: norms.rms_norm(x.sin(), weight).square().sum()  # noqa: E731
    checkpoint(call, x, use_reentrant=False).backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_values_that_changed_since_forward_are_noticed() -> None:
    x, weight = tensor(4, 8), tensor(8)
    y = norms.rms_norm(x * 1, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, residual_out = norms.add_rms_norm(x, x, weight)
    with torch.no_grad():
        residual_out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_graph_where_none_is_wanted() -> None:
    x, weight = tensor(4, 8), tensor(8)
    with torch.no_grad():
        assert norms.rms_norm(x, weight).grad_fn is None
    with torch.inference_mode():
        assert norms.rms_norm(x, weight).grad_fn is None
    assert norms.rms_norm(x.detach(), weight.detach()).grad_fn is None
    assert norms.rms_norm(x.detach(), weight).requires_grad
    assert norms.rms_norm(x, weight).grad_fn is not None


def test_forward_gives_the_same_bits_with_and_without_a_graph() -> None:
    named = inputs("add_layer_norm", "bfloat16")
    with torch.no_grad():
        expected = norms.add_layer_norm(**named)
    for got, plain in zip(norms.add_layer_norm(**named), expected, strict=True):
        assert torch.equal(got, plain)


def test_threads_train_at_once() -> None:
    def train(results: list[Any], number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(64, 32, generator=generator).to(where).requires_grad_()
        norms.rms_norm(x, weight).square().sum().backward()
        results[number] = x.grad

    where = torch.empty(0).device
    weight = tensor(32, grad=False)
    together: list[Any] = [None] * 4
    with torch.device("cpu"):
        threads = [threading.Thread(target=train, args=(together, n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        alone: list[Any] = [None] * 4
        with torch.device("cpu"):
            train(alone, number)
        assert torch.equal(alone[number], together[number])


# Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_double_backward_is_refused(function: str) -> None:
    named = inputs(function)
    loss = total(getattr(norms, function)(**named))
    first = next(iter(named.values()))
    (gradient,) = torch.autograd.grad(loss, first, create_graph=True)
    assert gradient.requires_grad  # not detached: the next call says why it cannot be had
    with pytest.raises(RuntimeError, match=r"differentiable only once$"):
        gradient.sum().backward()


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_double_backward_to_an_input_is_refused(function: str) -> None:
    """torch.autograd.grad goes to the tensors that it is given, and past all that lies aside."""
    named = inputs(function)
    loss = total(getattr(norms, function)(**named))
    first = next(iter(named.values()))
    (gradient,) = torch.autograd.grad(loss, first, create_graph=True)
    penalty = gradient.square().sum() + sum(value.square().sum() for value in named.values())
    for name, value in named.items():
        if name != "bias":  # which no gradient depends on
            with pytest.raises(RuntimeError, match=r"differentiable only once$"):
                torch.autograd.grad(penalty, value, retain_graph=True)


def test_checkpointed_norms_take_create_graph() -> None:
    """A checkpoint gives each saved tensor once."""
    x = tensor(3, 8)
    y = torch.utils.checkpoint.checkpoint(norms.rms_norm, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(total(y), x, create_graph=True)
    (expected,) = torch.autograd.grad(total(norms.rms_norm(x)), x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_transforms_are_refused(function: str) -> None:
    call, named = getattr(norms, function), inputs(function)
    values, detached = list(named.values()), [value.detach() for value in named.values()]
    batched = tuple(0 if value.ndim == 3 else None for value in values)
    message = r"^[xq] must be a tensor with memory of its own, got one within torch\.func"
    for tensors in (values, detached):
        with pytest.raises(TypeError, match=message):
            torch.func.vmap(call, in_dims=batched)(*tensors)
        with pytest.raises(TypeError, match=message):
            torch.func.grad(lambda *tensors: total(call(*tensors)))(*tensors)


@pytest.mark.filterwarnings(TORCHS_OWN)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_forward_mode_is_refused(function: str, grad: bool) -> None:
    named = {name: value.detach().requires_grad_(grad) for name, value in inputs(function).items()}
    forward_ad = torch.autograd.forward_ad
    for name, value in named.items():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            with pytest.raises(RuntimeError, match="has a forward-mode tangent, and this function"):
                getattr(norms, function)(**(named | {name: dual}))


@pytest.mark.filterwarnings(TORCHS_OWN)
@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_the_short_road_drops_no_gradient(function: str) -> None:
    call, named = getattr(norms, function), inputs(function)
    plain = {name: value.detach() for name, value in named.items()}
    for _ in range(3):  # from the second on by the short road, on a GPU
        call(**plain)
    for name in named:
        result = call(**(plain | {name: named[name]}))
        assert (result if function in PLAIN else result[0 if name[0] != "k" else 1]).requires_grad
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(plain[name], torch.ones_like(plain[name]))
            with pytest.raises(RuntimeError, match="has a forward-mode tangent"):
                call(**(plain | {name: dual}))
        batch = plain[name].expand(2, *plain[name].shape).clone()
        with pytest.raises(TypeError, match=r"one within torch\.func"):
            torch.func.vmap(lambda one, name=name: call(**(plain | {name: one})))(batch)
    with torch.no_grad():
        result = call(**named)
    assert not (result if function in PLAIN else result[0]).requires_grad


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_given_outputs_are_refused(function: str) -> None:
    named = inputs(function)
    like = {"out": "x", "residual_out": "residual", "q_out": "q", "k_out": "k"}
    call = getattr(norms, function)
    for out, name in like.items():
        if name not in named:
            continue
        given = {out: torch.empty_like(named[name], requires_grad=False)}
        message = rf"requires grad, .* a given {out} have no gradient: .* torch\.no_grad\(\)$"
        with pytest.raises(RuntimeError, match=message):
            call(**named, **given)
        with torch.no_grad():
            call(**named, **given)
        given[out].requires_grad_()
        with pytest.raises(ValueError, match=rf"^{out} must not require grad"):
            call(**named, **given)


def test_rows_that_are_left_untouched_are_refused() -> None:
    x, where = tensor(4, 8), torch.tensor([True, False, True, True])
    for options in ({"where": where}, {"valid_rows": torch.tensor(2)}):
        with pytest.raises(ValueError, match=r"^masked must be 'zero' where x requires grad"):
            norms.rms_norm(x, **options)
        with pytest.raises(ValueError, match=r"^masked must be 'zero' where weight requires grad"):
            norms.rms_norm(x.detach(), tensor(8), **options)
    norms.rms_norm(x, masked="keep").sum().backward()  # without a mask it says nothing


def test_errors_of_a_recorded_call_are_those_of_any_call() -> None:
    x = tensor(4, 8)
    with pytest.raises(ValueError, match=r"^weight must have shape \(8,\), got \(7,\)$"):
        norms.rms_norm(x, tensor(7))
    with pytest.raises(TypeError, match=r"^residual must be an array"):
        norms.add_rms_norm(x, None)
    with pytest.raises(ValueError, match=r"^q_weight must have shape \(8,\), got \(7,\)$"):
        norms.qk_norm(x, x, tensor(7))
    with pytest.raises(ValueError, match=r"^weight_offset must be 0 without a weight"):
        norms.layer_norm(x, weight_offset=1.0)
    with pytest.raises(TypeError, match=r"^masked must be a string"):
        norms.layer_norm(x, masked=1, valid_rows=torch.tensor(2))


@pytest.mark.parametrize("function", [*PLAIN, *ADDS])
def test_functions_with_statistics_and_gradients_record_none(function: str) -> None:
    named = inputs(function)
    with pytest.raises(RuntimeError, match=r"^x requires grad, .* torch\.no_grad\(\)"):
        getattr(norms, f"{function}_forward")(**named)


def test_a_call_does_not_import_torch() -> None:
    program = (
        "import sys, numpy, cupy_rmsnorm as norms;"
        "norms.rms_norm(numpy.ones((2, 3), numpy.float32));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True)


# Streams and devices --------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*PLAIN, *ADDS, "qk_norm"])
def test_backward_runs_on_forwards_stream(
    function: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no streams")
    named = inputs(function)
    call, backward = getattr(norms, function), _run.backward
    total(call(**named)).backward()
    expected = {name: value.grad for name, value in named.items()}
    values = {name: value.detach().clone() for name, value in named.items()}
    seen: list[tuple[int, int]] = []

    def spy(*arguments: Any, **rest: Any) -> Any:
        seen.append((threading.get_ident(), torch.cuda.current_stream().cuda_stream))
        return backward(*arguments, **rest)

    monkeypatch.setattr(_run, "backward", spy)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        late = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # what runs on another stream reads NaN
            for name, value in late.items():
                value.copy_(values[name])
                value.requires_grad_()
            loss = total(call(**late))
            torch.cuda._sleep(20_000_000)
            loss.backward(torch.ones_like(loss))
        side.synchronize()
        for name, value in late.items():
            assert torch.equal(value.grad, expected[name]), name
    assert {stream for _, stream in seen} == {side.cuda_stream}
    assert threading.get_ident() not in {thread for thread, _ in seen}


def test_backward_runs_on_forwards_device(device: str) -> None:
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    named = inputs("add_rms_norm")
    total(norms.add_rms_norm(**named)).backward()
    with torch.device("cuda:1"):
        other = {
            name: value.detach().to("cuda:1").requires_grad_() for name, value in named.items()
        }
        loss = total(norms.add_rms_norm(**other))
    with torch.cuda.device(0):
        loss.backward()
        assert torch.cuda.current_device() == 0
    for name, value in other.items():
        assert value.grad.device.index == 1
        assert torch.equal(value.grad.cpu(), named[name].grad.cpu()), name
