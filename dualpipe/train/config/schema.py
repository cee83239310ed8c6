"""The settings of a training run: one frozen dataclass per TOML table. Every field is also a command-line option.

A field may have a rule that refuses values that can never work; `Config` checks it. `config.fit.fit_world` checks
the fields that depend on the number of ranks. Only the trainer uses these classes: code below it takes plain sizes and
process groups. The string below a field is its help text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from dualpipe.runtime.storage import Location, as_location

STDLIB = "stdlib"  # value of data.path: the source code of Python's standard library
BYTES = "bytes"  # value of data.tokenizer: one token per byte
AUTO = "auto"  # value of data.tokenizer: the checkpoint's tokenizer; value of export.to_hf: a folder in output.dir
TOKENIZER = "tokenizer.json"  # name in a checkpoint of the file of the package `tokenizers`
TOKENIZER_CONFIG = "tokenizer_config.json"  # name in a checkpoint of what transformers knows of the tokenizer
TEXT_KEY = "text"  # default of data.text_key
Algorithm = Literal["muon", "adamw"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)  # values of optimizer.name that are not the path of a class
# The names in `train.optim.lr_schedule.SCHEDULES`.
LRSchedule = Literal["cosine", "linear", "constant", "wsd"]


def _rule(is_valid: Callable[[Any], object], remedy: str) -> Callable[[Any], Any]:
    """Return a function that makes a field from its default. `Config` refuses invalid values, with the remedy."""
    return lambda default: field(default=default, metadata={"is_valid": is_valid, "remedy": remedy})


_at_least_0 = _rule(lambda value: value >= 0, "must be at least 0")
_at_least_1 = _rule(lambda value: value >= 1, "must be at least 1")
_not_negative = _rule(
    lambda value: all(number >= 0 for number in (value if isinstance(value, tuple) else (value,))),  # one, or several
    "must not be negative",
)
_positive = _rule(lambda value: value > 0, "must be positive")
_fraction = _rule(lambda value: 0 <= value <= 1, "must be from 0 to 1")
_below_1 = _rule(lambda value: 0 <= value < 1, "must be at least 0 and less than 1")
_seconds = _rule(lambda value: 0 < value <= 1e9, "must be positive (seconds), up to 1e9")
_betas = _rule(lambda betas: all(0 <= beta < 1 for beta in betas), "both must be at least 0 and less than 1")
_wandb_project = _rule(
    lambda name: not name or getattr(find_spec("wandb"), "origin", None),  # None for a mere folder of this name
    "the package wandb is not installed; `pip install wandb`, or leave this out",
)


def _require(condition: object, name: str, value: object, remedy: str) -> None:
    """Raise ValueError unless the condition holds for the value of the field `name`."""
    if not condition:
        raise ValueError(f"{name} = {value!r}: {remedy}")


@dataclass(frozen=True)
class ModelConfig:
    """[model]: the model to train."""

    config: str = ""
    """path of a hub-style config.json, in the TOML relative to the TOML file; default: the one in init.from_hf"""
    backend: Literal["auto", "dualpipe", "transformers"] = "auto"
    """implementation of the model: this library's, or that of transformers (the extra "hf"); auto: this library's if
    it has the family"""
    attention: Literal["auto", "default", "fa3", "fa4", "flash", "cudnn", "efficient"] = "auto"
    """kernel of plain causal attention on CUDA; auto: the fastest for the GPU that runs; default: torch's own order"""
    expert_gemm: Literal["dualpipe", "grouped_mm", "auto"] = "dualpipe"
    """library of the experts' GEMMs in the forward and the input gradient: this one or torch; auto: the fastest, timed
    at the start; weight gradients are this library's"""


@dataclass(frozen=True)
class InitConfig:
    """[init]: the initial weights."""

    from_hf: str = ""
    """directory with a Hugging Face checkpoint; default: random weights from train.seed"""


