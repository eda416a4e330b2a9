"""Flags of a training job: model, optimizer, parallel sizes, batching, rollouts, launch and output.

`JobConfig` is the loss configuration plus these groups. Parallel sizes keep Megatron's own names.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from plugin.config.data_flags import DataFlags, RewardFlags
from plugin.config.engine_traits import ENGINES, EngineTraits, engine_traits
from plugin.config.estimator_traits import ESTIMATOR_TRAITS, estimator_traits
from plugin.config.eval_flags import EvalFlags
from plugin.config.flags import FlagGroup, Needs, expect, flag, needs_flag, read_yaml
from plugin.config.loss_flags import LossConfig
from plugin.config.policy_loss_traits import POLICY_LOSS_TRAITS, RATIO_LOSSES, ROLLOUT_LOSSES
from plugin.config.sampling_flags import SamplingFlags
from plugin.errors import ConfigError

DtypeName = Literal["float32", "bfloat16"]

#: What the built-in task uses where the user says nothing; a real model has other needs.
EMBEDDED_DEFAULTS: dict[str, Any] = {
    "lr": 3e-3,
    "rollout_batch_size": 64,
    "n_samples_per_prompt": 8,
    "num_rollouts": 100,
    "max_response_length": 8,
    "micro_batch_size": 256,
    "calculate_per_token_loss": True,
}


@dataclass(frozen=True)
class ModelFlags(FlagGroup):
    title: ClassVar[str] = "model"

    hf_checkpoint: str | None = flag(
        None, "Hugging Face model directory; none = a tiny model built on the spot"
    )
    embedded_model: Literal["qwen3", "qwen3_moe", "llama"] = flag(
        "qwen3", "family of the tiny model that is built without --hf-checkpoint"
    )
    ref_hf_checkpoint: str | None = flag(
        None, "reference policy of --use-kl-loss; none = the weights the run starts from"
    )
    teacher_hf_checkpoint: str | None = flag(None, "teacher policy of --teacher-tau")
    transformer_impl: Literal["auto", "transformer_engine", "local"] = flag(
        "auto", "Megatron's layers; auto = Transformer Engine where it can run"
    )
    train_dtype: DtypeName = flag("float32", "dtype of the trainer's weights and activations")
    fused_lm_head: Literal["auto", "on", "off"] = flag(
        "auto", "compute log-probs inside the LM head, without logits; auto = where it pays"
    )
    inplace_logits_grad: bool = flag(
        True, "write the gradient of the logits over the logits (saves their size in memory)"
    )
    separable_fast_path: Literal["auto", "on", "off"] = flag(
        "auto",
        "evaluate a token-separable loss inside the LM head, block by block; auto = where it can",
    )
    use_routing_replay: bool = flag(
        False, "MoE: the training pass repeats the routes of the trainer's own log-prob pass"
    )
    use_rollout_routing_replay: Literal[False, "ids", "ids+weights"] = flag(
        False,
        "MoE: the trainer repeats the routes that the rollout engine reports; ids+weights also "
        "mixes the experts with the engine's weights, which stops the router's gradient",
    )
    router_gradient: Literal["stop", "keep"] = flag(
        "stop",
        "MoE, where the engine's weights are replayed: stop = the router learns nothing; keep = "
        "the value is the engine's, the gradient that of the trainer's own weights",
        needs=Needs(
            "--use-rollout-routing-replay ids+weights",
            lambda config: config.replays_route_weights,
        ),
    )
    detect_routing: bool = flag(
        False,
        "MoE: have the engine report its routes and compare them with the trainer's own choices",
        needs=needs_flag("detect_mismatch"),
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = flag(
        "alltoall", "how tokens reach their experts"
    )
    moe_router_fusion: bool = flag(
        False,
        "fused MoE router of Transformer Engine on CUDA; refuses every routing replay and "
        "--detect-routing",
    )

    @property
    def replays_routes(self) -> bool:
        return self.use_routing_replay or bool(self.use_rollout_routing_replay)

    @property
    def replays_route_weights(self) -> bool:
        return self.use_rollout_routing_replay == "ids+weights"

    @property
    def wants_rollout_routes(self) -> bool:
        return bool(self.use_rollout_routing_replay) or self.detect_routing

    @property
    def looks_at_routes(self) -> bool:
        return self.replays_routes or self.detect_routing

    def check(self) -> None:
        expect(
            not (self.use_routing_replay and self.use_rollout_routing_replay),
            "--use-routing-replay with --use-rollout-routing-replay: routes can come from one "
            "source only; drop one of the two",
        )
        expect(
            not (self.moe_router_fusion and self.replays_routes),
            "--moe-router-fusion with routing replay: the fused router never looks at the "
            "replayed routes; drop --moe-router-fusion",
        )
        expect(
            not (self.moe_router_fusion and self.detect_routing),
            "--moe-router-fusion with --detect-routing: the fused router does not tell what it "
            "chose; drop one of the two",
        )


@dataclass(frozen=True)
class OptimizerFlags(FlagGroup):
    title: ClassVar[str] = "optimizer"

    lr: float = flag(1e-6, "learning rate", above=0)
    min_lr: float = flag(
        0.0,
        "learning rate at the end of the decay",
        at_least=0,
        needs=Needs(
            "--lr-decay-style linear or cosine", lambda config: config.lr_decay_style != "constant"
        ),
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "from lr to min-lr over the job"
    )
    lr_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least=0)
    weight_decay: float = flag(0.0, "decoupled weight decay", at_least=0)
    adam_beta1: float = flag(0.9, "Adam beta1", at_least=0)
    adam_beta2: float = flag(0.98, "Adam beta2", at_least=0)
    adam_eps: float = flag(1e-8, "Adam epsilon", above=0)
    clip_grad: float = flag(1.0, "largest gradient norm; 0 = no clipping", at_least=0)
    use_distributed_optimizer: bool = flag(
        False, "shard the optimizer state over data parallel ranks"
    )
    skip_on_grad_norm: float | None = flag(
        None, "skip a step whose gradient norm is above this", above=0
    )
    max_skipped_steps: int = flag(
        20,
        "skipped steps in a row (gradient not finite, or above --skip-on-grad-norm) that end the "
        "job",
        at_least=1,
    )

    def check(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            expect(value < 1, f"--{name.replace('_', '-')} is {value}; it must lie in [0, 1)")
        expect(
            self.min_lr <= self.lr,
            f"--min-lr is {self.min_lr}, above --lr {self.lr}; lower it",
        )


@dataclass(frozen=True)
class ParallelFlags(FlagGroup):
    title: ClassVar[str] = "parallel layout (Megatron's names)"

    tensor_model_parallel_size: int = flag(1, "tensor parallel ranks", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline stages", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "model chunks per pipeline stage (interleaved schedule)", at_least=2
    )
    context_parallel_size: int = flag(1, "context parallel ranks", at_least=1)
    expert_model_parallel_size: int = flag(1, "expert parallel ranks", at_least=1)
    expert_tensor_parallel_size: int = flag(1, "tensor parallel ranks of an expert", at_least=1)
    sequence_parallel: bool = flag(False, "split norms and dropouts over tensor parallel ranks")

    def check(self) -> None:
        expect(
            self.virtual_pipeline_model_parallel_size is None
            or self.pipeline_model_parallel_size > 1,
            "--virtual-pipeline-model-parallel-size is "
            f"{self.virtual_pipeline_model_parallel_size} with one pipeline stage; raise "
            "--pipeline-model-parallel-size or drop it",
        )
        expect(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "--sequence-parallel splits the sequence over tensor parallel ranks, and there is "
            "only one; drop it or raise --tensor-model-parallel-size",
        )

    @property
    def smallest_world_size(self) -> int:
        """The fewest ranks that hold one copy of the model in this layout."""
        dense = self.tensor_model_parallel_size * self.context_parallel_size
        expert = self.expert_tensor_parallel_size * self.expert_model_parallel_size
        return math.lcm(dense, expert) * self.pipeline_model_parallel_size


@dataclass(frozen=True)
class BatchingFlags(FlagGroup):
    title: ClassVar[str] = "batching and memory"

    micro_batch_size: int = flag(
        1, "samples per microbatch, unless --max-tokens-per-gpu is set", at_least=1
    )
    max_tokens_per_gpu: int | None = flag(
        None, "token budget of a microbatch: packs samples of different length", at_least=2
    )
    global_batch_size: int | None = flag(
        None,
        "responses per optimizer step: a mini-batch of the rollout; none = the whole rollout",
        at_least=1,
    )
    num_updates_per_rollout: int = flag(
        1, "epochs over the mini-batches of a rollout, each a new shuffle by seed", at_least=1
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(None, "activation recompute")
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "which layers full recompute covers"
    )
    recompute_num_layers: int | None = flag(None, "layers per recompute unit", at_least=1)

    def check(self) -> None:
        full = self.recompute_granularity == "full"
        given = self.recompute_method is not None and self.recompute_num_layers is not None
        expect(
            not full or given,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
            "for example --recompute-method uniform --recompute-num-layers 1",
        )
        expect(
            full or (self.recompute_method is None and self.recompute_num_layers is None),
            "--recompute-method and --recompute-num-layers would do nothing; add "
            "--recompute-granularity full",
        )


@dataclass(frozen=True)
class RolloutFlags(FlagGroup):
    title: ClassVar[str] = "rollouts"

    rollout_engine: str = flag(
        "transformers", "what generates the tokens; http = servers at --rollout-url", names=ENGINES
    )
    num_rollout_engines: int = flag(1, "engine actors; prompts are shared out", at_least=1)
    rollout_batch_size: int = flag(32, "prompts per rollout", at_least=1)
    n_samples_per_prompt: int = flag(8, "responses per prompt (one group)", at_least=1)
    num_rollouts: int = flag(100, "rollout batches to train on", at_least=1)
    max_prompt_length: int = flag(1024, "longer prompts are an error, in tokens", at_least=1)
    max_response_length: int = flag(1024, "tokens a response may have", at_least=1)
    rollout_top_p: float = flag(1.0, "nucleus sampling; 1 = off", above=0)
    rollout_top_k: int | None = flag(None, "sample among the k likeliest; none = off", at_least=1)
    use_rollout_sampling_mask: Literal["auto", "on", "off"] = flag(
        "auto",
        "have the engine report the ids that top-p and top-k kept, and compute every log-prob over "
        "them; auto = on where the engine truncates and can report them",
        needs=Needs(
            "--rollout-top-p below 1 or --rollout-top-k", lambda config: config.truncates_sampling
        ),
    )
    return_rollout_log_probs: bool = flag(
        True, "have the engine report the log-prob of every sampled token"
    )
    rollout_dtype: DtypeName = flag("float32", "dtype of the engine's weights")
    rollout_quantization: Literal["none", "int8"] = flag(
        "none", "int8 = the engine's linear layers keep 8-bit weights, one scale per output row"
    )
    rollout_max_batch: int = flag(256, "responses an engine generates at once", at_least=1)
    async_rollouts: bool = flag(False, "generate the next rollouts while the trainer trains")
    max_weight_staleness: int | None = flag(
        None, "async: drop samples more weight versions old than this; none = 1", at_least=0
    )
    partial_rollouts: bool = flag(
        False,
        "new weights interrupt running responses, which go on with them; each token keeps the "
        "version that sampled it",
        needs=needs_flag("async_rollouts"),
    )
    partial_rollout_mode: Literal["recompute", "continue"] = flag(
        "recompute",
        "interrupted responses are read again with the new weights, or go on with the keys and "
        "values of the old ones",
        needs=needs_flag("partial_rollouts"),
    )
    max_token_staleness: int | None = flag(
        None,
        "mask tokens more weight versions old than this, and drop groups only if a response has "
        "no other; none = drop groups with a token beyond --max-weight-staleness",
        at_least=0,
        needs=needs_flag("partial_rollouts"),
    )

    max_error_reschedule_attempts: int | None = flag(
        None,
        "times a group with a failed or empty response is sampled again before it is dropped; "
        "none = for ever, or 3 times where the reward failed",
        at_least=0,
    )
    rollout_timeout: float | None = flag(
        None,
        "seconds an engine may take for the requests it is sent at once before it is replaced; "
        "none = --step-timeout",
        above=0,
    )

    def check(self) -> None:
        expect(
            self.rollout_top_p <= 1,
            f"--rollout-top-p is {self.rollout_top_p}; it must lie in (0, 1]",
        )
        expect(
            self.max_weight_staleness is None or self.async_rollouts,
            f"--max-weight-staleness is {self.max_weight_staleness} but rollouts are synchronous "
            "and never stale; add --async-rollouts",
        )
        expect(
            (self.max_token_staleness or 0) <= self.staleness_limit,
            f"--max-token-staleness is {self.max_token_staleness} and --max-weight-staleness "
            f"{self.staleness_limit}: no token gets that old; lower the first or raise the second",
        )

    @property
    def truncates_sampling(self) -> bool:
        """Whether the engine samples from a part of the vocabulary."""
        return self.rollout_top_p < 1 or self.rollout_top_k is not None

    @property
    def staleness_limit(self) -> int:
        """The weight age that is still trained on."""
        if not self.async_rollouts:
            return 0
        return 1 if self.max_weight_staleness is None else self.max_weight_staleness


#: A task of the user's own may read any flag, and only such a task has several turns.
_OWN_TASK = Needs("--task-path with a multi-turn task", lambda config: config.task_path is not None)


@dataclass(frozen=True)
class ConversationFlags(FlagGroup):
    title: ClassVar[str] = "several turns (multi-turn tasks)"

    max_turns: int = flag(
        16, "replies of the policy in one trajectory", at_least=1, needs=_OWN_TASK
    )
    max_context_length: int | None = flag(
        None,
        "a turn starts only if its context and --max-response-length fit into so many tokens; "
        "none = no limit",
        at_least=2,
        needs=_OWN_TASK,
    )
    preserve_all_thinking: bool = flag(
        False,
        "keep the thinking of older turns that the chat template would strip",
        needs=_OWN_TASK,
    )
    preserve_thinking_between_tool_calls: bool = flag(
        False, "keep it until a new user message arrives", needs=_OWN_TASK
    )
    chat_template_kwargs: str | None = flag(
        None,
        'JSON object passed to the chat template, e.g. {"enable_thinking": false}; for multi-turn '
        "tasks and --apply-chat-template",
    )
    environment_timeout: float = flag(
        60.0,
        "seconds that one step of an environment may take; then its trajectory fails",
        above=0,
        needs=_OWN_TASK,
    )
    environment_threads: int = flag(
        16,
        "environments of an engine that take a step at the same time",
        at_least=1,
        needs=_OWN_TASK,
    )

    def check(self) -> None:
        self.template_arguments()

    def template_arguments(self) -> dict[str, Any]:
        """What the chat template is called with besides messages and tools."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            arguments = json.loads(self.chat_template_kwargs)
        except ValueError:
            arguments = None
        expect(
            isinstance(arguments, dict),
            f"--chat-template-kwargs is {self.chat_template_kwargs!r}; it must be a JSON object "
            "such as "
            '{"enable_thinking": false}',
        )
        return dict(arguments)


