# SPDX-License-Identifier: Apache-2.0
"""The modules of `cupy_rmsnorm.torch`: torch's own in all but what computes them."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest

from tests import compare, models, oracle

torch = pytest.importorskip("torch")

import cupy_rmsnorm  # noqa: E402
import cupy_rmsnorm.torch as norms  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16", "float64")
KINDS = [
    (norms.RMSNorm, {}),
    (norms.RMSNorm, {"eps": 0.5}),
    (norms.RMSNorm, {"elementwise_affine": False}),
    (norms.LayerNorm, {}),
    (norms.LayerNorm, {"eps": 0.5, "bias": False}),
    (norms.LayerNorm, {"elementwise_affine": False}),
]
every_kind = pytest.mark.parametrize(
    ("own", "options"),
    KINDS,
    ids=lambda value: value.__name__ if inspect.isclass(value) else "-".join(value) or "default",
)


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def fill(module: Any) -> Any:
    """Give every parameter values that are not alike."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters(), 10):
            parameter.copy_(values(*parameter.shape, seed=seed))
    return module


def arrays(module: Any) -> dict[str, Any]:
    return {name: models.numpy(parameter) for name, parameter in module.named_parameters()}


def eps_of(module: Any, x: np.ndarray) -> float:
    """torch's documented default."""
    if module.eps is not None:
        return float(module.eps)
    return float(np.finfo(np.float64 if x.dtype == np.float64 else np.float32).eps)


# torch's modules ---------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("shape", [5, (5,), (3, 5)])
def test_is_torchs_module(own: Any, options: Any, shape: Any) -> None:
    torchs = getattr(torch.nn, own.__name__)
    module = own(shape, **options, dtype=torch.bfloat16, device="cpu")
    like = torchs(shape, **options, dtype=torch.bfloat16, device="cpu")
    assert isinstance(module, torchs)
    assert repr(module) == repr(like)
    assert module.normalized_shape == like.normalized_shape
    assert list(module.state_dict()) == list(like.state_dict())
    for name, parameter in like.named_parameters():
        assert torch.equal(module.get_parameter(name), parameter)
        assert module.get_parameter(name).dtype is torch.bfloat16
    fill(like)
    module.load_state_dict(like.state_dict())
    like.load_state_dict(module.state_dict())
    module.reset_parameters()
    assert all(bool((p == (name == "weight")).all()) for name, p in module.named_parameters())


