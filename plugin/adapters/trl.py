"""TRL: a GRPOTrainer with our losses and corrections.

    trainer = CorrectedGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(use_vllm=True, ...),
                                   train_dataset=..., loss_config=LossConfig(policy_loss="icepop"))

The engine's log-probs come from vLLM; without `use_vllm` TRL records none, and a correction then
raises an error at the first step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from plugin.adapters.padded_loss import PaddedBatch, padded_loss
from plugin.config import LossConfig
from plugin.errors import ConfigError


class CorrectedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose loss is `padded_loss` of a `LossConfig`; everything else stays TRL's."""

    def __init__(self, *args: Any, loss_config: LossConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_config = loss_config
        if self.beta != 0 and not loss_config.use_kl_loss:
            raise ConfigError(
                f"beta is {self.beta} but --use-kl-loss is off, so it would do nothing; use "
                "kl_loss_coef of the LossConfig as the coefficient, and any beta other than 0 to "
                "have TRL compute the reference"
            )
        if loss_config.use_kl_loss and self.beta == 0:
            raise ConfigError(
                "--use-kl-loss needs reference log-probs, which TRL computes only for beta != 0; "
                "set beta"
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        completion_mask = inputs["completion_mask"]
        mask = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
        cur, entropy, aux_loss = self._current_log_probs(model, inputs)
        batch = PaddedBatch(
            cur,
            mask,
            inputs["advantages"],
            train_log_probs=inputs.get("old_per_token_logps"),
            rollout_log_probs=inputs.get("sampling_per_token_logps"),
            ref_log_probs=inputs.get("ref_per_token_logps"),
            entropy=entropy,
        )
        loss, metrics = padded_loss(self.loss_config, batch, self._reducer(mask, inputs))
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / self._accumulated_steps()
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            gathered = self.accelerator.gather(value.detach())
            self._metrics[mode][f"tis/{name}"].append(gathered.mean().item())
        return loss

    def _current_log_probs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs and entropies [B, R] at TRL's temperature, and the router's auxiliary loss."""
        prompt_ids, completion_ids = inputs["prompt_ids"], inputs["completion_ids"]
        input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        compute = self._get_per_token_logps_and_entropies
        # Image inputs keep the names of the parameters they are passed to.
        extra = {key: inputs[key] for key in inspect.signature(compute).parameters if key in inputs}
        return compute(
            model,
            input_ids,
            attention_mask,
            completion_ids.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **extra,
        )

    def _reducer(self, mask: Tensor, inputs: dict[str, Any]) -> Any:
        """One global token denominator, or the mean of sample means, scaled for accumulation."""

        def per_token(values: Tensor) -> Tensor:
            items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if self.model.training:
                items = items * self._accumulated_steps() / self.args.steps_per_generation
            return values.sum() / items

        def per_sample(values: Tensor) -> Tensor:
            means = values.sum(-1) / mask.sum(-1).clamp(min=1)
            return means.mean() / self._accumulated_steps()

        return per_token if self.loss_config.per_token else per_sample

    def _accumulated_steps(self) -> float:
        return self.current_gradient_accumulation_steps if self.model.training else 1.0
