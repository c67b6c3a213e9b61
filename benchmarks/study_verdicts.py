# SPDX-License-Identifier: Apache-2.0
"""Whether each claim of the write-ups holds, decided from the results by a rule a claim.

`benchmarks.study_report` puts the sentences into docs/study.md. A rule that lacks its numbers says
so; it never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

PENDING = "Verdict: *not measured yet.*"
SAME = 0.02  # times this close are equal
PLAIN_CASES = (*(f"4096x{size}" for size in (512, 1024, 2048, 4096, 8192)), "8192x8192")

Row = dict[str, Any]


class Results(Protocol):
    """What the rules read."""

    meta: dict[str, Any]
    rows: list[Row]
    numerics: list[Row]
    training: list[Row]
    counters: list[Row]
    host: list[Row]
    triton: list[Row]

    def us(self, **wanted: Any) -> float | None:
        """The time of the one row with these values; None where there is none."""


def _quotients(
    results: Results, over: Row, under: Row, cases: Iterable[str] = PLAIN_CASES
) -> dict[str, float]:
    """Time of one over time of the other, by case."""
    found = {}
    for case in cases:
        times = [results.us(case=case, **each) for each in (over, under)]
        if times[0] is not None and times[1] is not None:
            found[case] = times[0] / times[1]
    return found


def _row(op: str, impl: str, dtype: str = "float16") -> Row:
    return {"op": op, "impl": impl, "dtype": dtype}


def _span(values: Iterable[float], form: str = ".2f") -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


def _holds(true: bool) -> str:
    return "holds" if true else "fails"


def rms_layer(results: Results) -> str:
    """Three claims about one ratio; the pack kernel decides."""
    quotients = _quotients(
        results, _row("layer_norm", "f16x8_pack_f32"), _row("rms_norm", "f16x8_pack_f32")
    )
    if not {"4096x512", "4096x4096"} <= quotients.keys():
        return PENDING
    short, long = quotients["4096x512"], quotients["4096x4096"]
    between = all(1.3 <= value <= 1.4 for value in quotients.values())
    return (
        f"Verdict, by `f16x8_pack_f32`: 5 - 7 % at K = 512 {_holds(1.05 <= short <= 1.07)} "
        f"({short - 1:+.1%}); twice as fast at 4096 {_holds(long >= 1.9)} ({long:.2f}); "
        f"30 - 40 % in general {_holds(between)} ({_span(quotients.values())} over the cases). "
        "30 % less compute understates the count, which is 40 - 43 %, and says nothing about time."
    )


def pack(results: Results) -> str:
    """Equal where the times are."""
    quotients = _quotients(
        results, _row("rms_norm", "f16x8_f32"), _row("rms_norm", "f16x8_pack_f32")
    )
    if not quotients:
        return PENDING
    equal = [case for case, value in quotients.items() if abs(value - 1) <= SAME]
    worst = max(quotients, key=lambda case: quotients[case])
    if len(equal) == len(quotients):
        return f"Verdict: holds, within {SAME:.0%} in every case."
    where = f"equal within {SAME:.0%} at {', '.join(equal)}, but " if equal else ""
    return f"Verdict: fails: {where}{quotients[worst]:.2f} times the time at {worst}."


def dlcm(results: Results) -> str:
    """Free where the times are equal."""
    found: dict[str, list[float]] = {"ca": [], "cg": []}
    for modifier, values in found.items():
        for base, dtype in (
            ("f16x8_pack_f32", "float16"),
            ("f32x4", "float32"),
            ("f32_ilp_1", "float32"),
        ):
            over = _row("rms_norm", f"{base} -dlcm={modifier}", dtype)
            values += _quotients(results, over, _row("rms_norm", base, dtype)).values()
    counted = {row["impl"]: row for row in results.counters if row["op"] == "rms_norm"}
    premise = "Verdict: the premise fails, by the instructions above"
    if "f16x8_f32" in counted:
        hits = counted["f16x8_f32"]["l1_hit_percent"]
        premise += f" and by {hits:.0f} % L1 hits of `f16x8_f32` at the default (Nsight Compute)"
    premise += ". That `ca` is free "
    if not found["ca"]:
        return f"{premise}has not been measured yet."
    free = all(abs(value - 1) <= SAME for value in found["ca"])
    return (
        f"{premise}{_holds(free)}: times of {_span(found['ca'], '.3f')} of the default's. "
        f"`cg`: {_span(found['cg'], '.3f')}."
    )


def block_size(results: Results) -> str:
    """Which was fastest at which hidden size, and what the wrong one costs."""
    best: dict[int, dict[int, int]] = {}
    cost = 1.0
    groups: dict[tuple[str, str], dict[int, Row]] = {}
    for row in results.rows:
        prefix, _, threads = row["impl"].partition("_vector_weight_")
        if threads and prefix in ("f32", "f16"):
            groups.setdefault((row["case"], row["dtype"]), {})[int(threads)] = row
    for rows in groups.values():
        threads = min(rows, key=lambda each: float(rows[each]["us"]))
        times = [float(row["us"]) for row in rows.values()]
        cost = max(cost, max(times) / min(times))
        counts = best.setdefault(rows[threads]["hidden_size"], {})
        counts[threads] = counts.get(threads, 0) + 1
    if not best:
        return PENDING
    listed = ", ".join(
        f"{hidden}: {' or '.join(str(threads) for threads in sorted(counts))}"
        for hidden, counts in sorted(best.items())
    )
    return (
        f"Verdict: the block size matters (the slowest took up to {cost:.1f} times the time of the "
        f"fastest). Fastest number of threads by hidden size, over cases and dtypes: {listed}."
    )


def eps(results: Results) -> str:
    """An eps hides where the error is that without eps."""
    rows = [row for row in results.numerics if row["claim"] == "eps"]
    if not rows:
        return PENDING
    parts = []
    for dtype, scale in dict.fromkeys((row["dtype"], row["scale"]) for row in rows):
        errors = {
            row["eps"]: row["error"]
            for row in rows
            if (row["dtype"], row["scale"]) == (dtype, scale)
        }
        hidden = [value for value, error in errors.items() if error <= 1.5 * errors[0.0]]
        largest = f"up to {max(hidden):g}" if max(hidden) > 0 else "none of them"
        parts.append(f"{dtype} times {scale:g} hides {largest}")
    return (
        "Verdict: fails. Which eps hides in the dtype's rounding (error at most 1.5 times that of "
        f"eps 0) depends on the magnitude of the rows as much as on the dtype: {'; '.join(parts)}. "
        "eps is a property of the model, and the same in every dtype."
    )


def fusion(results: Results) -> str:
    """Three times as fast or not."""
    found: list[float] = []
    for op in ("rms_norm", "layer_norm"):
        for name in ("cupy naive", "torch naive"):
            for dtype in ("float32", "float16"):
                over, under = _row(op, name, dtype), _row(op, "ours", dtype)
                found += _quotients(results, over, under).values()
    if not found:
        return PENDING
    return (
        f"Verdict: 3 times as fast {'holds as a lower bound' if min(found) >= 3 else 'fails'}: "
        f"{_span(found, '.1f')} times. The count of 3 reads and writes and 2 launches is too low "
        "for the expression as it is written."
    )


def reduction(results: Results) -> str:
    """What fewer accesses are worth."""
    found: list[float] = []
    for base, dtype in (("f16x8", "float16"), ("f32x4", "float32")):
        under = "f16x8_pack_f32" if base == "f16x8" else base
        over = _row("rms_norm", f"{base}_tree", dtype)
        found += _quotients(results, over, _row("rms_norm", under, dtype)).values()
    count = "Verdict: 40 % fewer fails as a number: it is 79 %. "
    counted = {row["impl"]: row for row in results.counters if row["op"] == "rms_norm"}
    if {"f16x8_pack_f32", "f16x8_tree"} <= counted.keys():
        names = ("f16x8_pack_f32", "f16x8_tree")
        few, many = (counted[name]["shared_wavefronts"] for name in names)
        count += (
            f"Nsight Compute counts {100 * (1 - few / many):.0f} % fewer wavefronts of shared "
            "memory at 4096 x 4096, where a warp's access is one. "
        )
    if not found:
        return f"{count}What it is worth has not been measured yet."
    return f"{count}The tree takes {_span(found)} times the time of the shuffles."


def ilp(results: Results) -> str:
    """Four sums against one."""
    found: list[float] = []
    for short, dtype in (("f16", "float16"), ("f32", "float32")):
        over, under = (_row("rms_norm", f"{short}_ilp_{n}", dtype) for n in (1, 4))
        found += _quotients(results, over, under).values()
    if not found:
        return PENDING
    return (
        f"Verdict: {_holds(min(found) > 1 + SAME)}: four are {_span(found)} times as fast as one."
    )


def cancellation(results: Results) -> str:
    """How wrong, and how much faster."""
    rows = [row for row in results.numerics if row["claim"] == "cancellation"]
    if not rows:
        return PENDING
    errors = {(row["impl"], row["mean"]): row["error"] for row in rows}
    mean = max(row["mean"] for row in rows)
    one, two = errors["f32x4_single_pass", mean], errors["f32x4", mean]
    times = _quotients(
        results,
        _row("layer_norm", "f16x8_single_pass"),
        _row("layer_norm", "f16x8_pack_f32"),
    )
    faster = f" Its time is {_span(times.values())} of that of two passes." if times else ""
    wrong = "wrong for data with a large mean" if one > 10 * two else "not worse here"
    return (
        f"Verdict: the saving holds, and the result is {wrong}: at a mean of {mean:g} its error is "
        f"{one:.1g}, that of two passes {two:.1g}.{faster} The library never uses it."
    )


def shift(results: Results) -> str:
    """Changed or not."""
    rows = [row for row in results.numerics if row["claim"] == "mean shift"]
    if not rows:
        return PENDING
    changes = {
        (op, what): max(row[f"{what} change"] for row in rows if row["op"] == op)
        for op in ("rms_norm", "layer_norm")
        for what in ("output", "gradient")
    }
    parts = [
        f"{what} {_holds(changes['rms_norm', what] < 1e-9)} (changes by up to "
        f"{changes['rms_norm', what]:.2g}; LayerNorm's by {changes['layer_norm', what]:.0e})"
        for what in ("output", "gradient")
    ]
    return (
        f"Verdict for RMSNorm: {', '.join(parts)}. RMSNorm is unaffected by *scaling* the row (eps "
        "aside)."
    )


def intensity(results: Results) -> str:
    """The share of two peaks."""
    peak, tensor = results.meta.get("peak_gflops"), 989_000
    rows = [row for row in results.rows if row["op"] == "rms_norm" and row["impl"] == "ours"]
    holds = "Verdict: 1 operation a byte holds for RMSNorm in 16 bits. "
    if not (peak and rows):
        return f"{holds}The share of peak has not been measured yet."
    flops = [row["gbps"] * 4 / (8 if row["dtype"] == "float32" else 4) for row in rows]
    most = max(flops)
    return (
        f"{holds}Below 1.5 % of peak {_holds(most / tensor < 0.015)} against the tensor cores "
        f"(at most {most / tensor:.2%} in any case) and {_holds(most / peak < 0.015)} against "
        f"float32's own peak (up to {most / peak:.1%})."
    )


def overflow(results: Results) -> str:
    """Which got rows wrong at x * 100."""
    rows = [
        row
        for row in results.rows
        if row["case"] == "4096x512 times 100"
        and row["dtype"] == "float16"
        and row["impl"] != "copy"
        and "dlcm" not in row["impl"]
    ]
    if not rows:
        return PENDING
    wrong = {row["impl"] for row in rows if row["right_rows"] < row["checked_rows"]}
    summed = {
        row["impl"]
        for row in rows
        if row["impl"].endswith("_f16") or row["impl"].endswith(" naive")
    }
    listed = ", ".join(f"`{name}`" for name in sorted(wrong))
    if wrong == summed:
        return (
            f"Verdict: holds. Wrong at x * 100 are exactly those that sum in float16: {listed}. It "
            "is silent: no NaN, no infinity, rows of zeros."
        )
    return f"Verdict: fails: wrong at x * 100 are {listed or 'none'}."


def counters(results: Results) -> str:
    """What Nsight Compute counted of wide and narrow loads."""
    rows = {row["impl"]: row for row in results.counters if row["op"] == "rms_norm"}
    if not {"f16x8_pack_f32", "f16x8_f32"} <= rows.keys():
        return (
            "Sectors a request and L1 hits: *not measured*. They need Nsight Compute and the right "
            "to read the GPU's counters (`python -m benchmarks.study_counters`); the figures above "
            "are counted from the addresses."
        )
    wide, narrow = rows["f16x8_pack_f32"], rows["f16x8_f32"]
    return (
        "Counted by Nsight Compute at 4096 x 4096: "
        f"{wide['load_sectors_per_request']:.1f} sectors a request and "
        f"{wide['l1_hit_percent']:.0f} % L1 hits with one wide load, "
        f"{narrow['load_sectors_per_request']:.1f} and {narrow['l1_hit_percent']:.0f} % with four "
        f"narrow ones; {narrow['instructions'] / wide['instructions']:.2f} times the instructions."
    )


def host(results: Results) -> str:
    """A built extension's call beside this library's."""
    us = {(row["impl"], row["case"]): row["us"] for row in results.host if row["op"] == "rms_norm"}
    built, ours = us.get(("extension", "torch out=")), us.get(("ours", "torch out="))
    if built is None or ours is None:
        return (
            "Verdict: *not measured*: no compiler or none of PyTorch's headers on the GPU's "
            "machine."
        )
    new_built, new_ours = us["extension", "torch allocating"], us["ours", "torch allocating"]
    bound, torchs = us["ours", "torch bound out="], us["torch", "torch allocating"]
    held = "holds" if built < ours else "fails"
    return (
        f"Verdict: {held}. By the host's clock, 4 rows of 4096 in float16 (results/host.json): an "
        "extension with the checks that it cannot do without, around a kernel that does nothing, "
        f"{built:.2f} us into a given output and {new_built:.2f} us with a new one; this library "
        f"{ours:.2f} us and {new_ours:.2f} us, bound {bound:.2f} us; torch's own compiled "
        f"`rms_norm` {torchs:.2f} us."
    )


def kernels(results: Results) -> str:
    """What each kernel beyond the classic list gains or loses beside the plain one of 16 bytes."""
    parts = []
    for op, names in (
        (
            "rms_norm",
            (
                *(f"f16_vector_weight_{threads}" for threads in (256, 512, 1024)),
                *(f"f16_ilp_{count}" for count in (1, 2, 4)),
                *("f16x8_persistent", "f16x8_async", "f16x8_tree", "f16x8_cluster"),
                *("f16x8_groups", "f16x8_mma"),
            ),
        ),
        ("layer_norm", ("f16x8_held", "f16_tiled", "f16x8_single_pass")),
    ):
        found = {
            name: _quotients(results, _row(op, name), _row(op, "f16x8_pack_f32")).values()
            for name in names
        }
        spans = [f"`{name}` {_span(values)}" for name, values in found.items() if values]
        if spans:
            parts.append(f"{op}: {', '.join(spans)}")
    if not parts:
        return PENDING
    return (
        "Measured, time over that of `f16x8_pack_f32`, from 4096 x 512 to 8192 x 8192; below 1 is "
        f"a gain. {'. '.join(parts)}."
    )


def triton(results: Results) -> str:
    """Shares of the copy's speed, and where this library is behind the kernel of the whole row."""
    races: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in results.triton:
        case = f"{row['rows']}x{row['hidden_size']}"
        races.setdefault((row["op"], case, row["dtype"]), {})[row["impl"]] = row
    if not races:
        return PENDING
    parts = []
    for op in dict.fromkeys(op for op, _, _ in races):
        mine = [found for key, found in races.items() if key[0] == op]
        shares = [
            f"{label} {_span(found[name]['ratio'] for found in mine)}"
            for name, label in (
                ("triton row", "the whole row"),
                ("triton tiled", "tiled"),
                ("torch", "torch"),
                ("ours", "this library"),
            )
        ]
        parts.append(f"{op}: {', '.join(shares)}")
    behind = [
        f"{' '.join(key)} ({found['ours']['us'] / found['triton row']['us']:.2f} times its time)"
        for key, found in races.items()
        if found["ours"]["us"] > (1 + SAME) * found["triton row"]["us"]
    ]
    return (
        f"Measured, of the copy's speed: {'; '.join(parts)}. Tiled reads the row once a pass and "
        "falls back where the passes leave the cache. This library is more than "
        f"{100 * SAME:.0f} % behind the whole row at {', '.join(behind) or 'none'}."
    )


def training(results: Results) -> str:
    """Equal if the means are closer than the seeds."""
    losses: dict[str, list[float]] = {}
    for row in results.training:
        losses.setdefault(row["norm"], []).append(float(row["valid_loss"]))
    if len(losses) < 2 or min(map(len, losses.values())) < 2:
        return PENDING
    layer, rms = losses["LayerNorm"], losses["RMSNorm"]
    difference = sum(rms) / len(rms) - sum(layer) / len(layer)
    spread = max(max(each) - min(each) for each in (layer, rms))
    return (
        f"Verdict: {_holds(abs(difference) <= spread)} for this model: RMSNorm's mean validation "
        f"loss differs by {difference:+.4f}, seeds of one norm by up to {spread:.4f}."
    )


RULES: dict[str, Callable[[Results], str]] = {
    f"verdict_{rule.__name__}": rule
    for rule in (
        *(rms_layer, pack, dlcm, block_size, eps, fusion, reduction, ilp, cancellation, shift),
        *(intensity, overflow, counters, host, kernels, triton, training),
    )
}
