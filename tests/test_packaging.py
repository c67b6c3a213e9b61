# SPDX-License-Identifier: Apache-2.0
"""The house: what a wheel holds, what an import costs, that imports run downward only, and that
README.md tells the truth."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cupy_rmsnorm
from cupy_rmsnorm import _info

CHECKOUT = Path(__file__).parent.parent
PACKAGE = CHECKOUT / "cupy_rmsnorm"
KERNELS = sorted((CHECKOUT / "kernels_cu").iterdir())

# From the top down: a module imports from lower lines only. CONTRIBUTING.md has the same picture.
LAYERS = """
    cli
    _study _tune
    torch
    _torch_patch
    _torch_fuse
    _torch_forwards
    _torch_modules
    __init__
    variants
    _api _api_forward _api_backward _tools
    _roads
    _torch_ops
    _torch_autograd
    _run
    _fast_pair _fast_backward
    _fast_learn
    _fast_torch _fast_cupy
    _fast
    _border
    _libraries
    _check_tools
    _check
    _cuda_warmup _watch
    _cuda _cpu
    _cuda_backward
    _plan_file
    _kernel _operands
    _enqueue
    _candidates
    _plan_backward
    _plan _source _build _layout _overlap _cpu_cast _cpu_pool
    _bench _docs _info _progress _refuse
    _call _device _dtypes _torch_memory
"""
LAYER = {module: depth for depth, line in enumerate(LAYERS.split("\n")) for module in line.split()}


def imports(module: str) -> set[str]:
    """The package's own modules that `module` imports, wherever in its text."""
    names: list[str] = []
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = ("cupy_rmsnorm." if node.level else "") + (node.module or "")
            names += [f"{origin.rstrip('.')}.{alias.name}" for alias in node.names]
    own = [name.split(".") for name in names if name.split(".")[0] == "cupy_rmsnorm"]
    # A name of the package that is no module is one of __init__'s.
    return {name[1] if len(name) > 1 and name[1] in LAYER else "__init__" for name in own}


def test_imports_run_downward_only() -> None:
    modules = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert set(modules) <= set(LAYER), "LAYERS and CONTRIBUTING.md name every module"
    upward = {
        f"{module} -> {other}"
        for module in modules
        for other in imports(module)
        if LAYER[other] <= LAYER[module]
    }
    assert upward == set()


FILES = "cupy_rmsnorm/*.py kernels_cu/* benchmarks/*.py tests/[!t_]*.py tests/emulator/[!_]*"


@pytest.mark.parametrize("pattern", FILES.split())
def test_contributing_names_every_file(pattern: str) -> None:
    text = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8")
    names = {path.name for path in CHECKOUT.glob(pattern)}
    assert names
    missing = {name for name in names if not re.search(rf"(?<!\w){re.escape(name)}\b", text)}
    assert missing == set()


def test_the_reader_of_imports_reads() -> None:
    assert imports("_api") >= {"_docs"}
    assert imports("_run") >= {"_border", "_check"}  # inside its functions
    assert "__init__" in imports("cli")
    assert imports("_dtypes") == set()


COST = """
import sys, time
begin = time.process_time()
import numpy
between = time.process_time()
import cupy_rmsnorm
end = time.process_time()
print(end - between, between - begin, *sorted({"cupy", "torch", "ml_dtypes"} & set(sys.modules)))
"""


def test_an_import_is_cheap_and_brings_no_other_library() -> None:
    def ask() -> list[str]:
        command = [sys.executable, "-W", "error", "-c", COST]
        return subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout.split()

    ask()  # writes the bytecode
    for _ in range(20):
        own, numpys, *others = ask()
        assert others == []
        # 25 ms where NumPy takes 62 ms, as on an idle machine; a busy one slows both alike.
        if float(own) <= max(0.025, 0.4 * float(numpys)):
            return
    pytest.fail(f"importing cupy_rmsnorm takes {own} s beside NumPy's {numpys} s")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The names of the files in a wheel and in an sdist of this checkout."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
        subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    return in_wheel, in_sdist


def test_a_wheel_holds_the_package_and_nothing_else(
    distributions: tuple[set[str], set[str]],
) -> None:
    wheel, _ = distributions
    metadata = f"cupy_rmsnorm-{cupy_rmsnorm.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel} == {"cupy_rmsnorm", metadata}
    for path in KERNELS:
        assert f"cupy_rmsnorm/kernels_cu/{path.name}" in wheel
    sources = {str(path.relative_to(CHECKOUT)) for path in PACKAGE.glob("*.py")}
    data = {"py.typed", "data/README.md", "data/smollm2_layer22.npz"}
    assert wheel >= sources | {f"cupy_rmsnorm/{name}" for name in data}
    assert f"{metadata}/licenses/LICENSE" in wheel
    assert not [name for name in wheel if name.endswith((".pyc", ".cu.py"))]


def test_an_sdist_holds_all_that_is_needed_to_build_and_test(
    distributions: tuple[set[str], set[str]],
) -> None:
    _, sdist = distributions
    for path in [*KERNELS, *PACKAGE.glob("*.py"), *(CHECKOUT / "tests").glob("*.py")]:
        assert str(path.relative_to(CHECKOUT)) in sdist
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".ci/run"):
        assert name in sdist


def test_kernels_are_cuda_sources_only() -> None:
    """A .py file there would break editable installs, and other files stay out of the wheel."""
    assert KERNELS
    assert {path.suffix for path in KERNELS} <= {".cu", ".cuh"}


def test_every_source_names_its_licence_first() -> None:
    sources = [
        *KERNELS,
        *(p for top in ("cupy_rmsnorm", "tests", "benchmarks", "examples", ".ci")
          for p in (CHECKOUT / top).rglob("*.py")),
    ]  # fmt: skip
    without = [
        str(path.relative_to(CHECKOUT))
        for path in sources
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text("utf-8").split("\n")[0]
    ]
    assert without == []


@pytest.mark.parametrize("name", ["demo", "tests"])
def test_readme_has_the_commands_that_ci_runs(name: str) -> None:
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    commands = re.findall(rf"^<!-- ci: {name} -->\n```sh\n(.+)\n```$", readme, re.MULTILINE)
    assert len(commands) == 1
    assert f"$(readme {name})" in (CHECKOUT / ".ci" / "run").read_text("utf-8")


def examples() -> dict[str, list[str]]:
    """README's Python examples by the library that they import first."""
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.+?)^```$", readme, re.MULTILINE | re.DOTALL)
    found: dict[str, list[str]] = {}
    for block in blocks:
        found.setdefault(block.split()[1], []).append(block)
    return found


@pytest.mark.parametrize("library", [pytest.param("cupy", marks=pytest.mark.gpu), "torch", "numpy"])
def test_readme_examples_run(library: str) -> None:
    pytest.importorskip(library)
    usable, reason = _info.available()
    if library == "cupy" and not usable:
        pytest.skip(reason)
    for example in examples()[library]:
        exec(compile(example, f"README.md ({library})", "exec"), {})


def test_examples_of_rows_run() -> None:
    text = (CHECKOUT / "docs" / "rows.md").read_text("utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/rows.md", "exec"), names)
    assert np.asarray(names["packed"])[:8].all()
    assert not np.asarray(names["packed"])[8:].any()


def test_readme_examples_are_short() -> None:
    assert sorted(examples()) == ["cupy", "numpy", "torch"]
    for example in itertools.chain(*examples().values()):
        assert len([line for line in example.splitlines() if line]) <= 8
