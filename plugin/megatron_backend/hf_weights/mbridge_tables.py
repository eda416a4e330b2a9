"""mbridge's weight tables, imported without every model that comes with them.

`import mbridge` imports all of its models; the vision ones load generation code of transformers and
torch's compiler, seconds for every rank. The tables are modules that need none of that. Not needed
any more once mbridge imports its models when they are asked for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from plugin.config.import_paths import load_function
from plugin.errors import ConfigError


@contextmanager
def _bare_packages() -> Iterator[None]:
    """Within it, mbridge's packages only say where their modules are; then they are as before."""
    if "mbridge" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("mbridge")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("mbridge is not installed; it maps the weights: pip install mbridge")
    root = Path(spec.submodule_search_locations[0])
    for name, place in (("mbridge", root), ("mbridge.models", root / "models")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(place)]
    try:
        yield
    finally:
        # A program that imports mbridge itself gets it whole.
        del sys.modules["mbridge"], sys.modules["mbridge.models"]


with _bare_packages():
    from mbridge.core.parallel_states import ParallelStates

__all__ = ["ParallelStates", "load_table"]


def load_table(path: str) -> Any:
    """The class at an import path such as `mbridge.models.qwen3:Qwen3Bridge`."""
    with _bare_packages():
        return load_function(path)
