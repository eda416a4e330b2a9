"""The comparison of engines runs with a model directory and says what each of them takes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.generation_bench import measure_engines
from tests.parallel.tiny_models import FAMILIES, hf_model


def test_engines_are_compared_with_a_model_of_ones_own(tmp_path: Path) -> None:
    hf_model(FAMILIES["qwen3"](max_position_embeddings=128)).save_pretrained(tmp_path)
    names = ["transformers engine", "generate"]
    results = measure_engines(str(tmp_path), "float32", 3, 2, 1, names)
    assert list(results) == [*names, "floor"]
    for name in names:
        assert results[name]["prompts, processor"] > 0
    assert results["floor"]["products"] > 0 and results["floor"]["weights read once"] > 0
