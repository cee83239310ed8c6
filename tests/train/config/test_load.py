"""The TOML config: defaults, overrides, and invalid settings."""

import json
import re
from dataclasses import asdict, fields
from importlib.util import spec_from_loader
from typing import get_args, get_type_hints

import pytest
import torch

from dualpipe.kernels.formats import FORMATS
from dualpipe.nn import Router
from dualpipe.nn.routing.losses import LOSSES
from dualpipe.train.config.fit import fit_world, resolve_tokenizer
from dualpipe.train.config.load import FIELDS_BY_FOREIGN_NAME, load_config, recorded_config
from dualpipe.train.config.schema import Config, DTypeRule, FormatName, RouterConfig
from dualpipe.train.step import build_routers

GOOD = """
[model]
config = "model/config.json"
[data]
path = "text"
[parallel]
pp = 2
[train]
steps = 7
[optimizer]
lr = 1
betas = [0.8, 0.9]
"""


@pytest.fixture
def toml(tmp_path):
    def write(text=GOOD):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_reads_tables_and_defaults(toml, tmp_path):
    config = load_config(toml())
    assert (config.parallel.pp, config.train.steps, config.optimizer.betas) == (2, 7, (0.8, 0.9))
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    assert config.train.dtype == "fp32" and resolve_tokenizer(config).data.tokenizer == "bytes"
    assert config.model.config == str(tmp_path / "model/config.json"), "relative to the TOML file"
    assert config.data.path == str(tmp_path / "text")


def test_special_paths_are_not_anchored(toml):
    config = resolve_tokenizer(load_config(toml(GOOD.replace('"text"', '"stdlib"'))))
    assert (config.data.path, config.data.tokenizer, config.data.validation_path) == ("stdlib", "bytes", None)


def tokenizer_of(*arguments):
    return resolve_tokenizer(load_config(*arguments)).data.tokenizer


def test_auto_tokenizer_is_the_one_of_the_checkpoint(toml, tmp_path):
    started = GOOD + '\n[init]\nfrom_hf = "start"\n'
    (tmp_path / "start").mkdir()
    assert tokenizer_of(toml(started)) == "bytes"
    (tmp_path / "start/tokenizer.json").write_text("{}")
    assert tokenizer_of(toml(started)) == str(tmp_path / "start")
    assert tokenizer_of(toml()) == "bytes", "no checkpoint"
    assert tokenizer_of(toml(started), ["--data.tokenizer", "bytes"]) == "bytes"
    other = started.replace('path = "text"', 'path = "text"\ntokenizer = "other"')
    assert tokenizer_of(toml(other)) == str(tmp_path / "other")
    assert tokenizer_of(toml(other), ["--data.tokenizer", "auto"]).endswith("start")


def test_a_path_called_none_is_a_path(toml, tmp_path):
    config = load_config(toml(GOOD.replace('"text"', '"text"\nvalidation_path = "None"')))
    assert config.data.validation_path == str(tmp_path / "None")