@dataclass(frozen=True)
class ExportConfig:
    """[export]: the export at the end of a run."""

    to_hf: str = ""
    """directory to create, with the model as a Hugging Face checkpoint; "auto": `hf` in output.dir, where the export of
    an earlier run is renamed"""
    merged: bool = False
    """with [lora]: export the whole model with the adapters added to its weights, instead of the adapters alone"""
    quantized: bool = False
    """export weights stored in fp8_block (for gpt-oss, mxfp4) in that format instead of dequantized"""


@dataclass(frozen=True)
class DataSource:
    """An element of data.sources: one of several texts to train on."""

    text_form = "PATH,weight=W"  # of `str`, and of an element on the command line
    path: str = ""
    """as data.path"""
    weight: float = 1.0
    """share of the tokens, in any unit: the share is weight divided by the sum of all weights"""

    def __post_init__(self) -> None:
        _require(self.path, "data.sources: path", self.path, "give a packed directory or a folder of text")
        _require(0 < self.weight < math.inf, "data.sources", str(self), "give a positive, finite weight")

    def __str__(self) -> str:
        return f"{self.path},weight={self.weight:g}"


@dataclass(frozen=True)
class DataConfig:
    """[data]: the source of the tokens."""

    path: str = _rule(bool, 'give a packed directory, a folder of text, or "stdlib"')(STDLIB)
    """directory made by `dualpipe data pack`, file or folder of text or of records in a format that docs/data.md lists,
    or "stdlib" (Python's own source code)"""
    tokenizer: str = _rule(bool, 'give "auto", "bytes" or the directory of a tokenizer')(AUTO)
    """"bytes", or the directory of a model's tokenizer, which transformers loads, or the path of a tokenizer.json
    without settings beside it; "auto": the one in init.from_hf if there is one, else "bytes"; ignored if path is packed
    already"""
    end_token: str = ""
    """token that ends a document of text; default: the tokenizer's eos_token; ignored if path is packed already"""
    text_key: str = _rule(bool, "give the key of a record's text")(TEXT_KEY)
    """key of the text in a record, for files of records; with `chat`, key of the messages, by default "messages" or
    "conversations" """
    chat: bool = False
    """pack conversations, in OpenAI's or ShareGPT's form, through the tokenizer's chat template; only the assistant's
    tokens count for the loss; ignored if path is packed already"""
    chat_template: str = ""
    """file with a chat template (jinja2); default: the tokenizer's"""
    validation_fraction: float = _below_1(0.02)
    """fraction of the documents reserved for validation, selected by a hash of their content; if that selects none or
    all of them (such as the only file): the last tokens, this fraction of all tokens"""
    validation_path: str | None = None
    """separate validation data; then `path` is used for training only"""
    sources: tuple[DataSource, ...] = ()
    """several texts with weights, instead of path: tables [[data.sources]], or on the command line PATH,weight=W for
    each; the weights may change when a run resumes"""
    separate_documents: bool = False
    """mask attention between documents packed into one sequence, restart positions at each document, and predict no
    document's first token from the one before"""

    def __post_init__(self) -> None:
        _require(not self.end_token or not self.chat, "data.end_token", self.end_token,
                 "leave it out, because the chat template ends conversations")
        _require(not self.sources or self.path == STDLIB, "data.path", self.path,
                 "leave it out, because data.sources names the texts")


