"""Dependencies point one way, and the core needs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugin"

CORE = {
    "errors",
    "host_storage",
    "ragged",
    "json_lines",
    "vocabulary_ids",
    "batch_types",
    "config",
    "sharding",
    "ppo_utils",
    "logprobs",
    "loss",
}
#: What everybody who makes samples sees of the core.
TYPES = {"errors", "json_lines", "host_storage", "ragged", "batch_types", "config"}
TASKS = {*TYPES, "tasks", "rewards", "environments", "engines", "weights"}
ROLLOUT = {"tasks", "rewards", "environments", "engines", "teachers", "weights"}
#: What the modules of a layer may import of this package, at the top or inside a function: a lazy import must not
#: hide a cycle. Commands name their module by path, so that `--help` stays instant.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "json_lines": set(),
    "host_storage": set(),
    "ragged": set(),
    "vocabulary_ids": {"errors", "ragged"},
    "batch_types": {"errors", "ragged", "vocabulary_ids"},
    "config": {"errors", "json_lines"},
    "sharding": {"errors", "ragged", "batch_types", "config"},
    "ppo_utils": {"errors", "ragged", "batch_types", "config", "sharding"},
    "logprobs": {"errors", "ragged", "batch_types", "config", "sharding", "ppo_utils"},
    "loss": CORE,
    "megatron_backend": CORE,
    "adapters": CORE,
    "observe": CORE,
    "weights": {"errors"},
    **dict.fromkeys(("tasks", "rewards", "environments"), TASKS),
    "engines": {*TYPES, "weights"},
    "teachers": {*TYPES, "engines"},
    "cluster": {*CORE, "megatron_backend", *ROLLOUT, "observe"},
    "controller": {*CORE, "megatron_backend", *ROLLOUT, "observe", "cluster"},
    "tools": {*CORE, "megatron_backend", *ROLLOUT, "observe", "cluster", "controller"},
    "commands": {*CORE, "megatron_backend", *ROLLOUT, "observe", "cluster", "controller", "tools"},
    "cli": {"errors", "config"},
    "__main__": {"cli"},
    "__init__": set(),
}

#: Libraries that belong to one layer; everywhere else they are imported inside functions or not at all.
OUTSIDE = {
    "megatron": {"megatron_backend"},
    "ray": {"cluster"},
    "mbridge": {"megatron_backend"},
    **{name: {"adapters"} for name in ("trl", "verl", "skyrl", "prime_rl")},
}


def modules() -> list[Path]:
    return sorted(PLUGIN.rglob("*.py"))


def layer_of(file: Path) -> str:
    first = file.relative_to(PLUGIN).parts[0]
    return first.removesuffix(".py")


@cache
def imports(file: Path, *, lazy: bool) -> set[str]:
    """Full names of everything imported outside `if TYPE_CHECKING`; with `lazy` also inside functions."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if not lazy and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
            if node.module == "plugin":
                found.update(f"plugin.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text()))
    return found


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_layers_below_its_own(file: Path) -> None:
    layer = layer_of(file)
    imported = {
        name.split(".")[1]
        for name in imports(file, lazy=True)
        if name.startswith("plugin.") and name != "plugin.__version__"
    }
    assert imported <= ALLOWED[layer] | {layer}, f"{layer} may import {sorted(ALLOWED[layer])}"


@pytest.mark.parametrize("library, layers", OUTSIDE.items())
def test_a_library_is_imported_by_its_layer_only(library: str, layers: set[str]) -> None:
    users = {
        layer_of(file)
        for file in modules()
        if any(name.split(".")[0] == library for name in imports(file, lazy=False))
    }
    assert users <= layers


def test_configuration_and_errors_import_without_torch() -> None:
    run_isolated(
        "import plugin.config, plugin.errors, sys\nassert 'torch' not in sys.modules\n", "torch"
    )


USE_THE_CORE = """
import sys
import torch
import plugin.loss, plugin.ppo_utils, plugin.batch_types
from plugin.config import LossConfig

batch = {
    "unconcat_tokens": [torch.tensor([1, 2, 3])],
    "total_lengths": [3],
    "response_lengths": [2],
    "loss_masks": [torch.ones(2)],
    "advantages": [torch.tensor([1.0, -1.0])],
    "rollout_log_probs": [torch.tensor([-1.0, -2.0])],
    "log_probs": [torch.tensor([-1.5, -1.5])],
}
logits = torch.randn(1, 3, 5, requires_grad=True)
path = "plugin.ppo_utils.rejection_function,plugin.ppo_utils.vanilla_tis_function"
config = LossConfig(use_tis=True, custom_tis_function_path=path, entropy_coef=0.1)
loss, metrics = plugin.loss.policy_loss_function(config, batch, logits, torch.sum)
loss.backward()
assert logits.grad.abs().sum() > 0 and "tis" in metrics
print("loss", float(loss))
"""


def run_isolated(source: str, *blocked: str) -> str:
    """Run `source` in a process where importing any of `blocked` raises ImportError."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {set(blocked)!r}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", block + source],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_core_computes_a_loss_with_torch_alone() -> None:
    blocked = ("megatron", "ray", "transformers", "matplotlib", "yaml", "mbridge", "tensorboard")
    assert run_isolated(USE_THE_CORE, *blocked).startswith("loss ")
