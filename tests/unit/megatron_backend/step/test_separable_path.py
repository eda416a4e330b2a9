"""The loss inside the LM head: loss, gradient, log-probs and metrics are those of the two-phase path."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.batch_types import Microbatch, RolloutBatch
from plugin.config import ROLLOUT_LOSSES, TrainerConfig
from plugin.errors import BatchError, ConfigError
from plugin.logprobs import row_gradients
from plugin.logprobs.kernels import blocked_torch
from plugin.loss.hook_chain import batch_declarations, statistics_of
from plugin.loss.inputs import KnownTokens
from plugin.loss.partial_objective import separable_obstacle, takes_separable_head
from plugin.loss.policy_losses import POLICY_LOSSES
from plugin.megatron_backend.step.loss_scaling import LossScale, total_weight
from plugin.megatron_backend.step.preparation import prepare
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import training_forward_step
from plugin.megatron_backend.step.step_metrics import step_metrics
from plugin.ppo_utils import token_separable
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from tests.unit.loss.sample_batches import random_batch
from tests.unit.megatron_backend.step.test_sequence_packing import place

HOOK = "plugin.ppo_utils."
SEPARABLE_HOOKS = ("vanilla_tis", "icepop", "off_policy_is", "dppo_tv_mask")
SEQUENCE_HOOKS = ("sequence_tis", "geometric_mask", "rejection", "veto", "opsm")
MASKS = ([1, 1, 0, 1, 1], [0, 0, 0], [1], [1, 0, 1, 1, 1, 1, 0])
BOUNDS = {"eps_clip": 0.15, "tis_clip": 1.2, "tis_clip_low": 0.7, "dppo_diff_low": 0.05}
CPU = torch.device("cpu")


def trainer_config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**{**BOUNDS, **settings})


class IdentityHead(torch.nn.Module):
    """A model whose LM head has the identity for a weight: its hidden states are its logits."""

    class OutputLayer(torch.nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, hidden: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
            return hidden @ self.weight.t(), None

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.post_process = True
        self.config = SimpleNamespace(sequence_parallel=False)
        self.hidden = hidden
        self.output_layer = self.OutputLayer(torch.eye(hidden.shape[-1], dtype=hidden.dtype))

    def forward(self, **_: Any) -> Tensor:
        return self.output_layer(self.hidden.view_as(self.hidden))[0]


class Outcome:
    """What one microbatch gives, with the gradient that Megatron's schedule would send back."""

    def __init__(
        self,
        config: TrainerConfig,
        masks: Sequence[Sequence[int]] = MASKS,
        *,
        dtype: torch.dtype = torch.float32,
        arriving: float = 1.0,
        drop: Sequence[str] = (),
        spoil: bool = False,
    ) -> None:
        columns, logits = random_batch(masks, seed=3)
        columns = {name: value for name, value in columns.items() if name not in drop}
        batch = RolloutBatch(columns)
        logits = logits[:, :-1].to(dtype)
        groups, errors = place(), ErrorCollector(CPU)
        (prepared,) = prepare([Microbatch(batch, is_padding=False)], groups)
        if batch_declarations(config):
            known = KnownTokens.of(config, prepared.columns, prepared.inputs.shards)
            old = known.fields["train_log_probs"]
            assert old is not None
            found = statistics_of(config, known.at_policy(config, old, None))
            prepared.columns["batch_statistics"] = found
        if spoil:  # rows without loss may hold anything
            logits[0, ~prepared.loss_rows] = float("nan")
        weight = total_weight(batch, per_token=config.per_token)
        scale = LossScale(config.per_token, weight, num_microbatches=3, dp_cp_size=2)
        table = StatisticsTable(CPU)
        kept: list[Tensor | None] = []
        step = training_forward_step(config, groups, scale, table, errors, kept_log_probs=kept)
        leaf = logits.requires_grad_()
        output, loss_of = step(iter([prepared]), IdentityHead(leaf))
        loss, self.num_tokens, _ = loss_of(output)
        with errors.collecting():
            (self.gradient,) = torch.autograd.grad(
                loss if config.per_token else loss / 3, leaf, torch.tensor(arriving)
            )
        self.error = errors.error
        self.loss, self.log_probs = loss.detach(), kept[0]
        self.metrics = {} if self.error else step_metrics(table)
        self.rows = prepared.loss_rows[prepared.inputs.rows]


