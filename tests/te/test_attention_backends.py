"""Whether our rules choose Transformer Engine's layers exactly where its own Python finds a kernel for packed rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.errors import ConfigError
from plugin.megatron_backend.model.families import FAMILIES, family_of
from plugin.megatron_backend.model.layout_rules import context_exchange, with_engine_for
from plugin.tools.plan.fake_world import Traffic, fake_world
from tests.parallel import tiny_models
from tests.te.python_of_te import KernelCalled, backends, import_te

HEADS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3_moe": {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen2": {
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "sliding_window": 4096,
    },
    "mistral": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "qwen3_next": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
    "glm4": {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    "deepseek_v3": {
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
}
"""Heads and windows of a published model of every family."""

A100, H100, B200 = (8, 0), (9, 0), (10, 0)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def engine_finds(
    model: dict[str, Any], config: TrainerConfig, dtype: str, capability: tuple[int, int]
) -> list[bool]:
    """Transformer Engine's own choice for layers with and without a window: has it kernels, has it anything at all?"""
    latent = model.get("multi_latent_attention", False)
    heads = (
        (model["qk_head_dim"] + model["qk_pos_emb_head_dim"], model["v_head_dim"])
        if latent
        else None
    )
    exchange = context_exchange(config, model) or "p2p"
    found = [
        backends(
            capability,
            qkv_dtype=DTYPES[dtype],
            num_heads=model["num_attention_heads"],
            num_gqa_groups=model["num_attention_heads"] if latent else model["num_query_groups"],
            head_dim_qk=heads[0] if heads else model["kv_channels"],
            head_dim_v=heads[1] if heads else model["kv_channels"],
            window_size=window,
            softmax_type=model.get("softmax_type", "vanilla"),
            context_parallel=config.context_parallel_size > 1,
            cp_comm_type=exchange,
        )
        for window in {(-1, 0), model.get("window_size") or (-1, 0)}
    ]
    # A kernel has to take every layer; each may have another one.
    kernels = all(flash or cudnn for flash, cudnn, _ in found)
    return [kernels, all(unfused or kernels for *_, unfused in found)]


def test_every_family_is_here() -> None:
    assert set(HEADS) == set(FAMILIES)


@pytest.mark.parametrize("capability", [A100, H100, B200])
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("family", sorted(HEADS))
def test_its_layers_are_chosen_where_it_has_a_kernel_and_nowhere_else(
    family: str, size: int, capability: tuple[int, int]
) -> None:
    import_te()
    hf_config = tiny_models.ALL_FAMILIES[family](**HEADS[family])
    model = family_of(hf_config).transformer_arguments(hf_config)
    for dtype in DTYPES:
        config = TrainerConfig(train_dtype=dtype, context_parallel_size=size)
        device = Capabilities(cuda=True, transformer_engine=True, compute_capability=capability)
        ours = on_device(config, with_engine_for(hf_config, config, device)).transformer_impl
        has_kernels, has_any = engine_finds(model, config, dtype, capability)
        if ours == "transformer_engine":
            # The unfused attention would hold the scores of the longest sample for every one.
            assert has_kernels, (dtype, "chosen without a kernel")
        elif family != "qwen3_next" and not windows_do_not_divide(model, size):
            assert not has_kernels, (dtype, "a kernel is left unused")
        if dtype == "float32":
            assert has_any == (size == 1 and family != "gpt_oss")  # by the unfused one


def windows_do_not_divide(model: dict[str, Any], size: int) -> bool:
    """What `get_attention_backend` does not look at: the entry of its context parallelism does, see below."""
    return model.get("window_size") is not None and model["num_query_groups"] % size > 0


def enter(
    size: int,
    exchange: str,
    heads: int,
    groups: int,
    window: tuple[int, int],
    softmax: str = "vanilla",
) -> None:
    """Enter its context parallel attention with a packed row, as rank 0 of `size`, up to the first kernel."""
    import_te()
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    query, key, value = (
        torch.zeros(16, count, 64, dtype=torch.bfloat16) for count in (heads, groups, groups)
    )
    ends = torch.tensor([0, 16 * size], dtype=torch.int32)
    device = mock.patch.object(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, minor=0)
    )
    with device, fake_world(0, size, {"context_parallel_size": size}, Traffic()) as ranks:
        context_parallel.attn_forward_func_with_cp(
            True,
            *(query, key, value, ends, ends, 16 * size, 16 * size, ends, ends, 0.0),
            *(ranks.cp_group, list(range(size)), torch.cuda.Stream(), exchange),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            use_fused_attention=True,
            window_size=window,
            softmax_type=softmax,
        )


def test_windows_go_through_the_exchange_of_heads_alone() -> None:
    with pytest.raises(AssertionError, match="does not support sliding window"):
        enter(2, "p2p", 4, 2, (7, 0))
    with pytest.raises(AssertionError, match="is not supported"):
        enter(2, "all_gather", 4, 2, (7, 0))
    with pytest.raises(KernelCalled):
        enter(2, "a2a", 4, 2, (7, 0))


def test_heads_that_ranks_cannot_share_are_refused_by_both() -> None:
    with pytest.raises(AssertionError, match="heads needs to be divisible by CP size"):
        enter(4, "a2a", 4, 2, (7, 0))
    config = TrainerConfig(context_parallel_size=4, transformer_impl="transformer_engine")
    found = with_engine_for(
        tiny_models.tiny_mistral(num_attention_heads=4, num_key_value_heads=2),
        config,
        Capabilities(cuda=True, transformer_engine=True, compute_capability=H100),
    )
    with pytest.raises(ConfigError, match="cannot be divided by --context-parallel-size 4"):
        on_device(config, found)


def test_sinks_have_no_way_with_packed_rows() -> None:
    with pytest.raises(AssertionError, match="qkv_format = 'thd'"):
        enter(2, "a2a", 4, 2, (-1, 0), softmax="learnable")
