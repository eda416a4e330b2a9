"""An environment for the peers: their packages without dependencies, on top of the one that runs this.

Nothing is installed into the project's own environment, and no peer can bring another PyTorch.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / ".venv-bench"
REQUIREMENTS = Path(__file__).with_name("peer_requirements.txt")


def run_inside(module: str, arguments: list[str]) -> int:
    """Build the environment if it is missing, then run `python -m module` in it."""
    python = DIRECTORY / "bin" / "python"
    if not python.exists():
        build()
    return subprocess.run([str(python), "-m", module, *arguments], cwd=ROOT).returncode


def build() -> None:
    """Create `.venv-bench`; a peer that cannot be installed is left out and reported as absent."""
    subprocess.run([sys.executable, "-m", "venv", str(DIRECTORY)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = DIRECTORY / "lib" / version / "site-packages"
    # With its .pth files: that environment may stand on another one itself.
    below = sysconfig.get_path("purelib")
    (own / "project.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    pip = [str(DIRECTORY / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    for line in REQUIREMENTS.read_text().splitlines():
        if line and not line.startswith("#"):
            subprocess.run([*pip, line], check=False)
