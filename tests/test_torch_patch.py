# SPDX-License-Identifier: Apache-2.0
"""`patch` and `unpatch`: each norm by its own semantics, and everything else as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import io
import pickle
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import compare, models, oracle

torch = pytest.importorskip("torch")

from cupy_rmsnorm import _torch_patch  # noqa: E402
from cupy_rmsnorm.torch import PatchReport, RMSNorm, patch, unpatch  # noqa: E402


class Norms(NamedTuple):
    """What a family's model has, said once more and apart from the table under test."""

    kind: str
    count: int
    cast: str = "before_weight"
    weight_offset: float = 0.0
    eps: str = "variance_epsilon"
    norm: str = "rms"
    adds: int = 2  # layers that keep a residual beside a norm


NORMS = {
    "Llama": Norms("LlamaRMSNorm", 5),
    "Mistral": Norms("MistralRMSNorm", 5),
    "Qwen2": Norms("Qwen2RMSNorm", 5),
    "Qwen3": Norms("Qwen3RMSNorm", 9),
    "Gemma": Norms("GemmaRMSNorm", 5, "once", 1.0, "eps"),
    "Gemma2": Norms("Gemma2RMSNorm", 9, "once", 1.0, "eps"),
    "Gemma3": Norms("Gemma3RMSNorm", 13, "once", 1.0, "eps"),
    "Phi": Norms("LayerNorm", 3, "once", eps="eps", norm="layer"),
    "Phi3": Norms("Phi3RMSNorm", 5),
    "DeepseekV3": Norms("DeepseekV3RMSNorm", 9),
    "T5": Norms("T5LayerNorm", 12, adds=0),
}


def dtypes(*names: str) -> Any:
    """Test with these, the ones that are not float32 or bfloat16 on the GPU only."""
    return pytest.mark.parametrize(
        ("device", "dtype"),
        [
            pytest.param(device, getattr(torch, name), marks=marks, id=f"{device}-{name}")
            for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
            for name in names
            if device == "cuda" or name != "float16"
        ],
        indirect=["device"],
    )


every_dtype = dtypes("float32", "bfloat16", "float16")
# In float32 the norms' share of the error drowns in that of matrix products, whose order differs.
half_dtypes = dtypes("bfloat16", "float16")


def pair(family: str, device: str, dtype: Any, seed: int = 0) -> tuple[Any, Any, PatchReport]:
    """The same model twice: as it is, and patched."""
    pytest.importorskip("transformers")
    eager = models.build(family, seed).to(device, dtype)
    patched = copy.deepcopy(eager)
    return eager, patched, patch(patched)


# transformers' models ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", NORMS)
def test_every_norm_of_a_model_is_replaced(family: str) -> None:
    pytest.importorskip("transformers")
    model = models.build(family)
    expected = NORMS[family]
    report = patch(model)
    assert set(report.replaced.values()) == {expected.kind}
    assert len(report.replaced) == expected.count
    assert report.left == {}
    assert len(report.fused) == expected.adds
    assert f"{expected.count} {expected.kind}" in str(report)


@every_dtype
@pytest.mark.parametrize("family", NORMS)
def test_each_module_is_within_the_bound_of_its_rule(family: str, device: str, dtype: Any) -> None:
    """On what the model itself gives it."""
    _, model, report = pair(family, device, dtype)
    seen: dict[str, tuple[Any, Any]] = {}
    for name in report.replaced:
        model.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: seen.update({name: (given[0], out)})
        )
    models.logits(model)
    assert set(seen) == set(report.replaced)
    expected = NORMS[family]
    for name, (x, y) in seen.items():
        module = model.get_submodule(name)
        bias = getattr(module, "bias", None)
        reference = oracle.forward(
            models.numpy(x),
            models.numpy(module.weight),
            None if bias is None else models.numpy(bias),
            norm=expected.norm,
            eps=getattr(module, expected.eps),
            weight_offset=expected.weight_offset,
            cast=expected.cast,
        ).y
        got = models.numpy(y)
        compare.close(got, reference.value, reference.bound(got.dtype.name), name)