def test_overrides_replace_the_file(toml):
    options = ["--optimizer.lr", "3e-4", "--train.sequence-length=9", "--data.path", "here", "--train.dtype", "bf16"]
    config = load_config(toml(), [*options, "--optimizer.betas", "0.5", "0.6", "--data.validation_path", "v"])
    assert (config.optimizer.lr, config.train.sequence_length, config.train.dtype) == (3e-4, 9, "bf16")
    assert config.data.path == "here", "relative to the working directory"
    assert (config.optimizer.betas, config.data.validation_path) == ((0.5, 0.6), "v")
    assert config.train.steps == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "[trian]\nsteps = 1", "unknown key 'trian'; the nearest valid name is 'train'"),
        (GOOD.replace("steps", "step"), r"\[train\]: unknown key 'step'; the nearest valid name is 'steps'"),
        (GOOD.replace("lr = 1", "learning_rate = 1"), "'learning_rate'; the nearest valid name is 'lr'"),
        (GOOD.replace("steps = 7", "seq_len = 7"), "'seq_len'; the nearest valid name is 'sequence_length"),
        (GOOD.replace("steps = 7", "lr = 7"), r"\[train\]: unknown key 'lr'; .* in another table: 'optimizer.lr'"),
        (GOOD + "[checkpoint]\nlearning_rate = 1", "in another table: 'optimizer.lr'"),
        (GOOD + "[[dtypes.rules]]\npatern = 'a'", "unknown key 'patern'; .* is 'pattern'"),
        (GOOD.replace("steps = 7", 'steps = "7"'), "steps = '7' has the wrong type; it must be an integer"),
        (GOOD.replace("steps = 7", "steps = true"), "steps = True"),
        (GOOD.replace("steps = 7", "steps = 7.5"), "steps = 7.5"),
        (GOOD.replace("lr = 1", "lr = true"), "lr = True"),
        (GOOD.replace("lr = 1", 'lr = "1"'), "lr = '1'"),
        (GOOD.replace("[0.8, 0.9]", "[0.8, true]"), "betas = True"),
        (GOOD.replace("[0.8, 0.9]", "[0.8]"), "betas = .* a list of 2 numbers"),
        (GOOD.replace('"text"', "3"), r"run.toml: \[data\]: path = 3"),
        (GOOD.replace("pp = 2", 'layers_per_stage = [1, "2"]'), "layers_per_stage = '2'"),
        (GOOD + "[memory]\nrecompute = 'layer'", "recompute = 'layer'"),
        (GOOD + "[dtypes]\nrules = ['a,save=fp32']", "rules must be a table, got 'a,save=fp32'"),
        (GOOD + "[[dtypes.rules]]\nstorage = 'mxfp9'", "storage = 'mxfp9' .* 'fp64', 'mxfp8', 'nvfp4'"),
        (GOOD + "[[dtypes.rules]]\ngather = 'fp32'", "gather = 'fp32' .* 'mxfp8', 'nvfp4'"),
        (GOOD + "[[dtypes.rules]]\nstorage = 'mxfp8'\ngather = 'mxfp8'", "either stored"),
        (GOOD.replace("steps = 7", 'dtype = "fp16"'), "dtype = 'fp16' .* 'fp32', 'bf16'$"),
        (GOOD.replace("[0.8, 0.9]", "[0.8, 1.0]"), "optimizer.betas .* less than 1"),
        (GOOD.replace("[0.8, 0.9]", '[0.8, 0.999]\nmoments = "bf16"'), "optimizer.betas .* below 0.996"),
        (GOOD.replace("lr = 1", "lr = nan"), "optimizer.lr = nan"),
        (GOOD + "[router]\nz_loss = nan", "router.z_loss = nan"),
        (GOOD.replace("pp = 2", 'schedule = "dualpipe"'), "schedule = 'dualpipe' .*'dualpipev'"),
        ("[model]", "give model.config"),
        ("model = 3", "must be a table"),
        ("[model", "is not valid TOML"),
    ],
)
def test_refuses_a_bad_file(toml, text, message):
    with pytest.raises(ValueError, match=message):
        load_config(toml(text))


def test_format_names_equal_the_library_formats(toml):
    assert get_args(FormatName) == tuple(FORMATS)
    text = "[[dtypes.rules]]\npattern = '*'\nstorage = 'bf16'\ngather = 'nvfp4'"
    (rule,) = load_config(toml(GOOD + text)).dtypes.rules
    assert rule == DTypeRule("*", storage="bf16", gather="nvfp4")
    assert load_config(toml(), ["--dtypes.rules", str(rule)]).dtypes.rules == (rule,)


@pytest.mark.parametrize("name", LOSSES)
def test_every_router_loss_has_a_field(toml, name):
    assert name.endswith("_loss"), "by which `dualpipe parity` knows it"
    coefficient = LOSSES[name].coefficient
    (field,) = {name, coefficient} & {setting.name for setting in fields(RouterConfig)}
    config = fit_world(load_config(toml(), [f"--router.{field}", "0.5"]), 2)
    router = Router(4, 2, 1)
    routers = build_routers(config, [router], group=None, device=torch.device("cpu"))
    with routers.step():
        assert router.step.coefficients == {name: 0.5}


IMPOSSIBLE = {  # values, by the message about them
    "must be at least 0": {"parallel.dp": -1, "parallel.ranks_per_node": -1},
    "must be at least 1": dict.fromkeys(
        ("parallel.pp", "parallel.dp_replicate", "parallel.cp", "parallel.ep", "train.steps",
         "train.sequence_length", "train.micro_batch_size", "train.num_chunks", "train.log_interval",
         "train.print_interval", "guard.limit"), 0),
    "must not be negative": dict.fromkeys(
        ("train.seed", "train.eval_interval", "train.eval_batches", "router.balance", "router.z_loss",
         "router.bias_update_rate", "optimizer.weight_decay", "optimizer.warmup_steps", "optimizer.clip_norm",
         "optimizer.qk_clip", "checkpoint.interval", "checkpoint.keep_last", "checkpoint.keep_every",
         "memory.capacity", "memory.logits", "train.gc_interval", "train.batch_size",
         "train.time_limit", "watchdog.timeout", "guard.spike",
         "guard.checksum_interval", "guard.recheck_interval",
         "parallel.schedule_memory", "mtp.weight", "mtp.last_weight", "mtp.last_steps",
         "lora.rank", "lora.alpha"), -1),
    "must be positive": {"optimizer.lr": 0, "optimizer.eps": -1, "parallel.timeout": 0},
    "must be from 0 to 1": {"optimizer.min_lr_ratio": 1.5, "optimizer.decay_fraction": -0.5},
    "must be above 0 and at most 1": {"optimizer.layer_decay": 0},
    "must be at least 0 and less than 1": {"data.validation_fraction": 1, "optimizer.momentum": 1, "lora.dropout": 1},
    "both must be at least 0 and less than 1": {"optimizer.betas": [-0.1, 0.5]},
    "give ": {"data.path": "", "data.tokenizer": "", "data.text_key": "", "checkpoint.resume": "", "output.dir": ""},
    "the package wandb is not installed": {"metrics.wandb": "project"},
}


