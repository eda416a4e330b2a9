"""These tests need Transformer Engine's Python without its libraries (`make test-te`); elsewhere there are none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from tests.te.python_of_te import import_te


def _is_whole() -> bool:
    try:
        importlib.metadata.distribution("transformer_engine_torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if importlib.util.find_spec("transformer_engine") is None or _is_whole():
    collect_ignore_glob = ["test_*"]
else:
    import_te()  # before Megatron-Core looks for it
