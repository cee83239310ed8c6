"""The model of `dualpipe parity --model`: from a function of the user's, or a transformers directory."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dualpipe.runtime.errors import nearest
from dualpipe.train.model_parity.models.cut_model import ComparedModel, CutModel


def find_model(text: str) -> ComparedModel:
    """Return the model for the value of `--model`: "module:function" or a transformers directory.

    Modules in the working directory are found too. Raises ValueError for other text, if the function does not exist, or
    if it returns something other than a `CutModel`.
    """
    if Path(text).is_dir():
        try:
            from dualpipe.train.model_parity.models.hub_model import HubModel
        except ImportError as error:
            raise ValueError(f"--model {text!r}: a directory needs transformers, which cannot be imported ({error}); "
                             "install it, or give module:function") from error
        return HubModel(Path(text))
    module_name, _, function_name = text.rpartition(":")
    if not module_name or not function_name:
        raise ValueError(f"--model {text!r} is no directory and no module:function; give a function that returns a "
                         "dualpipe.train.model_parity.CutModel, or a directory with config.json and safetensors")
    function = _find_function(text, module_name, function_name)
    torch.manual_seed(0)  # the same weights on every rank, unless the function wants others
    model = function()
    if not isinstance(model, CutModel):
        raise ValueError(f"--model {text!r} returned a {type(model).__name__}; it must return a "
                         "dualpipe.train.model_parity.CutModel")
    _check_fields(text, model)
    return model


def _find_function(text: str, module_name: str, function_name: str) -> Callable[[], Any]:
    """Return a function by the names of its module and its own."""
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)  # last: a folder here must not hide an installed package of the same name
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # another module, which the user's module imports
        raise ValueError(f"--model {text!r}: there is no module {error.name!r} in {directory} or among installed "
                         "packages; give its name as Python imports it") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = nearest(function_name, [name for name, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"--model {text!r}: module {module_name!r} has no function {function_name!r}{hint}")
    return cast("Callable[[], Any]", function)


def _check_fields(text: str, model: CutModel) -> None:
    """Raise ValueError for fields with invalid values."""
    if not isinstance(model.whole, nn.Module):
        raise ValueError(f"--model {text!r}: CutModel.whole must be an nn.Module; got {type(model.whole).__name__}")
    for field in ("cut", "batch", "loss"):
        if not callable(getattr(model, field)):
            raise ValueError(f"--model {text!r}: CutModel.{field} must be a function; got "
                             f"{type(getattr(model, field)).__name__}")
    if model.num_chunks < 1:
        raise ValueError(f"--model {text!r}: CutModel.num_chunks must be at least 1; got {model.num_chunks}")
