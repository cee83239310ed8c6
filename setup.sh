#!/usr/bin/env bash
# Install what one extra of pyproject.toml needs into the virtual environment $VENV. Called by make.
#   EXTRA   viz, which makes the environment anew, or test or lint, which add to it
#   PYTHON  interpreter to use (3.11 or newer)
#   TORCH   a torch release to install instead of the pinned one
#   WHEELS  a folder that `make wheels` has filled: everything but torch and Triton comes from there, without an index
# An interpreter that already has torch >= 2.11 lends its packages; no other torch is downloaded in its place.
set -euo pipefail
constraints=$VENV/constraints.txt  # exact versions, for all extras

# Prints the release of the interpreter's torch, and then the folders of its packages; fails where it has none.
describe_torch='
import importlib.metadata, sys, torch
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
print(importlib.metadata.version("torch"), *(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")'

from=()
if [ -n "${WHEELS:-}" ]; then
    [ -z "$TORCH" ] || { echo "TORCH=$TORCH: $WHEELS has no torch; leave TORCH out, or WHEELS" >&2; exit 2; }
    from=(--no-index --find-links "$WHEELS")
fi

if [ "$EXTRA" = viz ]; then
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    if [ -n "$TORCH" ]; then
        { grep -vE '^(torch|triton)==' constraints.txt; echo "torch==$TORCH"; } > "$constraints"
        "$VENV/bin/pip" install "torch==$TORCH" -c "$constraints"
    elif lent=$("$PYTHON" -c "$describe_torch" 2> /dev/null); then
        # Not --system-site-packages: in a virtual environment that would show the packages of the interpreter below it.
        tail -n +2 <<< "$lent" > "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
        { grep -vE '^(torch|triton)==' constraints.txt; echo "torch==$(head -n 1 <<< "$lent")"; } > "$constraints"
    elif [ -n "${WHEELS:-}" ]; then
        echo "$PYTHON has no torch 2.11 or newer, and $WHEELS has none; name an interpreter that has: PYTHON=python3.12" >&2
        exit 2
    else
        cp constraints.txt "$constraints"
    fi
    # The interpreter of Triton before 3.7, which torch 2.11 comes with, fails with numpy 2.4.
    case $("$VENV/bin/pip" list --format freeze | grep '^triton==') in
        triton==[0-2].* | triton==3.[0-6].*)
            sed -i -e '/^numpy==/d' -e 's/^# with Triton before 3.7: //' "$constraints" ;;
    esac
fi
"$VENV/bin/pip" install -e ".[$EXTRA]" -c "$constraints" "${from[@]}"
# Without --no-deps, botocore would take python-dateutil back to 2. Without these packages, the tests of S3 are skipped.
if [ "$EXTRA" = test ] && [ -z "${WHEELS:-}" ]; then
    "$VENV/bin/pip" install --no-deps --no-compile -r tests/s3-requirements.txt ||
        echo "setup.sh: s3fs and moto cannot be installed; the tests of S3 will be skipped" >&2
    # Without --no-deps, Colossal-AI would bring torch 2.5. Without both, tests of tests/schedule/test_others.py skip.
    "$VENV/bin/pip" install --no-deps --no-compile -r tests/schedule-requirements.txt ||
        echo "setup.sh: Megatron-Core and Colossal-AI cannot be installed; the tests against them will be skipped" >&2
fi
