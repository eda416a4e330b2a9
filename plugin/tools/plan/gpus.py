"""What a plan knows about GPUs: public figures of their makers' data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from plugin.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links.

    memory: bytes; tflops: dense bfloat16, 10^12 per second; link: bytes per second to GPUs of the
        same node, one direction; network: to other nodes, per GPU
    """

    name: str
    memory: int
    tflops: float
    link: float
    network: float


def _gpu(name: str, gib: float, tflops: float, link: float, network: float = 50) -> Gpu:
    return Gpu(name, int(gib * _GIB), tflops, link * 1e9, network * 1e9)


#: Memory: what torch can allocate from, as its out-of-memory errors state it ("has a total capacity
#: of ..."): H100 79.11 GiB (vllm-project/vllm issue 27508), H20 95.00 (modelscope/DiffSynth-Studio
#: issue 1238), RTX 4090 23.64 (ali-vilab/VGen issue 104), B200 178.35 (pytorch/ao pull request
#: 4002); others a little below nvidia-smi's total (A100 81,920 and 40,960 MiB, L40S 46,068 MiB in
#: modal-labs/modal-client pull request 2797).
#: FLOPs and links: data sheets of NVIDIA and AMD, dense (half of what is stated with sparsity) and
#: one direction of NVLink (A100 600, H100, H200 and H20 900, B200 1,800 GB/s in both), of MI300X's
#: Infinity Fabric (896 GB/s in both) or of PCIe 4.0 x16.
#: The makers' own pages could not be read; others that give their figures agree: A100 312 TFLOPS,
#: 300 + 300 GB/s, HGX B200 2,250, 2 x 900 (glennklockwood.com/garden/processors); H200 989, 900
#: (itkb.uw.cz); L40S 362.05, PCIe 4.0 with 64 GB/s in both (mullet.se); MI300X 896 in both
#: (gpu.blog). CUDA says of an A100 with 40 GB: 42,405,855,232 bytes (upb-pc2.atlassian.net).
#: Network: assumed, one port of 400 Gb/s per GPU, 200 or 100 with older and smaller ones.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 39.4, 312, 300, 25),
        _gpu("a100-80g", 79.2, 312, 300, 25),
        _gpu("h100-80g", 79.1, 989, 450),
        _gpu("h200-141g", 139.8, 989, 450),
        _gpu("h20-96g", 95.0, 148, 450),
        _gpu("b200-180g", 178.4, 2250, 900),
        _gpu("l40s-48g", 44.4, 362, 32, 12.5),
        _gpu("rtx4090-24g", 23.6, 165, 32, 12.5),
        _gpu("mi300x-192g", 191.0, 1307, 448),
    )
}


def gpu_named(name: str) -> Gpu:
    """An entry of the table; a `ConfigError` that names the nearest for anything else."""
    if name in GPUS:
        return GPUS[name]
    near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"--gpu {name} is not known; {hint}choose {', '.join(GPUS)}")
