"""Base class of model configurations: the fields of a hub `config.json`, and the locations of tensors on the hub.

Dimension letters: E experts, I expert intermediate, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from torch import nn

from dualpipe.nn.attention import Rotary, Yarn

# Sampling settings, which older versions of transformers keep in config.json instead of generation_config.json.
_SAMPLING = {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "bad_words_ids",
    "begin_suppress_tokens", "cache_implementation", "constraints", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dola_layers", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_decoder_ids", "forced_eos_token_id", "guidance_scale", "length_penalty", "low_memory", "max_length",
    "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_logits", "output_scores", "penalty_alpha", "prompt_lookup_num_tokens", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings",
    "suppress_tokens", "target_lookbehind", "temperature", "token_healing", "top_h", "top_k", "top_p", "typical_p",
    "use_mtp", "watermarking_config",
}
# Keys of config.json without an effect on the mathematics of a model, written by transformers and by training tools.
_IGNORED = _SAMPLING | {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_experts_implementation",
    "_flash_attn_2_enabled", "_name_or_path", "_pre_quantization_dtype", "add_cross_attention", "architectures",
    "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "custom_pipelines", "dtype", "eos_token_id", "experts_implementation", "finetuning_task",
    "gradient_checkpointing", "id2label", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference",
    "label2id", "mask_token_id", "max_position_embeddings", "max_seq_length", "model_max_length", "model_name",
    "model_type", "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "prefix", "problem_type", "pruned_heads", "quantization_config", "return_dict",
    "rope_parameters", "rope_scaling", "router_aux_loss_coef", "sep_token_id", "task_specific_params",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
}
# Keys of config.json for the number of layers for multi-token prediction (MTP), which follow the other layers.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
# Upper bounds of sizes, above those of any model; without them a wrong size may fail only after hours of building.
_MAX_SIZES = {
    "num_hidden_layers": 1000, **dict.fromkeys(MTP_LAYERS, 1000), "vocab_size": 2**24, "sliding_window": 2**31,
    "num_experts": 2**13, "n_routed_experts": 2**13, "n_shared_experts": 2**13, "num_attention_heads": 2**13,
    "num_key_value_heads": 2**13,
}
_MAX_SIZE = 2**20  # of sizes without an entry in _MAX_SIZES
# Exclusive lower bounds of the parameters of the rotary embedding.
_ROPE_BOUNDS = {
    "rope_theta": 1, "factor": 0, "original_max_position_embeddings": 0, "beta_fast": 0, "beta_slow": 0,
    "attention_factor": 0, "mscale": -1, "mscale_all_dim": -1,
}
_MAX_NUMBER = 1e30  # of all numbers that are not sizes


class UnsupportedModel(ValueError):
    """Raised for a model family or option that this library does not implement; another library may."""


@dataclass(frozen=True)
class HubTensorPart:
    """Tensor on the hub and the slice of a parameter of this library that it holds.

    name, shape: of the tensor on the hub.
    where: the slice, with one entry for each dimension of the parameter. For a single expert, the first entry has
    length 1, and `shape` has no dimension for it; the elements and their order are the same.
    transposed: the last two dimensions of the tensor on the hub are exchanged.
    """

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Sizes and options that all families share; fields are named as in the hub's `config.json`."""

    model_type: ClassVar[str]
    _ignored: ClassVar[frozenset[str]] = frozenset()  # keys without an effect on the family's mathematics
    _fixed: ClassVar[dict[str, Any]] = {}  # keys with a single supported value
    _nullable: ClassVar[frozenset[str]] = frozenset()  # keys for which null is a value, not the same as a missing key
    quantized_as: ClassVar[str] = "fp8_block"  # the format of the family's quantized checkpoints
    architecture: ClassVar[str]  # the class of the whole model in other libraries
    # "auto_map" of config.json for a family whose code comes with its checkpoint, since transformers lacks the family.
    auto_map: ClassVar[Mapping[str, str]] = {}

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    mtp_depth: int = 0  # number of trained layers for multi-token prediction: see `with_mtp`

    if TYPE_CHECKING:  # members that each family defines

        @property
        def num_experts(self) -> int: ...  # a field, or a property if the hub uses another name
        @property
        def rotary_dim(self) -> int: ...  # number of rotated dimensions of a head
        def layer(self, index: int) -> nn.Module: ...  # the `Layer` with this global index

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> Self:
        """Read the content of a hub `config.json`.

        Rope parameters may be in the older form (`rope_theta`, `rope_scaling`) or the newer one (`rope_parameters`).
        Raises `ValueError` for missing, mistyped or absurd sizes, `UnsupportedModel` for options that are unknown or
        not supported. The message names all of them.
        """
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in hub.items()
                  if value is not None or key in cls._nullable}
        cls._check_values(values)
        values = cls._translated(values | rope_fields(values))
        hub_fields = {field.name: field for field in fields(cls) if field.name != "mtp_depth"}
        if values.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(f"model_type must be {cls.model_type!r}; got {values['model_type']!r}")
        unsupported = [f"{key}={brief(values[key])} (only {only!r})" for key, only in cls._fixed.items()
                       if values.get(key, only) != only]
        unknown = values.keys() - hub_fields.keys() - _IGNORED - cls._ignored - cls._fixed.keys()
        unsupported += [f"{key}={brief(values[key])} (unknown)" for key in sorted(unknown)]
        if unsupported:
            remedy = "; remove unknown ones that do not change the model" if unknown else ""
            raise UnsupportedModel(f"options that {cls.model_type} does not support here: {', '.join(unsupported)}"
                                   f"{remedy}")
        missing = [name for name, field in hub_fields.items() if field.default is MISSING and name not in values]
        if missing:
            raise ValueError(f"the configuration lacks {', '.join(missing)}")
        cls._check_values(values)  # a second time, for values that were renamed
        return cls(**{name: values[name] for name in hub_fields if name in values})

    @classmethod
    def _check_values(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError for values of another type than their field, required sizes below 1, and absurd sizes."""
        types = get_type_hints(cls)
        problems: list[str] = []
        for field in fields(cls):
            if field.name not in values:
                continue
            value = values[field.name]
            largest = _MAX_SIZES.get(field.name, _MAX_SIZE)
            is_required = field.default is MISSING
            if not _fits(value, types[field.name], least=1 if is_required else 0):
                problems.append(f"{field.name}={brief(value)}")
            if type(value) is int and types[field.name] is not float and value > largest:
                problems.append(f"{field.name}={brief(value)} (at most {largest})")
        if problems:
            raise ValueError(f"values of the wrong type or size: {', '.join(problems)}")

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Rename the hub's keys to the names of the fields where they differ; return all values."""
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a `config.json` for `from_dict` and for other libraries.

        It lacks everything that this library does not know, such as the longest sequence and special tokens.
        """
        names = [field.name for field in fields(self) if field.name not in ("yarn", "mtp_depth")]
        values = {name: getattr(self, name) for name in names}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
        if self.yarn is not None:
            yarn = {key: value for key, value in asdict(self.yarn).items() if value is not None}
            rope |= {"rope_type": "yarn"} | yarn
            values["max_position_embeddings"] = int(self.yarn.original_max_position_embeddings * self.yarn.factor)
        # Without this key other libraries use a fixed default, whatever the other sizes are.
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        remote = {"auto_map": dict(self.auto_map)} if self.auto_map else {}
        return {"architectures": [self.architecture], **remote, "model_type": self.model_type, **self._fixed, **values,
                "rope_parameters": rope}

    @property
    def rotary(self) -> Rotary:
        """Rotary embedding of a head."""
        return Rotary(self.rotary_dim, self.rope_theta, self.yarn)

    def hub_parts(self, name: str, shape: Sequence[int]) -> list[list[HubTensorPart]]:
        """Return the locations of a parameter or buffer on the hub: a list of tensors for each way of storing it.

        `save_hf` uses the first way. A tied head is stored as the embedding, or in files of some tools the embedding as
        the head. Experts are separate tensors, or stacked.
        Example: the first half of expert 7's matrix in `layers.0.mlp.experts.gate_up_proj.weight` (E, 2I, H) is
        `model.layers.0.mlp.experts.7.gate_proj.weight` (I, H).
        """
        if self.tie_word_embeddings and name in ("embed_tokens.weight", "lm_head.weight"):
            return [[whole(hub_name, shape)] for hub_name in ("model.embed_tokens.weight", "lm_head.weight")]
        if name == "lm_head.weight":
            return [[whole(name, shape)]]
        prefix, experts_infix, projection = f"model.{name.removesuffix('.weight')}".partition(".mlp.experts.")
        if not experts_infix:
            return [[whole(f"model.{name}", shape)]]
        projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        experts, rows, columns = shape
        rows //= len(projections)
        separate: list[HubTensorPart] = []
        for expert in range(experts):
            for start, hub_projection in zip((0, rows), projections):
                where = (slice(expert, expert + 1), slice(start, start + rows), slice(0, columns))
                hub_name = f"{prefix}{experts_infix}{expert}.{hub_projection}.weight"
                separate.append(HubTensorPart(hub_name, (rows, columns), where))
        return [separate, [whole(f"{prefix}{experts_infix}{projection}", shape)]]

    def with_mtp(self) -> Self:
        """Return this configuration with its layers for multi-token prediction trained; ValueError if it has none."""
        depth = self.mtp_depth or len(self.carried_layers)
        if not depth:
            raise ValueError(f"a {self.model_type} whose config.json announces no layers for multi-token prediction "
                             f"({MTP_LAYERS[0]}) cannot train any: set mtp.weight = 0 (with `dualpipe hf`: leave "
                             "out --mtp), or add them to the config.json of a deepseek_v3")
        return replace(self, mtp_depth=depth)

    @property
    def all_layers(self) -> range:
        """Global indices of all trained layers, those for multi-token prediction last."""
        return range(self.num_hidden_layers + self.mtp_depth)

    @property
    def mtp_layers(self) -> range:
        """Global indices of the trained layers for multi-token prediction, which are in the last stage."""
        return self.all_layers[self.num_hidden_layers :]

    def mtp_depth_of(self, names: Iterable[str]) -> int:
        """Return the number of layers for multi-token prediction in a state dict with these names."""
        matches = (re.match(r"layers\.(\d+)\.", name) for name in names)
        num_layers = max((int(match[1]) + 1 for match in matches if match), default=0)
        return max(0, num_layers - self.num_hidden_layers)

    @property
    def carried_layers(self) -> range:
        """Global indices of MTP layers that are on the hub and not trained; `save_hf` copies them."""
        return range(0)

    @property
    def hub_copies(self) -> dict[str, str]:
        """Parameter names by the hub names of their copies.

        On the hub, each layer for multi-token prediction has a copy of the embedding and of the head. `save_hf` writes
        the copies for trained layers, `load_hf` skips them if they have the same values.
        """
        head = "embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"
        copies = (("embed_tokens.weight", "embed_tokens.weight"), ("shared_head.head.weight", head))
        return {f"model.layers.{layer}.{copy}": name for layer in self.mtp_layers for copy, name in copies}

    def carried_layer(self, name: str) -> int | None:
        """Return the layer of `carried_layers` that a tensor on the hub belongs to; None if there is none."""
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match is None:
            return None
        layer = int(match[1])
        return layer if layer in self.carried_layers else None

    def ignored_on_hub(self, name: str) -> bool:
        """Return True if a checkpoint may contain this tensor although the model does not."""
        is_copy = name in self.hub_copies or (self.tie_word_embeddings and name == "lm_head.weight")
        return is_copy or name.endswith("rotary_emb.inv_freq") or self.carried_layer(name) is not None


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(HubConfig):
    """Configuration of a family with grouped-query attention, whose experts have the hub's names.

    Raises `ValueError` for sizes of attention or of the router that do not fit together.
    """

    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                             f"num_key_value_heads ({self.num_key_value_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding; got {self.head_dim}")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok must be 1 to num_experts ({self.num_experts}); "
                             f"got {self.num_experts_per_tok}")

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head: all of them."""
        return self.head_dim


def _fits(value: Any, annotation: Any, least: int) -> bool:
    """Return True if a value has the type of an annotation, and a number is at least `least`.

    Fields of type float take integers too.
    """
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0], 0) for item in value)
    if arguments:  # a union
        return any(_fits(value, member, 0) for member in arguments)
    if type(value) in (int, float) and annotation is float:
        return least <= value < _MAX_NUMBER  # False for NaN
    return type(value) is annotation and (annotation is not int or value >= least)