@dataclass(frozen=True)
class ParallelConfig:
    """[parallel]: the layout of the ranks; pp * dp * cp * ep is their number."""

    pp: int = _at_least_1(1)
    """pipeline-parallel ranks"""
    dp: int = _at_least_0(0)
    """data-parallel ranks: pipelines that train on different data and shard the parameters (FSDP2); 0: the number of
    ranks divided by the other sizes, or dp_replicate if the number of ranks is unknown"""
    dp_replicate: int = _at_least_1(1)
    """number of replicas of the parameters (HSDP), a divisor of dp: each replica shards the parameters over its own
    dp / dp_replicate ranks, and gradients are summed over the replicas; for replicas that fit a node or a pod"""
    cp: int = _at_least_1(1)
    """context-parallel ranks: they share every sequence, each with an early and a late chunk; for sequences whose
    activations do not fit one rank"""
    cp_method: Literal["auto", "ring", "all_to_all"] = "auto"
    """attention over the chunks of other ranks: ring passes keys and values around, all_to_all gives each rank some
    heads of the whole sequence; auto: the one that sends fewer bytes, if the numbers of heads allow both"""
    ep: int = _at_least_1(1)
    """expert-parallel ranks: each has some of the experts and its own data, and dispatches tokens to the others"""
    dispatch: Literal["auto", "all_to_all", "two_hop"] = "auto"
    """way of tokens to experts on other ranks: all_to_all sends a token to each rank with experts of it; two_hop sends
    it once to each node with experts of it, and then within the node, with the same results; auto: two_hop if the ranks
    of ep are in several nodes, with the same number of them in each and more than one"""
    ranks_per_node: int = _at_least_0(0)
    """successive ranks that share a node, for dispatch; 0: as torchrun or SLURM has started them"""
    overlap: bool = True
    """run the two actions of a pair interleaved, so that communication of one overlaps compute of the other"""
    merge_weight_grads: bool = True
    """compute the experts' weight gradients of several micro-batches in one GEMM, which reads and writes their sum
    once, if the schedule has them side by side; the float32 sum can differ in its last bits on CUDA, not on CPU"""
    schedule: Literal[
        "dualpipev", "dualpipev_full", "dualpipev_half", "zbv", "v_half", "v_min", "gpipe", "1f1b", "zb1p", "zb2p",
        "interleaved_1f1b", "interleaved_zb", "auto",
    ] = "dualpipev"
    """pipeline schedule; dualpipev_full defers no weight gradients: less memory, a larger bubble; auto: the best one
    that a search finds, once, on the first rank"""
    schedule_costs: str = ""
    """for auto: costs of a stage as `dualpipe schedule --costs` takes them, as text such as "F=1,B=1.3,W=0.65,FB=1.95",
    or a JSON file; default: F=1,B=2,W=1, and pairs save nothing"""
    schedule_memory: float | tuple[float, ...] = _not_negative(0.0)
    """for auto: maximum stage activations on a rank, where a deferred weight gradient counts 0.5: one number, or one
    for each pipeline rank, such as [7, 9, 9, 9]; 0: that of dualpipev, 2 pp + 1"""
    layers_per_stage: tuple[int, ...] = ()
    """layers of each pipeline stage, from the first; default: stages of about equal compute"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": CUDA if the machine has a device for each of its ranks"""
    timeout: float = _seconds(600.0)
    """seconds without progress after which a rank stops waiting for another rank, or for a checkpoint, and fails"""
    interface: str = ""
    """network interface for communication between nodes, such as ib0; default: the one of each host's name"""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's dimensions, outermost first."""
        cp = {} if self.cp == 1 else {"cp": self.cp}
        return {"pp": self.pp, "dp": self.dp or self.dp_replicate, **cp, "ep": self.ep}

    def __str__(self) -> str:
        texts = {name: f"{name} {size}" for name, size in self.sizes.items()}
        if self.dp_replicate > 1:
            texts["dp"] += f" ({self.dp_replicate} x {self.sizes['dp'] // self.dp_replicate})"
        return ", ".join(texts.values())

    @property
    def replicas(self) -> int:
        """The number of pipelines, each with its own tokens. Means over the global batch are means over them."""
        return self.dp * self.cp * self.ep

    @property
    def dense_shards(self) -> int:
        """The number of ranks that a dense parameter is sharded over."""
        return self.replicas // self.dp_replicate

    @property
    def expert_shards(self) -> int:
        """The number of ranks that an expert's parameters are sharded over."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def batch_shards(self) -> int:
        """The number of parts that the global batch is split into; context-parallel pipelines share one."""
        return self.dp * self.ep

    @property
    def world_size(self) -> int:
        """The number of ranks of this layout; with dp 0, the smallest one."""
        return math.prod(self.sizes.values())


@dataclass(frozen=True)
class TrainConfig:
    """[train]: length and batch of the run. A step takes micro_batch_size * num_chunks * dp * ep sequences."""

    steps: int = _at_least_1(100)
    """optimizer steps"""
    sequence_length: int = _at_least_1(256)
    """tokens per sequence"""
    micro_batch_size: int = _at_least_1(1)
    """sequences per micro-batch"""
    num_chunks: int = _at_least_1(4)
    """micro-batches per step"""
    batch_size: int = _not_negative(0)
    """sequences per step over all ranks, from which num_chunks follows for any number of ranks; 0: num_chunks holds"""
    time_limit: float = _not_negative(0.0)
    """seconds from the start after which the run saves and stops with exit status 75; 0: no limit"""
    seed: int = _not_negative(0)
    """seed of the initial weights and the order of the data"""
    compile: bool = False
    """compile attention and dense MLPs with torch.compile"""
    deterministic: bool = False
    """use deterministic algorithms, and raise an error for operators without one; otherwise the backward of attention
    on CUDA is not deterministic"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of parameters and activations in the model; the optimizer keeps fp32 in both cases"""
    eval_interval: int = _not_negative(0)
    """steps between evaluations on validation data; 0: evaluate at the end only"""
    eval_batches: int = _not_negative(8)
    """global batches per evaluation; 0: never evaluate"""
    log_interval: int = _at_least_1(1)
    """steps between lines of the metrics; steps with an evaluation and the last step are always logged"""
    gc_interval: int = _not_negative(50)
    """steps between runs of Python's garbage collector, on all ranks after the same step; 0: whenever Python does"""
    print_interval: int = _at_least_1(10)
    """steps between printed lines if stdout is not a terminal; steps that are not logged are not printed; the first
    step, steps with an evaluation and the last step always are"""


