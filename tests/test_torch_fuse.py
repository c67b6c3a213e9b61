# SPDX-License-Identifier: Apache-2.0
"""The adds that `patch` moves into the kernels of norms: where, where not, and what stays."""

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

pytestmark = [  # raised within torch
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:At pre-dispatch tracing"),  # torch 2.4
]

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
        self.before, self.linear, self.norm = norm(SIZE), torch.nn.Linear(SIZE, SIZE), norm(SIZE)
        self.passed = False

    @passes_on
    def forward(self, hidden_states: Any, *, more: float = 0.25) -> Any:
        residual = hidden_states
        hidden_states = self.before(hidden_states)
        if more:
            hidden_states = super().scale(self.linear(hidden_states))
            hidden_states = residual + more * hidden_states * self.__before

            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        return residual - hidden_states


class Bare(Layer):
    """The same, and nothing that it does besides."""

    forward = Layer.forward.__wrapped__  # type: ignore[attr-defined]


class Apart(Layer):
    """Nothing that may be fused: other names, another operation, another module."""

    def forward(self, h: Any) -> Any:
        residual = h
        normed = self.norm(h)
        h = residual - normed
        kept = h + residual
        h = self.norm(h)
        h = h + kept
        residual = h
        h = self.linear(h)
        h = h
        h = self.norm(h)
        return h + residual


class Dropped(Layer):
    """Something between the add and the norm."""

    def forward(self, h: Any) -> Any:
        residual = self.linear(h)
        h = h + residual
        h = torch.nn.functional.dropout(h, 0.5, self.training)
        residual = h
        h = self.norm(h)
        return h + residual


def hides(function: Any) -> Any:
    """A decorator that holds what it calls somewhere else."""
    held = [function]
    return functools.wraps(function)(lambda *args, **kwargs: held[0](*args, **kwargs))


