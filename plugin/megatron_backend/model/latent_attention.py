"""Multi-head latent attention on the local layers: Megatron's own, with two things of Engine's.

Megatron's local layer spec cuts the two projections into the latents over tensor parallel ranks and
gathers what they give. The gradient of the gathered positional part of the keys is then that of one
rank's heads only, so ranks would train it apart. Transformer Engine's layers keep these projections
whole on every rank; here a plain linear layer does. Not needed once the local spec does the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from plugin.megatron_backend.model.whole_weight import WholeWeight

# Megatron-Core 0.16 takes Transformer Engine to be there because its own wrapper can be imported,
# and then calls `isinstance` with a mock. Not needed once it looks at the class.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


class WholeLinear(WholeWeight):
    """A linear layer without bias that every tensor parallel rank holds whole.

    Under sequence parallelism each rank sees its slice of the sequence; the mark on the weight
    makes Megatron sum the gradients.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, tp_group: Any) -> None:
        empty = torch.empty(outputs, inputs, dtype=config.params_dtype)
        super().__init__(config, empty, tp_group)
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[S, B, inputs] -> [S, B, outputs], and no bias."""
        return F.linear(x, self.weight), None


class LocalLatentAttention(MLASelfAttention):
    """Latent attention whose projections into the latents are whole on every rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        group = self.pg_collection.tp
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width, group)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(
                config, config.hidden_size, config.q_lora_rank, group
            )