@half_dtypes
@pytest.mark.parametrize("family", NORMS)
def test_logits_are_as_exact_as_the_models_own(family: str, device: str, dtype: Any) -> None:
    eager, patched, _ = pair(family, device, dtype)
    right = models.logits(models.in_float32(eager))
    allowed = 1.1 * models.error(models.logits(eager), right)
    assert models.error(models.logits(patched), right) <= allowed


@every_dtype
@pytest.mark.parametrize("family", NORMS)
def test_generates_the_same_tokens(family: str, device: str, dtype: Any) -> None:
    """All in float32; in 16 bits up to where the model's own error could choose another."""
    eager, patched, _ = pair(family, device, dtype)
    theirs, ours = models.generate(eager), models.generate(patched)
    sure = torch.ones_like(theirs.tokens, dtype=torch.bool)
    if dtype is not torch.float32:
        right = models.logits(models.in_float32(eager))
        error = (models.logits(eager) - right).abs().max()
        best, second = theirs.logits.topk(2).values.unbind(-1)
        sure = (best - second > error).cumprod(-1).bool()
        assert sure.sum() >= 3, "this model tells nothing"
    assert torch.equal(theirs.tokens[sure], ours.tokens[sure])


@half_dtypes
@pytest.mark.parametrize("family", NORMS)
def test_gradients_are_as_exact_as_the_models_own(family: str, device: str, dtype: Any) -> None:
    """Over three models: of one with so few rows the same error comes out 15 % up or down."""

    def squares(got: dict[str, Any], right: dict[str, Any]) -> list[float]:
        """Of the errors relative to each parameter's gradient."""
        zero = torch.zeros(())
        return [
            (models.error(got[name], wanted) / models.error(wanted, zero.to(wanted))) ** 2
            for name, wanted in right.items()
            if wanted.any()
        ]

    theirs, ours = [], []
    for seed in range(3):
        eager, patched, _ = pair(family, device, dtype, seed)
        right = models.gradients(models.in_float32(eager))
        found = models.gradients(eager), models.gradients(patched)
        assert set(found[0]) == set(found[1]) == set(right)
        theirs += squares(found[0], right)
        ours += squares(found[1], right)
    assert np.mean(ours) <= 1.1**2 * np.mean(theirs)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "T5", "Phi"])
def test_a_patched_model_compiles_in_one_graph(family: str, device: str) -> None:
    _, patched, _ = pair(family, device, torch.float32)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    assert models.error(models.logits(compiled), models.logits(patched)) == 0.0


def test_layers_that_are_alike_compile_once() -> None:
    """As an unpatched model's do: no guard asks for one layer's own object."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.LayerNorm(12)) for _ in range(4)))
    patch(model)
    for layer in model:
        layer.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        model(torch.ones(3, 12))
    assert counter.frame_count == 1


def test_every_class_of_the_table_computes_what_its_rule_says() -> None:
    """And what none of the others says."""
    transformers = pytest.importorskip("transformers")
    rules = {_torch_patch.LLAMA, _torch_patch.ONCE, _torch_patch.GEMMA, _torch_patch.T5}
    found = 0
    for name, rule in _torch_patch.RULES.items():
        cls = transformers_class(transformers, name)
        if cls is None:  # of a later or an earlier version
            continue
        found += 1
        for other in rules:
            claim = dataclasses.replace(other, eps=rule.eps)
            fault = _torch_patch._disagreement(cls, cls.forward, claim, 1e-6, ("weight",))
            assert (fault is None) == (other is rule), (name, other)
    assert found > 20


def transformers_class(transformers: Any, name: str) -> Any:
    """A norm's class; None where this version has no such model."""
    wanted = re.sub("RMSNorm$|LayerNorm$|_", "", name).removesuffix("Text").lower()
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        if folder.name.replace("_", "") == wanted:
            path = f"transformers.models.{folder.name}.modeling_{folder.name}"
            return getattr(importlib.import_module(path), name, None)
    return None


# What stays --------------------------------------------------------------------------------------


