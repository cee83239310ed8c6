"""The settings of a training run: one frozen dataclass per TOML table, every field also an option of the command line.

A field may have a rule, which `Config` holds it to: values that can never work are refused. What depends on the number
of ranks is checked by `config.fit_world`. Nothing below the training loop sees these classes: leaf code takes plain
sizes and groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from dualpipe.runtime.storage import Location, as_location

STDLIB = "stdlib"  # [data] path: the source code of Python's own standard library
BYTES = "bytes"  # [data] tokenizer: one token per byte
AUTO = "auto"  # [data] tokenizer: that of the checkpoint; [export] to_hf: in output.dir
TOKENIZER = "tokenizer.json"  # of a checkpoint, in the form of the package `tokenizers`
TEXT_KEY = "text"  # [data] text_key
Algorithm = Literal["muon", "adamw"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)  # [optimizer] name, but for a class of one's own


def _rule(holds: Callable[[Any], object], remedy: str) -> Callable[[Any], Any]:
    """Return a function from defaults to fields; `Config` refuses values that do not hold, with the remedy."""
    return lambda default: field(default=default, metadata={"holds": holds, "remedy": remedy})


_at_least_0 = _rule(lambda value: value >= 0, "must be at least 0")
_at_least_1 = _rule(lambda value: value >= 1, "must be at least 1")
_not_negative = _rule(lambda value: value >= 0, "must not be negative")
_positive = _rule(lambda value: value > 0, "must be positive")
_share = _rule(lambda value: 0 <= value <= 1, "must be from 0 to 1")
_below_1 = _rule(lambda value: 0 <= value < 1, "must be at least 0 and less than 1")
_seconds = _rule(lambda value: 0 < value <= 1e9, "must be positive (seconds), up to 1e9")
_betas = _rule(lambda betas: all(0 <= beta < 1 for beta in betas), "both must be at least 0 and less than 1")
_project = _rule(lambda name: not name or getattr(find_spec("wandb"), "origin", None),  # a mere folder has none
                 "the package wandb is not installed; `pip install wandb`, or leave this out")


def _require(condition: object, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: {remedy}")


@dataclass(frozen=True)
class ModelConfig:
    """[model]: what is trained."""

    config: str = ""
    """path of a hub-style config.json; in the TOML relative to the TOML file; without, that of init.from_hf"""
    backend: Literal["auto", "dualpipe", "transformers"] = "auto"
    """whose implementation of the model is trained: this library's, or that of transformers (the extra "hf"); auto:
    this library's where it has the family"""


@dataclass(frozen=True)
class InitConfig:
    """[init]: what the weights are at first."""

    from_hf: str = ""
    """a directory with a Hugging Face checkpoint; without, they are drawn by train.seed"""


@dataclass(frozen=True)
class ExportConfig:
    """[export]: what is written at the end besides the metrics."""

    to_hf: str = ""
    """a directory to make, with the model as a Hugging Face checkpoint; "auto": `hf` in output.dir, where that of an
    earlier run is kept under another name"""
    quantized: bool = False
    """weights that are stored in fp8_block (of gpt-oss in mxfp4) are written so, instead of in numbers"""


@dataclass(frozen=True)
class DataConfig:
    """[data]: where the tokens come from."""

    path: str = _rule(bool, 'give a packed directory, a folder of text, or "stdlib"')(STDLIB)
    """a directory made by `dualpipe data pack`, a file or folder of text or records (.jsonl, .jsonl.gz, .jsonl.zst,
    .parquet), or "stdlib" (Python's own source code)"""
    tokenizer: str = _rule(bool, 'give "auto", "bytes" or the path of a tokenizer.json')(AUTO)
    """"bytes", or the path of a `tokenizers` JSON file or of a directory with a tokenizer.json; "auto": that of
    init.from_hf where it has one, else "bytes"; not used where path is packed already"""
    text_key: str = _rule(bool, "give the key of a record's text")(TEXT_KEY)
    """what the text of a record is called, in files that have records"""
    validation_fraction: float = _below_1(0.02)
    """share of the documents that is held out for evaluation, chosen by a hash of their content; where that is none of
    them, or all, as with a single file: share of the tokens, the last ones"""
    validation_path: str | None = None
    """other data to evaluate on; then nothing is held out of `path`"""
    separate_documents: bool = False
    """documents packed into one sequence do not see each other, and positions start anew with each"""


