# SPDX-License-Identifier: Apache-2.0
"""The residual add that `patch` moves into a norm's kernel: where, where not, and what stays."""

from __future__ import annotations

import copy
import functools
import linecache
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests import models

torch = pytest.importorskip("torch")

from cupy_rmsnorm import _torch_forwards, _torch_fuse  # noqa: E402
from cupy_rmsnorm.torch import patch, unpatch  # noqa: E402

SIZE = 12
FUSED = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "DeepseekV3"]


def passes_on(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.passed = True
        return function(self, *args, **kwargs)

    return wrapper


class Scaled(torch.nn.Module):
    def scale(self, x: Any) -> Any:
        return 2 * x


class Given(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Layer(Scaled):
    """What a class's own forward may hold: a decorator, a closure, a private name, a default."""

    __before = 4.0

    def __init__(self, norm: Callable[..., Any] = torch.nn.RMSNorm) -> None:
        super().__init__()
        self.linear, self.norm, self.passed = torch.nn.Linear(SIZE, SIZE), norm(SIZE), False

    @passes_on
    def forward(self, hidden_states: Any, *, more: float = 0.25) -> Any:
        residual = hidden_states
        if more:
            hidden_states = super().scale(self.linear(hidden_states))
            hidden_states = residual + more * hidden_states * self.__before

            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        return residual - hidden_states


class Apart(Layer):
    """Three that are not it: something between, another name, another operation."""

    def forward(self, h: Any) -> Any:
        residual = h
        h = residual + self.linear(h)
        h = torch.nn.functional.dropout(h, 0.5, self.training)
        residual = h
        h = self.norm(h)
        h = residual + h
        residual = h
        normed = self.norm(h)
        h = residual - normed
        residual = h
        h = self.norm(h)
        h = residual + h
        residual = h
        h = self.linear(h)
        return h


def hides(function: Any) -> Any:
    """A decorator that holds what it calls somewhere else."""
    held = [function]
    return functools.wraps(function)(lambda *args, **kwargs: held[0](*args, **kwargs))


class Hidden(Layer):
    forward = hides(Layer.forward)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The dtypes that the fused functions are called with."""
    made: list[Any] = []

    def spy(function: Any) -> Any:
        def spied(x: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(x.dtype)
            return function(x, *args, **kwargs)

        return spied

    for name in ("add_rms_norm", "add_layer_norm"):
        monkeypatch.setattr(_torch_forwards, name, spy(getattr(_torch_forwards, name)))
    return made


@pytest.fixture
def x(device: str) -> Any:
    return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).to(device)


def trained(layer: Any, x: Any) -> list[Any]:
    """What it returns, and gradients."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("norm", [torch.nn.RMSNorm, torch.nn.LayerNorm])
def test_a_layer_computes_the_same(norm: Any, calls: list[Any], x: Any) -> None:
    layer = Layer(norm).to(x.device)
    expected = trained(layer, x)
    report = patch(layer)
    assert report.fused == {"": "Layer"}
    layer.passed = False
    torch.testing.assert_close(trained(layer, x), expected, rtol=1e-4, atol=1e-5)
    assert (len(calls), layer.passed) == (1, True)
    torch.testing.assert_close(layer(x, more=0.0), torch.zeros_like(x))
    own, made = type(layer).forward, layer.forward.__self__.function
    assert (made.__name__, made.__qualname__) == (own.__name__, own.__qualname__)
    assert set(unpatch(layer)) == {"", "norm"}
    assert torch.equal(trained(layer, x)[0], expected[0])
    assert len(calls) == 1


@pytest.mark.parametrize("family", FUSED)
def test_a_models_layers_add_in_the_kernel(family: str, calls: list[Any], device: str) -> None:
    """And in float32, where the sum is not rounded again, compute what they do with it apart."""
    pytest.importorskip("transformers")
    fused = models.build(family).to(device)
    apart = copy.deepcopy(fused)
    assert patch(apart, fuse_add=False).fused == {}
    expected = models.logits(apart)
    assert calls == []
    report = patch(fused)
    assert str(report).endswith(
        f"2 layers add the residual in the norm's kernel: 2 {family}DecoderLayer"
    )
    torch.testing.assert_close(models.logits(fused), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


def test_a_norm_with_hooks_runs_apart(calls: list[Any], x: Any) -> None:
    layer = Layer().to(x.device)
    patch(layer)
    seen: list[Any] = []
    hook: Any
    for add_hook in (
        layer.norm.register_forward_pre_hook,
        layer.norm.register_forward_hook,
        layer.norm.register_full_backward_hook,
        layer.norm.register_full_backward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
    ):
        hook = add_hook(lambda *given: seen.append(given[1]))
        trained(layer, x)
        hook.remove()
    assert (calls, len(seen) >= 5) == ([], True)
    trained(layer, x)
    assert len(calls) == 1


# What is added to x, and whether a kernel may add it.
ADDED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "alike": (lambda x: 2 * x, True),
    "of another dtype": (lambda x: x.bfloat16(), False),
    "of another shape": (lambda x: x[0], False),
    "a number": (lambda x: 1.0, False),
}


@pytest.mark.parametrize("added", ADDED)
def test_each_call_decides(added: str, calls: list[Any], x: Any) -> None:
    function, fuses = ADDED[added]
    layer = Layer().to(x.device)
    layer.linear = Given(function)
    expected = layer(x)
    patch(layer)
    got = layer(x)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == fuses
    layer.norm = torch.nn.SiLU()
    layer(x)
    assert len(calls) == fuses


def test_other_statements_stay(calls: list[Any], x: Any) -> None:
    layer = Apart().to(x.device)
    assert patch(layer).fused == {}
    layer(x)
    assert calls == []


# Why a layer is left -----------------------------------------------------------------------------


def reason(layer: Any) -> str:
    report = patch(layer)
    assert report.fused == {}
    assert report.replaced == {"norm": "RMSNorm"}
    return report.left[""]


def test_a_layer_that_is_left_says_why() -> None:
    assert "a decorator that does not show what it calls" in reason(Hidden())
    bound = Layer()
    bound.forward = functools.partial(Layer.forward, bound)
    assert "bound to the instance by other code" in reason(bound)
    layer = Layer()
    patch(layer)
    assert patch(layer).left == {"": "it is patched already", "norm": "it is patched already"}


SOURCE = """
from tests.test_torch_fuse import Layer
class Layer(Layer):
    def forward(self, x):
        x = x + 0.5 * x
        residual = x
        x = self.norm(x)
        return x - residual
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCE, None),
        (SOURCE.replace("0.5", "0.4"), "the source of its forward is not what runs"),
        (SOURCE.replace("def", "\n    def"), "the source of its forward is not at hand"),
        (SOURCE + ")", "the source of its forward is not at hand"),
        (None, "the source of its forward is not at hand"),
    ],
)
def test_the_source_has_to_be_what_runs(text: str | None, message: str, tmp_path: Any) -> None:
    path = tmp_path / "layers.py"
    names: dict[str, Any] = {"__name__": "layers"}
    exec(compile(SOURCE, str(path), "exec"), names)
    if text is not None:
        path.write_text(text)
    linecache.checkcache(str(path))
    if message:
        assert reason(names["Layer"]()) == message
    else:
        assert patch(names["Layer"]()).fused == {"": "Layer"}


# Around a layer ----------------------------------------------------------------------------------


@pytest.fixture
def llama(device: str) -> Any:
    pytest.importorskip("transformers")
    return models.build("Llama").to(device)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))]
)
def test_a_copy_is_fused_and_restored(duplicate: Any, llama: Any, calls: list[Any]) -> None:
    attributes = [dict(module.__dict__) for module in llama.modules()]
    patch(llama)
    expected = models.logits(llama)
    made = duplicate(llama)
    calls.clear()
    for layer in made.model.layers:
        assert layer.forward.__self__.module is layer
    assert torch.equal(models.logits(made), expected)
    assert len(calls) == 2
    assert len(unpatch(llama)) == 7
    assert [module.__dict__ for module in llama.modules()] == attributes


@pytest.mark.parametrize("sharded", [False, True])
def test_checkpointing_stays(sharded: bool, llama: Any, calls: list[Any]) -> None:
    """Also under a class that is made for the instance later, as FSDP does."""
    expected = models.gradients(llama)
    patch(llama)
    llama.train()
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    ran: list[str] = []
    for layer in llama.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, checkpoint
        layer.self_attn.register_forward_pre_hook(lambda *given: ran.append("attention"))
        if sharded:
            layer.__class__ = type("Sharded", (type(layer),), {})
    got = models.gradients(llama)
    assert (len(ran), len(calls)) == (4, 4), "each layer forwards, and once more for its backward"
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_layers_compile_once_with_the_add_in_the_operator(llama: Any) -> None:
    graphs: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    torch._dynamo.reset()
    patch(llama)
    expected = models.logits(llama)
    for layer in llama.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    assert torch.equal(models.logits(llama), expected)
    assert len(graphs) == 1
    assert graphs[0].count("cupy_rmsnorm.add") == 1


def test_code_is_told_from_other_code() -> None:
    def of(text: str) -> Any:
        return compile(text, "text", "exec")

    assert _torch_fuse._alike(of("lambda: 1"), of("lambda: 1"))
    for other in ("lambda: 2", "lambda: 1.0", "lambda x: 1", "lambda: x", "x"):
        assert not _torch_fuse._alike(of("lambda: 1"), of(other))
