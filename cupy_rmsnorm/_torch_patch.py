# SPDX-License-Identifier: Apache-2.0
"""Let the norms of a torch model run on this library: which module gets which replacement."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch

from ._torch_forwards import (
    FLOAT32,
    GemmaForward,
    LlamaForward,
    OnceForward,
    Replacement,
    T5Forward,
    TorchLayerForward,
    TorchRMSForward,
)
from ._torch_fuse import FusedLayer, fused


@dataclass(frozen=True)
class Rule:
    """How the norms of some models compute: the table of classes in transformers, one row a rule.

    A module of such a class is replaced only if it also computes what the rule says: see
    `_disagreement`.
    """

    replacement: type[Replacement]
    eps: str  # the attribute
    name: str  # of the class, with the model's name in place of {}
    models: str


LLAMA = Rule(
    LlamaForward,
    "variance_epsilon",
    "{}RMSNorm",
    "Llama Mistral Ministral Mixtral Qwen2 Qwen2Moe Qwen2VL Qwen2_5_VL Qwen3 Qwen3Moe Qwen3VLText "
    "Qwen3VLMoeText Phi3 Phi4Multimodal DeepseekV2 DeepseekV3",
)
ONCE = Rule(OnceForward, "variance_epsilon", "{}RMSNorm", "Olmo2 Olmo3 GptOss")
GEMMA = Rule(GemmaForward, "eps", "{}RMSNorm", "Gemma Gemma2 Gemma3 T5Gemma")
T5 = Rule(T5Forward, "variance_epsilon", "{}LayerNorm", "T5 MT5 UMT5 LongT5")
RULES = {
    rule.name.format(model): rule
    for rule in (LLAMA, ONCE, GEMMA, T5)
    for model in rule.models.split()
}
# torch's own, by their forward: a subclass that keeps it computes the same.
TORCHS: dict[Any, type[Replacement]] = {
    torch.nn.RMSNorm.forward: TorchRMSForward,
    torch.nn.LayerNorm.forward: TorchLayerForward,
}


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did: names of modules, with their class or the reason to leave them."""

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [_count("norms replaced", self.replaced)]
        if self.fused:
            lines.append(_count("layers add residuals in the kernels of norms", self.fused))
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{names[0] or 'the model'}{more} left: {reason}")
        return "\n".join(lines)


