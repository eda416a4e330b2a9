"""Chat prompts in the model's own template and responses that it sampled: what a job trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch

#: (prompt, response) token ids.
Row = tuple[list[int], list[int]]

#: (question, answer). The answers were sampled from the model at temperature 1, up to 24 tokens; most are cut there. Prompts have 36
#: to 60 tokens, so that rows differ in length.
CONVERSATIONS = (
    ("What is 3 + 4?", "The answer is 7, but that's not actual multiplication because 3 +"),
    (
        "Name three animals that live in the sea.",
        "Closely-spanning creatures among the multitude of lifeless bodies that give the sea its name, are the Pant",
    ),
    (
        "Write one sentence about the city of Paris.",
        "Paris is the City of Love, the Ideumat, the îbermás, the furthermás,",
    ),
    (
        "Translate to French: Good morning, how are you today?",
        "Je suis épasé et vous parlez Féminienne charade, mademois sur le c",
    ),
    (
        "A train leaves at 9:15 and arrives at 11:45. How many minutes does the journey take? Explain briefly.",
        "To calculate the journey time, we'll determine the total of 9 minutes and 15 minutes. Multiplying the",
    ),
    (
        "Why is the sky blue?",
        "The answer to this question lies in the scientific explanation. When sunlight reflects off a plane's surface, it scatters incident",
    ),
)


def chat_rows(tokenizer: Any, conversations: Sequence[tuple[str, str]]) -> list[Row]:
    """Token ids of questions in the chat template, and of their answers."""
    rows = []
    for question, answer in conversations:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt, response = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, answer)
        )
        rows.append((prompt, response))
    return rows


def transformers_model(directory: Path | str, dtype: torch.dtype) -> Any:
    """The model as transformers computes it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def response_log_probs(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """[response] float32 per row: log-probs of its tokens, one row at a time and without padding."""
    found = []
    for prompt, response in rows:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return found


def rollout_batch(
    rows: Sequence[Row], advantages: Sequence[float], log_probs: Sequence[Tensor]
) -> RolloutBatch:
    """A batch with one advantage per response; `log_probs` are what an engine reported."""
    columns = {
        "unconcat_tokens": [torch.tensor(prompt + response) for prompt, response in rows],
        "total_lengths": [len(prompt) + len(response) for prompt, response in rows],
        "response_lengths": [len(response) for _, response in rows],
        "loss_masks": [torch.ones(len(response), dtype=torch.long) for _, response in rows],
        "advantages": [
            torch.full((len(response),), value)
            for (_, response), value in zip(rows, advantages, strict=True)
        ],
        "rollout_log_probs": list(log_probs),
    }
    batch = RolloutBatch(columns)
    batch.check()
    return batch
