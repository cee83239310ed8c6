"""The settings of a training run: one frozen dataclass per TOML table, every field also an option of the command line.

    config = load_config("examples/tiny-cpu.toml", ["--optimizer.lr", "3e-4"])

A table's own `__post_init__` refuses values that can never work; what depends on the number of ranks is checked by
`fit_world`. Nothing below the training loop sees these classes: leaf code takes plain sizes and groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

STDLIB = "stdlib"  # [data] path: the source code of Python's own standard library
BYTES = "bytes"  # [data] tokenizer: one token per byte


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: {remedy}")


@dataclass(frozen=True)
class ModelConfig:
    """[model]: what is trained."""

    config: str = ""
    """path of a hub-style config.json; in the TOML relative to the TOML file"""

    def __post_init__(self) -> None:
        _require(bool(self.config), "model.config", self.config, "give the path of a hub-style config.json")


@dataclass(frozen=True)
class DataConfig:
    """[data]: where the tokens come from."""

    path: str = STDLIB
    """a directory made by `dualpipe data pack`, a file or folder of text, or "stdlib" (Python's own source code)"""
    tokenizer: str = BYTES
    """"bytes", or the path of a `tokenizers` JSON file; not used where path is packed already"""
    validation_fraction: float = 0.02
    """share of the documents that is held out for evaluation (chosen by a hash of their content)"""
    validation_path: str | None = None
    """other data to evaluate on; then nothing is held out of `path`"""

    def __post_init__(self) -> None:
        _require(bool(self.path), "data.path", self.path, 'give a packed directory, a folder of text, or "stdlib"')
        _require(bool(self.tokenizer), "data.tokenizer", self.tokenizer, 'give "bytes" or the path of a tokenizer.json')
        fraction = self.validation_fraction
        _require(0 <= fraction < 1, "data.validation_fraction", fraction, "must be at least 0 and less than 1")


@dataclass(frozen=True)
class ParallelConfig:
    """[parallel]: how the ranks share the work; pp * dp * ep is their number."""

    pp: int = 1
    """pipeline ranks"""
    dp: int = 0
    """data-parallel ranks: pipelines that train on different data and share the parameters' storage (FSDP2); 0: as many
    as the ranks that were started allow, one where none were"""
    ep: int = 1
    """expert-parallel ranks: each has a part of the experts and data of its own, and sends tokens to the others"""
    overlap: bool = True
    """run the two actions of a pair in turn, so that one's communication is hidden behind the other's computing"""
    schedule: Literal["dualpipev", "zbv", "1f1b", "interleaved_1f1b"] = "dualpipev"
    """order of the pipeline's work"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes CUDA where the machine has a device for each of its ranks"""
    timeout: float = 600.0
    """seconds after which a rank that waits for another one gives up"""

    def __post_init__(self) -> None:
        for name, least in (("pp", 1), ("dp", 0), ("ep", 1)):
            _require(getattr(self, name) >= least, f"parallel.{name}", getattr(self, name), f"must be at least {least}")
        _require(self.timeout > 0, "parallel.timeout", self.timeout, "must be positive (seconds)")

    @property
    def replicas(self) -> int:
        """The pipelines that train on different data."""
        return self.dp * self.ep

    @property
    def world_size(self) -> int:
        """The number of ranks that this layout needs, at least."""
        return self.pp * max(1, self.dp) * self.ep


@dataclass(frozen=True)
class TrainConfig:
    """[train]: how long, and in which pieces. A step takes micro_batch_size * num_chunks * dp * ep sequences."""

    steps: int = 100
    """optimizer steps"""
    sequence_length: int = 256
    """tokens of a sequence"""
    micro_batch_size: int = 1
    """sequences of a micro-batch"""
    num_chunks: int = 4
    """micro-batches of a step"""
    seed: int = 0
    """of the initial weights and of the order of the data"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of parameters and activations in the model; the optimizer keeps fp32 in both cases"""
    eval_interval: int = 0
    """steps between evaluations on held-out data; 0 evaluates at the end only"""
    eval_batches: int = 8
    """global batches of an evaluation; 0 never evaluates"""

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "micro_batch_size", "num_chunks"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        for name in ("seed", "eval_interval", "eval_batches"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "must not be negative")


@dataclass(frozen=True)
class MemoryConfig:
    """[memory]: what is computed again instead of kept."""

    recompute: tuple[str, ...] = ()
    """parts of layers: attention, experts, norms or layer; of some layers as in experts:0-7; or none"""


@dataclass(frozen=True)
class RouterConfig:
    """[router]: what keeps the loads of the experts even. A coefficient or rate of 0 leaves its part out."""

    balance: float = 0.0
    """coefficient of the balance loss, which is 1 where loads are even"""
    balance_level: Literal["microbatch", "sequence", "global"] = "sequence"
    """what that loss is computed over; "global": the loads are those of the global batch of the step before"""
    z_loss: float = 0.0
    """coefficient of the z-loss, the mean square of the logits' logsumexp, which keeps logits small"""
    bias_update_rate: float = 0.0
    """balancing without a loss, for routers with a correction bias: what a bias moves by in each step"""
    balanced: bool = False
    """for benchmarks: experts take turns, whatever the router says"""

    def __post_init__(self) -> None:
        for name in ("balance", "z_loss", "bias_update_rate"):
            _require(getattr(self, name) >= 0, f"router.{name}", getattr(self, name), "must not be negative")


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: AdamW and its learning rate."""

    lr: float = 3e-4
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """decay of the running means of the gradient and of its square"""
    eps: float = 1e-8
    """added to the root of the mean square"""
    weight_decay: float = 0.1
    """on matrices only: norms, biases and other vectors are not decayed"""
    warmup_steps: int = 0
    """steps of linear warm-up"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """after the warm-up: a half cosine, or stable and then a linear decay (wsd)"""
    min_lr_ratio: float = 0.1
    """the last step's learning rate as a share of the peak"""
    decay_fraction: float = 0.2
    """wsd: share of all steps in which the learning rate decays"""
    clip_norm: float = 1.0
    """largest global gradient norm; 0 does not clip"""

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            _require(getattr(self, name) > 0, f"optimizer.{name}", getattr(self, name), "must be positive")
        for name in ("weight_decay", "warmup_steps", "clip_norm"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "must not be negative")
        for name in ("min_lr_ratio", "decay_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"optimizer.{name}", getattr(self, name), "must be from 0 to 1")
        good = all(0 <= beta < 1 for beta in self.betas)
        _require(good, "optimizer.betas", self.betas, "both must be at least 0 and less than 1")


@dataclass(frozen=True)
class OutputConfig:
    """[output]: where results go."""

    dir: str = "out"
    """metrics, pictures and packed data; relative to the working directory"""

    def __post_init__(self) -> None:
        _require(bool(self.dir), "output.dir", self.dir, "give a directory")


@dataclass(frozen=True)
class Config:
    """All tables of a run."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    output: OutputConfig = field(default_factory=OutputConfig)


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read the TOML file `path` and apply command-line `overrides` (`--table.field value`).

    Relative paths in the file are relative to the file, those in `overrides` and `output.dir` to the working directory.

    Raises:
        ValueError: the file is missing or no TOML, a table, key or option does not exist (the message names the
            nearest that does), or a value has the wrong type or is impossible.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    config = _anchor_paths(_table(Config, tables, where=str(path)), path.parent)
    return apply_overrides(config, overrides)


def apply_overrides(config: Config, overrides: typing.Sequence[str]) -> Config:
    """`config` with the fields named by `--table.field value` replaced. `--help` prints all fields and exits."""
    if not overrides:
        return config
    import tyro

    _check_option_names(overrides)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                tyro.conf.FlagConversionOff[Config], default=config, args=list(overrides), prog="dualpipe train CONFIG",
                description="Every field of the TOML file can be given here as well.", use_underscores=True,
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ValueError(_plain_message(messages.getvalue())) from None


def fit_world(config: Config, world_size: int) -> Config:
    """`config` with parallel.dp filled in; ValueError for a number of ranks that the layout does not need."""
    parallel = config.parallel
    pipelines, rest = divmod(world_size, parallel.pp * parallel.ep)
    if rest or pipelines == 0 or parallel.dp not in (0, pipelines):
        dp = parallel.dp or "any"
        raise ValueError(
            f"parallel.pp * dp * ep = {parallel.pp} * {dp} * {parallel.ep} cannot be {world_size}, the number of ranks "
            f"that were started; start {parallel.world_size}, or change parallel.pp or parallel.dp"
        )
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, dp=pipelines))


def _anchor_paths(config: Config, folder: Path) -> Config:
    def anchored(value: str | None, *special: str) -> str | None:
        return value if value is None or value in special else str(folder / value)

    data = dataclasses.replace(
        config.data,
        path=anchored(config.data.path, STDLIB),
        tokenizer=anchored(config.data.tokenizer, BYTES),
        validation_path=anchored(config.data.validation_path),
    )
    return dataclasses.replace(config, model=ModelConfig(config=anchored(config.model.config)), data=data)


def _nearest(name: str, valid: typing.Iterable[str]) -> str:
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"the nearest valid name is {close[0]!r}" if close else f"valid names are {', '.join(valid)}"


def _table(cls: type, values: object, *, where: str) -> Any:
    """Build the dataclass `cls` from a TOML table, refusing unknown keys and wrong types."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table, got {values!r}")
    hints = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; {_nearest(unknown[0], hints)}")
    if cls is Config and "model" not in values:
        raise ValueError(f"{where}: there is no [model] table; add one with `config = \"path/to/config.json\"`")
    return cls(**{key: _value(hints[key], value, where=f"{where}: {key}") for key, value in values.items()})


def _value(kind: Any, value: object, *, where: str) -> Any:
    """`value` as the annotation `kind`; an integer is taken for a float, nothing else is converted."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _table(kind, value, where=where.replace(": ", ": [", 1) + "]")
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and arguments[-1] is Ellipsis and isinstance(value, list):
        return tuple(_value(arguments[0], v, where=where) for v in value)
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_value(k, v, where=where) for k, v in zip(arguments, value))
    if origin is types.UnionType:
        return _value(arguments[0], value, where=where)  # TOML has no null: a given value is of the first kind
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} = {value!r} has the wrong type; it must be {_describe(kind)}")


def _describe(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if arguments and arguments[-1] is Ellipsis:
        return f"a list, each {_describe(arguments[0])}"
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(arguments)}: " + ", ".join(_describe(a) for a in arguments)
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(kind, str(kind))


def _check_option_names(overrides: typing.Sequence[str]) -> None:
    hints = typing.get_type_hints(Config)
    valid = [f"--{t}.{f.name}" for t, cls in hints.items() for f in dataclasses.fields(cls)]
    for argument in overrides:
        name = argument.split("=", 1)[0].replace("-", "_")
        name = "--" + name[2:]
        if argument.startswith("--") and name != "--help" and name not in valid:
            raise ValueError(f"unknown option {argument.split('=', 1)[0]!r}; {_nearest(name, valid)}")


def _plain_message(boxed: str) -> str:
    """tyro's message without its frame: the lines above the rule, joined."""
    lines = [line.strip("│ ") for line in boxed.splitlines() if not line.startswith(("╭", "╰"))]
    head = lines[: next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))]
    return " ".join(line for line in head if line) or boxed.strip()
