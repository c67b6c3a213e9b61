# SPDX-License-Identifier: Apache-2.0
"""The rules on single values, and the refusals that the border raises."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import numpy as np


def kind(value: object) -> str:
    """How a message calls the type of `value`."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def is_number(value: object) -> bool:
    """Whether `value` is a real Python or NumPy scalar; a bool is none."""
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, float, np.integer, np.floating)):
        return True
    return isinstance(value, np.generic) and value.dtype.name == "bfloat16"


def number(name: str, value: object) -> float:
    """`value` as a finite float."""
    if not is_number(value):
        raise TypeError(f"{name} must be a real number, got {shown(value)}")
    try:
        result = float(cast(float, value))
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {result}")
    return result


def epsilon(value: object) -> float:
    """`value` as an eps."""
    eps = number("eps", value)
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return eps


def flag(name: str, value: object) -> bool:
    """`value` as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def count(name: str, value: object) -> int:
    """`value` as an int of at least 1."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        result = operator.index(cast(Any, value))
    except TypeError:
        raise TypeError(f"{name} must be an int, got {shown(value)}") from None
    if result < 1:
        raise ValueError(f"{name} must be at least 1, got {result}")
    return result


def grouped(groups: object, *, axes: int, per_head: bool) -> int:
    """`groups` as an int that goes with the other options."""
    result = count("groups", groups)
    if result > 1 and per_head:
        raise ValueError(f"groups must be 1 with per_head=True, got {result}")
    if result > 1 and axes > 1:
        raise ValueError(f"groups must be 1 where {axes} axes are normalised, got {result}")
    return result


def divides(groups: int, hidden_size: int, whose: str) -> None:
    """Refuse groups that are not equal."""
    if hidden_size % groups:
        raise ValueError(f"groups must divide {whose} {hidden_size}, got {groups}")


def partial(value: object, row_size: int | None = None) -> int | None:
    """`value` as a number of columns; None where it is all of `row_size`."""
    if value is None:
        return None
    result = count("partial", value)
    if row_size is not None and result > row_size:
        raise ValueError(f"partial must be at most {row_size}, the size of a row, got {result}")
    return None if result == row_size else result


def offset(value: object, *, weighted: bool, weight_name: str = "weight") -> float:
    """`value` as a weight_offset."""
    result = number("weight_offset", value)
    if result and not weighted:
        raise ValueError(f"weight_offset must be 0 without a {weight_name}, got {result}")
    return result + 0.0  # -0.0 == 0.0, and equal options are to give equal bits


def lone_constant(weight: object, bias: object) -> None:
    """Refuse a number as bias where the weight is none: a positional eps would pass as one."""
    if is_number(bias) and not is_number(weight):
        raise TypeError(
            f"bias must be an array unless weight is a number, got {bias}: eps goes by name, "
            f"eps={bias}"
        )


