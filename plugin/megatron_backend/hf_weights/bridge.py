"""mbridge's tables for one model: what its tensors are called, how they are fused and cut.

Q, K and V interleaved by group, gate above up, cuts over tensor parallel ranks, vocabulary padding:
mbridge is kept up with the models, and writing these tables by hand would duplicate it. Transport
is ours (`weight_loading.py`, `weight_export.py`): mbridge builds and loads whole models with
Transformer Engine's layer spec, names parameters after that spec, asks two object collectives per
exported parameter, and edits its class-level tables when embeddings are tied. So parameters are
first renamed (`parameter_names.py`), and the tables are used through a private subclass. mbridge is
pinned: the methods used are not its public API, and the round-trip tests guard them.
"""

from __future__ import annotations

import copy
from typing import Any

from plugin.megatron_backend.hf_weights.mbridge_tables import ParallelStates, load_table
from plugin.megatron_backend.model.builder import padded_vocab_size
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.parallel_groups import ParallelGroups


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
            # mbridge's own config would be another one, and fails for configs of transformers 5
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