class TinyRMSNorm(torch.nn.Module):
    """Llama's norm under the name that the table knows."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states: Any) -> Any:
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class Doubled(TinyRMSNorm):
    def forward(self, hidden_states: Any) -> Any:
        return 2 * super().forward(hidden_states)


class Fails(TinyRMSNorm):
    def forward(self, hidden_states: Any) -> Any:
        raise NotImplementedError("not here")


@contextmanager
def named(cls: type, name: str) -> Iterator[type]:
    """`cls` under another name; picklable under its own again afterwards."""
    own = cls.__name__
    cls.__name__ = name
    try:
        yield cls
    finally:
        cls.__name__ = own


@pytest.fixture
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    with named(TinyRMSNorm, "LlamaRMSNorm"):
        made = torch.nn.Sequential(
            torch.nn.Linear(12, 12), TinyRMSNorm(12), torch.nn.LayerNorm(12), torch.nn.RMSNorm(12)
        )
        yield made


@pytest.fixture
def x() -> Any:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(1))


def run(model: Any, x: Any) -> Any:
    with torch.no_grad():
        return model(x)


def test_class_parameters_and_state_stay(model: Any, x: Any) -> None:
    classes = [type(module) for module in model.modules()]
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    expected = run(model, x)
    assert set(patch(model).replaced) == {"1", "2", "3"}
    torch.testing.assert_close(run(model, x), expected, rtol=1e-5, atol=1e-6)
    assert [type(module) for module in model.modules()] == classes
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)


def test_unpatch_restores_everything(model: Any, x: Any) -> None:
    before = [dict(module.__dict__) for module in model.modules()]
    expected = run(model, x)
    patch(model)
    assert unpatch(model) == ["1", "2", "3"]
    assert [module.__dict__ for module in model.modules()] == before
    assert torch.equal(run(model, x), expected)
    assert unpatch(model) == []


def test_patching_twice_changes_nothing(model: Any) -> None:
    patch(model)
    bound = [module.__dict__.get("forward") for module in model.modules()]
    again = patch(model)
    assert again.replaced == {}
    assert set(again.left.values()) == {"it is patched already"}
    assert [module.__dict__.get("forward") for module in model.modules()] == bound
    assert unpatch(model) == ["1", "2", "3"]


def test_hooks_stay(model: Any, x: Any) -> None:
    calls: list[str] = []
    model[1].register_forward_pre_hook(lambda module, given: calls.append("before"))
    patch(model)
    model[1].register_forward_hook(lambda module, given, out: calls.append("after"))
    run(model, x)
    assert calls == ["before", "after"]


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_runs_on_its_own_weights(model: Any, x: Any, duplicate: Any) -> None:
    model = torch.nn.Sequential(*list(model)[2:])  # of classes that a pickle finds by name
    patch(model)
    expected = run(model, x)
    made = duplicate(model)
    for module in made:
        assert module.forward.__self__.module is module
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(made, x), expected)
    assert unpatch(made) == ["0", "1"]
    torch.testing.assert_close(run(made, x), expected, rtol=1e-5, atol=1e-6)
    assert run(model, x).abs().max() == 0, "the original is patched still"


def test_a_new_weight_is_seen(model: Any, x: Any) -> None:
    patch(model)
    expected = run(model, x)
    model[3].weight = torch.nn.Parameter(torch.full((12,), 2.0))
    torch.testing.assert_close(run(model, x), 2 * expected)
    state = {name: value * 3 for name, value in model[3].state_dict().items()}
    model[3].load_state_dict(state, assign=True)
    torch.testing.assert_close(run(model, x), 6 * expected)
    torch.nn.utils.parametrize.register_parametrization(model[3], "weight", torch.nn.Softplus())
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(torch.nn.Softplus, "forward", lambda self, weight: weight / 6)
        torch.testing.assert_close(run(model, x), expected)


def test_a_parametrised_bias_is_seen(model: Any, x: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(model[2], "bias", torch.nn.Softplus())
    expected = run(model[2], x)
    patch(model)
    torch.testing.assert_close(run(model[2], x), expected)


def test_a_patched_model_moves_to_another_dtype(model: Any, x: Any) -> None:
    patch(model)
    assert run(model.bfloat16(), x.bfloat16()).dtype is torch.bfloat16
    assert run(model.double(), x.double()).dtype is torch.float64


def test_arguments_keep_their_names(model: Any, x: Any) -> None:
    expected = run(model[1], x), run(model[2], x), run(model[3], x)
    patch(model)
    with torch.no_grad():
        got = model[1](hidden_states=x), model[2](input=x), model[3](x=x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


# What is left ------------------------------------------------------------------------------------


def reasons(module: Any) -> str:
    report = patch(torch.nn.Sequential(module))
    assert report.replaced == {}
    return report.left.get("0", "")


def test_what_is_left_says_why() -> None:
    assert reasons(torch.nn.Linear(4, 4)) == ""
    assert "not a norm of rows that is known" in reasons(torch.nn.BatchNorm1d(4))
    assert "not a norm of rows that is known" in reasons(torch.nn.GroupNorm(2, 4))
    assert "this library's own" in reasons(RMSNorm(4))
    bound = torch.nn.LayerNorm(4)
    bound.forward = functools.partial(print)
    assert "bound to the instance by other code" in reasons(bound)
    with named(Doubled, "LlamaRMSNorm"):
        assert "does not compute what a norm of that name does" in reasons(Doubled(4))
    with named(Fails, "LlamaRMSNorm"):
        assert "could not be tried: NotImplementedError: not here" in reasons(Fails(4))
    with named(TinyRMSNorm, "LlamaRMSNorm"):
        no_eps, biased = TinyRMSNorm(4), TinyRMSNorm(4)
        no_eps.variance_epsilon = None
        assert "no number called variance_epsilon" in reasons(no_eps)
        biased.bias = torch.nn.Parameter(torch.zeros(4))
        assert "parameters other than a weight" in reasons(biased)
    with named(TinyRMSNorm, "GemmaRMSNorm"):
        tiny = TinyRMSNorm(4)
        tiny.eps = 1e-6
        assert "could not be tried: AttributeError" in reasons(tiny)
    with named(TinyRMSNorm, "Olmo2RMSNorm"):
        assert "does not compute what a norm of that name does" in reasons(TinyRMSNorm(4))


class NoFunction:
    """A forward that neither is a function nor can be a key."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit.")
