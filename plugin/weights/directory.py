"""Versions of the weights as directories of safetensors files, for servers that share a disk.

A tensor is a file that is named by the checksum of its content. A version is a directory of links
to such files, so tensors that have not changed are not written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from plugin.errors import ParallelError
from plugin.weights.buckets import bucket_entries


class WeightDirectory:
    """Writes `<label>` directories below `root`; one that has this name is complete.

    written_bytes: of the version written last; reused tensors are not counted
    """

    def __init__(self, root: str | Path, hf_config: Mapping[str, Any]) -> None:
        self._root, token = Path(root).resolve(), secrets.token_hex(6)
        self._tensors = self._root / f"{token}.tensors"
        self._partial = self._root / f"{token}.partial"
        self._tensors.mkdir(parents=True)
        self._labels: list[str] = []
        self._config = json.dumps(dict(hf_config))
        self._files: list[str] = []
        self.written_bytes = 0

    def path_of(self, label: str) -> str:
        """The directory of a complete version."""
        return str(self._root / label)

    def begin(self) -> None:
        """Start a version; what an unfinished one left is removed."""
        shutil.rmtree(self._partial, ignore_errors=True)
        with self._writing():
            self._partial.mkdir()
        self._files, self.written_bytes = [], 0

    def add(self, bucket: bytes | np.ndarray) -> None:
        """Add the tensors of a safetensors bucket to the version that was begun."""
        for name, entry, content in bucket_entries(bucket):
            header = json.dumps({name: entry | {"data_offsets": [0, len(content)]}}).encode()
            header += b" " * (-len(header) % 8)
            with self._writing():
                self._add(len(header).to_bytes(8, "little") + header, content.data)

    def _add(self, header: bytes, content: memoryview) -> None:
        digest = hashlib.sha256(header)
        digest.update(content)
        file = self._tensors / digest.hexdigest()
        if not _is_whole(file):
            partial = file.with_suffix(".partial")
            try:
                with partial.open("wb") as writer:
                    writer.write(header)
                    writer.write(content)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
            # The file may be linked from a version that a server reads, so it is not written over.
            partial.replace(file)
            self.written_bytes += len(header) + len(content)
        self._files.append(file.name)
        _link(file, self._partial / f"model-{len(self._files):05d}.safetensors")

    def finish(self, label: str) -> None:
        """Make the version visible under its label."""
        if label in self._labels:  # the version came again, because it was damaged
            shutil.rmtree(self._root / label, ignore_errors=True)
            self._labels.remove(label)
        with self._writing():
            (self._partial / "config.json").write_text(self._config)
            self._partial.rename(self._root / label)
        self._labels.append(label)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the disk refuses into a `ParallelError`, so that the engine is tried again."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise ParallelError(
                f"--rollout-weights-dir: a version of the weights cannot be written to "
                f"{self._root} ({error.strerror or error}), after {self.written_bytes:,} bytes of "
                "it; the directory needs room for two versions of the model: make room, or choose "
                "another directory"
            ) from error

    def remove_older(self, label: str) -> None:
        """Delete the versions before `label`, and the tensors that it does not have."""
        for older in self._labels[: self._labels.index(label)]:
            shutil.rmtree(self._root / older, ignore_errors=True)
        self._labels = [label]
        kept = set(self._files)
        for file in self._tensors.iterdir():
            if file.name not in kept:
                file.unlink(missing_ok=True)


def read_directory(directory: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version, one file in memory at a time."""
    for file in sorted(Path(directory).glob("*.safetensors")):
        yield from safetensors.torch.load_file(file).items()


def _is_whole(file: Path) -> bool:
    """Whether the file is there, with the content that its name promises."""
    try:
        with file.open("rb") as reader:
            return hashlib.file_digest(reader, "sha256").hexdigest() == file.name
    except FileNotFoundError:
        return False


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # a file system without hard links
        place.symlink_to(file)
