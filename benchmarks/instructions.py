# SPDX-License-Identifier: Apache-2.0
"""What the study kernels compile to: registers, loads, barriers, shuffles. Needs no GPU.

`python -m benchmarks.instructions` writes results/instructions.json, one row an instantiation,
architecture and set of options. It takes about a minute, and needs nvdisasm.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cupy_rmsnorm import _source, variants
from cupy_rmsnorm._kernel import DeviceProperties
from cupy_rmsnorm.variants import Instance, Variant
from tests import compiled

RESULTS = Path(__file__).parent / "results" / "instructions.json"
ARCHS = (75, 90)
CACHE_MODIFIERS = ("ca", "cg")  # of ptxas -dlcm
HIDDEN_SIZES = (1024, 4096)

_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def instance(variant: Variant, hidden_size: int, arch: int) -> Instance:
    """What the variant launches for rows of this size."""
    launch = variant.geometry(variant, hidden_size, 1, DeviceProperties(arch, 132))
    return variant, launch.template_arguments


def compile_instances(instances: Iterable[Instance], arch: int) -> dict[Instance, dict[str, Any]]:
    """Compile for `arch`, one module for all of a source and options."""
    modules: dict[tuple[str, tuple[str, ...]], list[Instance]] = {}
    for each in dict.fromkeys(instances):
        modules.setdefault((each[0].source, each[0].options), []).append(each)
    found = {}
    for (source, options), members in modules.items():
        found |= _compile(source, options, members, arch)
    return found


def _compile(
    source: str, options: tuple[str, ...], members: list[Instance], arch: int
) -> dict[Instance, dict[str, Any]]:
    import cupy

    log = io.StringIO()
    names = [variant.name_expression(arguments) for variant, arguments in members]
    with compiled._no_device(arch):
        module = cupy.RawModule(
            code=_source.load(source),
            options=(*options, "--ptxas-options=-v"),
            name_expressions=names,
        )
        module.compile(log_stream=log)
        mapping, cubin = module.module.mapping, module.module.cubin
    usage = compiled._usage(log.getvalue())
    listing = compiled._disassemble(cubin) if compiled.disassembler() else {}
    found = {}
    for each, name in zip(members, names, strict=True):
        registers, _, spills, shared = usage[mapping[name]]
        found[each] = {
            "registers": registers,
            "spill_bytes": spills,
            "shared_bytes": shared,
            **_count(listing.get(mapping[name], "")),
        }
    return found


def _count(sass: str) -> dict[str, Any]:
    opcodes = Counter(_OPCODE.findall(sass))
    opcodes.pop("NOP", None)  # the padding behind the code

    def kinds(*starts: str) -> dict[str, int]:
        found = {code: n for code, n in opcodes.items() if code.split(".")[0] in starts}
        return dict(sorted(found.items()))

    return {
        "instructions": sum(opcodes.values()),
        "global_loads": kinds("LDG", "LDGSTS"),
        "global_stores": kinds("STG"),
        "shared": kinds("LDS", "STS"),
        "shuffles": sum(kinds("SHFL").values()),
        "barriers": sum(kinds("BAR").values()),
        "float": sum(kinds("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "HMMA").values()),
    }


def rows() -> list[dict[str, Any]]:
    """Every variant at two hidden sizes; those with the plainest loads under each modifier too."""
    table = list(variants.TABLE)
    for name in ("f32x4", "f16x8_pack_f32", "f32_ilp_1"):
        variant = vars(variants.rms_norm)[name]
        table += [
            dataclasses.replace(
                variant, options=(*variant.options, f"--ptxas-options=-dlcm={modifier}")
            )
            for modifier in CACHE_MODIFIERS
        ]
    found = []
    for arch in ARCHS:
        sized = [
            (instance(variant, size, arch), size)
            for variant in table
            if variant.min_arch <= arch
            for size in HIDDEN_SIZES
            if size in variant.sizes
        ]
        results = compile_instances((each for each, _ in sized), arch)
        for each, size in sized:
            variant = each[0]
            _, _, modifier = variant.options[-1].partition("-dlcm=")
            found.append(
                {
                    "op": f"{variant.norm}_norm",
                    "impl": variant.name,
                    "dtype": variant.dtype,
                    "hidden_size": size,
                    "arch": arch,
                    "dlcm": modifier or "default",
                    **results[each],
                }
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all of them and write the table."""
    parser = argparse.ArgumentParser(description="Count what the study kernels compile to.")
    parser.add_argument("--json", type=Path, default=RESULTS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if compiled.disassembler() is None:
        raise SystemExit("this benchmark needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    lines = ",\n".join(json.dumps(row) for row in rows())
    head = json.dumps(compiled.versions())
    options.json.write_text(f'{{"meta": {head},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
