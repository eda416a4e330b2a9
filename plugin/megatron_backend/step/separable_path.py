"""Chooses between the two ways from logits to their gradient, and prepares the one-visit way for a microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.logprobs.kernels import cpu_extension
from plugin.logprobs.separable_lm_head import separable_lm_head
from plugin.logprobs.separable_logprobs import separable_log_probs
from plugin.loss.interfaces import LossInputs
from plugin.loss.normalization import token_weights
from plugin.loss.policy_loss import known_fields
from plugin.loss.separable_loss import CUR, ENTROPY, loss_gradients, program_or_refusal
from plugin.loss.token_program import TokenProgram
from plugin.megatron_backend.step.sequence_packing import ModelInputs

#: Relative difference of two float32 evaluations of the same formula that is still rounding.
_TOLERANCE = 1e-4

_verified: set[TokenProgram] = set()


def separable_program(
    config: TrainerConfig, tp_size: int, device: torch.device, has_train_log_probs: bool = True
) -> TokenProgram | None:
    """The program of the configured loss if the separable path is to be taken, else None.

    `--separable-fast-path on` where it cannot work is a ConfigError; auto takes it where it is known to pay: on
    the CPU with the C++ kernels.
    """
    choice = config.separable_fast_path
    if choice == "off" or (choice == "auto" and not _pays(config, device)):
        return None
    return program_or_refusal(config, tp_size, has_train_log_probs, insist=choice == "on")


def _pays(config: TrainerConfig, device: torch.device) -> bool:
    if device.type != "cpu" or not config.inplace_logits_grad:
        return False
    return cpu_extension.load_library() is not None


class SeparableMicrobatch:
    """A microbatch whose loss is evaluated together with its log-probs."""

    def __init__(
        self,
        config: TrainerConfig,
        program: TokenProgram,
        inputs: ModelInputs,
        columns: dict[str, Any],
    ) -> None:
        self.config, self.program, self.inputs = config, program, inputs
        fields, mask, shards = known_fields(config, columns, inputs.shards.device)
        self.weights = token_weights(
            shards,
            mask,
            columns["loss_masks"],
            per_token=config.per_token,
            mask_sums=columns.get("rollout_mask_sums"),
        )
        fields["weights"] = self.weights
        used = ("weights", *program.inputs)
        self.fields = {
            name: torch.where(mask, value, 0.0)
            for name, value in fields.items()
            if name in used and value is not None
        }
        missing = [name for name in program.inputs if name not in {*fields, CUR, ENTROPY}]
        if missing:
            raise BatchError(f"the batch has no {', '.join(missing)}, which the loss needs")

    def log_probs(
        self,
        output: Tensor,
        head_weight: Tensor | None,
        row_mask: Tensor,
        expected_gradient: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob and entropy [R] without gradient, and a 0 that carries the gradient of the weighted loss.

        output: logits [B, S_local, V], overwritten by their gradient with --inplace-logits-grad; or with
            `head_weight` [V, H] hidden states [B, S_local, H]
        row_mask: bool [B * S_local] on the CPU, the rows that carry loss
        """
        rows = self.inputs.rows
        count = self.inputs.tokens.numel()
        targets = torch.zeros(count, dtype=torch.int64, device=output.device)
        targets[rows] = self.inputs.targets
        spread = {
            name: value.new_zeros(count).index_copy_(0, rows, value)
            for name, value in self.fields.items()
        }
        flat = output.reshape(count, -1)
        temperature = self.config.rollout_temperature
        if head_weight is None:
            log_probs, entropy, anchor = separable_log_probs(
                flat,
                targets,
                self.program,
                spread,
                temperature=temperature,
                expected_gradient=expected_gradient,
                inplace_grad=self.config.inplace_logits_grad,
            )
        else:
            log_probs, entropy, anchor = separable_lm_head(
                flat,
                head_weight,
                targets,
                self.program,
                spread,
                row_mask=row_mask,
                temperature=temperature,
                expected_gradient=expected_gradient,
            )
        return log_probs[rows], entropy[rows], anchor

    def verify(self, inputs: LossInputs) -> None:
        """Compare the program with the ordinary loss, once per program, or always with --validate-batch always.

        A recorded program cannot know of state that a hook keeps or of values it reads behind torch's back.
        """
        validate = self.config.validate_batch
        asks_device = validate == "auto" and inputs.mask.device.type != "cpu"
        if validate == "never" or asks_device or (self.program in _verified and validate == "auto"):
            return
        if not bool(inputs.mask.any()):
            return
        assert inputs.entropy is not None
        values = {**self.fields, CUR: inputs.cur_log_probs, ENTROPY: inputs.entropy}
        mine = self.program.run(values)
        for found, wanted in zip(
            mine, loss_gradients(self.config, inputs, self.weights), strict=True
        ):
            off = torch.where(inputs.mask, found - wanted, 0.0).abs().max()
            if not bool(off <= _TOLERANCE * wanted.abs().max() + 1e-12):
                raise BatchError(
                    f"the correction is declared @token_separable, but its gradient differs by {float(off):.3g} "
                    f"(of at most {float(wanted.abs().max()):.3g}) when tokens are evaluated apart; remove the "
                    "declaration, or --separable-fast-path off"
                )
        _verified.add(self.program)