def test_names_of_other_trainers_map_to_fields():
    fields_of = {f"{table}.{setting.name}" for table, cls in get_type_hints(Config).items() for setting in fields(cls)}
    assert set(FIELDS_BY_FOREIGN_NAME.values()) <= fields_of
    assert not set(FIELDS_BY_FOREIGN_NAME) & {name.partition(".")[2] for name in fields_of}


def test_every_rule_of_a_field_refuses_a_value(toml, monkeypatch):
    monkeypatch.setattr("dualpipe.train.config.schema.find_spec", lambda name: None)
    ruled = {f"{table}.{setting.name}" for table, cls in get_type_hints(Config).items() for setting in fields(cls)
             if setting.metadata}
    assert ruled == {name for names in IMPOSSIBLE.values() for name in names}
    for remedy, values in IMPOSSIBLE.items():
        for name, value in values.items():
            table, field = name.split(".")
            with pytest.raises(ValueError, match=rf"^{table}.{field} = .*: {re.escape(remedy)}"):
                load_config(toml(f"[{table}]\n{field} = {json.dumps(value)}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.stepz", "3"], "unknown option '--train.stepz'; the nearest valid name is '--train.steps'"),
        (["--steps=3"], "'--steps'; the nearest valid name is '--train.steps'"),
        (["--train.lr", "3"], "'--train.lr'; the nearest valid name is '--optimizer.lr'"),
        (["--optimizer.learning_rate", "3"], "'--optimizer.learning_rate'; the nearest valid name is '--optimizer.lr'"),
        (["--learning-rate=3"], "'--learning-rate'; the nearest valid name is '--optimizer.lr'"),
        (["--train.steps", "x"], "--train.steps = 'x' has the wrong type"),
        (["--train.steps", "-1"], "train.steps = -1"),
        (["--train.steps"], "--train.steps: expected one argument"),
        (["--parallel.schedule", "x"], "--parallel.schedule = 'x' .* 'dualpipe"),
        (["--parallel.overlap", "yes"], "--parallel.overlap = 'yes'"),
        (["--optimizer.betas", "0.5"], "--optimizer.betas: expected 2 arguments"),
        (["--dtypes.rules", "*,storage=fp9"], "--dtypes.rules: storage = 'fp9'"),
        (["extra"], "unrecognized arguments: extra"),
        (["--memory.recompute", "attention", "--memory.recompute=experts"], "--memory.recompute is given 2 times"),
        (["--dtypes.rules", "a,compute=fp32,compute=bf16"], "gives compute twice"),
        (["--parallel.schedule_costs", "F=1"], "parallel.schedule_costs = 'F=1' .* 'dualpipev'"),
        (["--parallel.schedule", "zbv", "--parallel.schedule_memory", "4"], "parallel.schedule_memory = 4.0"),
        (["--parallel.schedule", "zbv", "--parallel.schedule_memory", "4", "5"], "memory = .4.0, 5.0. is for"),
        (["--parallel.schedule", "auto", "--parallel.pp", "3", "--parallel.schedule_memory", "4", "5"],
         "parallel.schedule_memory has 2 numbers, and parallel.pp is 3; give one number, or one for each pipeline"),
        (["--parallel.schedule", "auto", "--parallel.schedule_memory"], "parallel.schedule_memory has 0 numbers"),
        (["--parallel.schedule_memory", "x"], "= 'x' has the wrong type; it must be a number or list of numbers"),
        (["--parallel.schedule_memory", "4", "x"], "= 'x' has the wrong type; it must be a number"),
        (["--parallel.schedule_memory", "4", "-5"], "parallel.schedule_memory = .4.0, -5.0.: must not be negative"),
    ],
)
def test_refuses_bad_options(toml, options, message):
    with pytest.raises(ValueError, match=message):
        load_config(toml(), options)


