"""Checks that the engine can do what the job asks of it, and that it ignores no given flag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugin.config.engines import ENGINES
from plugin.config.flags import expect
from plugin.config.servers import ServerFlags

if TYPE_CHECKING:
    from plugin.config.job_config import JobConfig

#: Why an engine cannot be spread over several GPUs, by whether it asks servers.
_ONE_DEVICE = {
    False: "runs on one GPU; use vllm or sglang, or drop the flag",
    True: "uses servers that are started elsewhere; set their tensor parallel size there",
}


def check_engine(config: JobConfig) -> None:
    """Raise a `ConfigError` for what the engine of `config` cannot do or would ignore."""
    _check_weight_transport(config)
    if config.rollout_engine not in ENGINES:
        return  # the user's own gets the whole configuration and may read any flag
    _check_server_flags(config)
    _check_abilities(config)
    _check_partial_rollouts(config)
    _check_sampled_distribution(config)
    if config.engine_traits.asks_servers:
        _check_asked_servers(config)


def _check_weight_transport(config: JobConfig) -> None:
    if config.weight_transport == "delta":
        _check_deltas(config)
    expect(
        config.weight_transport in config.weight_transports,
        f"--weight-sync {config.weight_transport}: --rollout-engine {config.rollout_engine} gets "
        f"weights by {' or '.join(config.weight_transports)}; use auto, or another engine",
    )
    expect(
        config.weight_transport != "broadcast" or not config.colocate,
        "--weight-sync broadcast with --colocate: NCCL cannot join two processes that share a "
        "device, and the trainer's weights are offloaded while engines generate; use auto",
    )
    expect(
        config.weight_transport != "ipc" or bool(config.colocate),
        "--weight-sync ipc shares memory between a trainer rank and an engine on the same device, "
        "and here they have different ones; add --colocate, or use auto",
    )


def _check_deltas(config: JobConfig) -> None:
    """Deltas need a receiver of ours, and weights that it can write single elements of."""
    expect(
        "delta" in config.weight_transports,
        f"--weight-sync delta with --rollout-engine {config.rollout_engine}: only the engines "
        "transformers and vllm in the job's processes apply deltas; servers load whole tensors, "
        "and to a directory only the tensors that changed are written anyway; use auto",
    )
    expect(
        not config.colocate,
        "--weight-sync delta with --colocate: the weights stay on the device, where whole tensors "
        "are a copy, and an engine that sleeps has none to apply a delta to; use auto",
    )
    expect(
        not config.syncs_adapters,
        "--weight-sync delta with --lora-sync adapter, which sends only the adapters, nearly all "
        "of whose elements change; use --weight-sync broadcast",
    )
    expect(
        config.rollout_quantization == "none",
        f"--weight-sync delta with --rollout-quantization {config.rollout_quantization}: the "
        "engine does not keep the values that a delta is applied to; use --weight-sync broadcast",
    )


def _check_server_flags(config: JobConfig) -> None:
    """Flags of servers need an engine that uses or starts some."""
    engine, traits = config.rollout_engine, config.engine_traits
    asks, starts = traits.asks_servers, traits.starts_servers is not None
    needed = ["--rollout-url"]
    needed += ["--rollout-weights-dir"] if config.weight_transport == "directory" else []
    for given, name in (
        (config.rollout_urls, "--rollout-url"),
        (config.rollout_weights_dir, "--rollout-weights-dir"),
        (config.rollout_api_key_env, "--rollout-api-key-env"),
    ):
        expect(
            asks or not given or (starts and name == "--rollout-weights-dir"),
            f"{name} is given but --rollout-engine is {engine}, which uses no server; add "
            "--rollout-engine http or drop it",
        )
        expect(
            not asks or bool(given) or name not in needed,
            f"--rollout-engine {engine} needs {name}; add it",
        )
    expect(
        asks
        or starts
        or config.asks_teacher_servers
        or config.max_answer_bytes == ServerFlags.max_answer_bytes,
        f"--max-answer-bytes is {config.max_answer_bytes} but --rollout-engine is {engine}, "
        "which uses no server; drop it",
    )


def _check_abilities(config: JobConfig) -> None:
    engine, traits = config.rollout_engine, config.engine_traits
    expect(
        traits.quantizes or config.rollout_quantization == "none",
        f"--rollout-quantization {config.rollout_quantization} is done by the transformers "
        f"engine only; drop it, or use --rollout-engine transformers instead of {engine}",
    )
    expect(
        traits.reports_route_weights or not config.replays_route_weights,
        f"--use-rollout-routing-replay ids+weights with --rollout-engine {engine}, which "
        "reports the experts of a token and not their weights; use ids, or --rollout-engine "
        "transformers",
    )
    expect(
        traits.tensor_parallel or config.rollout_num_gpus_per_engine == 1,
        f"--rollout-num-gpus-per-engine is {config.rollout_num_gpus_per_engine}: "
        f"--rollout-engine {engine} {_ONE_DEVICE[traits.asks_servers]}",
    )
    expect(
        traits.sleeps or not config.colocate,
        f"--colocate with --rollout-engine {engine}: the servers keep their memory while the "
        "trainer trains; use transformers or vllm, or drop --colocate",
    )


def _check_partial_rollouts(config: JobConfig) -> None:
    if not config.interrupts_responses:
        return
    engine, modes = config.rollout_engine, config.engine_traits.partial_rollout_modes
    expect(
        bool(modes),
        f"--partial-rollouts: --rollout-engine {engine} cannot be interrupted; use "
        "transformers, or servers (--rollout-engine http)",
    )
    expect(
        config.partial_rollout_mode in modes,
        f"--partial-rollout-mode {config.partial_rollout_mode}: vLLM and SGLang cannot continue "
        f"with a KV cache of old weights; --rollout-engine {engine} can {' or '.join(modes)}",
    )
    expect(
        config.engine_traits.keeps_interrupted_routes or not config.wants_rollout_routes,
        f"--partial-rollouts with --use-rollout-routing-replay: --rollout-engine {engine} "
        "reports the routes of prefilling an interrupted response again, not those it was sampled "
        "with; use transformers or servers, or drop one of the flags",
    )


def _check_sampled_distribution(config: JobConfig) -> None:
    """Log-probs have to be of the distribution that tokens are sampled from."""
    engine, lowest = config.rollout_engine, config.sampling_traits.lowest_temperature
    expect(
        config.rollout_temperature >= lowest,
        f"--rollout-temperature is {config.rollout_temperature}; vLLM silently raises "
        f"temperatures below {lowest}, so its log-probs would be of a different distribution; "
        f"choose at least {lowest}",
    )
    expect(
        config.use_rollout_sampling_mask != "on" or config.engine_reports_kept_ids,
        f"--use-rollout-sampling-mask on: --rollout-engine {engine}"
        f"{' with vLLM servers' if config.engine_traits.asks_servers else ''} does not report the "
        "ids that top-p and top-k keep; use --rollout-engine transformers, or sample with "
        "--rollout-top-p 1 and without --rollout-top-k",
    )
    expect(
        engine != "vllm" or not config.replays_sampling_mask or config.rollout_top_k is not None,
        f"--rollout-top-p {config.rollout_top_p} without --rollout-top-k: vLLM reports the ids "
        "that it keeps only if a top-k bounds their number; add --rollout-top-k, for example 512",
    )
    expect(
        config.server_dialect != "sglang"
        or not config.return_rollout_log_probs
        or not config.truncates_sampling
        or config.replays_sampling_mask,
        "--rollout-top-p or --rollout-top-k with SGLang servers: SGLang reports log-probs of "
        "the distribution before truncation, not of the one it samples from; drop them, or "
        "--use-rollout-sampling-mask off",
    )


def _check_asked_servers(config: JobConfig) -> None:
    """Refuse flags of what is decided where the servers are started."""
    expect(
        config.rollout_dtype == "auto",
        f"--rollout-dtype {config.rollout_dtype} would be ignored: with --rollout-engine http "
        "the servers choose their dtype; set it where they are started",
    )
    expect(
        config.num_rollout_engines == 1,
        f"--num-rollout-engines is {config.num_rollout_engines} with --rollout-engine http: one "
        "client serves every URL; drop it",
    )
