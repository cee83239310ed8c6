"""The sdist and the wheel: their files, their metadata, and a run with only the packages that they require."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import dualpipe
from plain_install import hide_undeclared

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "dualpipe", "examples", "kernels", "models", "tests")
FILES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt",
    "mkdocs.yml", "pyproject.toml", "setup.py", "setup.sh", "wheels.sh",
)
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def sources():
    """Return the files to ship, relative to the root."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {str(p.relative_to(ROOT)) for p in found if p.suffix != ".pyc"} | set(FILES)


def build(kind, tree, folder):
    """Build as `python -m build` and pip do, but without a network."""
    command = [sys.executable, "-P", "-c", BUILD, f"build_{kind}", folder]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the unpacked sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    for name in sources():
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
    sdist = build("sdist", folder / "copy", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tree = folder / sdist.name.removesuffix(".tar.gz")
    return tree, build("wheel", tree, folder)


@pytest.mark.slow
def test_the_sdist_has_all_sources(built):
    tree, _ = built
    assert {name for name in sources() if not (tree / name).is_file()} == set()


@pytest.mark.slow
def test_the_wheel_has_the_packages_and_nothing_else(built):
    _, wheel = built
    where = {"dualpipe": "dualpipe", "kernels": "dualpipe/kernels", "models": "dualpipe/models"}
    split = [name.partition("/") for name in sources()]
    expected = {f"{where[top]}/{rest}" for top, _, rest in split if top in where}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"dualpipe/py.typed", "dualpipe/schedule/page.html"} <= found


@pytest.mark.slow
def test_the_metadata_is_complete(built):
    _, wheel = built
    archive = zipfile.ZipFile(wheel)
    info = f"dualpipe-{dualpipe.__version__}.dist-info"
    said = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert said["Version"] == dualpipe.__version__ and said["Requires-Python"] == ">=3.11"
    assert said["License-Expression"] == "MIT" and said["License-File"] == "LICENSE"
    assert said["Description-Content-Type"] == "text/markdown" and said.get_payload().startswith("# dualpipe\n")
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert "dualpipe = dualpipe.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    needs = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    for name in ("torch", "einops", "safetensors", "numpy", "rich", "tokenizers", "xxhash"):
        assert any(line.startswith(f"{name}>=") for line in needs), name
    extras = {name: sorted(line.partition(">=")[0] for line in said.get_all("Requires-Dist")
                           if line.endswith(f'extra == "{name}"'))
              for name in ("viz", "hf", "remote")}
    assert extras == {
        "viz": ["matplotlib", "tensorboard"], "hf": ["jinja2", "peft", "transformers"], "remote": ["fsspec"],
    }


def made_by(target):
    """Return the commands that make would run for a target, with nothing made yet."""
    done = subprocess.run(["make", "--dry-run", "--always-make", "VENV=none", target], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target, extras", [
    ("train", ["viz"]), ("bench", ["viz"]), ("test", ["viz", "test"]), ("lint", ["viz", "lint"]),
    ("docs", ["viz", "docs"]), ("gpu", ["viz", "test"]), ("gpu-node", ["viz", "test"]),
])
def test_make_installs_what_a_target_needs_and_no_more(target, extras):
    assert re.findall(r"\bEXTRA=(\w+) bash setup\.sh", made_by(target)) == extras
    assert 'install -e ".[$EXTRA]"' in (ROOT / "setup.sh").read_text()


@pytest.fixture
def recorded_pip(tmp_path):
    """Return an interpreter in place of python3, and a function that returns the arguments of its pip."""
    calls = tmp_path / "calls"
    python = tmp_path / "python3.12"
    python.write_text(f"""#!/bin/sh
if [ "$1" = -m ]; then echo "$@" >> {calls}; else exec {sys.executable} "$@"; fi
""")
    python.chmod(0o755)
    return python, lambda: calls.read_text().splitlines()


def test_wheels_are_those_of_the_tests_without_torch(recorded_pip, tmp_path):
    python, calls = recorded_pip
    environment = {**os.environ, "PYTHON": str(python), "TARGET": "3.12", "PLATFORMS": "manylinux_2_28_x86_64",
                   "WHEELS": str(tmp_path / "wheels")}
    subprocess.run(["bash", "wheels.sh"], cwd=ROOT, env=environment, check=True, capture_output=True)
    packages, older = calls()
    for words in ("--only-binary=:all:", "--python-version 3.12", "--platform manylinux_2_28_x86_64", "packages.txt"):
        assert words in packages
    assert "--no-deps" in older and "numpy==2.3.5" in (tmp_path / "wheels/before-triton-3.7.txt").read_text()
    named = (tmp_path / "wheels/packages.txt").read_text().split()
    assert {"einops>=0.8", "pytest>=8", "transformers>=5.0", "zstandard>=0.22", "setuptools<82"} <= set(named)
    both = named + (tmp_path / "wheels/constraints.txt").read_text().splitlines()
    assert not [name for name in both if re.match(r"(torch|triton|dualpipe)\b", name)]


