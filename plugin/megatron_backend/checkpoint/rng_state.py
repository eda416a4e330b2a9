"""Every random generator that a training rank draws from, as plain tensors."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups

_TRACKER = "tracker."


def rng_state() -> dict[str, Tensor]:
    """States of python's, numpy's and torch's generators and of Megatron's tracker, by name.

    Integers and bytes only, so they fit into a safetensors file.
    """
    _, words, gauss_next = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        # The last value of `words` is the position. A cached Gaussian is NaN where there is none.
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [float("nan") if gauss_next is None else gauss_next], dtype=torch.float64
        ),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().cpu()
    for name, tracked in get_cuda_rng_tracker().get_states().items():
        # The tracker for CUDA graphs holds generators instead of tensors.
        is_generator = isinstance(tracked, torch.Generator)
        state[_TRACKER + name] = (tracked.get_state() if is_generator else tracked).cpu()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Undo everything drawn since `rng_state` returned `state`."""
    gauss = float(state["python_gauss"][0])
    words = tuple(int(word) for word in state["python"].tolist())
    random.setstate((3, words, None if gauss != gauss else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"][0])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = get_cuda_rng_tracker()
    current = tracker.get_states()
    for name, value in state.items():
        if name.startswith(_TRACKER):
            tracked = name.removeprefix(_TRACKER)
            if isinstance(current.get(tracked), torch.Generator):
                current[tracked].set_state(value)
            else:
                current[tracked] = value
    tracker.set_states(current)


def reseed(seed: int, groups: ParallelGroups) -> None:
    """Seed all generators with one number that all ranks share; Megatron adds each rank's place."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=groups.tp_rank, ep_rank=groups.ep_rank, etp_rank=groups.etp_rank
    )
