# SPDX-License-Identifier: Apache-2.0
"""Plans from a file that `cupy-rmsnorm tune` wrote, and the file that is loaded.

A file belongs to one device model and one version of the library. It is JSON::

    {"meta": {"device": "NVIDIA H200", "cupy_rmsnorm": "0.1.0", ...},
     "plans": [{"op": "rms_norm", "hidden_size": 4096, "dtypes": {"x": "bfloat16"},
                "plan": {"kernel": "norm_forward", "vec_size": 8, ...}}, ...],
     "rows": [...]}

An entry has the dtypes that its op's plan depends on, and a plan every field of `Plan`. What was
measured is in `rows`, which nobody reads here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from . import _kernel
from ._call import Norm
from ._candidates import (
    backward_candidates,
    backward_fault,
    forward_candidates,
    forward_fault,
)
from ._dtypes import ROW_DTYPES, TABLE
from ._plan import Plan

LARGEST_FILE = 2**24  # bytes
LONGEST_ROW = 2**40
META = {"device", "cupy_rmsnorm", "driver", "cupy", "date"}  # the first two decide


class Op(NamedTuple):
    """What a plan depends on, apart from hidden size and device."""

    norm: Norm
    backward: bool
    dtypes: tuple[str, ...]  # of these arrays


OPS: Mapping[str, Op] = {
    "rms_norm": Op("rms", False, ("x",)),
    "layer_norm": Op("layer", False, ("x",)),
    "add_rms_norm": Op("rms", False, ("x", "residual")),
    "add_layer_norm": Op("layer", False, ("x", "residual")),
    "rms_norm_backward": Op("rms", True, ("x", "dout")),
    "layer_norm_backward": Op("layer", True, ("x", "dout")),
    # Here x is the saved residual_out.
    "add_rms_norm_backward": Op("rms", True, ("x", "dout", "dresidual_out")),
    "add_layer_norm_backward": Op("layer", True, ("x", "dout", "dresidual_out")),
}


class Key(NamedTuple):
    """The calls that a plan is for."""

    op: Op
    hidden_size: int
    dtypes: tuple[str, ...]  # in the op's order

    def candidates(self, arch: int) -> tuple[Plan, ...]:
        """What may be tried, the library's own plan first."""
        if self.op.backward:
            return backward_candidates(
                self.op.norm, self.hidden_size, self.dtypes[0], self._itemsize, arch
            )
        return forward_candidates(self.op.norm, self.hidden_size, *self._forward_dtypes, arch)

    def fault(self, plan: Plan, arch: int) -> str:
        """Why the plan cannot run; "" if it can."""
        if self.op.backward:
            return backward_fault(plan, self.hidden_size, self.dtypes[0], self._itemsize, arch)
        return forward_fault(plan, self.hidden_size, *self._forward_dtypes, arch)

    @property
    def _itemsize(self) -> int:
        return sum(TABLE[dtype].itemsize for dtype in self.dtypes)

    @property
    def _forward_dtypes(self) -> tuple[str, str | None]:
        return self.dtypes[0], self.dtypes[1] if len(self.dtypes) > 1 else None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plan file in use."""

    path: str
    sha256: str
    devices: frozenset[int]  # those that it is for
    plans: Mapping[Key, Plan]


_loaded: Loaded | None = None  # replaced as a whole: a call sees one file or the other

_FORWARD = {(op.norm, len(op.dtypes)): op for op in OPS.values() if not op.backward}
_BACKWARD = {(op.norm, len(op.dtypes)): op for op in OPS.values() if op.backward}


def forward_plan(
    device: int, norm: Norm, hidden_size: int, x_dtype: str, residual_dtype: str | None
) -> Plan | None:
    """The loaded plan of a forward row, if there is one."""
    loaded = _loaded
    if loaded is None or device not in loaded.devices:
        return None
    dtypes = (x_dtype,) if residual_dtype is None else (x_dtype, residual_dtype)
    return loaded.plans.get(Key(_FORWARD[norm, len(dtypes)], hidden_size, dtypes))


def backward_plan(
    device: int,
    norm: Norm,
    hidden_size: int,
    x_dtype: str,
    dout_dtype: str,
    dresidual_out_dtype: str | None,
) -> Plan | None:
    """The same of backward."""
    loaded = _loaded
    if loaded is None or device not in loaded.devices:
        return None
    given = (x_dtype, dout_dtype, dresidual_out_dtype)
    dtypes = tuple(dtype for dtype in given if dtype is not None)
    return loaded.plans.get(Key(_BACKWARD[norm, len(dtypes)], hidden_size, dtypes))


def loaded() -> Loaded | None:
    """The file in use."""
    return _loaded


def read(path: str) -> bytes:
    """What is in a file, or a byte more than the longest may have."""
    with open(path, "rb") as file:
        return file.read(LARGEST_FILE + 1)


def load(path: str, content: bytes, version: str) -> None:
    """Use the plans in a file's content, all of them or, where one is refused, none."""
    global _loaded
    try:
        document = parse(content)
        check_version(document, version)
        name = document["meta"]["device"]
        devices = _kernel.devices()
        mine = [index for index, properties in enumerate(devices) if properties.name == name]
        if not mine:
            here = ", ".join(sorted({repr(properties.name) for properties in devices}))
            raise ValueError(f"was made on {name!r}, and here is {here}: plans are for one device")
        plans = check_plans(document["plans"], devices[mine[0]].arch)
    except ValueError as error:
        raise ValueError(f"plan file {path}: {error}") from None
    digest = hashlib.sha256(content).hexdigest()
    _loaded = Loaded(os.path.abspath(path), digest, frozenset(mine), plans)