@dataclass(frozen=True)
class ParallelConfig:
    """[parallel]: how the ranks share the work; pp * dp * cp * ep is their number."""

    pp: int = _at_least_1(1)
    """pipeline ranks"""
    dp: int = _at_least_0(0)
    """data-parallel ranks: pipelines that train on different data and share the parameters' storage (FSDP2); 0: as many
    as the ranks that were started allow, dp_replicate where none were"""
    dp_replicate: int = _at_least_1(1)
    """parts that dp is cut into, which it must divide: parameters are sharded over the ranks of a part, of which each
    part has all, and gradients are summed over the parts (HSDP); for parts within a node, or a pod"""
    cp: int = _at_least_1(1)
    """context-parallel ranks: they share every sequence, of which each has two chunks, an early and a late one; for
    sequences whose activations one rank cannot hold"""
    cp_method: Literal["auto", "ring", "all_to_all"] = "auto"
    """how a token sees those of other ranks: keys and values go round all of them, or each rank gets whole sequences of
    some heads; auto: what sends fewer bytes, where the numbers of heads allow both"""
    ep: int = _at_least_1(1)
    """expert-parallel ranks: each has a part of the experts and data of its own, and sends tokens to the others"""
    overlap: bool = True
    """run the two actions of a pair in turn, so that one's communication is hidden behind the other's computing"""
    schedule: Literal["dualpipev", "dualpipev_full", "zbv", "v_half", "1f1b", "interleaved_1f1b", "auto"] = "dualpipev"
    """order of the pipeline's work; dualpipev_full defers no weight gradients: less memory, a larger bubble; auto: the
    best that a search finds, by the first rank and once"""
    schedule_costs: str = ""
    """for auto: costs of a stage as `dualpipe schedule --costs` takes them, as text such as "F=1,B=1.3,W=0.65,FB=1.95",
    or a JSON file; without, F=1,B=2,W=1, and nothing saved by pairs"""
    schedule_memory: float = _not_negative(0.0)
    """for auto: stage activations that a rank may hold, where a weight gradient that waits counts 0.5; 0: those of
    dualpipev, 2 pp + 1"""
    layers_per_stage: tuple[int, ...] = ()
    """layers of each stage of the pipeline, from the first; without, stages compute about the same"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes CUDA where the machine has a device for each of its ranks"""
    timeout: float = _seconds(600.0)
    """seconds after which a rank that waits for another one gives up, and a checkpoint that does not get on"""
    interface: str = ""
    """network interface by which the ranks of several nodes talk, such as ib0; without, that of each host's name"""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's dimensions, outermost first."""
        split = {} if self.cp == 1 else {"cp": self.cp}
        return {"pp": self.pp, "dp": self.dp or self.dp_replicate, **split, "ep": self.ep}

    def __str__(self) -> str:
        shards = self.sizes["dp"] // self.dp_replicate
        parts = f" ({self.dp_replicate} x {shards})" if self.dp_replicate > 1 else ""
        return ", ".join(f"{name} {size}{parts if name == 'dp' else ''}" for name, size in self.sizes.items())

    @property
    def replicas(self) -> int:
        """The pipelines, each of which has tokens of its own: what means are taken over."""
        return self.dp * self.cp * self.ep

    @property
    def dense_shards(self) -> int:
        """The ranks that a dense parameter is sharded over."""
        return self.replicas // self.dp_replicate

    @property
    def expert_shards(self) -> int:
        """The ranks that an expert's parameters are sharded over."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def batch_shards(self) -> int:
        """The parts that the rows of a global batch are cut into; context-parallel pipelines share one."""
        return self.dp * self.ep

    @property
    def world_size(self) -> int:
        """The number of ranks that this layout needs, at least."""
        return math.prod(self.sizes.values())


@dataclass(frozen=True)
class TrainConfig:
    """[train]: how long, and in which pieces. A step takes micro_batch_size * num_chunks * dp * ep sequences."""

    steps: int = _at_least_1(100)
    """optimizer steps"""
    sequence_length: int = _at_least_1(256)
    """tokens of a sequence"""
    micro_batch_size: int = _at_least_1(1)
    """sequences of a micro-batch"""
    num_chunks: int = _at_least_1(4)
    """micro-batches of a step"""
    batch_size: int = _not_negative(0)
    """sequences of a step of all ranks; num_chunks then follows from the ranks that there are; 0: num_chunks holds"""
    time_limit: float = _not_negative(0.0)
    """seconds from the start after which the run stops, saved, with exit status 75; 0: never"""
    seed: int = _not_negative(0)
    """what the initial weights and the order of the data are drawn by"""
    compile: bool = False
    """attention and dense MLPs go through torch.compile"""
    deterministic: bool = False
    """operators give the same bits each time, or raise; on CUDA the backward of attention otherwise does not"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of parameters and activations in the model; the optimizer keeps fp32 in both cases"""
    eval_interval: int = _not_negative(0)
    """steps between evaluations on held-out data; 0 evaluates at the end only"""
    eval_batches: int = _not_negative(8)
    """global batches of an evaluation; 0 never evaluates"""
    log_interval: int = _at_least_1(1)
    """every so many steps one is printed and written to the metrics; evaluated ones, and the last, always are"""
    gc_interval: int = _not_negative(50)
    """steps between runs of Python's garbage collector, on all ranks after the same step; 0: whenever Python does"""
    print_interval: int = _at_least_1(10)
    """every so many steps one of these is printed where stdout is no terminal; the first, evaluated ones and the last
    always are"""


