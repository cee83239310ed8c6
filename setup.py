"""Packaging of dualpipe.

`kernels/` and `models/` are top-level folders of the repository but subpackages of the import name: a top-level import
package called `kernels` would shadow the Hugging Face package that `transformers` looks for.
"""

from setuptools import find_packages, setup

PACKAGE_DIR = {"dualpipe": "dualpipe", "dualpipe.kernels": "kernels", "dualpipe.models": "models"}

EXTRAS = {
    "train": ["tyro>=1.0", "rich>=13", "tensorboard>=2.16", "tokenizers>=0.20", "matplotlib>=3.8"],
    "viz": ["matplotlib>=3.8"],
    "data": ["zstandard>=0.22", "pyarrow>=16"],
}
EXTRAS["test"] = [
    *EXTRAS["train"], *EXTRAS["data"], "pytest>=8", "pytest-timeout>=2.3", "transformers>=5.0", "ruff>=0.9",
]  # fmt: skip
REQUIRES = ["torch>=2.11", "triton; platform_system == 'Linux'", "einops>=0.8", "safetensors>=0.4", "numpy>=1.26"]

setup(
    name="dualpipe",
    version="0.1.0",
    description="Mixture-of-experts training on a V-shaped bidirectional pipeline (DualPipeV)",
    license="MIT",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["dualpipe", "dualpipe.*"]),
        *("dualpipe." + p for p in find_packages(include=["kernels", "kernels.*", "models", "models.*"])),
    ],
    package_dir=PACKAGE_DIR,
    package_data={"dualpipe": ["py.typed"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["dualpipe = dualpipe.cli:main"]},
)
