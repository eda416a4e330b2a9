"""Which models a job uses: from a Hugging Face directory, or a tiny one with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from plugin.config import JobConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.megatron_backend.lora.targets import check_adapter_directory, check_lora
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.layout_rules import check_model
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer

if TYPE_CHECKING:
    from torch import Tensor

_HIDDEN, _HEAD_DIM, _LAYERS, _HEADS, _QUERY_GROUPS, _EXPERTS = 64, 16, 2, 4, 2, 4


@dataclass(frozen=True)
class ModelSource:
    """A model's config and where its weights are.

    hf_config: the config as a mapping, `model_type` included
    directory: Hugging Face directory that every trainer node can read, or None
    seed: of random weights, where there is no directory
    """

    hf_config: dict[str, Any]
    directory: str | None = None
    seed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on disk; 0 for random ones, which are small."""
        files = () if self.directory is None else Path(self.directory).glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    def as_config(self) -> Any:
        """The config as transformers' object."""
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.hf_config)

    def random_weights(self) -> dict[str, Tensor]:
        """Weights that depend on the config and the seed only, by their Hugging Face names."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(
                self.as_config(), dtype=torch.float32, trust_remote_code=False
            )
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def policy_source(config: JobConfig) -> ModelSource:
    """The policy that is trained."""
    if config.hf_checkpoint is None:
        tiny = _tiny_config(config)
        # Not through transformers, whose import the driver would wait for.
        described = SimpleNamespace(**tiny)
        check_model(described, config)
        source = ModelSource(tiny, seed=config.seed)
    else:
        source = directory_source(config.hf_checkpoint, "--hf-checkpoint", config)
        described = source.as_config()
    check_lora(described, config)
    check_adapter_directory(described, config)
    return source


def directory_source(directory: str, option: str, config: JobConfig) -> ModelSource:
    """The model in a local Hugging Face directory; one that the layout cannot cut is refused."""
    import transformers

    path = Path(directory).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{option} {directory} holds no config.json; give a local Hugging Face model directory"
        )
    try:
        loaded = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers makes of a broken config.json
        raise ConfigError(
            f"{option} {directory} is not a model that transformers {transformers.__version__} "
            f"knows, and code that comes with a model is not run; choose a model of a supported "
            f"family ({error})"
        ) from error
    check_model(loaded, config)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{option} {directory} holds no *.safetensors file, only these are read; convert the "
            "model with save_pretrained(safe_serialization=True)"
        )
    unknown, missing = family_of(loaded).misfits(loaded, HfDirectory(path))
    if unknown:
        raise ConfigError(
            f"{option} {directory} holds {len(unknown)} tensors that a {loaded.model_type} model "
            f"of its config.json has no place for, the first of them {unknown[0]}; give weights "
            "that belong to config.json, unquantized or in block-wise float8"
        )
    if missing:
        raise ConfigError(
            f"{option} {directory} lacks {len(missing)} tensors of a {loaded.model_type} model of "
            f"its config.json, the first of them {missing[0]}; download the missing files, or "
            "give weights that belong to config.json"
        )
    # The trainer dequantizes what it reads, and engines get plain weights from the trainer.
    plain = {k: v for k, v in loaded.to_dict().items() if k != "quantization_config"}
    return ModelSource(plain, directory=str(path.resolve()))


def _tiny_config(config: JobConfig) -> dict[str, Any]:
    """The config of a model of about 0.1 M parameters that the layout can cut."""
    tensor = config.tensor_model_parallel_size
    chunks = config.pipeline_model_parallel_size * (
        config.virtual_pipeline_model_parallel_size or 1
    )
    tiny: dict[str, Any] = {
        "model_type": config.embedded_model,
        "vocab_size": CharacterTokenizer(ALPHABET).vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": max(_LAYERS, chunks),
        "num_attention_heads": max(_HEADS, tensor),
        "num_key_value_heads": max(_QUERY_GROUPS, tensor),
        "head_dim": max(_HEAD_DIM, config.engine_traits.smallest_head_dim),
        "max_position_embeddings": max(
            config.max_response_length + 128, config.max_context_length or 0
        ),
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    if config.embedded_model == "qwen3_moe":
        tiny |= {
            "num_experts": max(_EXPERTS, config.expert_model_parallel_size),
            "num_experts_per_tok": 2,
            "moe_intermediate_size": _HIDDEN,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return tiny