def assert_same(config: TrainerConfig, **options: Any) -> None:
    fast = Outcome(_with(config, separable_fast_path="on"), **options)
    slow = Outcome(_with(config, separable_fast_path="off"), **options)
    assert fast.error is None and slow.error is None, (fast.error, slow.error)
    torch.testing.assert_close(fast.loss, slow.loss)
    torch.testing.assert_close(fast.gradient, slow.gradient)
    assert fast.num_tokens == slow.num_tokens
    assert fast.log_probs is not None and slow.log_probs is not None
    torch.testing.assert_close(fast.log_probs[fast.rows], slow.log_probs[slow.rows])
    assert fast.metrics.keys() == slow.metrics.keys()
    for name, value in slow.metrics.items():
        assert fast.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def _with(config: TrainerConfig, **settings: Any) -> TrainerConfig:
    return TrainerConfig(**{**vars(config), **settings})


TERMS: dict[str, dict[str, Any]] = {
    "no regularizer": {},
    "reference KL": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
    "unbiased reference KL": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "rollout KL": {"use_rollout_kl_loss": True, "rollout_kl_loss_coef": 0.2},
    "rollout KL of kept tokens": {
        "use_rollout_kl_loss": True,
        "rollout_kl_loss_coef": 0.2,
        "rollout_kl_estimator_type": "abs",
        "rollout_kl_scope": "kept",
    },
}
SEQUENCE_LOSSES = ("gspo", "gmpo", "vespo", "topr", "minpro")
SEPARABLE_LOSSES = [name for name in POLICY_LOSSES if name not in SEQUENCE_LOSSES]
PAIRS = [
    (loss, hook)
    for loss, hook in itertools.product(SEPARABLE_LOSSES, (None, *SEPARABLE_HOOKS))
    if hook is None or loss not in ROLLOUT_LOSSES
]


@pytest.mark.filterwarnings("ignore:off_policy_is_function")
@pytest.mark.filterwarnings("ignore:.*counts pi_theta")
@pytest.mark.parametrize(("loss", "hook"), PAIRS)
def test_every_loss_hook_and_regularizer_equals_two_phases(loss: str, hook: str | None) -> None:
    settings: dict[str, Any] = {"policy_loss": loss}
    if hook is not None:
        settings |= {"use_tis": True, "custom_tis_function_path": f"{HOOK}{hook}_function"}
        settings |= {"allow_biased_correction": True}
    if loss in ROLLOUT_LOSSES:
        settings |= {"teacher_tau": 0.2, "adv_tau": 0.9}
    for terms, entropy_coef in itertools.product(TERMS.values(), (0.0, 0.05)):
        assert_same(trainer_config(**settings, **terms, entropy_coef=entropy_coef))


@pytest.mark.parametrize(
    "settings",
    [
        {"calculate_per_token_loss": True},
        {
            "calculate_per_token_loss": True,
            "loss_denominator": "kept",
            "policy_loss": "icepop",
            "entropy_coef": 0.0,
        },
        {"inplace_logits_grad": False},
        {"rollout_temperature": 0.7},
        {"eps_clip_c": 1.1},
        {"policy_loss": "dppo_tv", "dppo_ratio_cap": 1.2},
        {"get_mismatch_metrics": True},
        {"use_rollout_logprobs": True},
        {
            "use_tis": True,
            "custom_tis_function_path": f"{HOOK}icepop_function,{HOOK}dppo_tv_mask_function",
        },
        {"validate_batch": "always"},
    ],
    ids=str,
)
def test_settings_around_the_loss_keep_their_meaning(settings: dict[str, Any]) -> None:
    assert_same(trainer_config(**{"entropy_coef": 0.05, **settings}))


def test_bfloat16_logits_round_the_same_gradient_once() -> None:
    config = trainer_config(entropy_coef=0.05)
    fast, slow = (
        Outcome(_with(config, separable_fast_path=choice), dtype=torch.bfloat16)
        for choice in ("on", "off")
    )
    # 8 bits of mantissa: neighbors differ by at most 2^-7 of their value
    torch.testing.assert_close(fast.gradient, slow.gradient, rtol=2**-7, atol=1e-6)


def test_without_trainer_log_probs_the_updates_own_stand_for_them() -> None:
    assert_same(trainer_config(entropy_coef=0.01), drop=["log_probs"])


def test_a_microbatch_without_loss_has_a_gradient_of_zero() -> None:
    assert_same(trainer_config(entropy_coef=0.05), masks=[[0, 0, 0], [0]])


@pytest.mark.parametrize("arriving", [0.5, 0.0, 1.0 + 1e-8])
def test_a_factor_that_nobody_announced_still_reaches_the_gradient(arriving: float) -> None:
    assert_same(trainer_config(entropy_coef=0.05), arriving=arriving)


def test_rows_without_loss_are_not_read() -> None:
    fast = Outcome(trainer_config(separable_fast_path="on", entropy_coef=0.05), spoil=True)
    clean = Outcome(trainer_config(separable_fast_path="on", entropy_coef=0.05))
    assert fast.error is None
    assert torch.equal(fast.gradient, clean.gradient)


