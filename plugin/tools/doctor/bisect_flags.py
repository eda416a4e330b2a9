"""The flags of `megatron-tis doctor --bisect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from plugin.config.flags import FlagGroup, expect, flag, option_name
from plugin.config.model import DtypeName

#: What says how an engine is run, and its value where none is said.
_OF_ENGINE = {
    "engine_hf_checkpoint": None,
    "save_hidden_states": None,
    "rollout_quantization": "none",
    "engine_pass": "prompt",
}


@dataclass(frozen=True)
class BisectFlags(FlagGroup):
    """Which engine and trainer are compared, and where the result goes."""

    title: ClassVar[str] = "where the mismatch comes from (--bisect)"

    hf_checkpoint: str | None = flag(
        None, "directory of the trainer's model, and the engine's; none = a tiny model"
    )
    embedded_model: Literal["qwen3", "qwen3_moe", "llama"] = flag(
        "qwen3_moe", "family of that tiny model"
    )
    engine_hf_checkpoint: str | None = flag(None, "directory of a different model for the engine")
    hidden_states: str | None = flag(
        None,
        "file with hidden states of an external engine (.safetensors or .npz) instead of running "
        "one",
    )
    save_hidden_states: str | None = flag(
        None, "file for the engine's hidden states (.safetensors or .npz)"
    )
    train_dtype: DtypeName = flag("float32", "the trainer's, besides float32")
    rollout_dtype: DtypeName = flag("bfloat16", "the engine's, besides float32")
    rollout_quantization: Literal["none", "int8"] = flag("none", "of the engine's weights")
    engine_pass: Literal["prompt", "decode"] = flag(
        "prompt",
        "the engine reads the tokens as one prompt, or one by one through its KV cache, as when it "
        "samples",
    )
    html: str | None = flag(None, "file for table and plots as a page")
    force: bool = flag(False, "replace files that exist")

    def check(self) -> None:
        for name, default in _OF_ENGINE.items():
            expect(
                self.hidden_states is None or getattr(self, name) == default,
                f"{option_name(name)} with --hidden-states: no engine runs, the file holds what "
                "one computed; drop one of the two",
            )
        expect(
            self.save_hidden_states is None
            or Path(self.save_hidden_states).suffix in (".npz", ".safetensors"),
            f"--save-hidden-states {self.save_hidden_states}: end it in .safetensors or .npz",
        )