@pytest.mark.parametrize("compile", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(3))])
def test_what_torch_jit_compiled_is_left(compile: Any) -> None:
    compiled = compile(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)))
    model = torch.nn.Sequential(torch.nn.LayerNorm(3), compiled, torch.nn.LayerNorm(4))
    report = patch(model)
    assert list(report.replaced) == ["0", "2"]
    assert report.left == {"1.1": "LayerNorm has a forward that is compiled by torch.jit"}
    assert unpatch(model) == ["0", "2"]


@pytest.mark.parametrize("kind", ["Other", "OtherNorm", "LlamaRMSNorm"])
def test_a_forward_that_is_no_function_is_left(kind: str) -> None:
    module = type(kind, (torch.nn.Module,), {"forward": NoFunction()})()
    report = patch(torch.nn.Sequential(torch.nn.LayerNorm(4), module))
    assert list(report.replaced) == ["0"]
    reason = f"{kind} has a forward that is no function"
    assert report.left == ({} if kind == "Other" else {"1": reason})


def test_a_patch_that_fails_changes_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    model[1].eps = "none"
    with pytest.raises(ValueError, match="none"):
        patch(model)
    assert unpatch(model) == []


def test_a_report_counts(model: Any) -> None:
    model.append(torch.nn.BatchNorm1d(12)).append(torch.nn.BatchNorm1d(12))
    assert str(patch(model)) == (
        "3 norms replaced: 1 LlamaRMSNorm, 1 LayerNorm, 1 RMSNorm\n"
        "4 and 1 more left: BatchNorm1d is not a norm of rows that is known here"
    )


