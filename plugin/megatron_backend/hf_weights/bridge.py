"""mbridge's tables for one model: names, fusions and tensor parallel cuts of its weights.

Q, K and V interleaved by group, gate above up, cuts over tensor parallel ranks, vocabulary padding:
mbridge is kept up with the models, and writing these tables by hand would duplicate it. Transport
is ours (`loading.py`, `export.py`): mbridge builds and loads whole models with
Transformer Engine's layer spec, names parameters after that spec, asks two object collectives per
exported parameter, and edits its class-level tables when embeddings are tied. So parameters are
first renamed (`canonical_name`), and the tables are used through a private subclass. mbridge is
pinned: the methods used are not its public API, and the round-trip tests guard them.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from plugin.config.import_paths import load_function
from plugin.errors import ConfigError
from plugin.megatron_backend.model.builder import (
    first_expert,
    model_tensors,
    padded_vocab_size,
    unwrap,
)
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.parallel_groups import ParallelGroups


@contextmanager
def _bare_packages() -> Iterator[None]:
    """Import mbridge's tables without every model that comes with them.

    `import mbridge` imports all of its models; the vision ones load generation code of transformers
    and torch's compiler, seconds for every rank. In the body mbridge's packages are empty
    and only locate their modules. Not needed once mbridge imports its models lazily.
    """
    if "mbridge" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("mbridge")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("mbridge is not installed; it maps the weights: pip install mbridge")
    root = Path(spec.submodule_search_locations[0])
    for name, place in (("mbridge", root), ("mbridge.models", root / "models")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(place)]
    try:
        yield
    finally:
        # A program that imports mbridge itself gets it whole.
        del sys.modules["mbridge"], sys.modules["mbridge.models"]


with _bare_packages():
    from mbridge.core.parallel_states import ParallelStates


def load_table(path: str) -> Any:
    """A bridge class of mbridge, or one of `tables.py`, by its import path."""
    with _bare_packages():
        return load_function(path)


def weight_bridge(model: Any, groups: ParallelGroups) -> Any:
    """mbridge's tables for this model; a subclass, because mbridge edits them when tied."""
    hf_config = model.hf_config
    base = load_table(FAMILIES[hf_config.model_type].weights)
    names = [f"{group}_{what}" for group in ("tp", "pp", "ep", "etp") for what in ("size", "rank")]
    states = ParallelStates(
        vpp_size=groups.vpp_size, **{name: getattr(groups, name) for name in names}
    )
    own_class = type(
        base.__name__,
        (base,),
        {
            "_DIRECT_MAPPING": dict(base._DIRECT_MAPPING),
            # mbridge's own config would be a different one, and fails with transformers 5
            "_build_config": lambda _self: model.config,
        },
    )
    # Some configs leave the width of a head to be computed.
    described = copy.copy(hf_config)
    if not model.config.multi_latent_attention:
        described.head_dim = model.config.kv_channels
    bridge = own_class(
        described,
        dtype=model.config.params_dtype,
        parallel_states=states,
        make_vocab_size_divisible_by=groups.tp_size,
    )
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = padded_vocab_size(hf_config.vocab_size, groups.tp_size)
    shared_name = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING["output_layer.weight"] = shared_name
    return bridge


_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
#: An expert's weight or bias in a canonical name; the third group is its number.
GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
#: Norms that Transformer Engine has inside the linear layer that follows them.
_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
#: Parameters that are cut by token.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
#: The layer that a parameter belongs to.
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def canonical_name(name: str, model: Any, first_expert: int) -> str:
    """A parameter's name in the whole model, in Transformer Engine's spelling.

    Layer numbers become global, and experts are counted from `first_expert`. The local spec's
    `layers.0.input_layernorm.weight` on the second of two 2-layer stages becomes
    `layers.2.self_attention.linear_qkv.layer_norm_weight`.
    """
    match = LAYER.match(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    rest, is_latent = name[match.end() :], model.config.multi_latent_attention
    if is_latent and rest in _LATENT_NORMS:
        rest = _LATENT_NORMS[rest]
    elif rest == "input_layernorm.weight" and not is_latent:
        rest = "self_attention.linear_qkv.layer_norm_weight"
    elif rest == "pre_mlp_layernorm.weight" and not hasattr(layer.mlp, "router"):
        rest = "mlp.linear_fc1.layer_norm_weight"
    elif expert := _LOCAL_EXPERT.match(rest):
        number = first_expert + int(expert.group(1))
        rest = f"mlp.experts.{expert.group(2)}.{expert.group(3)}{number}"
    elif expert := GROUPED_EXPERT.match(rest):
        number = first_expert + int(expert.group(3))
        rest = f"mlp.experts.{expert.group(1)}.{expert.group(2)}{number}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


def canonical_tensors(
    chunks: Iterable[Any], groups: ParallelGroups, *, as_first_rank: bool = False
) -> Iterator[tuple[str, Tensor, Any]]:
    """Canonical name, tensor and model of what this rank holds; without a tied LM head.

    as_first_rank: experts are numbered as on expert rank 0, so that all expert ranks agree
    """
    for model in map(unwrap, chunks):
        tied = model.hf_config.tie_word_embeddings
        for name, tensor in model_tensors(model):
            first = 0 if as_first_rank else first_expert(model, groups)
            canonical = canonical_name(name, model, first)
            if not (tied and canonical == "output_layer.weight"):
                yield canonical, tensor, model
