"""Transformer Engine's own Python on a machine without GPUs: its compiled extension is replaced by names that compute nothing.

What is real: every module, class, parameter, mark and assertion of its Python, and the choice of an attention backend. What is not:
kernels, and the part of that choice that cuDNN makes in C++ (`fused_attention`).
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

#: What `make venv-gpu` installs.
FLASH_ATTN = "2.8.3"


@dataclass(frozen=True)
class _Value:
    """A value of one of the extension's enumerations."""

    kind: str
    name: str

    def __int__(self) -> int:
        return hash(self.name) & 0xFF


class _Kind(type):
    """A class of the extension: whatever it is asked for is a value of it."""

    def __getattr__(cls, name: str) -> _Value:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Value(cls.__name__, name)


class _Extension(types.ModuleType):
    """`transformer_engine_torch`: classes begin with capitals, everything else is a kernel."""

    __all__ = ("get_cudnn_version",)

    @staticmethod
    def get_cudnn_version() -> int:
        """That of torch 2.13.0's CUDA build: 9.20."""
        return 92000

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _Kind(name, (), {}) if name[0].isupper() else _kernel(name)
        setattr(self, name, made)
        return made


class KernelCalled(Exception):
    """The Python got as far as a kernel."""


def _kernel(name: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise KernelCalled(name)

    return call


def import_te() -> Any:
    """`transformer_engine.pytorch`, with flash-attn 2 believed to be there."""
    if "transformer_engine.pytorch" in sys.modules:
        return sys.modules["transformer_engine.pytorch"]
    # Its own switch for not loading its libraries, made for building it.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected a PyTorch installation")
        common = importlib.import_module("transformer_engine.common")
    sys.modules["transformer_engine_torch"] = _Extension("transformer_engine_torch")
    common.load_framework_extension = lambda framework: None
    engine = importlib.import_module("transformer_engine.pytorch")
    attention = _attention()
    attention.FlashAttentionUtils.version = Version(FLASH_ATTN)
    attention.FlashAttentionUtils.set_flash_attention_version()
    return engine


def _attention() -> Any:
    return importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils"
    )


def fused_attention(capability: tuple[int, int], head_dims: tuple[int, int]) -> Any:
    """What cuDNN 9.20 takes of packed rows in half precision, read from Transformer Engine's `fused_attn.cpp`.

    From sm_90 on; heads up to 128, on sm_90 up to 256, on sm_100 also 192 with values of 128.
    """
    kinds = sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend
    small = max(head_dims) <= 128
    on_hopper = capability == (9, 0) and max(head_dims) <= 256
    latent = capability >= (10, 0) and head_dims == (192, 128)
    fits = capability >= (9, 0) and (small or on_hopper or latent)
    return kinds.NVTE_F16_arbitrary_seqlen if fits else kinds.NVTE_No_Backend


def backends(capability: tuple[int, int], **given: Any) -> list[bool]:
    """Whether flash-attn, cuDNN's and the unfused attention take packed rows on a device of `capability`.

    given: fields of Transformer Engine's `AttentionParams`
    """
    import torch

    attention = _attention()
    heads = given["head_dim_qk"], given["head_dim_v"]
    extension = sys.modules["transformer_engine_torch"]
    extension.get_fused_attn_backend = lambda *_: fused_attention(capability, heads)
    attention.get_device_compute_capability = lambda: capability
    params = attention.AttentionParams(
        qkv_type=torch.Tensor,
        qkv_layout="thd_thd_thd",
        batch_size=4,
        max_seqlen_q=4096,
        max_seqlen_kv=4096,
        attn_mask_type="padding_causal",
        core_attention_bias_shape=None,
        pad_between_seqs=False,
        attention_dropout=0.0,
        deterministic=False,
        is_training=True,
        **given,
    )
    flash, _, fused, _, unfused, _ = attention.get_attention_backend(params)
    return [bool(flash), bool(fused), bool(unfused)]