def unload() -> None:
    """Use the library's own plans again."""
    global _loaded
    _loaded = None


# What a file may hold -----------------------------------------------------------------------------


def parse(content: bytes) -> dict[str, Any]:
    """A file's three parts, the first of which is checked."""
    if len(content) > LARGEST_FILE:
        raise ValueError(f"is longer than {LARGEST_FILE} bytes")
    try:
        document = json.loads(content, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, of an integer's length
        raise ValueError(f"cannot be read as JSON: {error}") from None
    parts = _members("the file", document, required={"meta", "plans"}, optional={"rows"})
    meta = _members("meta", parts["meta"], required={"device", "cupy_rmsnorm"}, optional=META)
    for name in ("device", "cupy_rmsnorm"):
        _typed(f"meta: {name}", meta[name], str)
    return parts


def check_version(document: Mapping[str, Any], version: str) -> None:
    """Refuse the file of another version: its plans may not be those that are tested."""
    made_by = document["meta"]["cupy_rmsnorm"]
    if made_by != version:
        raise ValueError(
            f"was made by cupy_rmsnorm {made_by}, this is {version}: run cupy-rmsnorm tune again"
        )


def check_plans(entries: Any, arch: int) -> dict[Key, Plan]:
    """The plans by what they are for; each is one that tune can have written."""
    plans: dict[Key, Plan] = {}
    for number, entry in enumerate(_typed("plans", entries, list)):
        where = f"plans[{number}]"
        try:
            key = _key(entry)
            where += f" ({entry['op']}, hidden size {key.hidden_size}, {'/'.join(key.dtypes)})"
            plan = _plan(entry["plan"])
            if fault := key.fault(plan, arch):
                raise ValueError(fault)
            if plan not in key.candidates(arch):
                raise ValueError("it is none of the plans that cupy-rmsnorm tune tries")
            if key in plans:
                raise ValueError("there is another plan for the same calls")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        plans[key] = plan
    return plans


def _key(entry: Any) -> Key:
    members = _members("an entry", entry, required={"op", "hidden_size", "dtypes", "plan"})
    name = _typed("op", members["op"], str)
    if name not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {name!r}")
    hidden_size = _typed("hidden_size", members["hidden_size"], int)
    if not 1 <= hidden_size <= LONGEST_ROW:
        raise ValueError(f"hidden_size must be 1 to {LONGEST_ROW}, got {_shown(hidden_size)}")
    op = OPS[name]
    given = _members("dtypes", members["dtypes"], required=set(op.dtypes))
    dtypes = tuple(given[array] for array in op.dtypes)
    for array, dtype in zip(op.dtypes, dtypes, strict=True):
        if not isinstance(dtype, str) or dtype not in ROW_DTYPES:
            names = ", ".join(ROW_DTYPES)
            raise ValueError(f"dtypes: {array} must be one of {names}, got {_shown(dtype)}")
    if "float64" in dtypes and set(dtypes) != {"float64"}:
        raise ValueError(f"dtypes: float64 goes with float64 alone, got {', '.join(dtypes)}")
    return Key(op, hidden_size, dtypes)


_PLAN_TYPES: Mapping[str, type] = {
    field.name: {"str": str, "int": int, "bool": bool}[str(field.type)]
    for field in dataclasses.fields(Plan)
}


def _plan(value: Any) -> Plan:
    members = _members("plan", value, required=set(_PLAN_TYPES))
    for name, cls in _PLAN_TYPES.items():
        _typed(name, members[name], cls)
        if cls is int and not 0 <= members[name] < 2**31:
            raise ValueError(f"{name} must be 0 to {2**31 - 1}, got {_shown(members[name])}")
    return Plan(**members)


def _members(
    what: str,
    value: Any,
    *,
    required: AbstractSet[str],
    optional: AbstractSet[str] = frozenset(),
) -> dict[str, Any]:
    members: dict[str, Any] = _typed(what, value, dict)
    if missing := sorted(required - members.keys()):
        raise ValueError(f"{what} must have {', '.join(missing)}")
    if unknown := sorted(members.keys() - required - optional):
        raise ValueError(f"{what} has {_shown(unknown[0])}, which nothing here is called")
    return members


_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    bool: "true or false",
}


def _typed(what: str, value: Any, cls: type) -> Any:
    """`value`, which is exactly a `cls`: true is no 1 here, and 1.0 none either."""
    if type(value) is not cls:
        raise ValueError(f"{what} must be {_JSON_NAMES[cls]}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has two members of one name")
    return members


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
