"""Which packages there are; all else is in pyproject.toml.

`kernels/` and `models/` are top-level folders of the repository but subpackages of the import name: a top-level import
package called `kernels` would shadow the Hugging Face package that `transformers` looks for.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["dualpipe", "dualpipe.*"]),
        *("dualpipe." + p for p in find_packages(include=["kernels", "kernels.*", "models", "models.*"])),
    ],
    package_dir={"dualpipe": "dualpipe", "dualpipe.kernels": "kernels", "dualpipe.models": "models"},
)