@pytest.mark.parametrize("value", [5.0, (5.0, 4.5)])
def test_memory_of_all_pipeline_ranks_or_of_each(toml, value):
    numbers = value if isinstance(value, tuple) else (value,)
    by_option = load_config(
        toml(), ["--parallel.schedule", "auto", "--parallel.schedule_memory", *map(str, numbers)])
    setting = f'schedule = "auto"\nschedule_memory = {json.dumps(value)}'
    by_file = load_config(toml(GOOD.replace("pp = 2", f"pp = 2\n{setting}")))
    assert by_option.parallel.schedule_memory == by_file.parallel.schedule_memory == value
    assert recorded_config(json.loads(json.dumps(asdict(by_file)))) == by_file


def test_of_a_single_value_given_twice_the_last_counts(toml):
    assert load_config(toml(), ["--train.steps", "5", "--train.steps=6"]).train.steps == 6


@pytest.mark.parametrize(("option", "value"), [
    ("--optimizer.lr", "inf"), ("--optimizer.weight_decay", "inf"), ("--router.balance", "inf"),
    ("--train.seed", "1" + 30 * "0"),  # more than 64 bits
])
def test_numbers_are_finite_everywhere(toml, option, value):
    name = option.removeprefix("--")
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        load_config(toml(), [option, value])
    table, field = name.split(".")
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        load_config(toml(f"[{table}]\n{field} = {value}\n"))


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e10"])
def test_timeouts_out_of_range_are_refused(toml, value):
    with pytest.raises(ValueError, match=f"parallel.timeout = {float(value)}: must be positive"):
        load_config(toml(), [f"--parallel.timeout={value}"])


def test_a_missing_optional_package_is_named(toml, monkeypatch):
    monkeypatch.setattr("dualpipe.train.config.schema.find_spec", lambda name: None)
    message = "metrics.wandb = 'project': .*`pip install wandb`"
    with pytest.raises(ValueError, match=message):
        load_config(toml(), ["--metrics.wandb", "project"])
    folder = spec_from_loader("wandb", None, is_package=True)  # of a folder that happens to be called so
    monkeypatch.setattr("dualpipe.train.config.schema.find_spec", lambda name: folder)
    with pytest.raises(ValueError, match=message):
        load_config(toml(), ["--metrics.wandb", "project"])


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"run.toml is not valid TOML: .*utf-8"):
        load_config(tmp_path / "run.toml")


def test_a_recorded_configuration_is_the_one_that_was_recorded(toml):
    config = load_config(toml())
    recorded = json.loads(json.dumps(asdict(config)))
    assert recorded_config(recorded) == config
    recorded["router"]["unknown"] = 0
    with pytest.raises(ValueError, match="unknown key 'unknown'"):
        recorded_config(recorded)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the config .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml")


def test_dp_follows_from_the_number_of_ranks(toml):
    config = load_config(toml())
    assert [fit_world(config, world).parallel.dp for world in (2, 4, 6)] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"2 \* any \* 1 cannot be 3"):
        fit_world(config, 3)
    with pytest.raises(ValueError, match=r"cannot be 2, .*; start 4"):
        fit_world(load_config(toml(), ["--parallel.dp", "2"]), 2)


def test_dp_replicate_splits_dp(toml):
    config = load_config(toml(), ["--parallel.dp_replicate", "2"])
    assert config.parallel.world_size == 4, "dp is at least as many"
    fitted = fit_world(config, 8).parallel
    assert (fitted.dp, fitted.dense_shards, fitted.expert_shards, fitted.batch_shards) == (4, 2, 2, 4)
    assert str(fitted) == "pp 2, dp 4 (2 x 2), ep 1"
    with pytest.raises(ValueError, match=r"dp_replicate = 2 does not divide dp = 3, .*; give 1 or 3"):
        fit_world(config, 6)


def test_batch_size_gives_num_chunks_for_any_number_of_ranks(toml):
    config = load_config(toml(), ["--train.batch_size", "24", "--train.micro_batch_size", "2"])
    assert [fit_world(config, world).train.num_chunks for world in (2, 4, 6, 8)] == [12, 6, 4, 3]
    with pytest.raises(ValueError, match=r"a multiple of 10, .*; give 20 or 30, .* one of 1, 2, 3, 4, 6, 12$"):
        fit_world(config, 10)
    with pytest.raises(ValueError, match=r"a multiple of 26, .*; give 26"):
        fit_world(config, 26)


def test_help_lists_the_fields(toml, capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(toml(), ["--help"])
    assert stop.value.code == 0
    assert "--optimizer.weight_decay" in capsys.readouterr().out