#: An engine of the user's own may read any flag.
_SERVERS = Needs(
    "--rollout-engine http",
    lambda config: config.engine_traits.asks_servers or config.rollout_engine not in ENGINES,
)


@dataclass(frozen=True)
class ServerFlags(FlagGroup):
    title: ClassVar[str] = "rollout servers (--rollout-engine http)"

    rollout_url: str | None = flag(
        None, "URLs of inference servers, separated by commas; requests are balanced over them"
    )
    rollout_server: Literal["vllm", "sglang"] = flag("vllm", "what the servers are", needs=_SERVERS)
    rollout_weights_dir: str | None = flag(
        None, "directory that job and servers share, through which the servers get new weights"
    )
    rollout_request_timeout: float = flag(
        600.0,
        "seconds a server may take for one response, to its last byte",
        above=0,
        needs=_SERVERS,
    )
    rollout_request_retries: int = flag(
        3,
        "times a response is asked for again before it counts as failed",
        at_least=0,
        needs=_SERVERS,
    )
    max_answer_bytes: int = flag(
        16 << 20,
        "size of one answer, decompressed; a larger one is a bad answer. At most 16 are read at a "
        "time",
        at_least=1 << 10,
    )
    rollout_api_key_env: str | None = flag(
        None, "environment variable with the servers' API key, which is sent as a bearer token"
    )

    def check(self) -> None:
        expect(
            self.rollout_api_key_env is None
            or re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.rollout_api_key_env) is not None,
            "--rollout-api-key-env must be the name of an environment variable that holds the key, "
            "not the key; export it and give its name",
        )
        # The value is not shown: it would carry the secret into the logs.
        expect(
            not {"@", "?"} & set(self.rollout_url or ""),
            "--rollout-url holds a password or key (user:password@ or ?key=...), which run files "
            "and the process list would show; put the servers' API key into an environment "
            "variable and give its name with --rollout-api-key-env",
        )
        for url in self.rollout_urls:
            parts = urlsplit(url)
            expect(
                parts.scheme in ("http", "https") and bool(parts.hostname),
                f"--rollout-url holds {url!r}; expected http://host:port",
            )
            if parts.scheme == "http" and not _is_loopback(str(parts.hostname)):
                warnings.warn(
                    f"--rollout-url {url}: prompts, responses, control of the weights and the API "
                    "key, if there is one, travel unencrypted; keep the servers on a private "
                    "network, or use https",
                    stacklevel=2,
                )
        doubled = [url for url in self.rollout_urls if self.rollout_urls.count(url) > 1]
        expect(not doubled, f"--rollout-url names {doubled[:1]} twice; name every server once")

    @property
    def rollout_urls(self) -> tuple[str, ...]:
        """The servers' addresses, without a slash at the end."""
        given = (self.rollout_url or "").split(",")
        return tuple(url.strip().rstrip("/") for url in given if url.strip())


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class LaunchFlags(FlagGroup):
    title: ClassVar[str] = "launch"

    num_nodes: int = flag(1, "nodes that hold trainer ranks", at_least=1)
    num_gpus_per_node: int | None = flag(
        None,
        "trainer ranks per node, one per GPU, or per CPU slot without GPUs; none = as few as fit "
        "the layout",
        at_least=1,
    )
    address: str | None = flag(
        None, "Ray cluster to join: host:port, or auto; none = a private one on this machine"
    )
    colocate: bool = flag(
        False, "engines share the trainer's GPUs (or CPU slots) instead of having their own"
    )
    cpus_per_rank: int = flag(1, "CPU slots that a rank or engine reserves", at_least=1)
    threads_per_rank: int | Literal["auto"] = flag(
        "auto",
        "torch threads of a rank or engine on CPU; auto = the node's cores over its ranks, or over "
        "the engines; asynchronous: over both; 1 for a model of hidden size below 256",
        at_least=1,
    )
    start_timeout: float = flag(300.0, "seconds the actors may take to start", above=0)
    step_timeout: float = flag(1800.0, "seconds a step of trainer or engine may take", above=0)
    max_restarts: int = flag(
        3,
        "times in a row that a lost engine, or the trainer, is restarted without progress",
        at_least=0,
    )
    network_interface: str | None = flag(
        None, "interface for trainer traffic between nodes; none = loopback, or Ray's with several"
    )
    seed: int = flag(1234, "seed of weights, prompts and sampling", at_least=0)