@pytest.mark.parametrize("function", [patch, unpatch])
def test_what_is_no_module_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        function({})


# torch's own modules -----------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("shape", [(12,), (3, 4)])
@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"eps": 0.5}])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_torchs_modules(kind: str, options: Any, shape: Any, device: str, dtype: Any) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(shape, **options).to(device, dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = 1e-3 * torch.randn(5, *shape).to(device, dtype)
    expected = run(module, x)
    patch(module)
    got = run(module, x)
    assert got.dtype is expected.dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=4 * unit, atol=4 * unit)
    with pytest.raises((ValueError, RuntimeError)):
        module(torch.ones(5, 7, device=device, dtype=dtype))


def nested(x: Any) -> Any:
    return torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)


# What this library refuses: how x and the module become that.
REFUSED = {
    "float64 x": (torch.Tensor.double, lambda module: module),
    "float64 weight": (torch.Tensor.bfloat16, torch.nn.Module.double),
    "complex": (lambda x: torch.complex(x, 2 * x), lambda module: module),
    "nested": (nested, lambda module: module),
    "negated": (lambda x: torch.complex(x, -x).conj().imag, lambda module: module),
    "meta": (lambda x: x.to("meta"), lambda module: module.to("meta")),
    "another shape": (lambda x: x[:, 1:], lambda module: module),
}


# torch's own RMSNorm says that it is slow with a weight of another dtype.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "LlamaRMSNorm"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("refused", REFUSED)
def test_what_this_library_refuses_is_left_to_the_module(
    refused: str, kind: str, affine: bool, model: Any, device: str
) -> None:
    """Its forward computes it, or says why not."""
    of_x, of_module = REFUSED[refused]
    module = model[1] if kind == "LlamaRMSNorm" else getattr(torch.nn, kind)(12)
    if kind != "LlamaRMSNorm" and not affine:
        module = getattr(torch.nn, kind)(12, elementwise_affine=False)
    module = of_module(module.to(device))
    x = of_x(torch.randn(5, 12, device=device))

    def outcome() -> Any:
        try:
            return run(module, x)
        except Exception as error:
            return type(error), str(error)

    expected = outcome()
    assert patch(torch.nn.Sequential(module)).replaced
    got = outcome()
    if isinstance(expected, tuple):
        assert got == expected or isinstance(got, torch.Tensor), "this library may take more"
        return
    assert (got.dtype, got.device) == (expected.dtype, expected.device)
    if refused == "nested":
        expected, got = expected.values(), got.values()
    if refused != "meta":
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_what_an_operator_refuses_compiles_as_the_modules_own(dtype: str, device: str) -> None:
    module = torch.nn.RMSNorm(12).to(device)
    x = torch.randn(5, 12, dtype=getattr(torch, dtype), device=device)
    expected = run(module, x)
    patch(torch.nn.Sequential(module))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, x), expected)


# torch's own RMSNorm says on a GPU that it is slow with a float32 weight.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_autocast_gives_torchs_dtype(kind: str, device: str) -> None:
    module = getattr(torch.nn, kind)(12).to(device)
    inputs = [torch.randn(5, 12, device=device, dtype=d) for d in (torch.float32, torch.bfloat16)]
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        expected = [module(x) for x in inputs]
        patch(module)
        got = [module(x) for x in inputs]
    assert [y.dtype for y in got] == [y.dtype for y in expected]


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "T5"])
def test_mixed_dtypes_come_out_as_before(family: str, given: str, weight: str, device: str) -> None:
    eager, patched, report = pair(family, device, getattr(torch, weight))
    name = next(iter(report.replaced))
    size = eager.get_submodule(name).weight.numel()
    x = torch.randn(7, size).to(device, getattr(torch, given))
    expected, got = run(eager.get_submodule(name), x), run(patched.get_submodule(name), x)
    assert got.dtype is expected.dtype
    rtol = 1e-5 if got.dtype is torch.float32 and given == weight else 2**-7
    torch.testing.assert_close(got, expected, rtol=rtol, atol=0)