DTypeName = Literal["fp32", "bf16", "fp16", "fp64"]
FormatName = Literal["mxfp8", "nvfp4", "fp8_block", "fp8_block_pow2", "mxfp4"]


@dataclass(frozen=True)
class PatternRule:
    """An element of a list of rules: settings for the names that `pattern` matches. A field that is None is not set."""

    text_form = "PATTERN,FIELD=VALUE,..."  # of `str`, and of an element on the command line
    pattern: str = ""
    """segments of a tensor's or module's name, joined by dots: *.mlp.gate; "*" is any number of whole segments"""

    def __str__(self) -> str:
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)[1:]}
        return ",".join([self.pattern, *(f"{name}={value}" for name, value in values.items() if value is not None)])


@dataclass(frozen=True)
class DTypeRule(PatternRule):
    """An element of dtypes.rules: dtypes of the tensors that `pattern` matches. A field that is None is not changed."""

    storage: Literal[DTypeName, FormatName] | None = None
    """dtype of the parameter that the optimizer updates, or format of stored weights, which have fp32 masters"""
    compute: DTypeName | None = None
    """dtype of the parameter in the forward pass"""
    reduce: DTypeName | None = None
    """dtype of the buffer in which gradients are accumulated and reduced"""
    save: DTypeName | None = None
    """dtype of the tensor in an export"""
    output: DTypeName | None = None
    """dtype of the output of a module that computes in another dtype than the modules around it"""
    gather: FormatName | None = None
    """format of the all-gather of weights, quantized each time from shards in their storage dtype"""

    def __post_init__(self) -> None:
        names = [setting.name for setting in fields(self)[1:]]
        _require(any(getattr(self, name) for name in names), "dtypes.rules", self.pattern,
                 f"a rule needs a pattern and at least one of {', '.join(names)}")
        _require(not self.gather or self.storage not in get_args(FormatName), "dtypes.rules", str(self),
                 "weights are either stored or gathered in a format; give storage a dtype, or leave one of them out")
        _require(all(self.pattern.split(".")), "dtypes.rules: pattern", self.pattern,
                 "give segments joined by dots, such as *.mlp.gate")