DTypeName = Literal["fp32", "bf16", "fp16", "fp64"]
FormatName = Literal["mxfp8", "nvfp4", "fp8_block", "fp8_block_pow2", "mxfp4"]
REMOVED_FIELDS = {  # fields that earlier versions had, and what to do instead
    f"router.{name}": "routes that are even whatever the router says are for benchmarks/bench_training.py alone; leave "
                      "it out, and set router.balance for loads that training keeps even"
    for name in ("balanced", "balanced_stride")
}
REMOVED_CHOICES = {  # values that earlier versions took, and what to do instead
    "fp8_tensor": "FP8 with a single scale for a whole matrix has been removed: choose fp8_block or mxfp8",
}


@dataclass(frozen=True)
class ByPattern:
    """An element of a list of rules: what holds of what `pattern` matches; fields left out are None."""

    pattern: str = ""
    """segments joined by dots, of a tensor's name or of a module's: *.mlp.gate; "*" is any number of whole segments"""

    def __str__(self) -> str:
        """Return the text that the rule's `parse` takes."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self)[1:])
        return ",".join([self.pattern, *(f"{name}={value}" for name, value in given if value is not None)])


@dataclass(frozen=True)
class DTypeRule(ByPattern):
    """An element of dtypes.rules: what holds of the tensors that `pattern` matches; fields left out are not changed."""

    storage: Literal[DTypeName, FormatName] | None = None
    """dtype of the parameter that the optimizer updates, or format that weights are stored in, beside fp32 masters"""
    compute: DTypeName | None = None
    """dtype of what a forward sees"""
    reduce: DTypeName | None = None
    """dtype of the buffer that gradients accumulate and are reduced in"""
    save: DTypeName | None = None
    """dtype of the tensor in an export"""
    output: DTypeName | None = None
    """dtype of what a module returns that computes in another dtype than those around it"""
    gather: FormatName | None = None
    """format that weights are gathered in, each time from shards in their storage dtype"""

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)[1:]]
        _require(any(getattr(self, name) for name in names), "dtypes.rules", self.pattern,
                 f"a rule needs a pattern and at least one of {', '.join(names)}")
        _require(not self.gather or self.storage not in get_args(FormatName), "dtypes.rules", str(self),
                 "weights are stored in a format or gathered in one; give storage a dtype, or leave one of them out")
        _require(all(self.pattern.split(".")), "dtypes.rules: pattern", self.pattern,
                 "give segments joined by dots, such as *.mlp.gate")

    @classmethod
    def parse(cls, text: str) -> DTypeRule:
        """The rule "PATTERN,FIELD=DTYPE,...", as it is given on a command line."""
        pattern, *rest = text.split(",")
        named: dict[str, Any] = {name: dtype for name, _, dtype in (each.partition("=") for each in rest)}
        values = {name: get_args(get_args(hint)[0]) for name, hint in get_type_hints(cls).items() if name != "pattern"}
        known = all(dtype in values.get(name, ()) for name, dtype in named.items())
        removed = "".join(f"; {REMOVED_CHOICES[dtype]}" for dtype in named.values() if dtype in REMOVED_CHOICES)
        _require(known, "dtypes.rules", text, f"give PATTERN,FIELD=DTYPE,..., where a field is one of "
                 f"{', '.join(values)}, and a dtype one of {', '.join(get_args(DTypeName))}; gather takes formats, and "
                 f"storage as well: {', '.join(get_args(FormatName))}{removed}")
        return cls(pattern, **named)


@dataclass(frozen=True)
class DTypesConfig:
    """[dtypes]: exceptions from train.dtype, by the names that `dualpipe dtypes CONFIG` prints."""

    rules: tuple[DTypeRule, ...] = ()
    """rules for tensors, as [[dtypes.rules]] in the TOML; on the command line each is PATTERN,FIELD=DTYPE,..."""
    products: Literal["auto", "weight-only"] = "auto"
    """products with weights in a format: "auto" has them in FP8 where the format has such and train.dtype is bf16;
    "weight-only" takes rows as they are"""
    fp8_weight_grad: bool = False
    """make the weight gradients of products in FP8 from rows in FP8, which take half of the memory until then"""
    fp8_dispatch: bool = False
    """send tokens to the experts of other ranks in FP8, half of the bytes; results and gradients go as they are"""


@dataclass(frozen=True)
class MemoryConfig:
    """[memory]: what is computed again instead of kept, and what there is."""

    recompute: tuple[str, ...] = ()
    """parts of layers: attention, experts, norms or layer, dispatch (the experts, and tokens are sent to them again
    instead of kept); of some layers as in experts:0-7; or none"""
    capacity: float = _not_negative(0.0)
    """GB (10^9 bytes) of a device, for `dualpipe memory` to say what is left; 0: not said"""


@dataclass(frozen=True)
class RouterConfig:
    """[router]: what keeps the loads of the experts even. A coefficient or rate of 0 leaves its part out."""

    balance: float = _not_negative(0.0)
    """coefficient of the balance loss, which is 1 where loads are even"""
    balance_level: Literal["microbatch", "sequence", "global"] = "sequence"
    """what that loss is computed over; "global": the loads are those of the global batch of the step before"""
    z_loss: float = _not_negative(0.0)
    """coefficient of the z-loss, the mean square of the logits' logsumexp, which keeps logits small"""
    bias_update_rate: float = _not_negative(0.0)
    """balancing without a loss, for routers with a correction bias: what a bias moves by in each step"""


