"""The state of a rank's random number generators, as JSON."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch

from dualpipe.device import random_state, set_random_state


def capture() -> dict[str, Any]:
    """Of Python's, NumPy's and torch's global generators; of a GPU that of the current device."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(), "torch": _text(torch.get_rng_state()),
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],
    }
    cuda = random_state()
    return state if cuda is None else state | {"cuda": _text(cuda)}


def restore(state: dict[str, Any]) -> None:
    """Continue where `capture` was called."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state:
        set_random_state(_bytes(state["cuda"]))


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators with a number that depends on these three alone."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
