"""`LossConfig`: everything `policy_loss_function` reads, and the checks across its groups."""

from __future__ import annotations

import warnings
from collections.abc import Container
from dataclasses import dataclass

from plugin.config.correction_flags import CorrectionFlags
from plugin.config.flags import expect
from plugin.config.objective_flags import (
    AdvantageFlags,
    LossReduction,
    NormalizationFlags,
    RegularizerFlags,
)
from plugin.config.policy_loss_flags import PolicyLossFlags
from plugin.errors import ConfigError


@dataclass(frozen=True)
class LossConfig(
    PolicyLossFlags, CorrectionFlags, RegularizerFlags, AdvantageFlags, NormalizationFlags
):
    """Everything `policy_loss_function` reads."""

    def check(self) -> None:
        self._check_correction_fits_loss()
        self._check_reduction()
        self._check_kept_denominator()

    @property
    def reduction(self) -> LossReduction:
        """How the losses of tokens become one: as asked for, or as the policy loss is defined."""
        if self.loss_reduction is not None:
            return self.loss_reduction
        return "token-mean" if self.loss_traits.per_token else "sample-mean"

    @property
    def per_token(self) -> bool:
        """Whether the loss has one global token denominator."""
        return self.reduction == "token-mean"

    @property
    def fixed_length(self) -> int | None:
        """The tokens that a sample is divided by, where that is a constant."""
        return self.loss_fixed_length or getattr(self, "max_response_length", None)

    @property
    def distills(self) -> bool:
        """Whether a teacher says, alone or with the rewards, what is learned."""
        return self.teacher_tau > 0 or (self.distill_topk is not None and self.distill_coef > 0)

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss accounts for tokens that another policy sampled.

        It does if it compares with the rollout policy: by itself, by a correction, or because the
        engine's log-probs stand for the old ones that it compares with.
        """
        compares_with = self.loss_traits.compares_with
        compares_with_old = compares_with == "train" or self.use_tis
        return (
            compares_with == "rollout"
            or (self.use_tis and not self._only_compares_with_cur())
            or (self.train_log_probs == "rollout" and compares_with_old)
        )

    def needs_rollout_log_probs(self) -> list[str]:
        """The features in use that cannot work without the engine's log-probs."""
        old = self.train_log_probs
        wanted = {
            f"--policy-loss {self.policy_loss}": self.loss_traits.compares_with == "rollout",
            "--use-tis": self.use_tis,
            "--use-rollout-kl-loss": self.use_rollout_kl_loss,
            "--train-log-probs rollout or --use-rollout-logprobs": self.train_log_probs
            == "rollout",
            "--train-log-probs approximate": self.train_log_probs == "approximate",
            "--get-mismatch-metrics": self.get_mismatch_metrics,
        }
        return [name for name, needed in wanted.items() if needed]

    def require_rollout_log_probs(self, available: bool) -> None:
        """Fail at once where a feature would otherwise be silently inert."""
        needing = self.needs_rollout_log_probs()
        if needing and not available:
            raise ConfigError(
                f"{', '.join(needing)} needs rollout_log_probs and the batch has none; make the "
                "engine return the log-prob of every sampled token, or turn the feature off"
            )

    def require_teacher(self, columns: Container[str]) -> None:
        """Fail at once where a batch lacks what distillation needs of the teacher."""
        expect(
            not self.teacher_tau or "teacher_log_probs" in columns,
            f"--teacher-tau is {self.teacher_tau} but the batch has no teacher_log_probs; give a "
            "teacher",
        )
        names = ("teacher_topk_ids", "teacher_topk_log_probs")
        expect(
            not self.distill_topk or all(name in columns for name in names),
            f"--distill-topk is {self.distill_topk} but the batch lacks {' or '.join(names)}; give "
            "a teacher",
        )

    def _check_correction_fits_loss(self) -> None:
        if not self.use_tis:
            return
        expect(
            self.loss_traits.compares_with != "rollout",
            f"--use-tis with --policy-loss {self.policy_loss}: that loss already compares the "
            "current policy with the rollout policy, so the mismatch would be counted twice; drop "
            "--use-tis",
        )
        doubled = [
            name
            for name in self.hook_names()
            if name.replace(":", ".").rsplit(".", 1)[-1] == "off_policy_is_function"
        ]
        if doubled and self.loss_traits.compares_with == "train":
            message = (
                f"{doubled[0]} on --policy-loss {self.policy_loss} counts pi_theta/pi_old twice "
                "and is right only for the first update on a rollout"
            )
            if not self.allow_biased_correction:
                raise ConfigError(
                    f"{message}; use --policy-loss reinforce, or insist with "
                    "--allow-biased-correction"
                )
            warnings.warn(message, stacklevel=2)

    def _check_reduction(self) -> None:
        expect(
            self.reduction != "fixed-length" or self.fixed_length is not None,
            "--loss-reduction fixed-length needs --loss-fixed-length, the tokens that every sample "
            "is divided by; give the longest response",
        )
        expect(
            self.loss_denominator == "original"
            or self.reduction not in ("fixed-length", "prompt-mean"),
            f"--loss-denominator kept with --loss-reduction {self.reduction}: kept tokens are "
            "counted over a sample or over all; use token-mean, sample-mean or group-mean, or the "
            "original denominator",
        )

    def _check_kept_denominator(self) -> None:
        regularized = {
            "--kl-loss-coef": self.kl_loss_coef,
            "--rollout-kl-loss-coef": self.rollout_kl_loss_coef,
            "--entropy-coef": self.entropy_coef,
            "--distill-coef": self.distill_coef if self.distill_topk else 0,
        }
        active = [name for name, value in regularized.items() if value]
        expect(
            not (self.loss_denominator == "kept" and self.per_token and active),
            f"--loss-denominator kept with a global token denominator and {', '.join(active)}: the "
            "two terms would need two denominators; use --no-calculate-per-token-loss or the "
            "original one",
        )
