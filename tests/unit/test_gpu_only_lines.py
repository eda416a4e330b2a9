"""What only a GPU runs is named, small, and shown with what checks it here."""

from __future__ import annotations

from tests.gpu_only_lines import GPU_ONLY, ROOT, all_lines, count, files_asking_for_cuda, table


def test_every_file_that_asks_for_cuda_is_in_the_table() -> None:
    missing = sorted(set(files_asking_for_cuda()) - {part.file for part in GPU_ONLY})
    assert not missing, f"add them to tests/gpu_only_lines.py, with what checks them: {missing}"


def test_less_than_a_twentieth_of_the_package_runs_on_gpus_only() -> None:
    assert count() < 0.05 * all_lines()


def test_the_documentation_shows_the_table() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    fix = "copy tests.gpu_only_lines.table() into docs/testing.md"
    assert f"<!-- gpu-only: begin -->\n{table()}\n<!-- gpu-only: end -->" in text, fix
