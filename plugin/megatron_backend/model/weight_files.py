"""Opening the weight files of a Hugging Face directory; imports nothing of Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugin.errors import WeightError


def open_weights(file: Path) -> Any:
    """An open safetensors file; reads its header, which also shows whether it is whole."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"{file} is not a whole safetensors file ({error}); copy or download it again"
        ) from error