class Hidden(Layer):
    forward = hides(Layer.forward)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which fused calls were made, and not refused."""
    made: list[str] = []

    def spy(name: str) -> Any:
        function = getattr(_torch_forwards.Replacement, name)

        def spied(*args: Any) -> Any:
            result = function(*args)
            if result is not None:
                made.append(name)
            return result

        return spied

    for name in ("run_added", "run_beside"):
        monkeypatch.setattr(_torch_forwards.Replacement, name, spy(name))
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
def test_a_layer_computes_the_same(norm: Any, calls: list[str], x: Any) -> None:
    layer = Layer(norm).to(x.device)
    expected = trained(layer, x)
    shorter = layer(x, more=0.0)
    report = patch(layer)
    assert report.fused == {"": "Layer"}
    layer.passed = False
    torch.testing.assert_close(trained(layer, x), expected, rtol=1e-4, atol=1e-5)
    assert (calls, layer.passed) == (["run_beside", "run_added"], True)
    torch.testing.assert_close(layer(x, more=0.0), shorter, rtol=1e-5, atol=1e-6)
    own, made = type(layer).forward, layer.forward.__self__.function
    assert (made.__name__, made.__qualname__) == (own.__name__, own.__qualname__)
    calls.clear()
    assert set(unpatch(layer)) == {"", "before", "norm"}
    assert torch.equal(trained(layer, x)[0], expected[0])
    assert calls == []


@pytest.mark.parametrize("asked", ["y", "kept", "weight"])
def test_one_of_two_gradients_may_be_absent(asked: str, x: Any) -> None:
    layer = Layer().to(x.device)
    patch(layer)
    layer.before.weight.requires_grad_(asked == "weight")
    x.requires_grad_()
    y, kept = _torch_fuse.norm_beside(x, layer.before)
    loss = (kept if asked == "kept" else y).sin().sum()
    (got,) = torch.autograd.grad(loss, layer.before.weight if asked == "weight" else x)
    unpatch(layer)
    loss = (x if asked == "kept" else layer.before(x)).sin().sum()
    (expected,) = torch.autograd.grad(loss, layer.before.weight if asked == "weight" else x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FUSED)
def test_a_models_layers_add_in_the_kernel(family: str, calls: list[str], device: str) -> None:
    """And in float32, where the sum is not rounded again, compute what they do with it apart."""
    pytest.importorskip("transformers")
    fused = models.build(family).to(device)
    apart = copy.deepcopy(fused)
    assert patch(apart, fuse_add=False).fused == {}
    expected = models.logits(apart)
    assert calls == []
    report = patch(fused)
    assert str(report).endswith(
        f"2 layers add residuals in the kernels of norms: 2 {family}DecoderLayer"
    )
    torch.testing.assert_close(models.logits(fused), expected, rtol=1e-5, atol=1e-5)
    assert calls == ["run_added"] * 2


@pytest.mark.parametrize(("name", "other"), [("norm", "run_beside"), ("before", "run_added")])
def test_a_norm_with_hooks_runs_apart(name: str, other: str, calls: list[str], x: Any) -> None:
    layer = Layer().to(x.device)
    patch(layer)
    norm = layer.get_submodule(name)
    seen: list[Any] = []
    for add_hook in (
        norm.register_forward_pre_hook,
        norm.register_forward_hook,
        norm.register_full_backward_hook,
        norm.register_full_backward_pre_hook,
    ):
        hook = add_hook(lambda *given: seen.append(given[0]))
        trained(layer, x)
        hook.remove()
    assert (calls, seen) == ([other] * 4, [norm] * 4)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    trained(layer, x)
    hook.remove()
    assert len(calls) == 4
    trained(layer, x)
    assert len(calls) == 6


# What is added to x, and whether a kernel may add it.
ADDED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "alike": (lambda x: 2 * x, True),
    "of another dtype": (lambda x: x.bfloat16(), False),
    "of another shape": (lambda x: x[0], False),
    "a number": (lambda x: 1.0, False),
}


@pytest.mark.parametrize("added", ADDED)
def test_each_call_decides(added: str, calls: list[str], x: Any) -> None:
    function, fuses = ADDED[added]
    layer = Layer().to(x.device)
    layer.linear = Given(function)
    expected = layer(x)
    patch(layer)
    got = layer(x)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert calls == ["run_added"] * fuses, "x needs no gradient"
    layer.norm = torch.nn.SiLU()
    layer(x)
    assert calls == ["run_added"] * fuses


def test_other_statements_stay(calls: list[str], x: Any) -> None:
    layer, dropped = Apart().to(x.device), Dropped().to(x.device)
    assert patch(layer).fused == {}
    patch(dropped)
    layer(x), dropped(x)
    assert calls == ["run_beside"]


# Why a layer is left -----------------------------------------------------------------------------


def reason(layer: Any) -> str:
    report = patch(layer)
    assert report.fused == {}
    assert report.replaced == {"before": "RMSNorm", "norm": "RMSNorm"}
    return report.left[""]


def test_a_layer_that_is_left_says_why() -> None:
    assert "a decorator that does not show what it calls" in reason(Hidden())
    bound = Layer()
    bound.forward = functools.partial(Layer.forward, bound)
    assert "bound to the instance by other code" in reason(bound)
    layer = Layer()
    patch(layer)
    assert patch(layer).left == dict.fromkeys(["", "before", "norm"], "it is patched already")


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
def test_a_copy_is_fused_and_restored(duplicate: Any, llama: Any, calls: list[str]) -> None:
    attributes = [dict(module.__dict__) for module in llama.modules()]
    patch(llama)
    expected = models.logits(llama)
    made = duplicate(llama)
    calls.clear()
    for layer in made.model.layers:
        assert layer.forward.__self__.module is layer
    assert torch.equal(models.logits(made), expected)
    assert calls == ["run_added"] * 2
    assert len(unpatch(llama)) == 7
    assert [module.__dict__ for module in llama.modules()] == attributes


@pytest.mark.parametrize("sharded", [False, True])
def test_checkpointing_stays(sharded: bool, llama: Any, calls: list[str]) -> None:
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
    assert len(ran) == 4, "each layer forwards, and once more for its backward"
    assert (calls.count("run_added"), calls.count("run_beside")) == (4, 4)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


# Under torch.compile ----------------------------------------------------------------------------

compiles = pytest.mark.skipif(
    not _torch_forwards.METHODS_ARE_TRACED, reason="dynamo leaves the norms of a patched model"
)
# Dynamo looks at the gradient of every input, a layer's hidden states too.
not_a_leaf = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


class Compiler:
    """A backend that keeps the forward and the backward graphs that torch.compile makes."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.forward: list[Any] = []
        self.backward: list[Any] = []
        self._backend = aot_autograd(
            fw_compiler=functools.partial(self._keep, self.forward),
            bw_compiler=functools.partial(self._keep, self.backward),
        )
        torch._dynamo.reset()

    def __call__(self, function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=self._backend, **({"fullgraph": True} | options))

    def layers(self, model: Any) -> None:
        """Compile each layer."""
        for layer in model.model.layers:
            layer.compile(backend=self._backend, fullgraph=True)

    @staticmethod
    def _keep(graphs: list[Any], module: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        graphs.append(module.graph)
        return make_boxed_func(module.forward)


def called(graph: Any) -> list[str]:
    """What a graph calls, without its overloads: this library's operators by their names."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [target.removeprefix("cupy_rmsnorm.").rsplit(".", 1)[0] for target in targets]


def added_behind_norms(graph: Any) -> list[Any]:
    """The adds to what a backward operator made: each reads and writes all of it once more."""

    def made_by_a_norm(node: Any) -> bool:
        if not isinstance(node, torch.fx.Node) or node.op != "call_function":
            return False
        name = str(node.target)
        if name.startswith("cupy_rmsnorm."):
            return "norm_backward" in name
        passes_on = ("getitem", "view", "alias", "detach", "clone")
        return any(word in name for word in passes_on) and made_by_a_norm(node.args[0])

    adds = [node for node in graph.nodes if str(node.target).startswith("aten.add.")]
    return [node for node in adds if any(map(made_by_a_norm, node.args))]


@compiles
@not_a_leaf
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi"])
def test_layers_compile_once_with_the_adds_in_operators(family: str, device: str) -> None:
    pytest.importorskip("transformers")
    model = models.build(family).to(device)
    patch(model)
    expected = models.gradients(model)
    compiler = Compiler()
    compiler.layers(model)
    torch.testing.assert_close(models.gradients(model), expected, rtol=1e-5, atol=1e-7)
    (forward,), (backward,) = compiler.forward, compiler.backward
    norm = "layer_norm" if family == "Phi" else "rms_norm"
    adds = 0 if family == "Phi" else 1
    assert called(forward).count(f"add_{norm}_forward") == adds
    assert called(backward).count(f"add_{norm}_backward") == adds + 1
    assert added_behind_norms(backward) == []
    for graph in (forward, backward):
        assert not [name for name in called(graph) if "copy" in name or "beside" in name]


def beside(x: Any, layer: Any) -> tuple[Any, Any]:
    """A norm and its x, neither the first nor the last thing that is computed."""
    y, kept = _torch_fuse.norm_beside(2 * x, layer.before)
    return y.cos(), 3 * kept


def differentiated(function: Any, x: Any, layer: Any, asked: Callable[..., Any]) -> list[Any]:
    """What it returns, and the gradients of what is asked of that."""
    results = function(x, layer)
    loss = sum((one * torch.linspace(-1, 2, SIZE).to(one)).sum() for one in asked(*results))
    needed = [one for one in (x, *layer.before.parameters()) if one.requires_grad]
    return [*results, *torch.autograd.grad(loss, needed, allow_unused=True)]


ASKED: dict[str, Callable[..., Any]] = {
    "both": lambda *both: both,
    "y": lambda y, kept: [y],
    "kept": lambda y, kept: [kept],
}


@compiles
@pytest.mark.parametrize("norm", [torch.nn.RMSNorm, torch.nn.LayerNorm])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_compiled_norm_has_the_bits_of_one_that_is_not(
    asked: str, dtype: str, norm: Any, x: Any
) -> None:
    layer = Layer(norm).to(x.device, getattr(torch, dtype))
    x = x.to(layer.before.weight.dtype).requires_grad_()
    patch(layer)
    compiler = Compiler()
    for needs in (True, False):
        layer.before.weight.requires_grad_(needs)
        got = differentiated(compiler(beside), x, layer, ASKED[asked])
        for one, other in zip(got, differentiated(beside, x, layer, ASKED[asked]), strict=True):
            assert not one.any() if other is None else torch.equal(one, other)
    for graph in compiler.backward:
        assert added_behind_norms(graph) == []
        assert sum("norm_backward" in name for name in called(graph)) == 1


VIEWS: dict[str, Callable[[Any], Any]] = {
    "part": lambda kept: kept[1:],
    "view": lambda kept: kept.view(-1, 2),
    "transposed": lambda kept: kept.mT,
    "expanded": lambda kept: kept.unsqueeze(0).expand(2, *kept.shape),
}


@compiles
@not_a_leaf
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_x_that_leaves_the_graph_has_its_gradient(
    view: str, breaks: bool, x: Any
) -> None:
    layer = Layer().to(x.device)
    patch(layer)

    def run(x: Any) -> Any:
        y, kept = _torch_fuse.norm_beside(x, layer.before)
        seen = VIEWS[view](kept)
        if breaks:
            torch._dynamo.graph_break()
        return y.cos(), seen

    x.requires_grad_()
    results = [function(2 * x) for function in (run, Compiler()(run, fullgraph=not breaks))]
    expected, got = (torch.autograd.grad(y.sum() + 3 * seen.sin().sum(), x) for y, seen in results)
    torch.testing.assert_close(got, expected)


def without_gradients(function: Any, x: Any, layer: Any) -> list[Any]:
    with torch.no_grad():
        return list(function(x, layer))


@compiles
@pytest.mark.parametrize("case", ["no_grad", "x needs none", "of two dtypes", "hooks"])
def test_where_no_operator_adds_a_gradient(case: str, x: Any) -> None:
    layer = Layer().to(x.device)
    patch(layer)
    x.requires_grad_(case != "x needs none")
    x = x.bfloat16().detach().requires_grad_() if case == "of two dtypes" else x
    if case == "hooks":
        layer.before.register_forward_hook(lambda *given: None)

    def run(function: Any) -> list[Any]:
        if case == "no_grad":
            return without_gradients(function, x, layer)
        return differentiated(function, x, layer, ASKED["both"])

    compiler = Compiler()
    got = run(compiler(beside))
    for one, other in zip(got, run(beside), strict=True):
        assert torch.equal(one, other)
    assert not any("add_rms_norm_backward" in called(graph) for graph in compiler.backward)


@compiles
def test_a_checkpoint_is_compiled_with_the_adds_in_operators(x: Any) -> None:
    layers = [Bare().to(x.device) for _ in range(2)]
    for layer in layers:
        patch(layer)

    def checkpointed(x: Any) -> Any:
        for layer in layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.sin()

    compiler = Compiler()
    compiled = compiler(checkpointed)
    for rows in (5, 4, 3):
        given = x[:rows].clone().requires_grad_()
        expected = torch.autograd.grad(checkpointed(given).sum(), given)
        got = torch.autograd.grad(compiled(given).sum(), given)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert len(compiler.backward) == 2, "of one shape, and of any"
    for backward in compiler.backward:
        assert called(backward).count("add_rms_norm_backward") == 4
        assert called(backward).count("rms_norm_forward") == 2, "a checkpoint computes again"
        assert added_behind_norms(backward) == []


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_is_exported(strict: bool, x: Any) -> None:
    if strict and _torch_forwards.TORCH < (2, 11):
        pytest.skip("dynamo takes the layer's parameters for inputs")
    layer = Bare().to(x.device)
    patch(layer)
    expected = layer(x)
    exported = torch.export.export(layer, (x.requires_grad_(),), strict=strict)
    for program in (exported, exported.run_decompositions()):
        assert torch.equal(program.module()(x), expected)


def test_the_operator_of_a_norm_beside_its_x(x: Any) -> None:
    operator = torch.ops.cupy_rmsnorm.norm_beside.default
    given = "layer", x.requires_grad_(), *torch.ones(2, SIZE).to(x), 1e-5, 0.5, -1, "once", None
    torch.library.opcheck(operator, given)
    y, _ = operator(*given)
    (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable only once$"):
        gradient.sum().backward()
    with pytest.raises(TypeError, match=r"one within torch\.func"):
        torch.func.grad(lambda x: operator("layer", x, *given[2:])[0].sum())(x.detach())


def test_code_is_told_from_other_code() -> None:
    def of(text: str) -> Any:
        return compile(text, "text", "exec")

    assert _torch_fuse._alike(of("lambda: 1"), of("lambda: 1"))
    for other in ("lambda: 2", "lambda: 1.0", "lambda x: 1", "lambda: x", "x"):
        assert not _torch_fuse._alike(of("lambda: 1"), of(other))
