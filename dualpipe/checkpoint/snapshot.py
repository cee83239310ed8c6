"""The content of a checkpoint on one rank at the time of a save: its tensors, and their description as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualpipe import __version__
from dualpipe.checkpoint.assign import Offer
from dualpipe.checkpoint.manifest import Manifest
from dualpipe.checkpoint.optimizer_state import tensor_to_number
from dualpipe.checkpoint.state import CheckpointState, TensorPart, capture_random, parts_of
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import TRAFFIC
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import raise_for

_FLOAT32_OR_WIDER = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class SaveRequest(NamedTuple):
    """The arguments of `Checkpoints.save`."""

    state: CheckpointState
    step: int
    plan: DTypePlan | None
    config: Any
    extra: Any


class Snapshot(NamedTuple):
    """The content of a checkpoint on this rank. The tensors share memory with the run."""

    manifest: Manifest  # sequence, time and files are not known yet
    random: str  # random state, as JSON
    parts: dict[str, TensorPart]
    offers: dict[str, Offer]

    @classmethod
    def take(cls, request: SaveRequest, layout: dict[str, int], checksum: str) -> Snapshot:
        """Take a snapshot of a run; raise ValueError if it cannot be saved."""
        manifest = _describe(request, layout, checksum)
        parts = parts_of(request.state)
        _check_float32(parts, manifest.dtypes)
        offers = {name: Offer(part.dtype, part.shape, part.box) for name, part in parts.items()}
        return cls(manifest, json.dumps(capture_random()), parts, offers)


def _check_float32(parts: Mapping[str, TensorPart], dtypes: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ValueError for tensors that the dtype plan saves in float32 but that have a narrower dtype."""
    problems = []
    for name, part in parts.items():
        is_saved_in_float32 = dtypes.get(name, {}).get("save") == "fp32"
        if is_saved_in_float32 and isinstance(part.dtype, torch.dtype) and part.dtype not in _FLOAT32_OR_WIDER:
            problems.append(f"{name} is stored in {short_name(part.dtype)}")
    raise_for("what the dtype plan saves in float32 must be stored so:", problems)


def _describe(request: SaveRequest, layout: dict[str, int], checksum: str) -> Manifest:
    """Return this rank's description of a checkpoint. Later changes of config and extra do not affect it."""
    if type(request.step) is not int or request.step < 0:
        raise ValueError(f"step must be a number of optimizer steps, 0 or more; got {request.step!r}")
    return Manifest(
        step=request.step, sequence=0, saved_at="", layout=layout,
        own_dimensions=[name for name in layout if name not in ("world", *TRAFFIC)],
        versions={"dualpipe": __version__, "torch": torch.__version__, "python": platform.python_version()},
        dtypes=_dtype_names(request.plan),
        config=_json_copy("config", request.config), extra=_json_copy("extra", request.extra),
        checksum=checksum, files={},
    )


def _dtype_names(plan: DTypePlan | None) -> dict[str, dict[str, str]]:
    """Return the dtypes of a plan by tensor and use, such as {"storage": "bf16", "compute": "bf16", "save": "bf16"}.

    A quantized tensor also has the name of its format, under "gathered" or "stored".
    """
    if plan is None:
        return {}
    names = {}
    for name, dtypes in plan.tensors.items():
        names[name] = {use: short_name(getattr(dtypes, use)) for use in ("storage", "compute", "save")}
        if dtypes.format:
            names[name]["gathered" if dtypes.gathered else "stored"] = dtypes.format.name
    return names


def _json_copy(name: str, value: Any) -> Any:
    """Return a value as it will be read from JSON; raise ValueError for one that JSON cannot hold."""
    try:
        return json.loads(json.dumps(value, default=tensor_to_number))
    except TypeError as error:
        raise ValueError(f"{name} must be what JSON can hold, as numbers, strings, lists and dicts: {error}") from None
