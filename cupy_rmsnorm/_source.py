# SPDX-License-Identifier: Apache-2.0
"""Finds the CUDA sources and splices our own headers into one string.

CuPy keys its disk cache by the text it is given and not by the files that text includes, so a
header that changed under an unchanged `#include` would be served from an old cubin. Spliced text
has no such gap. `#line` marks keep the compiler's messages pointing at the real files.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\s*$')
_PACKAGE = Path(__file__).parent


@functools.cache
def directory() -> Path:
    """The folder of the `.cu` sources: inside an installed package, beside it in a checkout."""
    for candidate in (_PACKAGE / "kernels_cu", _PACKAGE.parent / "kernels_cu"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no kernels_cu in {_PACKAGE} or beside it; reinstall the package")


@functools.cache
def load(kernel: str) -> str:
    """The text of `kernel`.cu with every quoted include spliced in once."""
    return "\n".join(_splice(f"{kernel}.cu", set())) + "\n"


def _splice(name: str, seen: set[str]) -> list[str]:
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((directory() / name).read_text("ascii").splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        if include[1] not in seen:
            lines += _splice(include[1], seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines
