# SPDX-License-Identifier: Apache-2.0
"""Let a Hugging Face model's norms run on this library, and get the model's own back.

    python examples/patched_llama.py

A small Llama with random weights stands for one that you load: it takes torch and transformers.
"""

from __future__ import annotations

import sys

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cupy_rmsnorm import is_available
    from cupy_rmsnorm.torch import patch, unpatch
except ModuleNotFoundError as error:
    sys.exit(f'{error}. In a clone, run: pip install ".[models]"')


def main() -> bool:
    """Whether the patched model writes what the model writes."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to("cuda" if is_available() else "cpu")
    prompt = torch.tensor([[1, 17, 42]], device=model.device)
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 16, "do_sample": False}

    own = model.generate(prompt, **given)
    print(patch(model))
    patched = model.generate(prompt, **given)
    print(patched[0].tolist())

    model.train()  # its gradients come through the kernels, too
    loss = model(input_ids=patched, labels=patched).loss
    loss.backward()
    print(f"loss {loss.item():.4f}, |dweight| {model.model.norm.weight.grad.norm().item():.4f}")

    print(f"{len(unpatch(model))} modules restored")
    return torch.equal(own, patched)


if __name__ == "__main__":
    print("same tokens" if main() else "OTHER TOKENS")