@dataclass(frozen=True)
class DTypesConfig:
    """[dtypes]: exceptions from train.dtype, by the names that `dualpipe dtypes CONFIG` prints."""

    rules: tuple[DTypeRule, ...] = ()
    """rules for tensors, as [[dtypes.rules]] in the TOML; on the command line PATTERN,FIELD=DTYPE,... for each"""
    gemm_precision: Literal["auto", "weight-only"] = "auto"
    """GEMMs with weights in a format; "auto": in FP8 if the format has FP8 GEMMs and train.dtype is bf16;
    "weight-only": activations are not quantized"""
    fp8_weight_grad: bool = False
    """run the weight-gradient GEMMs of FP8 GEMMs in FP8 too; saved activations in FP8 take half of the memory"""
    fp8_dispatch: bool = False
    """dispatch tokens to the experts of other ranks in FP8, half of the bytes; results and gradients are not
    quantized"""


@dataclass(frozen=True)
class MemoryConfig:
    """[memory]: activation recompute, and the memory of a device."""

    recompute: tuple[str, ...] = ()
    """parts of layers to recompute instead of keeping their activations: attention, experts, norms or layer, dispatch
    (the experts, whose tokens are also dispatched a second time); for some layers as in experts:0-7; or none"""
    logits: float = _not_negative(0.5)
    """GB (10^9 bytes) of logits, counted in float32, that exist at once: the head and the loss run on a part of the
    tokens at a time, where the head is a plain linear layer; 0: on all tokens of a micro-batch"""
    capacity: float = _not_negative(0.0)
    """GB (10^9 bytes) of a device, for `dualpipe memory` to report the rest; 0: no report"""

    @property
    def part_bytes(self) -> int:
        """Return `logits` in bytes."""
        return round(self.logits * 1e9)


@dataclass(frozen=True)
class RouterConfig:
    """[router]: load balancing of the experts. A coefficient or rate of 0 turns its part off."""

    balance: float = _not_negative(0.0)
    """coefficient of the balance loss, which is 1 for even loads"""
    balance_level: Literal["microbatch", "sequence", "global"] = "sequence"
    """scope of the balance loss; "global": with the loads of the previous step's global batch"""
    z_loss: float = _not_negative(0.0)
    """coefficient of the z-loss, the mean square of the logits' logsumexp, which keeps logits small"""
    bias_update_rate: float = _not_negative(0.0)
    """change of a correction bias per step: balancing without a loss, for routers that have such a bias"""


@dataclass(frozen=True)
class MTPConfig:
    """[mtp]: training of a model's layers for multi-token prediction."""

    weight: float = _not_negative(0.0)
    """weight of the mean MTP loss beside the next-token loss; 0: the layers are not trained, and an export copies them
    from init.from_hf"""
    last_weight: float = _not_negative(0.1)
    """weight in the last steps"""
    last_steps: int = _not_negative(0)
    """number of steps with last_weight; 0: weight holds to the end"""

    def __post_init__(self) -> None:
        _require(self.weight or self.last_steps <= 0, "mtp.last_steps", self.last_steps,
                 "must be 0 if mtp.weight is 0; set mtp.weight above 0")

    def weight_of(self, step: int, steps: int) -> float:
        """Return the weight in step `step`, counted from 1, of a run of `steps` steps."""
        return self.last_weight if step > steps - self.last_steps else self.weight


