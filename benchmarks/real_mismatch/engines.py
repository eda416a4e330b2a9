"""The engines that are compared, their prompts, and what they answer."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from plugin.batch_types import RolloutSample
from plugin.config import JobConfig
from plugin.config.model import DtypeName
from plugin.engines.choice import make_engine
from plugin.engines.protocol import Generation, GenerationRequest, RolloutEngine, SamplingParameters
from plugin.weights.buckets import pack_buckets

#: Numbers that share a scale in the 4-bit formats of GGUF.
_BLOCK = 32

_TOPICS = (
    *(
        "the tides",
        "bread",
        "a lighthouse",
        "prime numbers",
        "rain",
        "the heart",
        "chess",
        "a violin",
    ),
    *("volcanoes", "honey", "the moon", "bicycles", "libraries", "snow", "maps", "clocks"),
)
_FORMS = (
    "Explain in a few sentences how people came to understand {}.",
    "Write the beginning of a short story about {}.",
    "Give a list of five facts about {}, each with a reason.",
)


@dataclass(frozen=True)
class Setting:
    """An engine and how it samples.

    weights: what the engine holds of the trainer's weights: all of them, or rounded to 8 bits with a scale per output, or
        to 4 bits with a scale per 32 inputs
    together: responses that are generated at the same time
    """

    engine: Literal["transformers", "vllm", "vllm_server"]
    dtype: DtypeName
    weights: Literal["as sent", "int8", "int4"] = "as sent"
    top_p: float = 1.0
    top_k: int | None = None
    together: int = 48

    @property
    def name(self) -> str:
        """For rows of the data."""
        parts = [self.engine, self.dtype]
        parts += [self.weights] if self.weights != "as sent" else []
        parts += [f"top-p {self.top_p}, top-k {self.top_k}"] if self.top_p < 1 else []
        return ", ".join([*parts, f"{self.together} together"] if self.together != 48 else parts)


SETTINGS = (
    Setting("transformers", "float32"),
    Setting("transformers", "bfloat16"),
    Setting("transformers", "float16"),
    Setting("transformers", "bfloat16", "int8"),
    Setting("transformers", "bfloat16", "int4"),
    Setting("vllm", "float32"),
    Setting("vllm", "bfloat16"),
    Setting("vllm_server", "bfloat16"),
)
#: Those that also score their responses in one pass.
PREFILLED = tuple(s for s in SETTINGS if s.engine != "vllm_server" and s.weights == "as sent")
#: Sampled from part of the vocabulary; scored with and without the ids that were kept.
TRUNCATED = Setting("transformers", "bfloat16", top_p=0.9, top_k=50)
#: The same prompts and seeds, one response after the other.
ALONE = {s: replace(s, together=1) for s in PREFILLED if s.dtype != "float16"}


def chat_prompts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """Token ids of requests in the model's chat template."""
    questions = [form.format(topic) for form in _FORMS for topic in _TOPICS]
    if count > len(questions):
        raise SystemExit(f"--prompts is {count}, and there are {len(questions)}")
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions[:count]
    ]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def sampled(
    setting: Setting,
    prompts: Sequence[tuple[int, ...]],
    model: Path,
    stop: int,
    length: int,
    run_dir: Path,
) -> list[RolloutSample]:
    """One response to each prompt, with the log-probs that the engine reports.

    `metadata` has "prefill": those that the same engine gives to the whole text at once, where it can.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(model).to_dict()
    weights = load_file(model / "model.safetensors")
    parameters = SamplingParameters(
        top_p=setting.top_p,
        top_k=setting.top_k,
        max_response_length=length,
        stop_token_ids=(stop,),
        sampling_mask=setting.top_p < 1,
    )
    requests = [GenerationRequest(prompt, (i,), i) for i, prompt in enumerate(prompts)]
    samples = []
    with _engine(setting, hf_config, held(weights, setting), run_dir) as engine:
        answers = engine.generate(requests, parameters)
        for prompt, [answer] in zip(prompts, answers, strict=True):
            if not isinstance(answer, Generation):
                raise SystemExit(f"{setting.name}: {answer.reason}")
            samples.append(
                RolloutSample(
                    tokens=torch.cat([torch.tensor(prompt), answer.tokens]),
                    response_length=len(answer.tokens),
                    loss_mask=torch.ones_like(answer.tokens),
                    rollout_log_probs=answer.log_probs,
                    sampling_mask=answer.sampling_mask,
                )
            )
        if setting in PREFILLED and setting.engine == "vllm":
            for sample in samples:
                sample.metadata["prefill"] = _prefilled_by_vllm(engine, sample)
    if setting in PREFILLED and setting.engine == "transformers":
        for sample, found in zip(samples, _prefilled(model, setting.dtype, samples), strict=True):
            sample.metadata["prefill"] = found
    return samples


def _prefilled_by_vllm(engine: Any, sample: RolloutSample) -> Tensor:
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    ids = sample.tokens.tolist()
    [output] = engine._llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    rows = zip(ids, output.prompt_logprobs, strict=True)
    found = [row[token].logprob for token, row in list(rows)[-sample.response_length :]]
    return torch.tensor(found)


@torch.no_grad()
def _prefilled(model: Path, dtype: str, samples: Sequence[RolloutSample]) -> Iterator[Tensor]:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    for sample in samples:
        response = sample.tokens[-sample.response_length :, None]
        logits = network(sample.tokens[None]).logits[0, -sample.response_length - 1 : -1].float()
        yield logits.log_softmax(-1).gather(1, response)[:, 0]


@contextmanager
def _engine(
    setting: Setting, hf_config: dict[str, Any], weights: dict[str, Tensor], run_dir: Path
) -> Iterator[RolloutEngine]:
    config = JobConfig().unchecked_copy(
        rollout_engine=setting.engine,
        rollout_dtype=setting.dtype,
        rollout_max_batch=setting.together,
        max_context_length=512,
        run_dir=str(run_dir),
        rollout_weights_dir=str(run_dir / "weights"),
    )
    engine = make_engine(config, hf_config, "engine")
    try:
        buckets = list(pack_buckets(weights.items()))
        for number, bucket in enumerate(buckets):
            engine.load_weights(0, bucket, last=number == len(buckets) - 1)
        yield engine
    finally:
        if hasattr(engine, "close"):
            engine.close()
        del engine
        gc.collect()


def held(weights: dict[str, Tensor], setting: Setting) -> dict[str, Tensor]:
    """The weights as the engine holds them; embeddings, and the LM head tied to them, are never rounded."""
    if setting.weights == "as sent":
        return weights
    rounded = _to_int8 if setting.weights == "int8" else _to_int4
    return {
        name: rounded(value) if value.dim() == 2 and "embed" not in name else value
        for name, value in weights.items()
    }


def _to_int8(weight: Tensor) -> Tensor:
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


def _to_int4(weight: Tensor) -> Tensor:
    """As GGUF's Q4_0: the number of a block that is largest without its sign becomes -8 of its scale."""
    blocks = weight.float().view(-1, _BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = torch.where(largest == 0, 1.0, largest / -8)
    return ((blocks / scale).round().clamp(-8, 7) * scale).view_as(weight).to(weight.dtype)