def whole(name: str, shape: Sequence[int]) -> HubTensorPart:
    """Return the location of a parameter that the hub stores whole, in the same shape."""
    return HubTensorPart(name, tuple(shape), tuple(slice(0, size) for size in shape))


def rope_fields(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `rope_theta` and, if the embedding is stretched, `yarn`, from either form of config.json.

    `rope_scaling` replaces `rope_parameters`, as in transformers.

    Raises `UnsupportedModel` for a type other than "default" and "yarn" and for unknown parameters, `ValueError` for
    missing parameters, for numbers out of range, and if it is unclear which `rope_theta` is meant.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hub.get(key) or {}, Mapping):
            raise ValueError(f"{key} must be a JSON object; got {brief(hub[key])}")
    parameters = hub.get("rope_parameters") or {}
    stated = hub.get("rope_scaling") or parameters
    scaling = {key: value for key, value in stated.items() if value is not None}
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    theta = scaling.setdefault("rope_theta", hub.get("rope_theta", 10_000.0))
    replaced_theta = parameters.get("rope_theta")
    if replaced_theta not in (None, theta) and "rope_theta" not in stated:
        raise ValueError(f"rope_scaling replaces rope_parameters, so rope_theta would be {brief(theta)} instead of "
                         f"{brief(replaced_theta)}; put the model's rope_theta into rope_scaling")
    if rope_type == "yarn" and "max_position_embeddings" in hub:
        scaling.setdefault("original_max_position_embeddings", hub["max_position_embeddings"])
    if "truncate" in stated:
        scaling["truncate"] = bool(stated["truncate"])  # null counts as false in transformers
    out_of_range = [f"{key}={brief(value)}" for key, value in scaling.items() if key in _ROPE_BOUNDS
                    and not (type(value) in (int, float) and _ROPE_BOUNDS[key] < value < _MAX_NUMBER)]
    if out_of_range:
        raise ValueError(f"rope parameters out of range: {', '.join(out_of_range)}; expected positive numbers, and a "
                         "rope_theta above 1")
    theta = float(scaling.pop("rope_theta"))
    yarn_names = [field.name for field in fields(Yarn)]
    unknown = sorted(scaling.keys() - (yarn_names if rope_type == "yarn" else []))
    if unknown or rope_type not in ("default", "yarn"):
        raise UnsupportedModel(f"rope_type {brief(rope_type)} with {unknown} is not supported; only 'default' with "
                               f"rope_theta, and 'yarn' with {', '.join(yarn_names)}")
    if rope_type == "default":
        return {"rope_theta": theta}
    missing = [key for key in ("factor", "original_max_position_embeddings") if key not in scaling]
    if missing:
        raise ValueError(f"rope_type 'yarn' needs {' and '.join(missing)}; add them to rope_parameters")
    return {"rope_theta": theta, "yarn": Yarn(**scaling)}