@dataclass(frozen=True)
class LoRAConfig:
    """[lora]: low-rank adapters by peft (the extra "hf"), which are trained instead of the model's own weights."""

    rank: int = _not_negative(0)
    """rank of the adapters; 0: all weights are trained"""
    alpha: float = _not_negative(0.0)
    """adapters are multiplied by alpha / rank; 0: twice the rank"""
    dropout: float = _below_1(0.0)
    """probability that an element of an adapter's input is zero in training; not for experts and routers"""
    targets: tuple[str, ...] = ()
    """ends of the names in transformers of what gets an adapter: linear layers (q_proj), stacked weights
    (experts.gate_up_proj), routers (mlp.gate.weight), the head (lm_head); or all-linear"""
    rslora: bool = False
    """multiply adapters by alpha / sqrt(rank) instead"""
    config: str = ""
    """an adapter_config.json of peft, or the directory that holds it, in place of the fields above"""
    adapter: str = ""
    """directory of an adapter, as peft or an earlier run wrote it, to begin with; its adapter_config.json takes the
    place of the fields above"""

    def __post_init__(self) -> None:
        has_file = bool(self.config or self.adapter)
        changed = [setting.name for setting in fields(self) if getattr(self, setting.name) != setting.default]
        _require(not (self.config and self.adapter), "lora.config", self.config, "leave it out; lora.adapter has one")
        _require(not has_file or len(changed) == 1, "[lora]", changed,
                 "the adapter_config.json sets all of these; leave out all but lora.config or lora.adapter")
        _require(has_file or (self.rank > 0) == bool(self.targets), "lora.targets", self.targets,
                 "give both lora.rank and lora.targets, such as q_proj v_proj experts.gate_up_proj, or neither")

    @property
    def is_enabled(self) -> bool:
        """True if the run trains adapters."""
        return bool(self.rank or self.config or self.adapter)


NO_ADAPTERS = LoRAConfig()


