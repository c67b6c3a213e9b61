# SPDX-License-Identifier: Apache-2.0
"""Let the norms of a torch model run on this library, each by its own semantics.

A patched module keeps its class, parameters and hooks. What changes is one attribute of the
instance, ``forward``: a `functools.partial` of a function below over the module itself. Copies and
pickles of the model carry partials over their own modules.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ._api import layer_norm, rms_norm
from ._torch_modules import axis_of, check_shape, eps_for

FLOAT32 = torch.float32


# What stands in a forward's place. The parameters of `partial` come first, the rest is as in the
# function that it replaces, names included. A weight is looked up at each call, since training,
# `load_state_dict` and `to` may replace it; in `_parameters`, which takes a tenth of the time.


def llama_forward(module: Any, eps: float, hidden_states: Any) -> Any:
    """Round to x's dtype, then multiply: ``weight * xhat.to(x.dtype)``."""
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module.weight
    dtype = hidden_states.dtype
    if weight.dtype is dtype:
        return rms_norm(hidden_states, weight, eps=eps, cast="before_weight")
    promoted = torch.promote_types(dtype, weight.dtype)
    return rms_norm(hidden_states, weight, eps=eps, cast="before_weight", out_dtype=promoted)


def t5_forward(module: Any, eps: float, hidden_states: Any) -> Any:
    """Round to a 16-bit weight's dtype, then multiply: the output has the weight's dtype.

    Where x is float32 and the weight is not, the first of these two roundings is left out.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module.weight
    dtype = weight.dtype
    if hidden_states.dtype is dtype:
        return rms_norm(hidden_states, weight, eps=eps, cast="before_weight")
    return rms_norm(hidden_states, weight, eps=eps, out_dtype=dtype)


def once_forward(module: Any, eps: float, hidden_states: Any) -> Any:
    """Multiply in float32, then round to x's dtype."""
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module.weight
    return rms_norm(hidden_states, weight, eps=eps)


def gemma_forward(module: Any, eps: float, x: Any) -> Any:
    """Multiply by ``1 + weight`` in float32, then round to x's dtype."""
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module.weight
    return rms_norm(x, weight, eps=eps, weight_offset=1.0)


def torch_rms_forward(module: Any, eps: float | None, axis: Any, x: Any) -> Any:
    """torch.nn.RMSNorm, autocast included."""
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module.weight
        if weight is None:
            check_shape(x, module.normalized_shape)
    out_dtype = FLOAT32 if torch.is_autocast_enabled() and _is_cast(x) else None
    return rms_norm(x, weight, eps=eps_for(eps, x), axis=axis, out_dtype=out_dtype)


def torch_layer_forward(module: Any, eps: float, axis: Any, input: Any) -> Any:
    """torch.nn.LayerNorm, autocast included."""
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None:
        weight, bias = module.weight, module.bias
        if weight is None:
            check_shape(input, module.normalized_shape)
    out_dtype = FLOAT32 if torch.is_autocast_enabled() and _is_cast(input) else None
    return layer_norm(input, weight, bias, eps=eps, axis=axis, out_dtype=out_dtype)


def _is_cast(x: Any) -> bool:
    """Whether torch's norms compute this tensor in float32 because of autocast on the GPU."""
    return bool(x.is_cuda and x.dtype is not torch.float64)


