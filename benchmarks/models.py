# SPDX-License-Identifier: Apache-2.0
"""A patched model beside the same model with its own norms, Liger's, and torch.compile's.

    python -m benchmarks.models --json benchmarks/results/models.json [--budget 110] [--only TEXT]

A Llama of the shape of 1B parameters (random weights, bfloat16): a training step of 4 x 4096
tokens, with AdamW, and the decoding of one token behind 512 in a static cache. In a race the models
share their weights and differ in their norms alone; all take a step in turn, in an order that turns
round. A row's ratio is the time of the model's own norms over its own; `gain_us` is what a step of
this library saves against that row's, and `gain_low_us` to `gain_high_us` the 95 % interval of the
paired differences. The last case, the curves of benchmarks/curves.py, are losses and not times.

Needs transformers, torch and a GPU; `--tiny` runs all of it in seconds on whatever there is.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import race

FIRST_STEPS = 3  # not counted: they compile
FIRST_ROUNDS = 6  # not counted: steps of a GPU that was idle vary three times as much
ROUNDS = 20
DECODED = 4  # tokens a decode step is the mean of
PROMPT, CACHE = 512, 1024
LEARNING_RATE = 1e-6
# Norms that computed something else would miss these.
LOSS_TOLERANCE = 0.02  # of the loss
ERROR_RATIO = 1.25  # of the model's own distance from float32; how far two models lie is chance
CASES = (
    "training step",
    "decode step, CUDA graph",
    "decode step",
    "training step, layers compiled",
    "decode step, layers compiled, CUDA graph",
    "curves",
)
Step = Callable[[], float]  # takes a step and returns its seconds


@dataclass(frozen=True)
class Size:
    """What is measured. `compiler` is a backend of torch.compile."""

    batch: int
    length: int
    prompt: int
    cache: int
    config: dict[str, int]
    compiler: str = "inductor"


LLAMA_1B = Size(
    4,
    4096,
    PROMPT,
    CACHE,
    {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
)
TINY = Size(
    2,
    16,
    8,
    64,
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 128,
    },
    "aot_eager",
)


# Models that share their weights -----------------------------------------------------------------


def build(size: Size, device: str) -> Any:
    """The model with its own norms."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**size.config, rms_norm_eps=1e-5, tie_word_embeddings=True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).to(device)
    finally:
        torch.set_default_dtype(default)


def twin(model: Any) -> Any:
    """Modules of its own over the same parameters and buffers."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def ours(model: Any, size: Size) -> Any:
    from cupy_rmsnorm.torch import patch

    made = twin(model)
    report = patch(made)
    if report.left or len(report.replaced) != 2 * size.config["num_hidden_layers"] + 1:
        raise race.Wrong(str(report))
    return made


def liger(model: Any, size: Size) -> Any:
    """Liger's norm and nothing else of it."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    made, own = twin(model), modeling_llama.LlamaRMSNorm
    try:
        apply_liger_kernel_to_llama(
            rope=False,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            rms_norm=True,
            swiglu=False,
            model=made,
        )
    finally:
        modeling_llama.LlamaRMSNorm = own
    return made


def compiled_norms(model: Any, size: Size) -> Any:
    """Each norm compiled, as a patch would do it."""
    import torch

    made = twin(model)
    forward = torch.compile(type(made.model.norm).forward, backend=size.compiler)
    for module in made.modules():
        if type(module) is type(made.model.norm):
            module.forward = MethodType(forward, module)
    return made


def compiled_layers(model: Any, size: Size) -> Any:
    """Every layer compiled, norms and all.

    One compilation serves all layers in training; with a cache each is compiled for itself, and
    behind torch's limit the rest would run as they are.
    """
    import torch

    torch._dynamo.config.recompile_limit = 2 * size.config["num_hidden_layers"]
    for layer in model.model.layers:
        layer.compile(backend=size.compiler)
    return model


def models(model: Any, size: Size, case: str) -> dict[str, Callable[[], Any]]:
    """Who takes part in a case."""
    if "compiled" in case:
        return {
            "ours": lambda: compiled_layers(ours(model, size), size),
            "compile": lambda: compiled_layers(twin(model), size),
        }
    return {
        "ours": lambda: ours(model, size),
        "torch": lambda: model,
        "compile": lambda: compiled_norms(model, size),
        "liger": lambda: liger(model, size),
    }


# Steps -------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds from the first of its work on the device to the last."""
    import torch

    if device != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


class Training:
    """Forward, backward and an optimizer's step on the same tokens."""

    def __init__(self, model: Any, size: Size, device: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        shape = (size.batch, size.length)
        tokens = torch.randint(size.config["vocab_size"], shape, generator=generator)
        self._tokens, self._device = tokens.to(device), device
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, fused=device == "cuda"
        )

    def step(self, model: Any) -> Step:
        """One that may be timed."""

        def work() -> None:
            self._optimizer.zero_grad(set_to_none=True)
            self.loss(model).backward()
            self._optimizer.step()

        return lambda: timed(work, self._device)

    def loss(self, model: Any) -> Any:
        return model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss

    def check(self, model: Any, like: Any) -> None:
        """Raise `Wrong` where a model's loss is another's."""
        import torch

        with torch.no_grad():
            got, expected = float(self.loss(model)), float(self.loss(like))
        if not abs(got - expected) <= LOSS_TOLERANCE * expected:
            raise race.Wrong(f"its loss is {got:.4f} and not {expected:.4f}")


