"""Versions of the weights as directories of safetensors files, for servers that share a disk."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class WeightDirectory:
    """Writes `<label>` directories below `root`; one that has this name is complete.

    A label names the weights among all jobs that ever wrote to the servers: it holds a random part
    and the version.
    """

    def __init__(self, root: str | Path, hf_config: Mapping[str, Any]) -> None:
        self._root = Path(root).resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        self._config = json.dumps(dict(hf_config))
        self._token = secrets.token_hex(6)
        self._partial = self._root / f"{self._token}.partial"
        self._buckets = 0
        self.label: str | None = None

    def path_of(self, label: str) -> str:
        """The directory of a complete version."""
        return str(self._root / label)

    @staticmethod
    def version_of(label: str) -> int:
        """The weight version that a label names."""
        return int(label.rpartition("-v")[2])

    def begin(self) -> None:
        """Start a version; what an unfinished one left is removed."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._buckets = 0
        self._partial.mkdir()

    def add(self, bucket: bytes | np.ndarray) -> None:
        """Write one more safetensors file of the version that was begun."""
        self._buckets += 1
        whole: Any = bucket
        (self._partial / f"model-{self._buckets:05d}.safetensors").write_bytes(whole)

    def finish(self, version: int) -> None:
        """Make the version visible under its label."""
        (self._partial / "config.json").write_text(self._config)
        self.label = f"{self._token}-v{version}"
        self._partial.rename(self._root / self.label)

    def remove_older(self) -> None:
        """Delete the earlier versions that this object wrote."""
        for directory in self._root.glob(f"{self._token}-v*"):
            if directory.name != self.label:
                shutil.rmtree(directory, ignore_errors=True)
