# SPDX-License-Identifier: Apache-2.0
"""The `backend` fixture: every test that takes it runs on each array library and device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.backends import BACKENDS, Backend, missing

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


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if cls.gpu else ())
        for name, cls in BACKENDS.items()
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One array library on one device. What a test did to its arrays is verified afterwards."""
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    made = BACKENDS[request.param]()
    with made.running():
        yield made
        made.synchronize()
        made.verify()