def test_without_a_compiler_blocks_of_torch_operations_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_gradients, "row_kernels_for", lambda logits: blocked_torch)
    # 2 rows of 7 float32 columns per block: several blocks, the last one partial
    monkeypatch.setitem(blocked_torch._BLOCK_BYTES, "cpu", 2 * 7 * 4)
    assert_same(trainer_config(entropy_coef=0.05, use_tis=True))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy_loss": "gspo"}, "gspo is not token-separable"),
        *(
            ({"use_tis": True, "custom_tis_function_path": f"{HOOK}{name}_function"}, name)
            for name in SEQUENCE_HOOKS
        ),
        (
            {"use_tis": True, "loss_denominator": "kept", "calculate_per_token_loss": False},
            "its own count of kept tokens",
        ),
    ],
)
def test_losses_over_sequences_take_two_phases_and_cannot_be_forced(
    settings: dict[str, Any], reason: str
) -> None:
    config = trainer_config(**settings)
    assert separable_obstacle(config) is not None
    assert not takes_separable_head(config, 1)
    with pytest.raises(
        ConfigError, match=f"--separable-fast-path on: .*{reason}.*; use auto or off"
    ):
        takes_separable_head(_with(config, separable_fast_path="on"), 1)


@pytest.mark.parametrize(
    ("settings", "tp_size"),
    [({"separable_fast_path": "off"}, 1), ({}, 2), ({"fused_lm_head": "off"}, 1)],
)
def test_auto_takes_two_phases_where_the_head_is_not_whole_or_not_fused(
    settings: dict[str, Any], tp_size: int
) -> None:
    assert takes_separable_head(trainer_config(), 1)
    assert not takes_separable_head(trainer_config(**settings), tp_size)


def test_insisting_on_it_without_the_fused_head_is_refused() -> None:
    config = trainer_config(separable_fast_path="on", fused_lm_head="off")
    with pytest.raises(ConfigError, match="--fused-lm-head is off; use auto or off"):
        takes_separable_head(config, 1)


# Hooks of a user, named by this file's path.
def _hook(weigh: Any) -> Any:
    def function(
        args: Any, *, pg_loss: Tensor, rollout_log_probs: Any, loss_masks: Any, **_: Any
    ) -> Any:
        with torch.no_grad():
            weight = weigh(torch.cat(list(rollout_log_probs)))
        return pg_loss * weight, loss_masks, {"own_weight": weight}

    return function


own_hook = token_separable(_hook(lambda rollout: 2 * torch.sigmoid(rollout + 1)))
undeclared_hook = _hook(lambda rollout: 2 * torch.sigmoid(rollout + 1))
mixing_hook = token_separable(_hook(lambda rollout: torch.exp(rollout - rollout.mean())))
length_hook = token_separable(_hook(lambda rollout: torch.sigmoid(rollout) / len(rollout)))
secretive_hook = token_separable(_hook(lambda rollout: rollout * sum(rollout.tolist())))
strength = 1.0
stateful_hook = token_separable(_hook(lambda rollout: torch.full_like(rollout, strength)))
mixes_when_long = token_separable(
    _hook(lambda rollout: rollout if len(rollout) < 6 else rollout * rollout.mean())
)


def named(name: str, **settings: Any) -> TrainerConfig:
    path = f"{__name__}:{name}"
    return trainer_config(use_tis=True, custom_tis_function_path=path, **settings)


def test_a_users_hook_takes_part_once_it_declares_itself() -> None:
    assert takes_separable_head(named("own_hook"), 1)
    assert not takes_separable_head(named("undeclared_hook"), 1)
    assert_same(named("own_hook", entropy_coef=0.05))


@pytest.mark.parametrize("name", ["mixing_hook", "length_hook", "secretive_hook"])
def test_a_wrong_declaration_is_found_out_and_changes_nothing(name: str) -> None:
    config = named(name)
    assert separable_obstacle(config) is None  # it declares itself separable
    assert not takes_separable_head(config, 1)  # it is not
    fast, slow = Outcome(config), Outcome(_with(config, separable_fast_path="off"))
    assert torch.equal(fast.gradient, slow.gradient)
    with pytest.raises(ConfigError, match="--separable-fast-path on"):
        takes_separable_head(_with(config, separable_fast_path="on"), 1)


def test_a_hook_with_state_of_its_own_is_asked_anew_in_every_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = named("stateful_hook")
    assert_same(config)
    monkeypatch.setattr(f"{__name__}.strength", 1.5)
    assert_same(config)


def test_mixing_that_the_example_tokens_do_not_show_is_found_out_in_the_microbatch() -> None:
    config = named("mixes_when_long")
    assert takes_separable_head(config, 1)
    outcome = Outcome(config)
    assert isinstance(outcome.error, BatchError)
    assert "declared @token_separable" in str(outcome.error)
    assert not outcome.gradient.any()
