# SPDX-License-Identifier: Apache-2.0
"""The adds of a residual, done by the kernels of the norm beside them, for `patch`.

A decoder layer of transformers says

    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    ...
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

and a fused one, in their places,

    hidden_states, residual = norm_beside(hidden_states, self.input_layernorm)
    ...
    hidden_states, residual = add_norm(residual, hidden_states, self.post_attention_layernorm)

where backward adds the gradients of both results in the norm's kernel. Its forward is its class's
own, compiled once more from the text of its module with only this changed, around it the
decorators that its class's has, with their closures. What the norm is, and whether it may be run
so, both ask at each call.
"""

from __future__ import annotations

import ast
import functools
import linecache
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from ._torch_forwards import METHODS_ARE_TRACED, Replacement


def add_norm(x: Any, residual: Any, norm: Any) -> Any:
    """``norm(x + residual)`` and the sum: in one kernel where nothing would see the difference."""
    replacement = _replacement(norm)
    made = None if replacement is None else replacement.run_added(x, residual)
    if made is not None:
        return made
    total = x + residual
    return norm(total), total


def norm_beside(x: Any, norm: Any) -> Any:
    """``norm(x)`` and x, whose gradients one kernel adds."""
    if torch.is_grad_enabled():
        replacement = _replacement(norm)
        made = None if replacement is None else replacement.run_beside(x)
        if made is not None:
            return made
    return norm(x), x


def _replacement(norm: Any) -> Replacement | None:
    """What stands in for a norm's forward, unless hooks would miss its call."""
    if not METHODS_ARE_TRACED and torch.compiler.is_compiling():
        return None
    forward = norm.forward
    # Not getattr with a default: dynamo has always taken that (torch 2.11).
    replacement = forward.__self__ if isinstance(forward, MethodType) else None
    if not isinstance(replacement, Replacement) or (
        norm._forward_hooks
        or norm._forward_pre_hooks
        or norm._backward_hooks
        or norm._backward_pre_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return None
    return replacement


# What a fused forward calls, by the keywords that it is compiled with.
ADD_NORM, NORM_BESIDE = "_cupy_rmsnorm_add_norm", "_cupy_rmsnorm_norm_beside"
FUNCTIONS = {ADD_NORM: add_norm, NORM_BESIDE: norm_beside}


class FusedLayer:
    """What stands in the place of a layer's forward, as `Replacement` does in that of a norm's.

    The function is found again where the module's class changes, as FSDP changes it: what wraps
    forward then may be what checkpoints gradients.
    """

    __slots__ = ("function", "module", "norms", "own")

    def __init__(self, module: Any, norms: tuple[str, ...]) -> None:
        self.module = module
        self.norms = norms
        self._find()

    def _find(self) -> None:
        self.own = type(self.module).forward
        made = fused(self.own, self.norms)
        self.function = self.own if made is None or isinstance(made, str) else made

    def __getstate__(self) -> tuple[Any, tuple[str, ...]]:
        return self.module, self.norms

    def __setstate__(self, state: tuple[Any, tuple[str, ...]]) -> None:
        self.module, self.norms = state
        self._find()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self.module).forward
        if own is not self.own:
            if torch.compiler.is_compiling():
                return own(self.module, *args, **kwargs)
            self._find()
        return self.function(self.module, *args, **kwargs)


@functools.lru_cache(maxsize=256)
def fused(forward: Any, norms: tuple[str, ...]) -> FunctionType | str | None:
    """`forward` with the adds at these norms fused; why not; None where there is no such add."""
    if not isinstance(forward, FunctionType):
        return None
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is None:
        code = _fused_code(forward, norms)
        if not isinstance(code, CodeType):
            return code
        made = _copy(forward, code, forward.__closure__)
        made.__kwdefaults__ = {**(forward.__kwdefaults__ or {}), **FUNCTIONS}
        return made
    inner = fused(wrapped, norms)
    if not isinstance(inner, FunctionType):
        return inner
    cells = forward.__closure__ or ()
    if [_content(cell) is wrapped for cell in cells].count(True) != 1:
        return "its forward has a decorator that does not show what it calls"
    closure = tuple(CellType(inner) if _content(cell) is wrapped else cell for cell in cells)
    made = _copy(forward, forward.__code__, closure)
    made.__wrapped__ = inner  # type: ignore[attr-defined]
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _copy(function: Any, code: CodeType, closure: Any) -> FunctionType:
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    return made