def _count(what: str, modules: dict[str, str]) -> str:
    counts = collections.Counter(modules.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{len(modules)} {what}" + (f": {kinds}" if kinds else "")


def patch(model: Any, *, fuse_add: bool = True) -> PatchReport:
    """Let the norms of a torch model run on this library.

    Replaced are `torch.nn.RMSNorm` and `torch.nn.LayerNorm`, and the norms of Hugging Face's Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi, DeepSeek and T5, each with its own eps, weight offset
    and order of rounding, and only where a trial on the CPU shows that it computes just that.
    Class, parameters, state_dict and hooks stay, and so does the output: its dtype, and its values
    up to the order in which a row is summed. A call that this library refuses (mixed float64, a
    nested tensor, another device) is left to the module's own forward.

    Layers that add a residual just before such a norm, as the decoder layers of these models do,
    run both in one kernel, and backward adds a residual's gradient in the kernel of the norm beside
    it: their forward is compiled again from its source with these statements made one. The norm
    then sees the unrounded sum, as in `add_rms_norm`; in float32 nothing changes. A norm with
    hooks, or on tensors of several dtypes, runs apart as before.

    `unpatch` restores the model. A patched model may be copied, pickled, moved and trained; eps is
    read when it is patched. Patch before `torch.compile`. `torch.nn.DataParallel` does not work on
    a patched model: it copies modules with what is bound to them.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place, with all modules in it.
    fuse_add : bool, default True
        Whether layers may add residuals and their gradients in the kernels of norms.

    Returns
    -------
    PatchReport
        ``replaced``, a dict from a norm's name to its class; ``fused``, from the name of a layer
        that adds in the kernels of norms to its class; ``left``, from a name to the reason why that
        norm or layer was left. Printed, a summary.

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
    # Everything is decided before anything is bound: what raises leaves the model as it was.
    modules = list(_modules(model))
    norms = [_replacement(module) for _, module in modules]
    patched = {
        id(module)
        for (_, module), norm in zip(modules, norms, strict=True)
        if isinstance(norm, Replacement) or _is_patched(module, Replacement)
    }
    layers = [_fused_layer(module, patched) if fuse_add else None for _, module in modules]
    report = PatchReport()
    for made, done in ((norms, report.replaced), (layers, report.fused)):
        for (name, module), one in zip(modules, made, strict=True):
            if isinstance(one, str):
                report.left[name] = one
            elif one is not None:
                module.forward = one.forward
                done[name] = type(module).__name__
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


def _is_patched(module: Any, kinds: Any = (Replacement, FusedLayer)) -> bool:
    bound = module.__dict__.get("forward")
    return isinstance(bound, MethodType) and isinstance(bound.__self__, kinds)


def _bound(module: Any) -> str | None:
    """Why nothing can be bound to `module`."""
    if _is_patched(module):
        return "it is patched already"
    if "forward" in module.__dict__:
        return "its forward is bound to the instance by other code"
    return None


def _own_forward(cls: Any) -> FunctionType | None:
    """The forward of a class, if it is a function: torch.jit has others, which cannot be read."""
    forward = getattr(cls, "forward", None)
    return forward if isinstance(forward, FunctionType) else None


def _fused_layer(module: Any, patched: set[int]) -> FusedLayer | str | None:
    """What may stand in for a layer; why nothing may; None where it adds beside no patched norm."""
    norms = tuple(name for name, child in module.named_children() if id(child) in patched)
    made = fused(_own_forward(type(module)), norms) if norms else None
    if made is None:
        return None
    if isinstance(made, str):
        return made
    return _bound(module) or FusedLayer(module, norms)


def _replacement(module: Any) -> Replacement | str | None:
    """What may stand in for `module`; why nothing may; None for what is no norm."""
    cls: Any = type(module)
    jit = isinstance(module, torch.jit.ScriptModule)
    kind = module.original_name if jit else cls.__name__
    forward = _own_forward(cls)
    rule, torchs = RULES.get(kind), TORCHS.get(forward)
    named_norm = "norm" in kind.lower() and next(module.children(), None) is None
    if named_norm and (jit or forward is None):
        return f"{kind} has a forward that is {'compiled by torch.jit' if jit else 'no function'}"
    if forward is None or (rule is None and torchs is None):
        if cls.__module__.startswith(f"{__package__}."):
            return f"{kind} is this library's own"
        if named_norm:
            return f"{kind} is not a norm of rows that is known here"
        return None
    if (reason := _bound(module)) is not None:
        return reason
    if torchs is not None:
        return torchs(module, None if module.eps is None else float(module.eps))
    assert rule is not None
    eps = getattr(module, rule.eps, None)
    if not isinstance(eps, (int, float)):
        return f"{kind} has no number called {rule.eps}"
    reason = _disagreement(cls, forward, rule, float(eps), tuple(module._parameters))
    if reason is not None:
        return reason
    return rule.replacement(module, float(eps))


@functools.lru_cache(maxsize=256)
def _disagreement(
    cls: type, forward: Callable[..., Any], rule: Rule, eps: float, parameters: tuple[str, ...]
) -> str | None:
    """None if the forward of a class computes what `rule` says, tried on small tensors on the CPU.

    Within one rule a float32 result differs by the order of a sum alone, and a 16-bit one hardly
    ever; another order of the roundings moves many of the 16-bit results by a unit.
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
            ours = rule.replacement(stand_in, eps).forward(x)
            agrees = (ours.double() - theirs.double()).abs() <= 1e-5 * theirs.double().abs()
            if ours.dtype != theirs.dtype or agrees.double().mean() < 0.95:
                return f"{cls.__name__} does not compute what a norm of that name does"
    return None
