"""The character tokenizer of the tiny model as Hugging Face files."""

from __future__ import annotations

from pathlib import Path

from plugin.tasks.copy_digits import ALPHABET


def save_character_tokenizer(directory: Path) -> None:
    """Writes tokenizer files into a model directory; ids are those of `CharacterTokenizer`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: number for number, character in enumerate(ALPHABET + "$")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="$"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(directory)