# From source to code ------------------------------------------------------------------------------


def _fused_code(function: FunctionType, norms: tuple[str, ...]) -> CodeType | str | None:
    """The code of a function that calls `FUNCTIONS`.

    The whole file is compiled, and not run, so that the function's code differs from the one that
    runs by nothing else: neither in its closure nor in the lines that a traceback shows.
    """
    code = function.__code__
    if not set(norms) & set(code.co_names):
        return None
    lines = linecache.getlines(code.co_filename, function.__globals__)
    try:
        tree = ast.parse("".join(lines))
        definition = next(node for node in ast.walk(tree) if _defines(node, code))
    except (StopIteration, SyntaxError):
        return "the source of its forward is not at hand"
    own = _compiled(tree, code)
    if not _fuse(definition, norms):
        return None
    if own is None or not _alike(own, code):
        return "the source of its forward is not what runs"
    return _compiled(tree, code)


def _defines(node: ast.AST, code: CodeType) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        return False
    first = node.decorator_list[0] if node.decorator_list else node
    return first.lineno == code.co_firstlineno


def _fuse(definition: Any, norms: tuple[str, ...]) -> bool:
    """Call `FUNCTIONS` where they fit; whether there was such a place."""
    arguments = definition.args
    own_name = (*arguments.posonlyargs, *arguments.args)[0].arg
    before = ast.dump(definition)
    for node in ast.walk(definition):
        for name in ("body", "orelse", "finalbody"):
            block: Any = getattr(node, name, None)
            for count in (3, 2) if isinstance(block, list) else ():
                for i in reversed(range(len(block) - count + 1)):
                    statement = _one_statement(block[i : i + count], own_name, norms)
                    if statement is not None:
                        block[i : i + count] = [statement]
    if ast.dump(definition) == before:
        return False
    arguments.kwonlyargs += map(ast.arg, FUNCTIONS)
    arguments.kw_defaults += [ast.Constant(None) for _ in FUNCTIONS]
    ast.fix_missing_locations(definition)
    return True


def _one_statement(block: list[Any], own_name: str, norms: tuple[str, ...]) -> Any:
    """The statement that does what two or three of a block do; None for others."""
    *add, copies, normalises = block
    match copies, normalises:
        case (
            ast.Assign([ast.Name(residual) as kept], ast.Name(copied) as source),
            ast.Assign(
                [ast.Name(normed) as y],
                ast.Call(ast.Attribute(ast.Name(owner), name) as norm, [ast.Name(given)], []),
            ),
        ) if copied == normed == given != residual and owner == own_name and name in norms:
            function = NORM_BESIDE
            operands: list[Any] = [source]
        case _:
            return None
    match add:
        case []:
            pass
        case [ast.Assign([ast.Name(total)], ast.BinOp(x, ast.Add(), other))] if total == given:
            function, operands = ADD_NORM, [x, other]
        case _:
            return None
    call = ast.Call(ast.Name(function, ast.Load()), [*operands, norm], [])
    made = ast.Assign([ast.Tuple([y, kept], ast.Store())], call)
    return ast.copy_location(made, normalises)


def _compiled(tree: ast.Module, like: CodeType) -> CodeType | None:
    """The code of the function that `like` is the code of."""
    whole = compile(tree, like.co_filename, "exec", dont_inherit=True)
    found = [whole]
    for code in found:  # grows
        if (code.co_name, code.co_firstlineno) == (like.co_name, like.co_firstlineno):
            return code
        found += [value for value in code.co_consts if isinstance(value, CodeType)]
    return None


def _alike(one: Any, other: Any) -> bool:
    """Whether two codes do the same; of one that has run, `==` may see traces of that."""
    if not isinstance(one, CodeType):
        return type(one) is type(other) and one == other
    return (
        isinstance(other, CodeType)
        and one.co_code == other.co_code
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and one.co_freevars == other.co_freevars
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_alike, one.co_consts, other.co_consts))
    )
