"""Plans and predictions of the tiny example."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from dualpipe.cli import main
from dualpipe.models import read_config
from dualpipe.plan.machines import read_machine
from dualpipe.plan.predict import Prediction
from dualpipe.train.config.fit import fit_world
from dualpipe.train.config.load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "tiny-cpu.toml"


def prediction(*options: str) -> Prediction:
    config = load_config(TINY, options)
    config = fit_world(config, config.parallel.world_size)
    return Prediction(config, read_config(config.model.config), read_machine("h100"))


def plan(capsys, *options: str) -> list[str]:
    """Return the lines of a plan, which fit into 200 columns."""
    with mock.patch.dict(os.environ, COLUMNS="200"):
        status = main(["plan", str(TINY), "--gpus", "4", "--global-batch", "4096", *options])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out.splitlines()
