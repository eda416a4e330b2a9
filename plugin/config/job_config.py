"""`JobConfig`: everything a training job reads, and the checks across its groups of flags."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from plugin.config.data import DataFlags, RewardFlags
from plugin.config.engine_checks import check_engine
from plugin.config.engines import (
    WEIGHT_TRANSPORTS,
    EngineArgumentFlags,
    EngineTraits,
    TransportTraits,
    WeightTransport,
    engine_traits,
)
from plugin.config.evaluation import EvalFlags, check_evaluation
from plugin.config.flags import expect, read_yaml
from plugin.config.launch import LaunchFlags, OutputFlags
from plugin.config.loss.loss_config import ESTIMATOR_TRAITS, estimator_traits
from plugin.config.loss.policy_loss import POLICY_LOSS_TRAITS, RATIO_LOSSES, ROLLOUT_LOSSES
from plugin.config.rollout import (
    LONG_RESPONSE,
    ConversationFlags,
    RolloutFlags,
    SamplingFlags,
    check_sampling,
)
from plugin.config.servers import ServerFlags
from plugin.config.teachers import TeacherFlags
from plugin.config.trainer_config import CriticFlags, TrainerConfig
from plugin.errors import ConfigError

#: Defaults of the built-in task; a real model needs others.
EMBEDDED_DEFAULTS: dict[str, Any] = {
    "lr": 3e-3,
    "rollout_batch_size": 64,
    "n_samples_per_prompt": 8,
    "num_rollouts": 100,
    "max_response_length": 8,
    "micro_batch_size": 256,
    "loss_reduction": "token-mean",
}
#: Default seconds without progress that an engine, or a server with a response, may take.
_PATIENCE = 600.0
#: Defaults with a model of the user's own.
_OWN_MODEL_DEFAULTS: dict[str, Any] = {"max_tokens_per_gpu": "auto"}
#: Defaults with adapters on it: ten times the learning rate of training all weights.
_LORA_DEFAULTS: dict[str, Any] = _OWN_MODEL_DEFAULTS | {"lr": 1e-5}


@dataclass(frozen=True)
class JobConfig(
    TrainerConfig,
    CriticFlags,
    TeacherFlags,
    DataFlags,
    RewardFlags,
    RolloutFlags,
    SamplingFlags,
    EvalFlags,
    ServerFlags,
    EngineArgumentFlags,
    ConversationFlags,
    LaunchFlags,
    OutputFlags,
):
    """Everything `megatron-tis train` reads."""

    @classmethod
    def from_sources(cls, flags: Mapping[str, Any], yaml_file: str | Path | None = None) -> Self:
        """As `FlagGroup.from_sources`, over the defaults of the built-in job or of adapters."""
        settings = read_yaml(Path(yaml_file)) if yaml_file else {}
        given = {**settings, **flags}
        own_model = given.get("hf_checkpoint") or given.get("hf-checkpoint")
        adapters = given.get("lora_rank") or given.get("lora-rank")
        of_own_model = _LORA_DEFAULTS if adapters else _OWN_MODEL_DEFAULTS
        below = of_own_model if own_model else EMBEDDED_DEFAULTS
        named = {key.replace("-", "_") for key in given}
        named |= {other.of for name, other in cls.aliases().items() if name in named}
        if "micro_batch_size" in named:
            named.add("max_tokens_per_gpu")
        extra = {key: value for key, value in below.items() if key not in named}
        for source in (flags, settings):
            expect(
                None in (source.get("num_epochs"), source.get("num_rollouts")),
                f"--num-epochs {source.get('num_epochs')} with --num-rollouts "
                f"{source.get('num_rollouts')}: both say how long the job trains; drop one",
            )
        if flags.get("num_rollouts") is not None:
            extra["num_epochs"] = None
        config = super().from_sources({**extra, **flags}, yaml_file)
        config.refuse_idle_flags(flags, settings)
        return config

    def check(self) -> None:
        self._check_world()
        self._check_rollouts()
        self._check_mini_batches()
        self._check_approximation()
        self._check_stale_samples()
        check_sampling(self)
        check_engine(self)
        check_evaluation(self)
        self._check_other_policies()
        self._check_estimator()
        self._check_entropy_target()
        self._check_lora()

    @property
    def rounds_rollout_weights(self) -> str | None:
        """The flag that rounds the engine's weights more coarsely than the trainer's, if any."""
        if self.rollout_quantization != "none":
            return f"--rollout-quantization {self.rollout_quantization}"
        if self.rollout_dtype in ("auto", "float32", self.train_dtype):
            return None
        trainer = "float32" if self.train_dtype == "auto" else self.train_dtype
        known = "" if self.train_dtype == "float32" else f", with a trainer in {trainer},"
        return f"--rollout-dtype {self.rollout_dtype}{known}"

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy without its adapters, and no model of its own."""
        return self.lora_rank > 0 and self.use_kl_loss and self.ref_hf_checkpoint is None

    @property
    def trains_critic(self) -> bool:
        """Whether the job has a value model."""
        return self.advantage_estimator == "gae"

    def critic_learning_rate(self, update: int) -> float:
        """Warm-up, then constant; `update` counts from 0."""
        rate = self.critic_lr or self.lr
        return rate * min(1.0, (update + 1) / max(1, self.critic_lr_warmup_steps))

    @property
    def fixed_length(self) -> int:
        """The tokens that --loss-reduction fixed-length divides a sample by."""
        return self.loss_fixed_length or self.max_response_length

    @property
    def longest_sample(self) -> int:
        """The most tokens of prompt and response, if the model has so many positions."""
        return self.max_context_length or self.max_prompt_length + self.max_response_length

    @property
    def saves_at_end(self) -> bool:
        """Whether a checkpoint is written at the end of a run, also of an interrupted one."""
        if self.save_at_end is not None:
            return self.save_at_end
        return self.hf_checkpoint is not None or self.save_interval is not None

    @property
    def bulk_of_groups(self) -> str | None:
        """What groups have that stays with the engines, if anything."""
        if self.wants_rollout_routes:
            return "routes of experts"
        if self.score_centering_topk:
            return "the likeliest ids of their samplers"
        return "ids kept by truncated sampling" if self.replays_sampling_mask else None

    @property
    def keeps_group_journal(self) -> bool:
        """Whether finished groups are written to the run directory."""
        if self.group_journal is not None:
            return self.group_journal
        can_resume = self.save_interval is not None or self.saves_at_end
        return self.async_rollouts and can_resume and self.bulk_of_groups is None

    @property
    def longest_response_seconds(self) -> float:
        """How long a response may take that is as long as allowed and as slow as allowed."""
        longest = max(self.max_response_length, self.eval_max_response_length or 0)
        return longest / self.least_response_speed

    @property
    def request_patience(self) -> float:
        """Seconds a server may take for one response."""
        return self.rollout_request_timeout or max(_PATIENCE, self.longest_response_seconds)

    @property
    def engine_patience(self) -> float:
        """Seconds without progress after which an engine that has requests counts as hung."""
        if self.rollout_timeout is not None:
            return self.rollout_timeout
        # While an environment works, its responses get no tokens.
        patience = _PATIENCE + (self.environment_timeout if self.task_path else 0.0)
        reports = self.engine_traits.reports_tokens
        return patience if reports else patience + self.longest_response_seconds

    @property
    def server_silence(self) -> float:
        """Seconds that a server with requests, and with metrics, may generate nothing."""
        return min(self.rollout_timeout or _PATIENCE, self.request_patience)

    @property
    def transfer_patience(self) -> float:
        """Seconds that sending weights to the engines may take."""
        if self.weight_timeout is not None:
            return self.weight_timeout
        patience = min(self.step_timeout, 3 * self.engine_patience)
        if not self.async_rollouts or self.interrupts_responses:
            return patience
        # Weights wait for the trajectories under way.
        if self.task_path is None:
            return patience + self.longest_response_seconds
        turn = self.longest_response_seconds + self.environment_timeout
        return patience + self.max_turns * turn

    @property
    def ranks_per_node(self) -> int:
        """Trainer ranks on each node."""
        if self.num_gpus_per_node is not None:
            return self.num_gpus_per_node
        return -(-self.smallest_world_size // self.num_nodes)

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.num_nodes * self.ranks_per_node

    def _check_world(self) -> None:
        smallest = self.smallest_world_size
        expect(
            self.world_size % smallest == 0,
            f"--num-nodes {self.num_nodes} x --num-gpus-per-node {self.ranks_per_node} gives "
            f"{self.world_size} ranks; the layout (tensor {self.tensor_model_parallel_size}, "
            f"pipeline {self.pipeline_model_parallel_size}, context {self.context_parallel_size}, "
            f"expert {self.expert_model_parallel_size}) needs a multiple of {smallest}",
        )
        expect(
            not (self.colocate and self.async_rollouts),
            "--colocate with --async-rollouts: engines that share the trainer's devices cannot "
            "generate while it trains; drop one of the two",
        )

    def _check_estimator(self) -> None:
        name = self.advantage_estimator
        expect(
            self.n_samples_per_prompt > 1 or not estimator_traits(name).group,
            f"--n-samples-per-prompt is 1 with --advantage-estimator {name}: a group of one has no "
            "baseline and every advantage is 0; sample at least 2, or use reinforce_plus_plus",
        )
        if not estimator_traits(name).rewards:
            self._check_without_rewards()
        if estimator_traits(name).parts:
            self._check_several_rewards()
        expect(
            self.lambd == 1 or name not in ESTIMATOR_TRAITS or estimator_traits(name).values,
            f"--lambd is {self.lambd}: only GAE has a lambda, so --advantage-estimator {name} "
            "would ignore it; drop it, or use --advantage-estimator gae",
        )

    def _check_entropy_target(self) -> None:
        if self.entropy_target is None:
            return
        option = f"--entropy-target {self.entropy_target}"
        expect(
            self.entropy_coef <= self.entropy_coef_max,
            f"{option} starts at --entropy-coef {self.entropy_coef}, above --entropy-coef-max "
            f"{self.entropy_coef_max}; raise the latter or lower the former",
        )
        expect(
            not (self.loss_denominator == "kept" and self.per_token),
            f"{option} with --loss-denominator kept and a global token denominator: the entropy "
            "bonus would need a second one; use --no-calculate-per-token-loss or the original one",
        )

    def _check_several_rewards(self) -> None:
        name, given = self.advantage_estimator, len(self.reward_specs)
        expect(
            given > 1,
            f"--advantage-estimator {name} with {given} --reward: it normalizes each of several "
            "rewards by itself; name at least two, or use grpo",
        )
        expect(
            self.overlong_buffer_length is None,
            f"--overlong-buffer-length is {self.overlong_buffer_length} with --advantage-estimator "
            f"{name}: the penalty is taken off the sum of the rewards, which {name} does not look "
            "at; drop it, or add --reward length_penalty",
        )

    def _check_without_rewards(self) -> None:
        expect(
            self.distills,
            f"--advantage-estimator {self.advantage_estimator} without a teacher: nothing would be "
            "learned; add --teacher-tau or --distill-topk, or choose an estimator of rewards",
        )
        expect(
            not self.dynamic_sampling,
            f"--dynamic-sampling with --advantage-estimator {self.advantage_estimator}: groups "
            "would be dropped by rewards that are not trained on; drop one of the two",
        )
        expect(
            not self.eval_data or bool(self.reward or self.reward_function_path),
            f"--eval-data with --advantage-estimator {self.advantage_estimator} and no --reward: "
            "nothing would score the evaluation; name a reward",
        )

    def _check_rollouts(self) -> None:
        expect(
            self.prompt_data is None or self.hf_checkpoint is not None,
            f"--prompt-data {self.prompt_data} needs a model with a tokenizer; add --hf-checkpoint",
        )
        expect(
            self.reward_function_path is None or self.prompt_data is not None,
            "--reward-function-path scores --prompt-data; add it, or put the reward into the task",
        )
        if self.truncates_sampling and not self.replays_sampling_mask:
            self._accept_bias_of_truncation()
        self._check_centered_sampling()
        expect(
            not (self.group_journal and self.bulk_of_groups),
            f"--group-journal: groups have {self.bulk_of_groups}, which stay with the engines and "
            "end with them; drop it, a resumed run generates such groups again",
        )

    @property
    def replays_sampling_mask(self) -> bool:
        """Whether log-probs are computed over the ids that the engine kept."""
        choice = self.use_rollout_sampling_mask
        return self.truncates_sampling and (
            choice == "on" or (choice == "auto" and self.engine_reports_kept_ids)
        )

    @property
    def engine_reports_kept_ids(self) -> bool:
        """Whether what samples the tokens reports the ids that top-p and top-k kept."""
        if self.server_dialect is not None:
            return self.server_dialect == "sglang"  # vLLM's completions API does not
        return self.engine_traits.reports_kept_ids

    def _accept_bias_of_truncation(self) -> None:
        """Refuse ratios between the full and a truncated distribution, unless the user insists."""
        message = (
            "--rollout-top-p or --rollout-top-k: the engine samples from a truncated distribution "
            "and the trainer's log-probs are of the full one"
        )
        compares = self.loss_traits.compares_with is not None or self.use_tis
        if (compares or self.use_rollout_kl_loss) and not self.allow_biased_correction:
            raise ConfigError(
                f"{message}, so ratios and their gradients are biased; use "
                "--use-rollout-sampling-mask with an engine that reports the kept ids "
                "(transformers), sample with 1 and none, or insist with --allow-biased-correction"
            )
        warnings.warn(f"{message}, so gradients are biased; prefer 1 and none", stacklevel=3)

    def _check_centered_sampling(self) -> None:
        """Score centering needs both distributions over the same ids, and the old policy's."""
        if not self.score_centering_topk:
            return
        option = f"--score-centering-topk {self.score_centering_topk}"
        expect(
            self.replays_sampling_mask or not self.truncates_sampling,
            f"{option} with --rollout-top-p or --rollout-top-k whose kept ids are not replayed: "
            "the engine's log-probs are of another set of ids than the trainer's; use "
            "--use-rollout-sampling-mask with an engine that reports them, or sample with 1 and "
            "none",
        )
        expect(
            not (self.truncates_sampling and self.server_dialect == "sglang"),
            f"{option} with --rollout-top-p or --rollout-top-k and SGLang, which reports the "
            "log-probs of its likeliest ids before truncation; use --rollout-engine transformers "
            "or vllm, or sample with 1 and none",
        )
        old = self.centers_first_update_only
        expect(
            not old or self.updates_per_rollout == 1,
            f"{option} with {self.updates_per_rollout} updates per rollout and {', '.join(old)}: "
            "after the first update the old policy is no longer the current one, and its log-probs "
            "of ids that were not sampled are not kept; use --policy-loss icepop or another that "
            "compares with the rollout policy, off_policy_is_function on reinforce, or "
            "--train-log-probs rollout",
        )

    @property
    def responses_per_rollout(self) -> int:
        """Responses to all prompts of a rollout."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on a rollout: mini-batches times epochs."""
        size = self.global_batch_size or self.responses_per_rollout
        return self.responses_per_rollout // size * self.num_updates_per_rollout

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole job."""
        return self.num_rollouts * self.updates_per_rollout

    def _check_mini_batches(self) -> None:
        size, everything = self.global_batch_size, self.responses_per_rollout
        if size is None or everything % size == 0:
            return
        fits = [n for n in range(1, everything + 1) if everything % n == 0]
        near = [max(n for n in fits if n < size), *[n for n in fits if n > size][:1]]
        raise ConfigError(
            f"--global-batch-size is {size} and a rollout has {everything} responses "
            f"(--rollout-batch-size {self.rollout_batch_size} x --n-samples-per-prompt "
            f"{self.n_samples_per_prompt}), which it has to divide; the nearest that fit are "
            f"{' and '.join(map(str, near))}"
        )

    def _check_approximation(self) -> None:
        approximate = self.train_log_probs == "approximate"
        expect(
            not approximate or self.updates_per_rollout > 1,
            "--train-log-probs approximate with one update per rollout: the training pass itself "
            "gives the trainer's log-probs then, so no pass is saved; drop it, or set "
            "--global-batch-size or --num-updates-per-rollout",
        )
        expect(
            not (approximate and self.use_routing_replay),
            "--train-log-probs approximate with --use-routing-replay: the routes come from the "
            "log-prob pass that it saves; drop one of the two",
        )

    def _check_stale_samples(self) -> None:
        """Refuse stale samples in a loss that treats them as the current policy's."""
        if self.staleness_limit == 0 or self.corrects_mismatch:
            return
        loss = self.policy_loss
        message = (
            f"--async-rollouts with --policy-loss {loss}: the loss never compares the current "
            "policy with the older one that sampled the tokens, so its gradient is biased"
        )
        if not self.allow_biased_correction:
            declare = f", or declare with @loss_traits that {loss} compares with it"
            raise ConfigError(
                f"{message}; add --use-tis, or choose --policy-loss {' or '.join(ROLLOUT_LOSSES)}, "
                f"or --use-rollout-logprobs with {' or '.join(RATIO_LOSSES)}"
                f"{'' if loss in POLICY_LOSS_TRAITS else declare}; or insist with "
                "--allow-biased-correction"
            )
        warnings.warn(message, stacklevel=2)

    @property
    def engine_traits(self) -> EngineTraits:
        """Where the engine comes from and which flags it reads."""
        return engine_traits(self.rollout_engine)

    @property
    def interrupts_responses(self) -> bool:
        """Whether new weights pause running responses instead of waiting for them.

        By default where waiting is long and pausing loses nothing: a response over three versions
        has tokens that are two versions old, and long ones would be dropped if they may not be.
        """
        if self.partial_rollouts is not None:
            return self.partial_rollouts
        traits = self.engine_traits
        keeps_routes = traits.keeps_interrupted_routes or not self.wants_rollout_routes
        can_pause = bool(traits.partial_rollout_modes) and keeps_routes and not traits.asks_servers
        is_long = self.max_response_length >= LONG_RESPONSE
        return can_pause and is_long and self.staleness_limit >= 2

    @property
    def server_dialect(self) -> str | None:
        """The software of the servers that generate, the job's own or others; None without any."""
        traits = self.engine_traits
        return self.rollout_server if traits.asks_servers else traits.starts_servers

    @property
    def wants_route_weights(self) -> bool:
        """Whether the engine is asked for the weights of its routes."""
        dumped = self.dump_routes and self.engine_traits.reports_route_weights
        return self.replays_route_weights or dumped

    @property
    def sampling_traits(self) -> EngineTraits:
        """Traits of what samples the tokens: the engine, or the servers behind it."""
        behind_servers = self.engine_traits.asks_servers
        return engine_traits(self.rollout_server) if behind_servers else self.engine_traits

    @property
    def weight_transport(self) -> WeightTransport:
        """How the engines get their weights."""
        if self.weight_sync != "auto":
            return self.weight_sync
        if self.rollout_weights_dir is not None and "directory" in self.weight_transports:
            return "directory"
        # Two processes on one GPU cannot be members of one NCCL group.
        other = "broadcast" if self.colocate else "ipc"
        fitting = [one for one in self.weight_transports if one != other]
        return (*fitting, *self.weight_transports)[0]

    @property
    def transport_traits(self) -> TransportTraits:
        """Traits of the job's weight transport."""
        return WEIGHT_TRANSPORTS[self.weight_transport]

    @property
    def delta_copies(self) -> tuple[int, int]:
        """Whole models in host memory for --weight-sync delta: of all ranks, and of an engine."""
        if self.weight_transport != "delta":
            return 0, 0
        return 1, self.rollout_num_gpus_per_engine * self.engine_traits.keeps_delta_base

    @property
    def weight_transports(self) -> tuple[WeightTransport, ...]:
        """Transports of the engine, or of the servers behind it, the best one first."""
        if self.engine_traits.asks_servers and self.rollout_server == "sglang":
            return ("broadcast", "directory")
        return self.engine_traits.weight_transports

    def _check_lora(self) -> None:
        if self.syncs_adapters:
            expect(
                self.engine_traits.takes_adapters and self.weight_transport == "broadcast",
                f"--lora-sync adapter with --rollout-engine {self.rollout_engine} and "
                f"--weight-sync {self.weight_transport}: adapters are sent to the engines "
                "transformers and vllm by broadcast only; use --lora-sync merged",
            )
            expect(
                not self.colocate,
                "--lora-sync adapter with --colocate: an engine that sleeps loses the base, which "
                "would have to be sent again with every version; use --lora-sync merged",
            )
        expect(
            not (self.reference_offload and self.reference_is_base)
            or self.teacher_hf_checkpoint is not None,
            "--reference-offload with --lora-rank: the reference is the policy without its "
            "adapters and has no weights of its own; drop it, or give --ref-hf-checkpoint",
        )

    def _check_other_policies(self) -> None:
        expect(
            self.ref_hf_checkpoint is None or self.use_kl_loss,
            f"--ref-hf-checkpoint {self.ref_hf_checkpoint} would never be read; add --use-kl-loss",
        )
        asking = [f"--teacher-tau is {self.teacher_tau}"] if self.teacher_tau else []
        asking += [f"--distill-topk is {self.distill_topk}"] if self.distill_topk else []
        expect(
            not asking or bool(self.teacher_specs),
            f"{', '.join(asking)} without a teacher; add --teacher-hf-checkpoint, --teacher-url or "
            "--teachers",
        )
        for spec in self.teacher_specs[:1]:
            expect(
                bool(asking), f"{spec.option} would do nothing; set --teacher-tau or --distill-topk"
            )
        expect(
            self.teacher_key is None or self.prompt_data is not None,
            f"--teacher-key {self.teacher_key} is a column of --prompt-data, which is not given; "
            "add it, or use one teacher",
        )
        if self.asks_teacher_servers:
            self._check_teacher_servers()

    def _check_teacher_servers(self) -> None:
        """Servers report log-probs at temperature 1 and over the whole vocabulary only."""
        expect(
            self.rollout_temperature == 1,
            f"--rollout-temperature is {self.rollout_temperature} with a teacher behind HTTP: "
            "servers report prompt log-probs at temperature 1, and those of the policy are at the "
            "rollouts' temperature; use 1, or a teacher in the job (--teacher-hf-checkpoint)",
        )
        expect(
            not self.replays_sampling_mask,
            "--rollout-top-p or --rollout-top-k with a teacher behind HTTP: servers report prompt "
            "log-probs of the whole vocabulary, and those of the policy are over the kept ids; "
            "sample with 1 and none, or use a teacher in the job (--teacher-hf-checkpoint)",
        )
