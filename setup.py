"""Package definition of megatron-tis (import name: plugin)."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    for line in (ROOT / "plugin" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("plugin/__init__.py has no __version__")


setup(
    name="megatron-tis",
    version=version(),
    description="Megatron-Core backend plugin for RL post-training with loadable off-policy corrections",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["plugin", "plugin.*"]),
    package_data={
        "plugin": ["py.typed"],
        "plugin.logprobs.kernels": ["*.cpp"],
        "plugin.observe": ["page/*"],
    },
    install_requires=["torch>=2.6", "numpy", "pyyaml"],
    extras_require={
        "megatron": [
            "megatron-core>=0.16.1",
            "mbridge>=0.15.1",
            "transformers>=5",
            "einops",
            "safetensors",
        ],
        "job": [
            "ray[default]>=2.40",
            "transformers>=5",
            "tensorboard",
            "tqdm",
            "matplotlib",
            "pyarrow",
            "jsonschema>=4.18",
        ],
        "math": ["math-verify>=0.9"],
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12", "flash-attn<=2.8.3"],
        # vLLM asks for one torch exactly: 0.32 for the 2.13.0 that the extra `gpu` is built for here.
        "vllm": ["vllm>=0.32,<0.33"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["megatron-tis = plugin.cli:main"]},
)