def test_takes_torchs_arguments_in_torchs_order() -> None:
    for own, torchs in ((norms.RMSNorm, torch.nn.RMSNorm), (norms.LayerNorm, torch.nn.LayerNorm)):
        expected = list(inspect.signature(torchs).parameters)
        got = inspect.signature(own).parameters
        positional = [name for name, p in got.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == expected
        for name in expected:
            assert got[name].default == inspect.signature(torchs).parameters[name].default


@every_kind
@pytest.mark.parametrize("parameters", ["float32", "same"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(own: Any, options: Any, parameters: str, dtype: str, device: str) -> None:
    if dtype == "float64":
        parameters = "same"
    made = getattr(torch, dtype if parameters == "same" else parameters)
    module = fill(own((3, 5), **options, dtype=made, device=device))
    x = values(2, 7, 3, 5, scale=1e-2).to(device, getattr(torch, dtype))
    with torch.no_grad():
        y = models.numpy(module(x))
    assert y.dtype == oracle.DTYPES[dtype]
    reference = oracle.forward(
        models.numpy(x),
        **arrays(module),
        norm="layer" if own is norms.LayerNorm else "rms",
        eps=eps_of(module, models.numpy(x)),
        ndim=2,
    ).y
    compare.close(y, reference.value, reference.bound(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_means_what_it_means_in_torch(dtype: str, device: str) -> None:
    """In values: so small a row that eps decides them."""
    x = values(4, 32, scale=2e-4).to(device, getattr(torch, dtype))
    with torch.no_grad():
        expected = torch.nn.RMSNorm(32, device=device, dtype=x.dtype)(x)
        got = norms.RMSNorm(32, device=device, dtype=x.dtype)(x)
    unit = torch.finfo(x.dtype).eps
    torch.testing.assert_close(got, expected, rtol=8 * unit, atol=0)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(own: Any, options: Any, dtype: str, device: str) -> None:
    module = fill(own(9, **options, dtype=getattr(torch, dtype), device=device))
    x = values(6, 11, 9).to(device, getattr(torch, dtype)).requires_grad_()
    dout = values(6, 11, 9, seed=1).to(x)
    module(x).backward(dout)
    given = arrays(module)
    weight = given.get("weight")
    x_array = models.numpy(x)
    reference = oracle.backward(
        models.numpy(dout),
        x_array,
        weight,
        norm="layer" if own is norms.LayerNorm else "rms",
        eps=eps_of(module, x_array),
    )
    dx = models.numpy(x.grad)
    compare.close(dx, reference.dx.value, reference.dx.bound(dtype), "dx")
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype is parameter.dtype
        expected = getattr(reference, f"d{name}")
        got = models.numpy(parameter.grad)
        compare.close(got, expected.value, expected.bound(dtype), f"d{name}")


@every_kind
def test_copies(own: Any, options: Any) -> None:
    module = fill(own(8, **options))
    x = values(4, 8).float()
    with torch.no_grad():
        expected = module(x)
        for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(made(x), expected)
        assert module.to(torch.float16)(x.half()).dtype is torch.float16


@every_kind
def test_autocast_keeps_the_inputs_dtype(own: Any, options: Any, device: str) -> None:
    module = own(8, **options, device=device)
    linear = torch.nn.Linear(8, 8, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = module(linear(values(4, 8).to(device, torch.float32)))
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
    assert linear.weight.grad.dtype is torch.float32
    for parameter in module.parameters():
        assert parameter.grad.dtype is torch.float32


def call(module: Any, x: Any) -> Any:
    return module(x, x) if isinstance(module, norms.AddRMSNorm | norms.QKNorm) else module(x)


every_module = pytest.mark.parametrize("kind", ["RMSNorm", "AddRMSNorm", "LayerNorm", "QKNorm"])


@every_module
@pytest.mark.parametrize("affine", [True, False])
def test_another_shape_is_refused(kind: str, affine: bool) -> None:
    """By the name of x: the weight is what it was before."""
    module = getattr(norms, kind)(8, elementwise_affine=affine)
    message = r"^[xq] must end in the axes \(8,\), got shape \(4, 9\)$"
    with pytest.raises(ValueError, match=message):
        call(module, torch.ones(4, 9))


@every_module
@pytest.mark.parametrize("x", [np.ones((4, 8), np.float32), [[1.0] * 8], None], ids=type)
def test_what_is_no_tensor_is_refused(kind: str, x: Any) -> None:
    with pytest.raises(TypeError, match=r"^(x|q|input) must be a torch\.Tensor, got "):
        call(getattr(norms, kind)(8), x)


@pytest.mark.parametrize("kind", ["RMSNorm", "AddRMSNorm", "QKNorm"])
def test_wrong_options_are_refused_by_the_constructor(kind: str) -> None:
    make = getattr(norms, kind)
    with pytest.raises(ValueError, match=r"^cast must be 'once' or 'before_weight', got 'twice'$"):
        make(8, cast="twice")
    with pytest.raises(TypeError, match=r"^weight_offset must be a real number, got None$"):
        make(8, weight_offset=None)
    with pytest.raises(ValueError, match=r"^weight_offset must be 0 without a weight, got 1\.0$"):
        make(8, weight_offset=1, elementwise_affine=False)
    with pytest.raises(TypeError, match=r"^(RMS|QK)Norm\.__init__\(\) missing 1 required"):
        make()


# What torch lacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["once", "before_weight"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_offset_and_cast(offset: float, cast: Any, device: str) -> None:
    module = norms.RMSNorm(
        24, 1e-6, weight_offset=offset, cast=cast, dtype=torch.bfloat16, device=device
    )
    assert bool((module.weight + offset == 1).all())
    fill(module)
    x = values(5, 24).to(device, torch.bfloat16)
    with torch.no_grad():
        y = models.numpy(module(x))
    reference = oracle.forward(
        models.numpy(x), **arrays(module), eps=1e-6, weight_offset=offset, cast=cast
    ).y
    compare.close(y, reference.value, reference.bound("bfloat16"))
    text = repr(module)
    assert ("weight_offset=1.0" in text) == bool(offset)
    assert ("cast='before_weight'" in text) == (cast != "once")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
def test_add_rms_norm(affine: bool, dtype: str, device: str) -> None:
    made = getattr(torch, dtype)
    module = fill(norms.AddRMSNorm((3, 5), elementwise_affine=affine, dtype=made, device=device))
    x, residual = (values(2, 7, 3, 5, seed=seed).to(device, made) for seed in (0, 1))
    with torch.no_grad():
        y, residual_out = module(x, residual)
    x_array = models.numpy(x)
    reference = oracle.forward(
        x_array,
        **arrays(module),
        residual=models.numpy(residual),
        eps=eps_of(module, x_array),
        ndim=2,
    )
    compare.close(models.numpy(y), reference.y.value, reference.y.bound(dtype))
    compare.equal(models.numpy(residual_out), reference.residual_out)


def test_add_rms_norm_has_gradients(device: str) -> None:
    module = fill(norms.AddRMSNorm(9, 1e-6, dtype=torch.float64, device=device))
    x, residual = (values(4, 9, seed=seed).to(device).requires_grad_() for seed in (0, 1))
    weight = module.weight.detach().clone().requires_grad_()
    like, like_residual = (t.detach().clone().requires_grad_() for t in (x, residual))
    y, total = module(x, residual)
    (y * y + 3 * total).sum().backward()
    total = like + like_residual
    y = torch.nn.functional.rms_norm(total, (9,), weight, 1e-6)
    (y * y + 3 * total).sum().backward()
    torch.testing.assert_close(x.grad, like.grad)
    torch.testing.assert_close(residual.grad, like_residual.grad)
    torch.testing.assert_close(module.weight.grad, weight.grad)


@pytest.mark.parametrize("options", [{}, {"heads": (4, 2)}, {"elementwise_affine": False}])
def test_qk_norm(options: Any, device: str) -> None:
    module = fill(norms.QKNorm(6, 1e-5, **options, dtype=torch.bfloat16, device=device))
    qkv = values(7, 8, 6).to(device, torch.bfloat16)
    q, k = qkv[:, :4], qkv[:, 4:6]
    with torch.no_grad():
        outputs = module(q, k)
    given = arrays(module)
    for x, y, name in zip((q, k), outputs, ("q_weight", "k_weight"), strict=True):
        reference = oracle.forward(models.numpy(x), given.get(name), eps=1e-5).y
        compare.close(models.numpy(y), reference.value, reference.bound("bfloat16"), name)


def test_qk_norm_has_gradients(device: str) -> None:
    module = fill(norms.QKNorm(6, 1e-5, dtype=torch.float64, device=device))
    q, k = (values(7, n, 6, seed=n).to(device).requires_grad_() for n in (4, 2))
    outputs = module(q, k)
    (outputs[0].square().sum() + outputs[1].pow(3).sum()).backward()
    for x, power, name in ((q, 2, "q_weight"), (k, 3, "k_weight")):
        weight = module.get_parameter(name).detach().clone().requires_grad_()
        like = x.detach().clone().requires_grad_()
        torch.nn.functional.rms_norm(like, (6,), weight, 1e-5).pow(power).sum().backward()
        torch.testing.assert_close(x.grad, like.grad)
        torch.testing.assert_close(module.get_parameter(name).grad, weight.grad)


def test_qk_norm_describes_itself() -> None:
    module = norms.QKNorm(6, weight_offset=1.0, cast="before_weight", heads=(4, 2))
    assert repr(module) == (
        "QKNorm(6, eps=None, elementwise_affine=True, heads=(4, 2), weight_offset=1.0, "
        "cast='before_weight')"
    )
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        "q_weight": (4, 6),
        "k_weight": (2, 6),
    }
    assert all(bool((p == 0).all()) for p in module.parameters())
    with pytest.raises(ValueError, match=r"q must end in the axes \(6,\), got shape \(1, 4, 5\)"):
        norms.QKNorm(6, elementwise_affine=False)(torch.ones(1, 4, 5), torch.ones(1, 2, 6))


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        (2, TypeError, "heads must be a pair of ints, q's and k's number of heads, got 2"),
        ((2,), TypeError, "heads must be a pair of ints, q's and k's number of heads, got (2,)"),
        ((2, 1, 1), TypeError, "heads must be a pair of ints, "),
        ((2.0, 1), TypeError, "heads[0] must be an int, got float"),
        ((2, 0), ValueError, "heads[1] must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_heads_are_a_pair(heads: Any, error: Any, message: str, affine: bool) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        norms.QKNorm(8, elementwise_affine=affine, heads=heads)


def test_other_heads_are_refused() -> None:
    module = norms.QKNorm(8, heads=[2, 1])
    assert module.heads == (2, 1)
    q, k = torch.ones(3, 2, 8), torch.ones(3, 1, 8)
    module(q, k)
    with pytest.raises(
        ValueError, match=r"^k must end in the axes \(1, 8\), got shape \(3, 2, 8\)$"
    ):
        module(q, q)
    with pytest.raises(TypeError, match=r"^head_size must be an int, got tuple$"):
        norms.QKNorm((8,))


# torch.compile -----------------------------------------------------------------------------------


class AllOfThem(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rms, self.layer = norms.RMSNorm(12), norms.LayerNorm(12)
        self.add, self.qk = norms.AddRMSNorm(12), norms.QKNorm(4)

    def forward(self, x: Any) -> Any:
        y, x = self.add(self.rms(x), self.layer(x))
        q, k = self.qk(y.unflatten(-1, (3, 4)), x.unflatten(-1, (3, 4)))
        return (q * k).sum(-1)


def test_modules_compile_without_a_graph_break(device: str) -> None:
    module = fill(AllOfThem()).to(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (1, 7, 64):
        x = values(rows, 12, seed=rows).to(device, torch.float32)
        module.zero_grad()
        y = compiled(x)
        y.square().sum().backward()
        got = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
        expected = module(x)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(got, [parameter.grad for parameter in module.parameters()])


# Documentation -----------------------------------------------------------------------------------


def test_the_package_does_not_bring_torch() -> None:
    assert "torch" not in cupy_rmsnorm.__all__


@pytest.mark.parametrize("name", norms.__all__)
def test_docstrings_describe_every_parameter(name: str) -> None:
    value = getattr(norms, name)
    text = inspect.getdoc(value) or ""
    assert text
    if name == "PatchReport":
        return
    assert "Examples\n--------" in text
    assert len(re.findall(r"^Parameters\n----------$", text, re.MULTILINE)) == 1
    described = {
        word.strip()
        for line in re.findall(r"^(\w[\w, ]*?)(?: :.*)?$", text, re.MULTILINE)
        for word in line.split(",")
    }
    for parameter in inspect.signature(value).parameters:
        assert parameter in described, f"{name} does not describe {parameter}"


@pytest.mark.parametrize("module", ["_torch_modules", "_torch_patch"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"cupy_rmsnorm.{module}"))
    assert result.attempted >= 9
    assert result.failed == 0
