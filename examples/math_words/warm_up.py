"""A small Qwen3 with its own BPE tokenizer, warmed up with supervised steps.

    python examples/math_words/warm_up.py --data runs/math_words --output runs/math_words/model

Writes a Hugging Face directory: config, weights, tokenizer with a chat template. Most of the
answers it sees are bare results, the others are worked out. It learns both: to calculate step by
step, and to guess a number that is mostly wrong. RL then finds out which of the two pays off.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IGNORED = -100  # the label that cross_entropy leaves out


def train_tokenizer(rows: Sequence[dict[str, str]], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over questions and answers; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chat = ["user\n", "assistant\n"]
    texts = [text for row in rows for text in (row["question"], row["answer"], *chat)]
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> Qwen3ForCausalLM:
    """Random weights; head size 32, as many key-value heads as query heads."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, str], *, bare: bool
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt through the chat template, and of the answer with its end.

    bare: only the last line of the answer, the result
    """
    messages = [{"role": "user", "content": row["question"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = row["answer"].splitlines()[-1] if bare else row["answer"]
    answer = tokenizer(shown, add_special_tokens=False)["input_ids"]
    return prompt, [*answer, tokenizer.eos_token_id]


def batches(
    worked: Sequence[tuple[list[int], list[int]]],
    bare: Sequence[tuple[list[int], list[int]]],
    bare_share: float,
    size: int,
    padding: int,
    seed: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end: tokens and labels [size, longest]; only the answer has labels.

    worked, bare: prompt and answer of every row, with and without its steps
    """
    rng = random.Random(seed)
    while True:
        chosen = [rng.choice(bare if rng.random() < bare_share else worked) for _ in range(size)]
        longest = max(len(prompt) + len(answer) for prompt, answer in chosen)
        tokens = torch.full((size, longest), padding)
        labels = torch.full((size, longest), IGNORED)
        for row, (prompt, answer) in enumerate(chosen):
            whole = prompt + answer
            tokens[row, : len(whole)] = torch.tensor(whole)
            labels[row, len(prompt) : len(whole)] = torch.tensor(answer)
        yield tokens, labels


def warm_up(model: Qwen3ForCausalLM, stream: Iterator[Any], steps: int, lr: float) -> None:
    """Supervised steps on the answers, with a linear warm-up and decay of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / (steps + 1))
    )
    began = time.monotonic()
    for step in range(1, steps + 1):
        tokens, labels = next(stream)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - began
            print(f"step {step:4}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tokenizer, model, supervised steps; then the directory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("runs/math_words"))
    parser.add_argument("--output", type=Path, default=Path("runs/math_words/model"))
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--bare-share", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    disable_progress_bar()  # of the one file that is written
    rows = [json.loads(line) for line in (options.data / "train.jsonl").open()]
    tokenizer = train_tokenizer(rows, options.vocabulary)
    model = build_model(tokenizer, options.hidden, options.layers)
    worked, bare = ([encode(tokenizer, row, bare=b) for row in rows] for b in (False, True))
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens; "
        f"longest prompt {max(len(p) for p, _ in worked)}, answer {max(len(a) for _, a in worked)}",
        flush=True,
    )
    stream = batches(
        worked, bare, options.bare_share, options.batch_size, tokenizer.pad_token_id, options.seed
    )
    warm_up(model, stream, options.steps, options.lr)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"{options.output}: model and tokenizer", flush=True)


if __name__ == "__main__":
    main()