@dataclass(frozen=True)
class OutputFlags(FlagGroup):
    title: ClassVar[str] = "output"

    run_dir: str | None = flag(None, "run directory; none = runs/<time>-<name>")
    name: str = flag("train", "name of the run")
    save_interval: int | None = flag(
        None, "rollouts between checkpoints; a lost trainer rank restarts from the last", at_least=1
    )
    save_at_end: bool | None = flag(
        None,
        "write a checkpoint at the end and on Ctrl-C; none = with --hf-checkpoint or "
        "--save-interval",
    )
    keep_checkpoints: int = flag(2, "checkpoints to keep, the newest", at_least=1)
    resume: bool = flag(False, "go on from the newest checkpoint in --run-dir")
    resume_from: str | None = flag(
        None, "go on from this checkpoint in --run-dir instead, e.g. step_0000012"
    )
    overwrite: bool = flag(
        False, "delete what an earlier run wrote to --run-dir and --dump-log-probs, then start"
    )
    save_hf: bool = flag(
        False, "write the trained model as a Hugging Face directory, model/, at the end"
    )
    save_hf_interval: int | None = flag(
        None, "rollouts between Hugging Face models in models/step_<number>/; all stay", at_least=1
    )
    detect_mismatch: bool = flag(
        True, "look for shifted, constant, tempered, truncated or stale log-probs at every step"
    )
    custom_detector_path: str | None = flag(
        None,
        "import paths of your own mismatch detectors, comma-separated",
        needs=needs_flag("detect_mismatch"),
    )
    dump_log_probs: str | None = flag(
        None, "directory for the log-probs of every step, for `megatron-tis compare`"
    )
    dump_routes: bool = flag(
        False,
        "MoE: the dump also holds the engine's routes and, where it reports them, their weights, "
        "for `megatron-tis compare --routing`",
        needs=Needs(
            "--dump-log-probs, and --use-rollout-routing-replay or --detect-routing",
            lambda config: config.dump_log_probs is not None and config.wants_rollout_routes,
        ),
    )
    log_samples: int = flag(
        3,
        "samples per rollout that samples.jsonl and the report keep, with their texts: in turn the "
        "best, the worst, a random one; 0 = none",
        at_least=0,
    )
    use_wandb: bool = flag(False, "also log to Weights & Biases, if it is installed")
    wandb_project: str = flag("megatron-tis", "its project", needs=needs_flag("use_wandb"))

    def check(self) -> None:
        expect(
            not self.resumes or self.run_dir is not None,
            "--resume without --run-dir: name the run directory to go on with",
        )
        expect(
            self.resume_from is None or re.fullmatch(r"step_\d+", self.resume_from) is not None,
            f"--resume-from is {self.resume_from}; name a checkpoint in --run-dir, such as "
            "step_0000012",
        )
        expect(
            not (self.overwrite and self.resumes),
            "--overwrite with --resume: one deletes the run that the other goes on with; drop one "
            "of the two",
        )
        expect(
            not self.overwrite or self.run_dir is not None or self.dump_log_probs is not None,
            "--overwrite without --run-dir: a run without it gets a new directory; drop it, or "
            "name the directory",
        )

    @property
    def resumes(self) -> bool:
        """Whether the job goes on with the run in its directory."""
        return self.resume or self.resume_from is not None