# Which module gets which -------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How the norms of some models compute: the table of classes in transformers, one row a rule.

    A module of such a class is replaced only if it also computes what the rule says: see
    `_disagreement`.
    """

    forward: Callable[..., Any]
    eps: str  # the attribute
    name: str  # of the class, with the model's name in place of {}
    models: str


LLAMA = Rule(
    llama_forward,
    "variance_epsilon",
    "{}RMSNorm",
    "Llama Mistral Ministral Mixtral Qwen2 Qwen2Moe Qwen2VL Qwen2_5_VL Qwen3 Qwen3Moe Qwen3VLText "
    "Qwen3VLMoeText Phi3 Phi4Multimodal DeepseekV2 DeepseekV3",
)
ONCE = Rule(once_forward, "variance_epsilon", "{}RMSNorm", "Olmo2 Olmo3 GptOss")
GEMMA = Rule(gemma_forward, "eps", "{}RMSNorm", "Gemma Gemma2 Gemma3 T5Gemma")
T5 = Rule(t5_forward, "variance_epsilon", "{}LayerNorm", "T5 MT5 UMT5 LongT5")
RULES = {
    rule.name.format(model): rule
    for rule in (LLAMA, ONCE, GEMMA, T5)
    for model in rule.models.split()
}
# torch's own, by their forward: a subclass that keeps it computes the same.
TORCHS: dict[Any, Callable[..., Any]] = {
    torch.nn.RMSNorm.forward: torch_rms_forward,
    torch.nn.LayerNorm.forward: torch_layer_forward,
}
FORWARDS = {*TORCHS.values(), *(rule.forward for rule in RULES.values())}


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did: names of modules, with the class replaced or the reason to leave it."""

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = collections.Counter(self.replaced.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines = [f"{len(self.replaced)} norms replaced" + (f": {kinds}" if kinds else "")]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{names[0]}{more} left: {reason}")
        return "\n".join(lines)


def patch(model: Any) -> PatchReport:
    """Let the norms of a torch model run on this library.

    Replaced are `torch.nn.RMSNorm` and `torch.nn.LayerNorm`, and the norms of Hugging Face's Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi, DeepSeek and T5, each with its own eps, weight offset
    and order of rounding, and only where a trial on the CPU shows that it computes just that.
    Class, parameters, state_dict and hooks stay, and so does the output: its dtype, and its values
    up to the order in which a row is summed.

    `unpatch` restores the model. A patched model may be copied, pickled, moved and trained; eps is
    read when it is patched. Patch before `torch.compile`. `torch.nn.DataParallel` does not work on
    a patched model: it copies modules with what is bound to them.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place, with all modules in it.

    Returns
    -------
    PatchReport
        ``replaced``, a dict from a module's name to its class, and ``left``, from a norm's name to
        the reason why it was left; printed, a summary.

    Raises
    ------
    TypeError
        `model` is not a torch.nn.Module.

    Examples
    --------
    >>> import torch
    >>> from cupy_rmsnorm.torch import patch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8)
    ... )
    >>> print(patch(model))
    1 norms replaced: 1 LayerNorm
    2 left: BatchNorm1d is not a norm of rows that is known here
    """
    report = PatchReport()
    for name, module in _modules(model):
        kind = type(module).__name__
        made = _replacement(module)
        if isinstance(made, functools.partial):
            module.forward = made
            report.replaced[name] = kind
        elif made is not None:
            report.left[name] = made
    return report


def unpatch(model: Any) -> list[str]:
    """Restore what `patch` replaced.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place, with all modules in it.

    Returns
    -------
    list of str
        The names of the modules that were restored.

    Raises
    ------
    TypeError
        `model` is not a torch.nn.Module.

    Examples
    --------
    >>> import torch
    >>> from cupy_rmsnorm.torch import patch, unpatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> report = patch(model)
    >>> unpatch(model)
    ['1']
    """
    restored = [name for name, module in _modules(model) if _is_patched(module)]
    for name in restored:
        del model.get_submodule(name).forward
    return restored


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    yield from model.named_modules()


def _is_patched(module: Any) -> bool:
    bound = module.__dict__.get("forward")
    return isinstance(bound, functools.partial) and bound.func in FORWARDS


def _replacement(module: Any) -> functools.partial[Any] | str | None:
    """A forward for `module`; why it has none; None for what is no norm."""
    cls: Any = type(module)
    kind = cls.__name__
    rule = RULES.get(kind)
    forward = TORCHS.get(cls.forward)
    if rule is None and forward is None:
        if cls.__module__.startswith(__package__ or "cupy_rmsnorm"):
            return f"{kind} is this library's own"
        leaf = next(module.children(), None) is None
        if leaf and "norm" in kind.lower():
            return f"{kind} is not a norm of rows that is known here"
        return None
    if _is_patched(module):
        return "it is patched already"
    if "forward" in module.__dict__:
        return "its forward is bound to the instance by other code"
    if forward is not None:
        eps = module.eps if module.eps is None else float(module.eps)
        return functools.partial(forward, module, eps, axis_of(module.normalized_shape))
    assert rule is not None
    eps = getattr(module, rule.eps, None)
    if not isinstance(eps, (int, float)):
        return f"{kind} has no number called {rule.eps}"
    reason = _disagreement(cls, cls.forward, rule, float(eps), tuple(module._parameters))
    if reason is not None:
        return reason
    return functools.partial(rule.forward, module, float(eps))


@functools.lru_cache(maxsize=256)
def _disagreement(
    cls: type, forward: Callable[..., Any], rule: Rule, eps: float, parameters: tuple[str, ...]
) -> str | None:
    """None if the forward of a class computes what `rule` says, tried on small tensors on the CPU.

    Within one rule a float32 result differs by the order of a sum alone, and a 16-bit one hardly
    ever; another order of the roundings moves a third of the 16-bit results by a unit.
    """
    if parameters != ("weight",):
        return f"{cls.__name__} has parameters other than a weight"
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 64, generator=generator)
    gain = torch.rand(64, generator=generator) + 0.5
    stand_in: Any = object.__new__(cls)
    torch.nn.Module.__init__(stand_in)
    setattr(stand_in, rule.eps, eps)
    half = torch.bfloat16
    with torch.no_grad():
        for dtype, weight_dtype in ((FLOAT32, FLOAT32), (half, half), (half, FLOAT32)):
            x = values.to(dtype)
            stand_in.weight = torch.nn.Parameter(gain.to(weight_dtype))
            try:
                theirs = forward(stand_in, x)
            except Exception as error:
                return f"{cls.__name__} could not be tried: {type(error).__name__}: {error}"
            ours = rule.forward(stand_in, eps, x)
            agrees = (ours.double() - theirs.double()).abs() <= 1e-5 * theirs.double().abs()
            if ours.dtype != theirs.dtype or agrees.double().mean() < 0.95:
                return f"{cls.__name__} does not compute what a norm of that name does"
    return None
