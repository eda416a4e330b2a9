"""Flags of LoRA: low-rank adapters beside frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from plugin.config.flags import FlagGroup, expect, flag, needs_flag

#: The linear layers that can have an adapter, as Hugging Face models name them: attention, latent
#: attention, MLP (of experts and shared experts, too).
LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
#: All of them that the model has.
ALL_LINEAR = "all-linear"

_LORA = needs_flag("lora_rank")


@dataclass(frozen=True)
class LoraFlags(FlagGroup):
    title: ClassVar[str] = "LoRA"

    lora_rank: int = flag(
        0, "train adapters of this rank and freeze the model; 0 = train all weights", at_least=0
    )
    lora_alpha: float = flag(
        32.0, "what an adapter computes is multiplied by alpha / rank", above=0, needs=_LORA
    )
    lora_target: str = flag(
        ALL_LINEAR,
        "linear layers with an adapter, by their Hugging Face names, comma-separated: "
        f"{', '.join(LORA_TARGETS)}; {ALL_LINEAR} = all of these that the model has",
        needs=_LORA,
    )
    lora_path: str | None = flag(
        None, "directory of a PEFT adapter that the run starts from; none = new ones", needs=_LORA
    )
    lora_sync: Literal["merged", "adapter"] = flag(
        "merged",
        "what engines get: weights with the adapters added to them; or the base once, and then "
        "adapters (--rollout-engine transformers or vllm)",
        needs=_LORA,
    )

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The names in --lora-target."""
        return tuple(name.strip() for name in self.lora_target.split(","))

    @property
    def lora_scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.lora_alpha / self.lora_rank

    @property
    def syncs_adapters(self) -> bool:
        """Whether engines get adapters instead of whole weights."""
        return self.lora_rank > 0 and self.lora_sync == "adapter"

    def check(self) -> None:
        named = self.lora_targets
        choices = f"{ALL_LINEAR}, or several of {', '.join(LORA_TARGETS)}"
        for name in named:
            expect(
                name in LORA_TARGETS or named == (ALL_LINEAR,),
                f"--lora-target {self.lora_target!r}: {name!r} cannot have an adapter; choose "
                f"{choices} (routers, embeddings and the LM head stay as they are)",
            )
        expect(
            len(set(named)) == len(named),
            f"--lora-target {self.lora_target!r} names a layer twice; name each once",
        )