@dataclass(frozen=True)
class TrainerConfig(LossConfig, ModelFlags, OptimizerFlags, ParallelFlags, BatchingFlags):
    """Everything a trainer reads."""


@dataclass(frozen=True)
class JobConfig(
    TrainerConfig,
    DataFlags,
    RewardFlags,
    RolloutFlags,
    SamplingFlags,
    EvalFlags,
    ServerFlags,
    ConversationFlags,
    LaunchFlags,
    OutputFlags,
):
    """Everything `megatron-tis train` reads."""

    @classmethod
    def from_sources(cls, flags: Mapping[str, Any], yaml_file: str | Path | None = None) -> Self:
        """As `FlagGroup.from_sources`, over the built-in job's defaults without a model."""
        settings = read_yaml(Path(yaml_file)) if yaml_file else {}
        given = {**settings, **flags}
        own_model = given.get("hf_checkpoint") or given.get("hf-checkpoint")
        below = {} if own_model else EMBEDDED_DEFAULTS
        named = {key.replace("-", "_") for key in given}
        if "loss_reduction" in named:
            named.add("calculate_per_token_loss")
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
        self._check_old_log_probs()
        self._check_stale_samples()
        self.check_sampling(self)
        self._check_engine()
        self.check_evaluation(self)
        self._check_other_policies()
        self._check_estimator()

    @property
    def rounds_rollout_weights(self) -> str | None:
        """The flag that gives the engine coarser weights than the trainer's, if any."""
        if self.rollout_quantization != "none":
            return f"--rollout-quantization {self.rollout_quantization}"
        coarser = self.rollout_dtype == "bfloat16" and self.train_dtype == "float32"
        return f"--rollout-dtype {self.rollout_dtype}" if coarser else None

    @property
    def saves_at_end(self) -> bool:
        """Whether the last weights are kept, of a whole and of an interrupted run."""
        if self.save_at_end is not None:
            return self.save_at_end
        return self.hf_checkpoint is not None or self.save_interval is not None

    @property
    def engine_patience(self) -> float:
        """Seconds an engine may take for what it is sent at once."""
        return self.rollout_timeout or self.step_timeout

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
            not estimator_traits(name).values,
            f"--advantage-estimator {name} needs a value model, and the job trains none; choose "
            "grpo, rloo or reinforce_plus_plus",
        )
        expect(
            self.n_samples_per_prompt > 1 or not estimator_traits(name).group,
            f"--n-samples-per-prompt is 1 with --advantage-estimator {name}: a group of one has no "
            "baseline and every advantage is 0; sample at least 2, or use reinforce_plus_plus",
        )
        expect(
            self.lambd == 1 or name not in ESTIMATOR_TRAITS,
            f"--lambd is {self.lambd}: only GAE has a lambda, and the job trains no value model "
            f"for it, so --advantage-estimator {name} would ignore it; drop it, or give an "
            "estimator of your own by import path",
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

    @property
    def replays_sampling_mask(self) -> bool:
        """Whether log-probs are computed over the ids that the engine kept."""
        choice = self.use_rollout_sampling_mask
        return self.truncates_sampling and (
            choice == "on" or (choice == "auto" and self._engine_reports_kept_ids)
        )

    @property
    def _engine_reports_kept_ids(self) -> bool:
        if self.engine_traits.asks_servers:
            return self.rollout_server == "sglang"  # vLLM's completions API does not
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

    def _check_old_log_probs(self) -> None:
        approximate = self.old_log_probs == "approximate"
        expect(
            not approximate or self.updates_per_rollout > 1,
            "--train-log-probs approximate with one update per rollout: the old log-probs are then "
            "the update's own and no pass is saved; drop it, or set --global-batch-size or "
            "--num-updates-per-rollout",
        )
        expect(
            not (approximate and self.use_routing_replay),
            "--train-log-probs approximate with --use-routing-replay: the routes come from the "
            "log-prob pass that it saves; drop one of the two",
        )

    def _check_stale_samples(self) -> None:
        """Refuse old samples in a loss that takes them for the current policy's."""
        if self.staleness_limit == 0 or self.corrects_mismatch:
            return
        loss = self.policy_loss
        message = (
            f"--async-rollouts with --policy-loss {loss}: the loss never compares the current "
            "policy with the older one that sampled the tokens, so its gradient is biased"
        )
        if not self.allow_biased_correction:
            declare = f", or @loss_traits of {loss} says that it compares with it"
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
    def wants_route_weights(self) -> bool:
        """Whether the engine is asked for the weights of its routes."""
        dumped = self.dump_routes and self.engine_traits.reports_route_weights
        return self.replays_route_weights or dumped

    @property
    def sampling_traits(self) -> EngineTraits:
        """Those of what samples the tokens in the end: the engine, or the servers behind it."""
        behind_servers = self.engine_traits.asks_servers
        return engine_traits(self.rollout_server) if behind_servers else self.engine_traits

    def _check_engine(self) -> None:
        """Check that a built-in engine can do what is asked, and reads every flag given."""
        engine, traits, http = (
            self.rollout_engine,
            self.engine_traits,
            self.engine_traits.asks_servers,
        )
        if engine not in ENGINES:
            return  # the user's own gets the whole configuration and may read any flag
        for given, name in (
            (self.rollout_urls, "--rollout-url"),
            (self.rollout_weights_dir, "--rollout-weights-dir"),
            (self.rollout_api_key_env, "--rollout-api-key-env"),
        ):
            expect(
                http or not given,
                f"{name} is given but --rollout-engine is {engine}, which asks no server; add "
                "--rollout-engine http or drop it",
            )
            expect(
                not http or bool(given) or name == "--rollout-api-key-env",
                f"--rollout-engine {engine} needs {name}; add it",
            )
        expect(
            http or self.max_answer_bytes == ServerFlags.max_answer_bytes,
            f"--max-answer-bytes is {self.max_answer_bytes} but --rollout-engine is {engine}, "
            "which asks no server; drop it",
        )
        expect(
            traits.quantizes or self.rollout_quantization == "none",
            f"--rollout-quantization {self.rollout_quantization} is done by the transformers "
            f"engine only; drop it, or use --rollout-engine transformers instead of {engine}",
        )
        expect(
            traits.reports_route_weights or not self.replays_route_weights,
            f"--use-rollout-routing-replay ids+weights with --rollout-engine {engine}, which "
            "reports the experts of a token and not their weights; use ids, or --rollout-engine "
            "transformers",
        )
        modes = traits.partial_rollout_modes
        expect(
            not self.partial_rollouts or bool(modes),
            f"--partial-rollouts: --rollout-engine {engine} cannot be interrupted; use "
            "transformers, or servers (--rollout-engine http)",
        )
        expect(
            not self.partial_rollouts or self.partial_rollout_mode in modes,
            f"--partial-rollout-mode {self.partial_rollout_mode}: servers do not say which tokens "
            f"which weights sampled while they go on; --rollout-engine {engine} can "
            f"{' or '.join(modes)}",
        )
        lowest = self.sampling_traits.lowest_temperature
        expect(
            self.rollout_temperature >= lowest,
            f"--rollout-temperature is {self.rollout_temperature}; vLLM raises what is below "
            f"{lowest} without saying so, and its log-probs would be of another distribution; "
            f"choose at least {lowest}",
        )
        expect(
            self.use_rollout_sampling_mask != "on" or self._engine_reports_kept_ids,
            f"--use-rollout-sampling-mask on: --rollout-engine {engine}"
            f"{' with vLLM servers' if http else ''} does not report the ids that top-p and top-k "
            "keep; use --rollout-engine transformers, or sample with --rollout-top-p 1 and without "
            "--rollout-top-k",
        )
        expect(
            engine != "vllm" or not self.replays_sampling_mask or self.rollout_top_k is not None,
            f"--rollout-top-p {self.rollout_top_p} without --rollout-top-k: vLLM reports the ids "
            "that it keeps only where a top-k bounds their number; add --rollout-top-k, for "
            "example 512",
        )
        if http:
            self._check_servers()

    def _check_servers(self) -> None:
        expect(
            self.rollout_dtype == "float32",
            f"--rollout-dtype {self.rollout_dtype} would be ignored: with --rollout-engine http "
            "the servers choose their dtype; set it where they are started",
        )
        expect(
            self.num_rollout_engines == 1,
            f"--num-rollout-engines is {self.num_rollout_engines} with --rollout-engine http: one "
            "client serves every URL; drop it",
        )
        expect(
            self.rollout_server != "sglang"
            or not self.return_rollout_log_probs
            or not self.truncates_sampling
            or self.replays_sampling_mask,
            "--rollout-top-p or --rollout-top-k with --rollout-server sglang: SGLang reports "
            "log-probs of the distribution before truncation, not of the one it samples from; "
            "drop them, or --use-rollout-sampling-mask",
        )

    def _check_other_policies(self) -> None:
        expect(
            self.ref_hf_checkpoint is None or self.use_kl_loss,
            f"--ref-hf-checkpoint {self.ref_hf_checkpoint} would never be read; add --use-kl-loss",
        )
        expect(
            self.teacher_tau == 0 or self.teacher_hf_checkpoint is not None,
            f"--teacher-tau is {self.teacher_tau} without a teacher; add --teacher-hf-checkpoint",
        )
        expect(
            self.teacher_hf_checkpoint is None or self.teacher_tau > 0,
            f"--teacher-hf-checkpoint {self.teacher_hf_checkpoint} would do nothing; set "
            "--teacher-tau",
        )
