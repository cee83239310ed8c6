#!/usr/bin/env bash
# Make the virtual environment $VENV with everything that training and tests need. Called by make.
#   PYTHON  interpreter to use (3.11 or newer)
#   TORCH   a torch release to install instead of the pinned one
# An interpreter that already has torch >= 2.11 shares it with the environment; nothing is downloaded in its place.
set -euo pipefail
has_torch='import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)'
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT

rm -rf "$VENV"
if [ -n "$TORCH" ]; then
    "$PYTHON" -m venv "$VENV"
    grep -vE '^(torch|triton)==' constraints.txt > "$constraints"
    "$VENV/bin/pip" install "torch==$TORCH" -c "$constraints"
elif "$PYTHON" -c "$has_torch" 2> /dev/null; then
    "$PYTHON" -m venv --system-site-packages "$VENV"
    grep -vE '^(torch|triton)==' constraints.txt > "$constraints"
else
    "$PYTHON" -m venv "$VENV"
    cp constraints.txt "$constraints"
fi
"$VENV/bin/pip" install -e '.[test]' -c "$constraints"
