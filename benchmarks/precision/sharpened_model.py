"""A model with random weights whose next-token distributions have a realistic entropy.

Random weights give logits of a standard deviation of about 0.3, so a nearly uniform distribution over the vocabulary. The LM
head is multiplied until the mean entropy is that of a trained model; logits are then as large as those of one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 8192
#: Mean entropy of the next token, in nats.
ENTROPY = 1.5


def model_config() -> Any:
    """Qwen3 with 8 layers, hidden size 256 and a vocabulary of 8,192: 11 M parameters."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def sharpened_weights(seed: int = 0) -> tuple[dict[str, Tensor], float]:
    """Float32 weights by Hugging Face name, and what the LM head was multiplied by."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config()).eval()
    logits = model(input_ids=random_tokens(2, 128, seed)).logits.flatten(0, 1)
    low, high = 1.0, 1000.0
    for _ in range(20):
        factor = math.sqrt(low * high)
        mean = torch.distributions.Categorical(logits=logits * factor).entropy().mean()
        low, high = (factor, high) if mean > ENTROPY else (low, factor)
    factor = math.sqrt(low * high)
    model.lm_head.weight.mul_(factor)
    return {name: value.clone() for name, value in model.state_dict().items()}, factor


def random_tokens(count: int, length: int, seed: int) -> Tensor:
    """[count, length] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, length), generator=generator)