@pytest.mark.parametrize("triton, numpy", [("3.6.0", "2.3.5"), ("3.7.1", "2.4.6")])
def test_numpy_goes_by_the_release_of_triton(tmp_path, triton, numpy):
    """The environment lends torch and Triton; a folder of wheels replaces the index."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("""#!/bin/sh
case "$*" in
    list*) echo triton==TRITON ;;
    install*) echo "$@" ;;
    *venv*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pip" ;;
    *sysconfig*) dirname "$0" ;;
    *import*) printf '2.11.0+cu130\n/lent/site-packages\n' ;;
esac
""".replace("TRITON", triton))
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "TORCH": "", "EXTRA": "viz", "WHEELS": "some",
                   "VENV": str(tmp_path / "venv")}
    done = subprocess.run(["bash", "setup.sh"], cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    assert "--no-index --find-links some" in done.stdout
    lines = (tmp_path / "venv" / "constraints.txt").read_text().splitlines()
    assert f"numpy=={numpy}" in lines and "torch==2.11.0+cu130" in lines
    assert not any(line.startswith("triton==") for line in lines)


@pytest.mark.parametrize("extra, wheels, is_installed", [
    ("test", "", True), ("lint", "", False), ("test", "some", False),
])
def test_packages_without_their_dependencies_leave_those_of_the_environment(tmp_path, extra, wheels, is_installed):
    """Nothing that they ask for is resolved, and a failure does not stop the set-up."""
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text("""#!/bin/sh
echo "$@"
case "$*" in *--no-deps*) exit 1 ;; esac
""")
    pip.chmod(0o755)
    environment = {**os.environ, "PYTHON": "none", "TORCH": "", "EXTRA": extra, "WHEELS": wheels, "VENV": str(tmp_path)}
    done = subprocess.run(["bash", "setup.sh"], cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for file, packages in (
        ("tests/s3-requirements.txt", {"s3fs", "moto", "botocore"}),
        ("tests/schedule-requirements.txt", {"megatron-core", "colossalai"}),
    ):
        assert (f"install --no-deps --no-compile -r {file}" in done.stdout) == is_installed
        lines = (ROOT / file).read_text().splitlines()
        names = {line.partition("==")[0] for line in lines if not line.startswith("#")}
        assert packages <= names and not names & pinned
    assert ("the tests of S3 will be skipped" in done.stderr) == is_installed
    assert ("the tests against them will be skipped" in done.stderr) == is_installed


def test_each_mark_of_slow_tests_is_run_by_a_target():
    assert '-m "not slow and not gpu"' in made_by("test")
    assert '-m "slow and not long and not idle and not gpu"' in made_by("test-slow")
    assert '-m "not idle and not gpu"' in made_by("test-all") and "-m idle" in made_by("test-idle")
    assert "--numprocesses 0 -m gpu" in made_by("test-gpu"), "they share one card"
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "@pytest.mark.idle\n" in path.read_text()]
    assert marked
    for path in marked:
        assert f" {path.relative_to(ROOT)} " in made_by("test-idle")


@pytest.mark.long
@pytest.mark.slow
def test_an_installed_wheel_trains_and_passes_the_tests_of_the_sdist(built, tmp_path):
    tree, wheel = built
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    purelib = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                             check=True, capture_output=True, text=True).stdout.strip()
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    Path(purelib, "lent.pth").write_text("\n".join(lent))  # its packages, but not what its .pth files make importable
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)

    hide_undeclared(Path(purelib))
    options = ["--data.path", "docs/training.md", "--data.validation_fraction", "0", "--train.steps", "2"]
    command = [tmp_path / "venv/bin/dualpipe", "train", "examples/tiny-cpu.toml", *options]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout and "pip install tensorboard matplotlib" in done.stdout
    Path(purelib, "sitecustomize.py").unlink()

    files = ["tests/schedule/test_types.py", "tests/train/config/test_load.py", "tests/plan/test_activations.py"]
    command = [python, "-P", "-m", "pytest", "-q", "-m", "not slow", *files]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
