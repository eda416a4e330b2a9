"""Both closures on a device that is not the host: nothing of the host is mixed in, and nothing waits for the device.

Layout, log-probs (blocks of torch operations), every loss, correction and regularizer, metrics and the three LM heads
give what they give on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin import ppo_utils
from plugin.batch_types import Microbatch, RolloutBatch
from plugin.config import TrainerConfig
from plugin.config.loss.policy_loss import POLICY_LOSS_TRAITS
from plugin.loss.hook_chain import batch_declarations, statistics_of
from plugin.loss.inputs import KnownTokens
from plugin.megatron_backend.step import microbatch_loss
from plugin.megatron_backend.step.loss_scaling import LossScale, weigh_samples
from plugin.megatron_backend.step.preparation import PreparedMicrobatch, prepare
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import log_prob_forward_step, training_forward_step
from plugin.megatron_backend.step.step_metrics import step_metrics
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from tests.pretend_device import PretendDevice
from tests.unit.loss.sample_batches import VOCABULARY, random_batch
from tests.unit.megatron_backend.rank_places import place
from tests.unit.megatron_backend.step.test_separable_path import IdentityHead

CPU = torch.device("cpu")
MASKS = ([1, 1, 0, 1, 1], [0, 0, 0], [1], [1, 0, 1, 1, 1, 1, 0])
HEADS = {
    "logits": {"fused_lm_head": "off"},
    "fused": {"fused_lm_head": "on", "separable_fast_path": "off"},
    "separable": {"fused_lm_head": "on"},
}
HOOKS = [name for name in ppo_utils.__all__ if name.endswith("_function")]
REGULARIZERS: dict[str, dict[str, Any]] = {
    "reference KL": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
    "rollout KL": {"use_rollout_kl_loss": True, "rollout_kl_loss_coef": 0.2},
    "entropy": {"entropy_coef": 0.05},
    "kept": {"policy_loss": "icepop", "loss_denominator": "kept"},
    "per token": {"calculate_per_token_loss": True},
    "fixed length": {"loss_reduction": "fixed-length", "loss_fixed_length": 8},
    "temperature": {"rollout_temperature": 0.7},
    "engine's log-probs": {"use_rollout_logprobs": True},
}


@contextmanager
def _plain() -> Iterator[None]:
    yield


def laid_out(
    config: TrainerConfig, device: torch.device, layout: Any = "packed", *, kept_ids: bool = False
) -> tuple[PreparedMicrobatch, Tensor, float]:
    """A microbatch for `device`, logits for its rows on the CPU, and the weight of the batch."""
    columns, logits = random_batch(MASKS, seed=3)
    if kept_ids:
        lengths = columns["response_lengths"]
        columns["rollout_kept_ids"] = [torch.arange(VOCABULARY).repeat(n).int() for n in lengths]
        columns["rollout_kept_counts"] = [torch.full((n,), VOCABULARY).int() for n in lengths]
    columns["group_index"] = [0, 0, 1, 1]
    batch, weight = weigh_samples(RolloutBatch(columns), config)
    microbatch = Microbatch(batch, is_padding=False)
    (prepared,) = prepare([microbatch], place(), layout=layout, device=device)
    prepared.columns["trainer_version"] = prepared.columns["current_version"] = 3
    rows = prepared.inputs.tokens.shape
    generator = torch.Generator().manual_seed(1)
    own = torch.randn(*rows, VOCABULARY, generator=generator)
    if layout == "packed":
        own = logits[:, : rows[1]]
    return prepared, own, weight


def training_pass(
    config: TrainerConfig, device: torch.device, pretend: PretendDevice | None, **options: Any
) -> dict[str, Any]:
    """Loss, gradient, log-probs and metrics of one microbatch through the training closure."""
    prepared, logits, weight = laid_out(config, device, **options)
    errors, table = ErrorCollector(device), StatisticsTable(device)
    if batch_declarations(config):
        # As in the trainer, before the schedule runs: thresholds over the batch are read back once.
        known = KnownTokens.of(config, prepared.columns, prepared.inputs.shards)
        inputs = known.at_policy(config, known.fields["rollout_log_probs"], None)
        prepared.columns["batch_statistics"] = statistics_of(config, inputs)
    scale = LossScale(config.per_token, weight, num_microbatches=3, dp_cp_size=2)
    model = IdentityHead(logits.to(device).requires_grad_())
    model.output_layer.weight = torch.nn.Parameter(torch.eye(VOCABULARY).to(device))
    log_probs: list[Tensor | None] = []
    with _plain() if pretend is None else pretend.no_reads():
        step = training_forward_step(
            config, place(), scale, table, errors, kept_log_probs=log_probs
        )
        output, loss_of = step(iter([prepared]), model)
        loss, num_tokens, _ = loss_of(output)
        gradients = torch.autograd.grad(
            loss, [model.hidden, model.output_layer.weight], allow_unused=True
        )
    if errors.error is not None:
        raise errors.error
    assert log_probs[0] is not None
    return {
        "loss": loss.detach().cpu(),
        "tokens": num_tokens.cpu(),
        "hidden gradient": gradients[0].cpu(),
        "log-probs": log_probs[0].cpu()[prepared.loss_tokens.cpu()],
        **{name: torch.tensor(value) for name, value in step_metrics(table.reduced(None)).items()},
    }


def check(config: TrainerConfig, **options: Any) -> None:
    wanted = training_pass(config, CPU, None, **options)
    with PretendDevice() as pretend:
        found = training_pass(config, pretend.device, pretend, **options)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=name, equal_nan=True
        )


def config_of(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**{"transformer_impl": "local", **settings})


@pytest.mark.parametrize("loss", POLICY_LOSS_TRAITS)
def test_every_policy_loss_stays_on_the_device(loss: str) -> None:
    # Inside the head where it is token-separable, behind the fused head otherwise.
    check(config_of(policy_loss=loss, **HEADS["separable"]))


@pytest.mark.parametrize("head", HEADS)
def test_every_head_stays_on_the_device(head: str) -> None:
    check(config_of(**HEADS[head], entropy_coef=0.05))


@pytest.mark.parametrize("hook", HOOKS)
def test_every_correction_stays_on_the_device(hook: str) -> None:
    path = f"plugin.ppo_utils.{hook}"
    rules = {"rejection_rules": "token_ratio=0.6:1.6,mean_k1=-0.35:0.35,max_k2=0:2"}
    settings = rules if hook == "rejection_function" else {}
    loss = "reinforce" if hook == "off_policy_is_function" else "ppo"
    check(config_of(policy_loss=loss, use_tis=True, custom_tis_function_path=path, **settings))


@pytest.mark.parametrize("term", REGULARIZERS)
def test_every_term_and_reduction_stays_on_the_device(term: str) -> None:
    check(config_of(**HEADS["separable"], **REGULARIZERS[term]))


@pytest.mark.parametrize("head", HEADS)
def test_kept_ids_stay_on_the_device(head: str) -> None:
    check(config_of(**HEADS[head]), kept_ids=True)


@pytest.mark.parametrize("head", ["logits", "fused"])
def test_padded_rows_stay_on_the_device(head: str) -> None:
    check(config_of(**HEADS[head]), layout="padded")


@pytest.mark.parametrize("head", ["logits", "fused"])
def test_the_log_prob_pass_stays_on_the_device(head: str) -> None:
    config, results = config_of(**HEADS[head]), []
    for use in (False, True):
        pretend = PretendDevice() if use else None
        with pretend or _plain():
            device = pretend.device if pretend else CPU
            prepared, logits, _ = laid_out(config, device)
            model = IdentityHead(logits.to(device))
            model.output_layer.weight = torch.nn.Parameter(torch.eye(VOCABULARY).to(device))
            with torch.no_grad(), pretend.no_reads() if pretend else _plain():
                step = log_prob_forward_step(config, place(), ErrorCollector(device))
                output, collect = step(iter([prepared]), model)
                log_probs = collect(output)
            assert log_probs is not None
            results.append(log_probs.cpu())
    torch.testing.assert_close(*results)


def test_a_read_that_is_planted_in_a_closure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = microbatch_loss.token_weights

    def planted(*args: Any, **kwargs: Any) -> Tensor:
        result = weights(*args, **kwargs)
        return result * 1.0 if float(result.sum()) > 0 else result

    monkeypatch.setattr(microbatch_loss, "token_weights", planted)
    with pytest.raises(AssertionError, match="the host waits for the device"):
        check(config_of())


def test_a_host_tensor_that_is_planted_in_a_closure_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = microbatch_loss.token_weights
    monkeypatch.setattr(microbatch_loss, "token_weights", lambda *a, **k: weights(*a, **k).cpu())
    with pytest.raises((RuntimeError, AssertionError), match=r"tensor of the host|waits for"):
        check(config_of())