@dataclass(frozen=True)
class OptimizerGroup(PatternRule):
    """An element of optimizer.groups: settings of the parameters that `pattern` matches.

    A field that is None changes nothing. Of several matching groups that set a field, the last one wins.
    """

    lr: float | None = None
    """peak learning rate"""
    weight_decay: float | None = None
    """decoupled weight decay; a custom optimizer applies it in its own way"""
    algorithm: Algorithm | None = None
    """update rule, with optimizer.name muon or adamw"""

    def __post_init__(self) -> None:
        has_setting = any(value is not None for value in (self.lr, self.weight_decay, self.algorithm))
        _require(all(self.pattern.split(".")) and has_setting, "optimizer.groups", str(self),
                 "a group needs a pattern and at least one of lr, weight_decay, algorithm")
        _require((self.lr is None or 0 < self.lr < math.inf) and 0 <= (self.weight_decay or 0) < math.inf,
                 "optimizer.groups", str(self), "lr must be positive, weight_decay not negative, and both finite")


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: the optimizer and its learning rate."""

    name: str = "adamw"
    """adamw; muon, for matrices and each expert's, with adamw for embeddings, head, routers, norms and biases; or the
    import path of a subclass of torch.optim.Optimizer (a custom optimizer)"""
    lr: float = _positive(3e-4)
    """peak learning rate, for adamw and muon alike"""
    momentum: float = _below_1(0.95)
    """muon: decay of the running mean of the gradient"""
    nesterov: bool = True
    """muon: Nesterov momentum, which adds the gradient to its running mean once more"""
    coefficients: Literal["jordan", "polar_express"] = "jordan"
    """muon: coefficients of the Newton-Schulz steps; polar_express gets closer to singular values of 1 in as many
    steps"""
    qk_clip: float = _not_negative(0.0)
    """QK-clip threshold: a step scales back the query and key weights of heads with a larger attention logit; 0: off;
    Kimi K2 uses 100"""
    options: str = ""
    """arguments of a custom optimizer, besides lr and weight_decay: JSON, such as '{"rho": 0.9}'"""
    groups: tuple[OptimizerGroup, ...] = ()
    """settings for parameters by name, as [[optimizer.groups]] in the TOML; on the command line
    PATTERN,FIELD=VALUE,... for each"""
    layer_decay: float = _rule(lambda value: 0 < value <= 1, "must be above 0 and at most 1")(1.0)
    """factor on the learning rate from each layer to the one before it"""
    betas: tuple[float, float] = _betas((0.9, 0.95))
    """adamw: decay of the running means of the gradient and of its square"""
    eps: float = _positive(1e-8)
    """term added to the root of the mean square"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype of the running means; bf16 saves 4 bytes per parameter (muon: 2), and needs betas below 0.996"""
    offload: bool = False
    """adamw: keep the running means in pinned host memory; a step brings them to the device in buckets, and back"""
    weight_decay: float = _not_negative(0.1)
    """weight decay of matrices; norms, sinks and biases, also of experts, have none; adamw and muon decouple it from
    the gradient, a custom optimizer applies it in its own way"""
    warmup_steps: int = _not_negative(0)
    """steps of linear warm-up"""
    schedule: LRSchedule = "cosine"
    """learning rate after the warm-up: half a cosine, a linear decay, the peak, or the peak followed by a linear decay
    (wsd)"""
    min_lr_ratio: float = _fraction(0.1)
    """learning rate of the last step as a fraction of the peak; not for "constant\""""
    decay_fraction: float = _fraction(0.2)
    """wsd: fraction of all steps in which the learning rate decays"""
    clip_norm: float = _not_negative(1.0)
    """maximum global gradient norm; 0: no clipping"""

    def __post_init__(self) -> None:
        _require(self.moments == "fp32" or max(self.betas) < 1 - 2**-8, "optimizer.betas", self.betas,
                 "moments in bf16 cannot decay as slowly; give both below 0.996, or optimizer.moments = \"fp32\"")
        _require(self.moments == "fp32" or self.momentum < 1 - 2**-8, "optimizer.momentum", self.momentum,
                 "a mean in bf16 cannot decay as slowly; give less than 0.996, or optimizer.moments = \"fp32\"")
        is_custom = self.name not in ALGORITHMS
        _require(not is_custom or "." in self.name, "optimizer.name", self.name,
                 "give adamw, muon, or the import path of a class, such as torch.optim.NAdam")
        _require(not is_custom or self.moments == "fp32", "optimizer.moments", self.moments,
                 f"only adamw and muon support it, optimizer.name is {self.name}; leave it out")
        _require(not self.offload or self.name == "adamw", "optimizer.offload", self.offload,
                 f"only adamw supports it, optimizer.name is {self.name}; leave it out")
        for group in self.groups:
            _require(not self.offload or group.algorithm != "muon", "optimizer.groups", str(group),
                     "optimizer.offload serves adamw only; leave out algorithm, or offload")
            _require(not is_custom or group.algorithm is None, "optimizer.groups", str(group),
                     f"algorithm requires optimizer.name adamw or muon, not {self.name}")
        try:
            options = json.loads(self.options) if self.options else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"optimizer.options = {self.options!r}: not JSON: {error}") from None
        _require(isinstance(options, dict) and (is_custom or not options), "optimizer.options", self.options,
                 "give a JSON object, and optimizer.name the import path of a class")
        _require(not {"lr", "weight_decay"}.intersection(options), "optimizer.options", self.options,
                 "leave out lr and weight_decay: they are optimizer.lr and optimizer.weight_decay")


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: saving the state of a run, and resuming from it."""

    dir: str = ""
    """directory of checkpoints, relative to the working directory, or a URL such as s3://bucket/run; default:
    `checkpoints` in output.dir"""
    interval: int = _not_negative(0)
    """steps between checkpoints; the last step is saved too; 0: never save"""
    mode: Literal["sync", "async", "off"] = "async"
    """async: copy to host memory, then train on while files are written"""
    writer: Literal["thread", "process"] = "thread"
    """writer of async checkpoints: a thread shares the interpreter with training; a process has its own"""
    checksum: Literal["xxh3_128", "sha256"] = "xxh3_128"
    """checksum of each file, verified before it is loaded; sha256 takes as long as writing does"""
    keep_last: int = _not_negative(3)
    """number of newest checkpoints to keep; 0: all"""
    keep_every: int = _not_negative(0)
    """also keep checkpoints of steps that are multiples of this; 0: no others"""
    resume: str = _rule(bool, 'give "auto", "never" or a path')("auto")
    """auto: resume from the newest complete checkpoint in `dir`; never: start anew; or the path or URL of a
    checkpoint, or of a directory of them, to begin with if `dir` has none yet"""
    allow: tuple[str, ...] = ()
    """names, with * and ?, of tensors that may be missing from a checkpoint, unused, or of another shape or dtype;
    "loader" allows other data or another order"""


@dataclass(frozen=True)
class WatchdogConfig:
    """[watchdog]: the time after which ranks report what they wait for, in the folder `why` of output.dir."""

    timeout: float = _not_negative(0.0)
    """seconds without any event; 0: half of parallel.timeout"""


@dataclass(frozen=True)
class GuardConfig:
    """[guard]: the reaction to non-finite numbers and loss spikes."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """reaction to a non-finite loss or gradient: stop the run; skip the step; or roll back to the last checkpoint and
    skip the data of the step"""
    limit: int = _at_least_1(3)
    """number of consecutive skipped steps or rollbacks after which the run stops"""
    spike: float = _not_negative(0.0)
    """robust z-score among earlier steps above which a step's loss or gradient norm is a spike; 0: no detection"""
    on_spike: Literal["warn", "rollback"] = "warn"
    """reaction to a spike: print a warning, or roll back to the last checkpoint before it and skip its data"""
    checksum_interval: int = _not_negative(0)
    """steps between checksums that compare state that ranks replicate; 0: none"""
    recheck_interval: int = _not_negative(0)
    """steps between micro-batches that are computed twice and must give the same bits; 0: none"""