class Decoding:
    """One token behind a prompt, whose keys and values lie in a static cache.

    Where the buffers of a captured graph lie is chance, and moves all its steps by more than a norm
    saves. So each step is of the next of several graphs, and an interval says how far chance goes.
    """

    def __init__(self, size: Size, device: str, graphs: int) -> None:
        import torch

        self._size, self._device, self._graphs = size, device, graphs
        self._prompt = torch.arange(size.prompt, device=device)[None] % size.config["vocab_size"]
        self._token = torch.full((1, 1), 7, device=device)
        self._at = torch.full((1, 1), size.prompt, device=device)
        self._kept: list[Any] = []
        self._exact: Any = None
        self._own_error = math.nan

    def prepare(self, model: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A call that decodes the token, and what lets the next one begin at the same place."""
        import torch
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=self._size.cache)
        known = inspect.signature(type(model).forward).parameters
        name = "cache" if "cache" in known else "past_key_values"
        more: dict[str, Any] = {}
        if "cache_position" in known:
            more["cache_position"] = self._at[0]
        # Lets the cache find out what it has to hold; nothing is compiled for the prompt.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            first = {"cache_position": torch.arange(self._size.prompt, device=self._device)}
            model(
                input_ids=self._prompt,
                use_cache=True,
                **{name: cache},
                **(first if more else {}),
            )
        lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
        tensors = [length for length in lengths if isinstance(length, torch.Tensor)]

        def call() -> Any:
            return model(
                input_ids=self._token,
                position_ids=self._at,
                use_cache=True,
                **{name: cache},
                **more,
            ).logits

        def rewind() -> None:
            for length in tensors:
                length.fill_(self._size.prompt)

        return call, rewind

    def step(self, model: Any) -> Step:
        """One that may be timed, the mean of several tokens."""
        import torch

        prepared = [self.prepare(model) for _ in range(self._graphs or 1)]
        if self._graphs:
            prepared = [(self._captured(*once), once[1]) for once in prepared]
        turns = itertools.cycle(prepared)

        def step() -> float:
            call, rewind = next(turns)
            rewind()

            def work() -> None:
                with torch.no_grad():
                    for _ in range(DECODED):
                        call()

            return timed(work, self._device) / DECODED

        return step

    def _captured(self, call: Callable[[], Any], rewind: Callable[[], None]) -> Callable[[], Any]:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(FIRST_STEPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            call()
        self._kept += [graph, call]  # the graph works on the cache that only the call holds
        return graph.replay  # type: ignore[no-any-return]

    def check(self, model: Any, like: Any) -> None:
        """Raise `Wrong` where a model is further from float32 than another of its dtype."""
        if self._exact is None:
            self._exact = self._logits(copy.deepcopy(like).float())
            self._own_error = self._error(like)
        error = self._error(model)
        if not error <= ERROR_RATIO * self._own_error:
            raise race.Wrong(
                f"its logits are {error:.4f} of their size off, and the model's own "
                f"{self._own_error:.4f}"
            )

    def _error(self, model: Any) -> float:
        """Of the logits, relative to their size."""
        difference = self._logits(model) - self._exact
        return float(difference.square().mean().sqrt() / self._exact.square().mean().sqrt())

    def _logits(self, model: Any) -> Any:
        import torch

        call, rewind = self.prepare(model)
        rewind()
        with torch.no_grad():
            return call().float()


# A race ------------------------------------------------------------------------------------------


def interleaved(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each, in turns whose order turns round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            seconds[name].append(steps[name]())
    return seconds


def quantile(degrees: int) -> float:
    """Student's t at 97.5 %: 2.093 for 19 degrees (Abramowitz and Stegun 26.7.5)."""
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences and its 95 % interval."""
    mean = statistics.fmean(differences)
    half = quantile(len(differences) - 1) * statistics.stdev(differences)
    half /= math.sqrt(len(differences))
    return mean, mean - half, mean + half


def rows_of(
    case: str, size: Size, seconds: Mapping[str, Sequence[float]], base: str
) -> list[race.Result]:
    """A row for each that took part."""
    tokens = size.batch * size.length if case.startswith("training") else 1
    own = statistics.median(seconds[base]) if base in seconds else math.nan
    rows = []
    for impl, times in seconds.items():
        median = statistics.median(times)
        row: race.Result = {
            "op": "llama_1b" if size is LLAMA_1B else "llama_tiny",
            "dtype": "bfloat16",
            "rows": tokens,
            "hidden_size": size.config["hidden_size"],
            "impl": impl,
            "case": case,
            "us": round(median * 1e6, 2),
            "ratio": round(own / median, 4) if base in seconds else None,
            "steps": len(times),
        }
        if impl != "ours" and "ours" in seconds:
            saved = [theirs - mine for theirs, mine in zip(times, seconds["ours"], strict=True)]
            names = ("gain_us", "gain_low_us", "gain_high_us")
            row |= {n: round(v * 1e6, 2) for n, v in zip(names, interval(saved), strict=True)}
        rows.append(row)
    return rows


def run_case(
    model: Any, size: Size, case: str, device: str, rounds: int
) -> tuple[list[race.Result], list[race.Result]]:
    """The rows of one case, and who was left out and why."""
    left_out, steps = [], {}
    training = case.startswith("training")
    work: Any = (
        Training(model, size, device)
        if training
        else Decoding(size, device, graphs=rounds if case.endswith("graph") else 0)
    )
    for impl, make in models(model, size, case).items():
        try:
            made = make().train(training)
            if made is not model:
                work.check(made, model)
            step = work.step(made)
            for _ in range(FIRST_STEPS):
                step()
            steps[impl] = step
        except Exception as error:
            left_out.append({"case": case, "impl": impl, "reason": race.reason(error)})
    interleaved(steps, FIRST_ROUNDS)
    seconds = interleaved(steps, rounds)
    return rows_of(case, size, seconds, "compile" if "compiled" in case else "torch"), left_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Race, write, and say what was gained."""
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description="A patched model beside others.")
    parser.add_argument("--only", default="", help=f"one of, or part of: {'; '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budget", type=float, default=110, help="begin no case after seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="of what is measured, where this is no checkout")
    parser.add_argument("--resume", type=Path, help="keep the other cases of this result file")
    parser.add_argument("--tiny", action="store_true", help="a model that runs anywhere")
    options = parser.parse_args(arguments)
    race.need("torch", "transformers")
    import torch

    from benchmarks import curves

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not options.tiny:
        race.need_gpu()
    size = TINY if options.tiny else LLAMA_1B
    cases = [case for case in CASES if case == options.only]
    cases = cases or [case for case in CASES if options.only in case]
    if device != "cuda":
        cases = [case for case in cases if not case.endswith("graph")]
    content: dict[str, Any] = {"meta": _meta(options, device), "rows": [], "left_out": []}
    content |= {"curves": [], "not_begun": []}
    if options.resume is not None:
        _keep(content, json.loads(options.resume.read_text()), cases)
    model = build(size, device) if cases != ["curves"] else None
    for case in cases:
        spent = time.perf_counter() - begin
        if spent > options.budget:
            content["not_begun"].append(case)
            print(f"budget spent: {case} not begun", flush=True)
            _write(options.json, content)
            continue
        print(f"[{spent:.0f} s] {case}", flush=True)
        try:
            if case == "curves":
                content["curves"] = curves.measure(device, tiny=options.tiny)
                print(curves.summary(content["curves"]), flush=True)
            else:
                rows, left_out = run_case(model, size, case, device, options.rounds)
                content["rows"] += rows
                content["left_out"] += left_out
                _show(rows, left_out)
        except Exception as error:
            content["left_out"].append({"case": case, "impl": "all", "reason": race.reason(error)})
            print(f"   FAILED {race.reason(error)}", flush=True)
        if model is not None:
            model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        _write(options.json, content)
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        partial = path.with_suffix(".partial")
        partial.write_text(race.dumps(content))
        os.replace(partial, path)


def _meta(options: argparse.Namespace, device: str) -> dict[str, Any]:
    import torch
    import transformers

    meta = {"device": device, "torch": torch.__version__}
    if device == "cuda":
        meta = race.meta(options.rounds, options.commit)
    meta |= {"transformers": transformers.__version__, "prompt": PROMPT}
    return meta | {"decoded": DECODED}


def _keep(content: dict[str, Any], earlier: dict[str, Any], cases: Sequence[str]) -> None:
    """Take over what was measured of other cases."""
    for name in ("rows", "left_out"):
        rows = race.taken_over(earlier, name)
        content[name] = [row for row in rows if row["case"] not in cases]
    content["not_begun"] = [case for case in earlier["not_begun"] if case not in cases]
    if "curves" not in cases:
        content["curves"] = earlier["curves"]


def _show(rows: Sequence[race.Result], left_out: Sequence[race.Result]) -> None:
    for row in rows:
        gain = ""
        if "gain_us" in row:
            low, high = row["gain_low_us"], row["gain_high_us"]
            gain = f"  gain {row['gain_us']:.1f} us [{low:.1f}, {high:.1f}]"
            gain += f", {row['gain_us'] / row['us']:.1%}"
        print(f"   {row['impl']:8} {row['us']:12.1f} us  {row['ratio']}{gain}", flush=True)
    for row in left_out:
        print(f"   {row['impl']} left out: {row['reason']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
