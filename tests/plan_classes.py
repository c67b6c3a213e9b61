# SPDX-License-Identifier: Apache-2.0
"""Which plans run through the same code: the test table has a row for each class."""

from __future__ import annotations

from typing import Any

from cupy_rmsnorm._plan import WARP, Plan

Class = tuple[Any, ...]


def plan_class(plan: Plan, hidden_size: int) -> Class:
    """What makes two plans run through the same code, counts of threads and vectors apart."""
    if plan.kernel == "norm_forward":
        vecs = min(plan.vecs_per_thread, 3)
        return plan.kernel, plan.vec_size, _lanes(plan), vecs, is_full(plan, hidden_size)
    if plan.kernel == "norm_forward_staged":
        return plan.kernel, plan.vec_size, plan.cluster_size, is_full(plan, hidden_size)
    return plan.kernel, plan.vec_size, plan.cluster_size


def backward_class(plan: Plan) -> Class:
    """The same of backward."""
    lanes = min(plan.threads_per_row, WARP)
    return plan.kernel, plan.vec_size, plan.cluster_size, lanes in (1, WARP)


def candidate_class(plan: Plan, hidden_size: int) -> Class:
    """The same of a plan that a plan file may bring, forward or backward."""
    if plan.kernel.startswith("norm_forward"):
        return *plan_class(plan, hidden_size), plan.early_weight
    if plan.cluster_size > 1 or plan.kernel != "norm_backward":
        return backward_class(plan)
    vecs = min(plan.vecs_per_thread, 3)
    return *backward_class(plan), vecs, is_full(plan, hidden_size)


def is_full(plan: Plan, hidden_size: int) -> bool:
    held = plan.vec_size * plan.vecs_per_thread * plan.threads_per_row * plan.cluster_size
    return held == hidden_size


def _lanes(plan: Plan) -> str:
    if plan.threads_per_row > WARP:
        return "block"
    if plan.threads_per_row == WARP:
        return "warp"
    return "lane" if plan.threads_per_row == 1 else "lanes"