@dataclass(frozen=True)
class OutputConfig:
    """[output]: the directory of results."""

    dir: str = _rule(bool, "give a directory")("out")
    """directory of metrics, pictures and packed data, relative to the working directory"""


@dataclass(frozen=True)
class MetricsConfig:
    """[metrics]: further sinks, besides metrics.jsonl and TensorBoard events in output.dir."""

    wandb: str = _wandb_project("")
    """project at Weights & Biases, by the package wandb; WANDB_MODE=offline writes a folder in output.dir instead"""


@dataclass(frozen=True)
class Config:
    """The configuration of a run: all tables."""

    model: ModelConfig = ModelConfig()
    init: InitConfig = InitConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    dtypes: DTypesConfig = DTypesConfig()
    memory: MemoryConfig = MemoryConfig()
    router: RouterConfig = RouterConfig()
    mtp: MTPConfig = MTPConfig()
    lora: LoRAConfig = LoRAConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    guard: GuardConfig = GuardConfig()
    output: OutputConfig = OutputConfig()
    metrics: MetricsConfig = MetricsConfig()
    export: ExportConfig = ExportConfig()

    def __post_init__(self) -> None:
        for table in fields(self):
            values = getattr(self, table.name)
            for setting in fields(values):
                name = f"{table.name}.{setting.name}"
                value = getattr(values, setting.name)
                if setting.metadata:
                    _require(setting.metadata["is_valid"](value), name, value, setting.metadata["remedy"])
                for number in value if isinstance(value, tuple) else (value,):
                    _require(not isinstance(number, float) or math.isfinite(number), name, value, "must be finite")
                    _require(not isinstance(number, int) or abs(number) < 2**63, name, value, "must fit 64 bits")

    @property
    def model_path(self) -> str:
        """The path of the model's config.json, or of the directory that holds it."""
        return self.model.config or self.init.from_hf

    @property
    def checkpoint_directory(self) -> Location:
        """The directory of the run's checkpoints, or its URL."""
        return as_location(self.checkpoint.dir or Path(self.output.dir) / "checkpoints")

    @property
    def export_directory(self) -> Path | None:
        """The directory of the exported model, or None if the run exports nothing."""
        if self.export.to_hf == AUTO:
            return Path(self.output.dir) / "hf"
        return Path(self.export.to_hf) if self.export.to_hf else None


def replace_field(config: Config, table: str, name: str, value: object) -> Config:
    """Return `config` with another value of the field `table`.`name`. Raises ValueError if it is not valid."""
    return replace(config, **{table: replace(getattr(config, table), **{name: value})})