@dataclass(frozen=True)
class MTPConfig:
    """[mtp]: training a model's layers for multi-token prediction."""

    weight: float = _not_negative(0.0)
    """what the mean of their losses counts beside the loss of the next; 0: they are not trained, and an export takes
    them from init.from_hf as they are"""
    last_weight: float = _not_negative(0.1)
    """that of the last steps"""
    last_steps: int = _not_negative(0)
    """how many these are; 0: weight holds to the end"""

    def __post_init__(self) -> None:
        _require(self.weight or self.last_steps <= 0, "mtp.last_steps", self.last_steps,
                 "goes with mtp.weight above 0")

    def weight_of(self, step: int, steps: int) -> float:
        """The weight in a step, from 1, of so many."""
        return self.last_weight if step > steps - self.last_steps else self.weight


@dataclass(frozen=True)
class OptimizerGroup(ByPattern):
    """An element of optimizer.groups: what holds of the parameters that `pattern` matches; fields left out change
    nothing, and of several groups that match the last one that says something holds."""

    lr: float | None = None
    """peak learning rate"""
    weight_decay: float | None = None
    """decoupled decay, but for a class of one's own, which has it its way"""
    algorithm: Algorithm | None = None
    """what updates them, with optimizer.name muon or adamw"""

    @classmethod
    def parse(cls, text: str) -> OptimizerGroup:
        """The group "PATTERN,FIELD=VALUE,...", as it is given on a command line."""
        def wrong(error: Exception) -> ValueError:
            return ValueError(f"optimizer.groups = {text!r}: {error}; give PATTERN,FIELD=VALUE,..., where a field is "
                              "lr, weight_decay or algorithm")

        pattern, *rest = text.split(",")
        try:
            values: dict[str, Any] = dict(each.split("=", 1) for each in rest)
            values |= {name: float(values[name]) for name in values.keys() - {"algorithm"}}
        except ValueError as error:
            raise wrong(error) from None
        try:
            return cls(pattern, **values)  # whose own ValueErrors say what is wrong, and of which group
        except TypeError as error:
            raise wrong(error) from None

    def __post_init__(self) -> None:
        given = (self.lr, self.weight_decay, self.algorithm)
        _require(all(self.pattern.split(".")) and any(value is not None for value in given), "optimizer.groups",
                 str(self), "a group needs a pattern and at least one of lr, weight_decay, algorithm")
        _require((self.lr is None or 0 < self.lr < math.inf) and 0 <= (self.weight_decay or 0) < math.inf,
                 "optimizer.groups", str(self), "lr must be positive, weight_decay not negative, and both finite")
        _require(self.algorithm in (None, *ALGORITHMS), "optimizer.groups", str(self),
                 "algorithm must be muon or adamw")


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: what updates the parameters, and its learning rate."""

    name: str = "adamw"
    """adamw; muon, for matrices and each expert's, with adamw for embeddings, head, routers, norms and biases; or the
    path to import a class of torch.optim.Optimizer by"""
    lr: float = _positive(3e-4)
    """peak learning rate; it serves adamw and muon alike"""
    momentum: float = _below_1(0.95)
    """muon: decay of the running mean of the gradient"""
    nesterov: bool = True
    """muon: the gradient counts once more beside its mean"""
    coefficients: Literal["jordan", "polar_express"] = "jordan"
    """muon: of its Newton-Schulz steps; polar_express comes closer to singular values of 1 in as many"""
    qk_clip: float = _not_negative(0.0)
    """largest attention score of a head, beyond which a step scales its weights back; 0: none; Kimi K2 has 100"""
    options: str = ""
    """arguments of a class of one's own, besides lr and weight_decay: JSON, such as '{"rho": 0.9}'"""
    groups: tuple[OptimizerGroup, ...] = ()
    """for parameters by name, as [[optimizer.groups]] in the TOML; on the command line PATTERN,FIELD=VALUE,..."""
    layer_decay: float = _rule(lambda value: 0 < value <= 1, "must be above 0 and at most 1")(1.0)
    """what learning rates are multiplied by from each layer to the one before"""
    betas: tuple[float, float] = _betas((0.9, 0.95))
    """adamw: decay of the running means of the gradient and of its square"""
    eps: float = _positive(1e-8)
    """added to the root of the mean square"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype that running means are kept in; bf16 saves 4 bytes of each parameter, muon's 2, and asks for betas below
    0.996"""
    weight_decay: float = _not_negative(0.1)
    """on matrices only: norms, sinks and biases, those of experts too, are not decayed; decoupled from the gradient by
    adamw and muon, while a class of one's own has it its way"""
    warmup_steps: int = _not_negative(0)
    """steps of linear warm-up"""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """after the warm-up: a half cosine, a linear decay, the peak, or stable and then a linear decay (wsd)"""
    min_lr_ratio: float = _share(0.1)
    """the last step's learning rate as a share of the peak, but for "constant\""""
    decay_fraction: float = _share(0.2)
    """wsd: share of all steps in which the learning rate decays"""
    clip_norm: float = _not_negative(1.0)
    """largest global gradient norm; 0 does not clip"""

    def __post_init__(self) -> None:
        _require(self.moments == "fp32" or max(self.betas) < 1 - 2**-8, "optimizer.betas", self.betas,
                 "moments in bf16 would not decay by them; give both below 0.996, or optimizer.moments = \"fp32\"")
        _require(self.moments == "fp32" or self.momentum < 1 - 2**-8, "optimizer.momentum", self.momentum,
                 "a mean in bf16 would not decay by it; give less than 0.996, or optimizer.moments = \"fp32\"")
        own = self.name not in ALGORITHMS
        _require(not own or "." in self.name, "optimizer.name", self.name,
                 "give adamw, muon, or the path to import a class by, such as torch.optim.NAdam")
        _require(not own or self.moments == "fp32", "optimizer.moments", self.moments, "adamw and muon have others")
        for group in self.groups:  # a string, while a command line is read
            _require(not own or getattr(group, "algorithm", None) is None, "optimizer.groups", str(group),
                     f"algorithm goes with optimizer.name adamw or muon, not {self.name}")
        try:
            options = json.loads(self.options) if self.options else {}
            _require(isinstance(options, dict) and (own or not options), "optimizer.options", self.options,
                     "give a JSON object, for a class of one's own")
            _require(not {"lr", "weight_decay"}.intersection(options), "optimizer.options", self.options,
                     "leave out lr and weight_decay: they are optimizer.lr and optimizer.weight_decay")
        except json.JSONDecodeError as error:
            raise ValueError(f"optimizer.options = {self.options!r}: no JSON: {error}") from None


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: saving the whole state of a run, and going on from it."""

    dir: str = ""
    """where checkpoints are, relative to the working directory, or a URL such as s3://bucket/run; without,
    `checkpoints` in output.dir"""
    interval: int = _not_negative(0)
    """steps from one to the next; the last step is saved too; 0: none are"""
    mode: Literal["sync", "async", "off"] = "async"
    """async: training goes on while it is written, after a copy to host memory"""
    writer: Literal["thread", "process"] = "thread"
    """what writes then: a thread takes turns with training in one interpreter; a process has its own"""
    checksum: Literal["xxh3_128", "sha256"] = "xxh3_128"
    """kind of each file's checksum, verified before it is loaded; sha256 takes as long as writing does"""
    keep_last: int = _not_negative(3)
    """so many stay; 0: all"""
    keep_every: int = _not_negative(0)
    """and those of steps that are a multiple of this; 0: no others"""
    resume: str = _rule(bool, 'give "auto", "never" or a path')("auto")
    """auto: go on from the newest in `dir` that is whole; never; or the path or URL of one, or of a directory of them,
    to begin with where `dir` has none yet"""
    allow: tuple[str, ...] = ()
    """names, with * and ?, of tensors that a checkpoint may lack, have besides, or have in another shape or dtype; with
    "loader" the data may be others, or come in another order"""


