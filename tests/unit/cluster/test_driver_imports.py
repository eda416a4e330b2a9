"""What the driver loads before its actors start: neither Megatron nor transformers."""

from __future__ import annotations

import subprocess
import sys

CHECKS_THE_DEFAULT_JOB = """
import sys
from plugin.config import JobConfig
from plugin.controller.job import check_job
check_job(JobConfig.from_sources({}))
print([name for name in ("megatron", "mbridge", "transformers", "ray") if name in sys.modules])
"""


def test_the_default_job_is_checked_without_megatron_and_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECKS_THE_DEFAULT_JOB], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_command_line_is_read_without_torch() -> None:
    code = "import sys, plugin.commands.train, plugin.cluster.ray_cluster as _\n"
    code += "print([name for name in ('torch', 'ray', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_rank_loads_its_weight_tables_without_the_compiler_and_mbridge_stays_whole() -> None:
    code = """
import sys
from plugin.megatron_backend.cpu_runtime import import_megatron
import_megatron()
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.hf_weights.bridge import load_table
tables = [load_table(family.weights) for family in FAMILIES.values()]
print("torch._dynamo" in sys.modules)
from mbridge import AutoBridge
from mbridge.models import Qwen3Bridge
print(Qwen3Bridge in tables)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stdout + done.stderr
