# SPDX-License-Identifier: Apache-2.0
"""Let the norms of a torch model run on this library, each by its own semantics.

A patched module keeps its class, parameters and hooks. What changes is one attribute of the
instance, ``forward``: a bound method of an object below that holds the module. Copies and pickles
of the model carry objects that hold their own modules, and torch.compile compiles once for all
layers: of a bound method it asks what it does, of another callable whether it is the same object.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from ._api import layer_norm, rms_norm
from ._torch_modules import axis_of, check_shape, eps_for

FLOAT32 = torch.float32
# The dtypes of x and weight that an operator takes together.
TAKEN = {
    (torch.float64, torch.float64),
    *itertools.product((torch.float16, torch.bfloat16, FLOAT32), repeat=2),
}

# On a GPU autocast returns layer_norm in float32, and rms_norm by some releases of torch only.
AUTOCASTS_RMS_NORM = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::rms_norm", "AutocastCUDA"
)


class Replacement:
    """What stands in a forward's place. `forward` names its argument as the one that it replaces.

    Parameters are looked up at each call, since training, `load_state_dict` and `to` may replace
    them; in `_parameters`, which takes a tenth of the time of ``module.weight``. One that is not
    there is parametrised, or None.
    """

    __slots__ = ("eps", "module")
    forward: Callable[..., Any]

    def __init__(self, module: Any, eps: Any) -> None:
        self.module = module
        self.eps = eps

    def norm(self, x: Any, weight: Any) -> Any:
        """What `forward` returns, by this library."""
        raise NotImplementedError

    def run(self, x: Any) -> Any:
        """`norm`, or the module's own forward where this library refuses the call.

        That may compute it (other dtypes, devices and layouts), or says why not in its own words.
        """
        weight = self.module._parameters.get("weight")
        if weight is None:
            weight = self.module.weight
        # Nothing would catch what an operator raises once it is compiled.
        if not torch.compiler.is_compiling() or _taken(x, weight):
            try:
                return self.norm(x, weight)
            except (TypeError, ValueError):  # before anything is computed
                pass
        return type(self.module).forward(self.module, x)


def _taken(x: Any, weight: Any) -> bool:
    return (x.dtype, x.dtype if weight is None else weight.dtype) in TAKEN


class LlamaForward(Replacement):
    """Round to x's dtype, then multiply: ``weight * xhat.to(x.dtype)``."""

    __slots__ = ()

    def forward(self, hidden_states: Any) -> Any:
        return self.run(hidden_states)

    def norm(self, x: Any, weight: Any) -> Any:
        dtype = x.dtype
        if weight.dtype is dtype:
            return rms_norm(x, weight, eps=self.eps, cast="before_weight")
        promoted = torch.promote_types(dtype, weight.dtype)
        return rms_norm(x, weight, eps=self.eps, cast="before_weight", out_dtype=promoted)


class T5Forward(Replacement):
    """Round to a 16-bit weight's dtype, then multiply: the output has the weight's dtype.

    Where x is float32 and the weight is not, the first of these two roundings is left out.
    """

    __slots__ = ()

    def forward(self, hidden_states: Any) -> Any:
        return self.run(hidden_states)

    def norm(self, x: Any, weight: Any) -> Any:
        dtype = weight.dtype
        if x.dtype is dtype:
            return rms_norm(x, weight, eps=self.eps, cast="before_weight")
        return rms_norm(x, weight, eps=self.eps, out_dtype=dtype)


class OnceForward(Replacement):
    """Multiply in float32, then round to x's dtype."""

    __slots__ = ()

    def forward(self, hidden_states: Any) -> Any:
        return self.run(hidden_states)

    def norm(self, x: Any, weight: Any) -> Any:
        return rms_norm(x, weight, eps=self.eps)


class GemmaForward(Replacement):
    """Multiply by ``1 + weight`` in float32, then round to x's dtype."""

    __slots__ = ()

    def forward(self, x: Any) -> Any:
        return self.run(x)

    def norm(self, x: Any, weight: Any) -> Any:
        return rms_norm(x, weight, eps=self.eps, weight_offset=1.0)


class TorchForward(Replacement):
    """What torch's own norms share."""

    __slots__ = ("axis",)

    def __init__(self, module: Any, eps: Any) -> None:
        super().__init__(module, eps)
        self.axis = axis_of(module.normalized_shape)


class TorchRMSForward(TorchForward):
    """torch.nn.RMSNorm, autocast included."""

    __slots__ = ()

    def forward(self, x: Any) -> Any:
        return self.run(x)

    def norm(self, x: Any, weight: Any) -> Any:
        if weight is None:
            check_shape(x, self.module.normalized_shape)
        dtype = _out_dtype(x) if AUTOCASTS_RMS_NORM else None
        return rms_norm(x, weight, eps=eps_for(self.eps, x), axis=self.axis, out_dtype=dtype)


class TorchLayerForward(TorchForward):
    """torch.nn.LayerNorm, autocast included."""

    __slots__ = ()

    def forward(self, input: Any) -> Any:
        return self.run(input)

    def norm(self, x: Any, weight: Any) -> Any:
        if weight is None:
            check_shape(x, self.module.normalized_shape)
        bias = self.module._parameters.get("bias")
        if bias is None:
            bias = self.module.bias
        return layer_norm(x, weight, bias, eps=self.eps, axis=self.axis, out_dtype=_out_dtype(x))


def _out_dtype(x: Any) -> Any:
    """The dtype that autocast gives the norm of x on the GPU; None: x's own."""
    if torch.is_autocast_enabled() and x.is_cuda and x.dtype is not torch.float64:
        return FLOAT32
    return None


# Which module gets which -------------------------------------------------------------------------


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
    up to the order in which a row is summed. A call that this library refuses (mixed float64, a
    nested tensor, another device) is left to the module's own forward.

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
        if isinstance(made, Replacement):
            module.forward = made.forward
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
    return isinstance(bound, MethodType) and isinstance(bound.__self__, Replacement)


def _replacement(module: Any) -> Replacement | str | None:
    """What may stand in for `module`; why nothing may; None for what is no norm."""
    cls: Any = type(module)
    kind = cls.__name__
    rule, torchs = RULES.get(kind), TORCHS.get(cls.forward)
    if rule is None and torchs is None:
        if cls.__module__.startswith(f"{__package__}."):
            return f"{kind} is this library's own"
        leaf = next(module.children(), None) is None
        if leaf and "norm" in kind.lower():
            return f"{kind} is not a norm of rows that is known here"
        return None
    if _is_patched(module):
        return "it is patched already"
    if "forward" in module.__dict__:
        return "its forward is bound to the instance by other code"
    if torchs is not None:
        return torchs(module, None if module.eps is None else float(module.eps))
    assert rule is not None
    eps = getattr(module, rule.eps, None)
    if not isinstance(eps, (int, float)):
        return f"{kind} has no number called {rule.eps}"
    reason = _disagreement(cls, cls.forward, rule, float(eps), tuple(module._parameters))
    if reason is not None:
        return reason
    return rule.replacement(module, float(eps))


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
            ours = rule.replacement(stand_in, eps).forward(x)
            agrees = (ours.double() - theirs.double()).abs() <= 1e-5 * theirs.double().abs()
            if ours.dtype != theirs.dtype or agrees.double().mean() < 0.95:
                return f"{cls.__name__} does not compute what a norm of that name does"
    return None