@dataclass(frozen=True)
class WatchdogConfig:
    """[watchdog]: when ranks write into `why` in output.dir what they wait for."""

    timeout: float = _not_negative(0.0)
    """seconds in which nothing is begun or ended; 0: half of parallel.timeout"""


@dataclass(frozen=True)
class GuardConfig:
    """[guard]: what is done about bad numbers."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """what is done about a loss or gradient: stop; leave the step out; or go back to the last checkpoint and leave its
    data out"""
    limit: int = _at_least_1(3)
    """steps left out, or times gone back, in a row, after which the run stops"""
    spike: float = _not_negative(0.0)
    """robust z-score of a step's loss or gradient norm among those before it, above which it counts as a spike; 0: no
    step does"""
    on_spike: Literal["warn", "rollback"] = "warn"
    """what is done about a spike: say it, or go back to the last checkpoint before it and leave its data out"""
    checksum_interval: int = _not_negative(0)
    """steps between checksums of what ranks must have the same of; 0: none are made"""
    recheck_interval: int = _not_negative(0)
    """steps between micro-batches that are computed twice, which must give the same bits; 0: none are"""


@dataclass(frozen=True)
class OutputConfig:
    """[output]: where results go."""

    dir: str = _rule(bool, "give a directory")("out")
    """metrics, pictures and packed data; relative to the working directory"""


@dataclass(frozen=True)
class MetricsConfig:
    """[metrics]: where else they go, besides metrics.jsonl and TensorBoard events in output.dir."""

    wandb: str = _project("")
    """a project at Weights & Biases, by the package wandb; with WANDB_MODE=offline a folder in output.dir"""


@dataclass(frozen=True)
class Config:
    """All tables of a run."""

    model: ModelConfig = ModelConfig()
    init: InitConfig = InitConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    dtypes: DTypesConfig = DTypesConfig()
    memory: MemoryConfig = MemoryConfig()
    router: RouterConfig = RouterConfig()
    mtp: MTPConfig = MTPConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    guard: GuardConfig = GuardConfig()
    output: OutputConfig = OutputConfig()
    metrics: MetricsConfig = MetricsConfig()
    export: ExportConfig = ExportConfig()

    def __post_init__(self) -> None:
        for table in fields(self):
            for each in fields(getattr(self, table.name)):
                name, value = f"{table.name}.{each.name}", getattr(getattr(self, table.name), each.name)
                if each.metadata:
                    _require(each.metadata["holds"](value), name, value, each.metadata["remedy"])
                for number in value if isinstance(value, tuple) else (value,):
                    _require(not isinstance(number, float) or math.isfinite(number), name, value, "must be finite")
                    _require(not isinstance(number, int) or abs(number) < 2**63, name, value, "must fit 64 bits")

    @property
    def model_path(self) -> str:
        """The path of the model's config.json, or of the directory that holds it."""
        return self.model.config or self.init.from_hf

    @property
    def checkpoint_directory(self) -> Location:
        """The folder of the run's checkpoints, or their URL."""
        return as_location(self.checkpoint.dir or Path(self.output.dir) / "checkpoints")

    @property
    def export_directory(self) -> Path | None:
        """The folder for the model at the end; None: nowhere."""
        if self.export.to_hf == AUTO:
            return Path(self.output.dir) / "hf"
        return Path(self.export.to_hf) if self.export.to_hf else None


def replace_field(config: Config, table: str, name: str, value: object) -> Config:
    """Return `config` with another value of the field `table`.`name`; ValueError where it cannot be."""
    return replace(config, **{table: replace(getattr(config, table), **{name: value})})
