"""A tokenizer in a reward worker decodes as the policy's does, and costs the worker no other library."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from plugin.config.data import parse_rewards
from plugin.rewards.reward_set import RewardSet
from plugin.rewards.text_rewards import PortableTokenizer, TextSource
from plugin.tasks.copy_digits import CharacterTokenizer

TEXT = "It 's 12 + 7 , isn 't it ?"


def trained(model: Any, trainer: Any, **settings: Any) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="<unknown>", **settings
    )


SPECIAL = ["<end>", "<unknown>"]


def byte_pairs(**settings: Any) -> PreTrainedTokenizerFast:
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=SPECIAL, show_progress=False)
    return trained(tokenizers.models.BPE(unk_token="<unknown>"), trainer, **settings)


def word_pieces(**settings: Any) -> PreTrainedTokenizerFast:
    trainer = tokenizers.trainers.WordPieceTrainer(special_tokens=SPECIAL, show_progress=False)
    return trained(tokenizers.models.WordPiece(unk_token="<unknown>"), trainer, **settings)


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("make", [byte_pairs, word_pieces])
@pytest.mark.parametrize("cleans", [False, True])
def test_text_is_what_the_whole_tokenizer_makes_of_it(make: Any, cleans: bool) -> None:
    tokenizer = make(clean_up_tokenization_spaces=cleans)
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    portable = pickle.loads(pickle.dumps(PortableTokenizer.of(tokenizer)))
    assert portable.load().decode(ids) == tokenizer.decode(ids)
    # Where transformers changes the text, it has to come along.
    if make is word_pieces:
        assert (portable.fast is None) == cleans


def test_a_tokenizer_with_a_decode_of_its_own_is_sent_as_it_is() -> None:
    shouting = Shouting(tokenizer_object=byte_pairs().backend_tokenizer)
    assert PortableTokenizer.of(shouting).load() is shouting
    characters = CharacterTokenizer("ab=")
    assert PortableTokenizer.of(characters).load() is characters


def test_a_worker_loads_neither_transformers_nor_numpy_for_it() -> None:
    source = TextSource(
        RewardSet(parse_rewards(("exact",))), PortableTokenizer.of(byte_pairs()), (0,)
    )
    program = (
        "import pickle, sys; import plugin.rewards.pool\n"
        "rewards = pickle.load(sys.stdin.buffer).load(); rewards.import_libraries()\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(source), capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == "[]"
