"""What the jobs of `job_bench` share with TRL's: prompts, reward, model and tokenizer.

The task is copying digits without a token that ends a response: every response runs to the greatest length, so both
sides generate and train on the same number of tokens however their policies develop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plugin.config import JobConfig
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.protocol import Prompt

SEED = 1234
_CHARACTERS = CharacterTokenizer(ALPHABET)


class Model(NamedTuple):
    """A Qwen3 of this size with untied embeddings."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = _CHARACTERS.vocab_size


class EndlessDigits(CopyDigitsTask):
    """Copy three digits; nothing ends a response before its greatest length.

    In a larger vocabulary every token stands for the character of its id modulo the alphabet, or a random policy
    would never earn a reward and its gradient would be 0.
    """

    def __init__(self) -> None:
        super().__init__(_CHARACTERS, seed=SEED)
        self.stop_token_ids = ()

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """Right positions divided by the longer of response and answer."""
        return super().reward(prompt, [token % _CHARACTERS.vocab_size for token in response])


def make_task(config: JobConfig, tokenizer: Any) -> EndlessDigits:
    """What `--task-path` names; the ids are the same in the tokenizer of `write_model`."""
    return EndlessDigits()


def write_model(model: Model, longest: int, directory: Path) -> None:
    """A Hugging Face directory with random weights and a tokenizer of one token per character.

    The tokenizer's end has the first id that the model does not have, so no policy can sample it.
    """
    import tokenizers
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=2 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads // 2,
        head_dim=model.hidden // model.heads,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    weights = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights.save_pretrained(directory)
    words = [_CHARACTERS.decode([i]) for i in range(_CHARACTERS.vocab_size)]
    words += [f"<{i}>" for i in range(len(words), model.vocabulary)] + ["<end>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(directory)
