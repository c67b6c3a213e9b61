# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers' own architectures with random weights, and what they compute."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests import oracle

VOCABULARY = 131
BATCH, LENGTH, NEW_TOKENS = 8, 11, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits far enough apart for greedy generation
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # generation goes on
    "tie_word_embeddings": False,
}
# Model class without "ForCausalLM" or so -> its config's class and what else that takes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"num_key_value_heads": 1}),
    "Mistral": ("MistralConfig", {"sliding_window": 8}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma": ("GemmaConfig", {}),
    "Gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 12, "sliding_window": 8}),
    "Gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 12, "sliding_window": 8}),
    "Phi": ("PhiConfig", {}),
    "Phi3": ("Phi3Config", {}),
    # Without experts: which of them a token goes to is not continuous in what a norm returns.
    "DeepseekV3": (
        "DeepseekV3Config",
        {
            "first_k_dense_replace": 2,
            "q_lora_rank": 20,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
            "head_dim": 4,
        },
    ),
    "T5": (
        "T5Config",
        {
            "d_model": 60,
            "d_kv": 12,
            "d_ff": 100,
            "num_layers": 2,
            "num_heads": 5,
            "initializer_factor": 1.0,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
}


def build(family: str, seed: int = 0) -> Any:
    """A model in float32 on the CPU, whose norms have weights that are not all alike."""
    import torch
    import transformers

    config_class, more = FAMILIES[family]
    sizes = SIZES if family != "T5" else {n: SIZES[n] for n in SIZES if n.endswith("_token_id")}
    if family == "T5":
        sizes = {**sizes, "vocab_size": VOCABULARY}
    config = getattr(transformers, config_class)(**{**sizes, **more})
    config._attn_implementation = "eager"
    kind = "ForConditionalGeneration" if family == "T5" else "ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, family + kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def inputs(model: Any, seed: int = 1) -> dict[str, Any]:
    """Token numbers for `model`, on its device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    tokens = tokens.to(next(model.parameters()).device)
    made = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        made["decoder_input_ids"] = tokens.flip(0)
    return made


def logits(model: Any) -> Any:
    """In float64."""
    import torch

    with torch.no_grad():
        return model(**inputs(model), use_cache=False).logits.double()


@dataclass
class Generated:
    tokens: Any  # (BATCH, NEW_TOKENS)
    logits: Any  # (BATCH, NEW_TOKENS, VOCABULARY), of the first token on


def generate(model: Any) -> Generated:
    """Greedily, with the cache that the model brings."""
    import torch

    given = {n: value for n, value in inputs(model).items() if n != "decoder_input_ids"}
    out = model.generate(
        **given,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Generated(out.sequences[:, -NEW_TOKENS:], torch.stack(out.logits, 1).double())


def gradients(model: Any) -> dict[str, Any]:
    """Of one step's loss, in float64, by the parameter's name."""
    model.zero_grad(set_to_none=True)
    given = inputs(model)
    given.pop("decoder_input_ids", None)
    loss = model(**given, labels=given["input_ids"], use_cache=False).loss
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def in_float32(model: Any) -> Any:
    """The same weights, computed in float32."""
    return copy.deepcopy(model).float()


def error(got: Any, exact: Any) -> float:
    """Root mean square of the difference."""
    return float((got - exact).square().mean().sqrt())


def numpy(tensor: Any) -> np.ndarray:
    """A tensor's values, bfloat16 as ml_dtypes'."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(oracle.BFLOAT16))
    return np.asarray(tensor.numpy())
