"""TRL: a real GRPOTrainer on a tiny model, where TRL is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import ConfigError

trl = pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("datasets", reason="TRL's dataset library is not installed")

WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "f"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(directory: Path) -> Any:
    """A model with a home on disk, from which TRL can load it a second time as the reference."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
    return Qwen3ForCausalLM.from_pretrained(directory)


def trainer(directory: Path, loss_config: LossConfig, **settings: Any) -> Any:
    from datasets import Dataset

    from plugin.adapters.trl import CorrectedGRPOTrainer

    arguments = trl.GRPOConfig(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        max_steps=1,
        learning_rate=0.1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    return CorrectedGRPOTrainer(
        model=tiny_model(directory / "model"),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c d", "e f", "b c"]}),
        processing_class=tokenizer(),
        loss_config=loss_config,
    )


def inputs() -> dict[str, Any]:
    """What TRL hands to its loss: two prompts, responses of 3 and 2 tokens."""
    generator = torch.Generator().manual_seed(3)
    completion_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    old = -2 + 0.3 * torch.randn(2, 3, generator=generator)
    return {
        "prompt_ids": torch.tensor([[2, 3], [4, 5]]),
        "prompt_mask": torch.ones(2, 2, dtype=torch.long),
        "completion_ids": torch.tensor([[6, 7, 1], [3, 1, 0]]),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -1.0]),
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + 0.2 * torch.randn(2, 3, generator=generator),
        "num_items_in_batch": completion_mask.sum().float(),
    }


def loss_and_gradient(owner: Any, model: Any, which: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss = which(owner, model, inputs())
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "loss_type, settings",
    [("grpo", {"calculate_per_token_loss": False}), ("dapo", {"calculate_per_token_loss": True})],
)
def test_ppo_equals_trls_own_loss_and_gradient(
    tmp_path: Path, loss_type: str, settings: dict[str, Any]
) -> None:
    corrected = trainer(tmp_path, LossConfig(**settings), loss_type=loss_type, beta=0.0)
    model = corrected.model.train()
    corrected.current_gradient_accumulation_steps = 1
    mine = loss_and_gradient(corrected, model, type(corrected)._compute_loss)
    theirs = loss_and_gradient(corrected, model, trl.GRPOTrainer._compute_loss)
    torch.testing.assert_close(mine, theirs)
    assert mine[1].abs().max() > 0


def test_a_correction_uses_the_engines_log_probs(tmp_path: Path) -> None:
    corrected = trainer(tmp_path, LossConfig(use_tis=True, tis_clip=1.05), beta=0.0)
    corrected.current_gradient_accumulation_steps = 1
    corrected._compute_loss(corrected.model.train(), inputs())
    logged = corrected._metrics["train"]
    assert 0 < logged["tis/tis_clipfrac"][-1] < 1
    without = {k: v for k, v in inputs().items() if k != "sampling_per_token_logps"}
    with pytest.raises(ConfigError, match="needs rollout_log_probs"):
        corrected._compute_loss(corrected.model, without)


def test_trls_loop_trains_with_our_loss(tmp_path: Path) -> None:
    corrected = trainer(tmp_path, LossConfig(policy_loss="cispo", entropy_coef=0.01), beta=0.0)
    before = [p.detach().clone() for p in corrected.model.parameters()]
    corrected.train()
    moved = [
        not torch.equal(old, new)
        for old, new in zip(before, corrected.model.parameters(), strict=True)
    ]
    assert any(moved)
    assert any("tis/ppo_kl" in entry for entry in corrected.state.log_history)


def test_a_beta_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beta is 0\.1"):
        trainer(tmp_path, LossConfig(), beta=0.1)
