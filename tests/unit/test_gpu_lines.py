"""What only a GPU runs is a small and known part of the package."""

from __future__ import annotations

from pathlib import Path

from tests import gpu_lines


def test_functions_that_use_a_gpu_are_below_three_percent_of_the_package() -> None:
    functions, total = gpu_lines.found()
    assert sum(function.lines for function in functions) < 0.03 * total


def test_a_function_counts_whole_if_a_line_of_it_names_the_device(tmp_path: Path) -> None:
    file = tmp_path / "plugin" / "one.py"
    file.parent.mkdir()
    file.write_text(
        "import torch\n\n\ndef waits():\n    # a comment\n    torch.cuda.synchronize()\n    return 1\n\n\n"
        'def tells():\n    """Says torch.cuda in its documentation alone."""\n    return 2\n'
    )
    root, gpu_lines.ROOT = gpu_lines.ROOT, tmp_path
    try:
        [found] = gpu_lines.functions_of(file)
    finally:
        gpu_lines.ROOT = root
    assert (found.name, found.lines) == ("waits", 3)