def ends_in(name: str, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Refuse an x that does not fit parameters which were there before it."""
    if axes and tuple(shape[-len(axes) :]) != tuple(axes):
        raise ValueError(
            f"{name} must end in the axes {tuple(axes)}, got shape {tuple(shape)}"
        ) from None


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """`value` as one of `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {either(map(repr, choices))}, got {value!r}")
    return value


def dtype_among(name: str, dtype: str, allowed: Sequence[str], beside: str = "") -> None:
    """Refuse a dtype that is none of `allowed`."""
    if dtype not in allowed:
        raise TypeError(f"{name} must be {either(allowed)}{beside}, got {dtype}")


def no_axes(name: str, wanted: str) -> NoReturn:
    """Refuse a 0-d array as a weight or bias."""
    raise TypeError(f"{name} must be an array of {wanted} or a Python number, got a 0-d array")


def not_a_tensor(name: str, value: object) -> NoReturn:
    """Refuse what a module of torch does not take."""
    raise TypeError(f"{name} must be a torch.Tensor, got {kind(value)}")


def pair_of_counts(name: str, value: object, what: str) -> tuple[int, int]:
    """`value` as two ints of at least 1."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of ints, {what}, got {value!r}")
    first, second = (count(f"{name}[{index}]", item) for index, item in enumerate(value))
    return first, second


def not_an_array(name: str, value: object, *, constant: bool = False) -> NoReturn:
    """Refuse a value that is no array of any library."""
    hint = ""
    if constant and isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value):
        hint = " (the normalised shape follows from x and axis)"
    wanted = "an array or a real number" if constant else "an array"
    raise TypeError(f"{name} must be {wanted}, got {kind(value)}{hint}")


def unsupported_array(name: str, rule: str, got: str) -> NoReturn:
    """Refuse an array of a kind that no backend reads."""
    raise TypeError(f"{name} must be {rule}, got {got}")


def not_a_dtype(name: str, value: object) -> NoReturn:
    """Refuse a value that names no dtype."""
    raise TypeError(f"{name} must be a dtype, got {value!r}") from None


def unreachable_device(name: str, device: str) -> NoReturn:
    """Refuse an array that lies neither in host memory nor on a CUDA device."""
    raise ValueError(f"{name} must be on the CPU or a CUDA device, got {device}")


def no_gpu(name: str, reason: str) -> NoReturn:
    """Refuse a GPU array where the GPU backend cannot run."""
    raise RuntimeError(f"{name} is on a CUDA device, but the GPU backend cannot run: {reason}")


def forked() -> NoReturn:
    """Refuse GPU work in a process that CUDA does not serve."""
    raise RuntimeError(
        "CUDA does not serve this process, which was forked from one that had used it: start "
        "processes by multiprocessing's 'spawn'"
    )


def needs_gradient(name: str) -> NoReturn:
    """Refuse to detach a torch tensor silently."""
    raise RuntimeError(
        f"{name} requires grad, and this function records no gradient: "
        "call it under torch.no_grad(), or pass a detached tensor"
    )


def output_needs_gradient(name: str) -> NoReturn:
    """Refuse to write into a torch tensor that requires grad."""
    raise ValueError(f"{name} must not require grad, got a tensor that does")


def has_tangent(name: str) -> NoReturn:
    """Refuse to drop a torch tensor's forward-mode tangent silently."""
    raise RuntimeError(
        f"{name} has a forward-mode tangent, and this function computes none: "
        "pass torch.autograd.forward_ad.unpack_dual(...).primal"
    )


def transformed(name: str) -> NoReturn:
    """Refuse a torch tensor that stands for others."""
    raise TypeError(
        f"{name} must be a tensor with memory of its own, got one within torch.func, whose "
        "transforms (vmap, grad, jvp) this function has not: its leading axes are rows already"
    )


def output_while_recorded(name: str, recorded: str) -> NoReturn:
    """Refuse a given output of a call that autograd records."""
    raise RuntimeError(
        f"{recorded} requires grad, and values that are written into a given {name} have no "
        f"gradient: leave {name} out, or call it under torch.no_grad()"
    )


def kept_rows_while_recorded(recorded: str) -> NoReturn:
    """Refuse rows that are left untouched in a call that autograd records."""
    raise ValueError(
        f"masked must be 'zero' where {recorded} requires grad, got 'keep': pass masked='zero', or "
        "call it under torch.no_grad()"
    )


def second_derivative() -> NoReturn:
    """Refuse to differentiate a gradient."""
    raise RuntimeError("the gradient of a norm has no gradient: a norm is differentiable only once")


def misaligned(name: str, itemsize: int, got: int) -> NoReturn:
    """Refuse an array whose elements a GPU cannot load."""
    raise ValueError(
        f"{name} must begin at a multiple of its element size, {itemsize} bytes, "
        f"got an address that is {got} past one: copy it first"
    )


def other_library(name: str, x_name: str, wanted: str, got: str) -> NoReturn:
    """Refuse an output of another library than x's."""
    raise TypeError(f"{name} must be of {x_name}'s library, {wanted}, got {got}")


def uneven_strides(name: str) -> NoReturn:
    """Refuse an output whose strides do not count whole elements."""
    raise ValueError(f"{name} must have strides of whole elements, got a field of a wider record")


def shown(value: object) -> str:
    """How a message shows a value of a wrong kind."""
    return repr(value) if value is None or isinstance(value, (str, bool)) else kind(value)


def either(words: Iterable[object]) -> str:
    """The words as a list that ends in "or"."""
    *head, last = map(str, words)
    return f"{', '.join(head)} or {last}" if head else last
