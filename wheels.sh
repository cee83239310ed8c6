#!/usr/bin/env bash
# Download into $WHEELS, as wheels, what the tests and benchmarks need but torch and Triton. Called by make wheels.
#   WHEELS     folder; it is made where there is none
#   PYTHON     interpreter whose pip downloads
#   TARGET     release of Python that the wheels are for; it need not be installed
#   PLATFORMS  tags of its platform, the newest glibc first
set -euo pipefail

# Prints the packages that `make gpu` names: those of the extra `test` with all that it includes, what builds the
# library, and what torch asks for besides CUDA, which has to fit constraints.txt too: torch 2.11 an older setuptools.
list_packages='
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
def packages(names):
    for name in names:
        if of_us := re.fullmatch(r"dualpipe\[(.*)\]", name):
            for extra in of_us[1].split(","):
                yield from packages(extras[extra])
        elif not re.match(r"(torch|triton)\b", name):
            yield name
of_torch = ["filelock", "fsspec", "jinja2", "networkx", "setuptools<82", "sympy", "typing_extensions"]
print(*packages(project["project"]["dependencies"] + extras["test"]), *project["build-system"]["requires"], *of_torch,
      sep="\n")'

download=("$PYTHON" -m pip download --only-binary=:all: --implementation cp --python-version "$TARGET" --dest "$WHEELS")
for platform in $PLATFORMS; do
    download+=(--platform "$platform")
done

mkdir -p "$WHEELS"
"$PYTHON" -c "$list_packages" > "$WHEELS/packages.txt"
grep -vE '^(torch|triton)==' constraints.txt > "$WHEELS/constraints.txt"
"${download[@]}" -r "$WHEELS/packages.txt" -c "$WHEELS/constraints.txt"
sed -n 's/^# with Triton before 3.7: //p' constraints.txt > "$WHEELS/before-triton-3.7.txt"
"${download[@]}" --no-deps -r "$WHEELS/before-triton-3.7.txt"
echo "$WHEELS has $(find "$WHEELS" -name '*.whl' | wc -l) wheels for Python $TARGET"
