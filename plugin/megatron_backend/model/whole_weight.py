"""Modules whose one weight is the same on all tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class WholeWeight(MegatronModule):
    """Holds `weight` whole on every tensor parallel rank; in a checkpoint it is there once."""

    def __init__(self, config: TransformerConfig, weight: Tensor, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weight, not cut over tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
