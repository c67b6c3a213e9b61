# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a test that takes `backend` runs on each array library and device, one that takes
`device` on each that torch has, one that takes `gpu` on each library that has a GPU.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from types import ModuleType

import hypothesis
import pytest

from cupy_rmsnorm import _fast
from tests.backends import BACKENDS, Backend, skip_without

# CI draws the same examples in each run; a developer's run draws new ones.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile(
    "new",
    hypothesis.settings.get_profile("ci"),
    derandomize=False,
    max_examples=1000,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "sampled(n): the emulator, for which each kernel is compiled anew, runs every n-th case; "
        "tests/kernels.py is what it walks in full",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out, seen = [], collections.Counter[str]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and "[emulator" in item.name:
            test = item.nodeid.split("[")[0]
            if seen[test] % mark.args[0]:
                left_out.append(item)
            seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if cls.gpu else ())
        for name, cls in BACKENDS.items()
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One array library on one device. What a test did to its arrays is verified afterwards."""
    skip_without(request.param)
    made = BACKENDS[request.param]()
    with made.running():
        yield made
        made.synchronize()
        made.verify()


@pytest.fixture(params=["cupy", "torch-cuda"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Either library's arrays on the GPU, for tests of that alone."""
    skip_without(request.param)
    made = BACKENDS[request.param]()
    yield made
    made.synchronize()
    made.verify()


@pytest.fixture
def cupy() -> ModuleType:
    """CuPy, where it has a GPU."""
    skip_without("cupy")
    import cupy

    return cupy


@pytest.fixture
def torch() -> ModuleType:
    """torch, where it has a GPU."""
    skip_without("torch-cuda")
    import torch

    return torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the torch tensors of a test lie."""
    skip_without(f"torch-{request.param}")
    return str(request.param)


@pytest.fixture(autouse=True)
def general_road() -> None:
    """No test takes the short road because an earlier one made the same call."""
    _fast.forget()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line a reason; pytest's own list has one a place."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(str(report.longrepr[2]) for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} {reason}")
