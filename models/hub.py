"""What a model family knows of its form on the Hugging Face hub: `config.json`, and where its tensors are.

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

# Keys of config.json that say nothing about the mathematics of a model.
_IGNORED = {
    "_attn_implementation", "_experts_implementation", "_name_or_path", "architectures", "attn_implementation",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "experts_implementation",
    "id2label", "is_encoder_decoder", "label2id", "max_position_embeddings", "model_type", "name_or_path",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "quantization_config", "return_dict",
    "rope_parameters", "rope_scaling", "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache",
}
# config.json's names for how many layers for multi-token prediction (MTP) are behind the others.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
# Of what is more than in any model, some would be built for hours before it fails. Of sizes without a name here 2^20.
_MOST = {
    "num_hidden_layers": 1000, **dict.fromkeys(MTP_LAYERS, 1000), "vocab_size": 2**24, "sliding_window": 2**31,
    "num_experts": 2**13, "n_routed_experts": 2**13, "n_shared_experts": 2**13, "num_attention_heads": 2**13,
    "num_key_value_heads": 2**13,
}
# What parameters of the rotary embedding are above.
_LEAST = {
    "rope_theta": 0, "factor": 0, "original_max_position_embeddings": 0, "beta_fast": 0, "beta_slow": 0,
    "attention_factor": 0, "mscale": -1, "mscale_all_dim": -1,
}
_LARGEST = 1e30  # of all numbers that are no sizes


class UnsupportedModel(ValueError):
    """A family, or an option of one, that this library has no implementation of; another library may have one."""


@dataclass(frozen=True)
class HubTensorPart:
    """One tensor on the hub, and the part of one of ours that it is.

    where: the slices of ours, one for each dimension; those of a single expert's row keep their dimension. The hub's
    tensor has the same elements in the same order, without the dimensions that `shape` lacks; `transposed`: with its
    last two dimensions exchanged.
    """

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]
    transposed: bool = False


Part = HubTensorPart  # the former name; it goes with the next release


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Sizes and options that all families have; fields are named as in the hub's `config.json`."""

    model_type: ClassVar[str]
    _ignored: ClassVar[frozenset[str]] = frozenset()  # keys without a meaning for the family's mathematics
    _fixed: ClassVar[dict[str, Any]] = {}  # keys of which one value is supported
    _nullable: ClassVar[frozenset[str]] = frozenset()  # keys for which null is a value, not the same as no such key
    quantized_as: ClassVar[str] = "fp8_block"  # the format of the family's quantized checkpoints
    architecture: ClassVar[str]  # the class of the whole model in other libraries
    # config.json's "auto_map" of a family whose code comes with its checkpoint, as transformers has none of its name.
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
    mtp_depth: int = 0  # layers for multi-token prediction that are trained: see `with_mtp`

    if TYPE_CHECKING:  # what each family has

        @property
        def num_experts(self) -> int: ...  # a field of some, and a property where the hub has another name
        @property
        def rotary_dim(self) -> int: ...  # how many dimensions of a head are rotated
        def layer(self, index: int) -> nn.Module: ...  # a `Layer`, of this global index

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> Self:
        """Read the content of a hub `config.json`, older (`rope_theta`, `rope_scaling`) or newer (`rope_parameters`).

        Raises `ValueError` naming every option that is unknown or not supported, or every missing size.
        """
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in hub.items()
                  if value is not None or key in cls._nullable}
        cls._check_values(values)
        values = cls._translated(values | rope_fields(values))
        known = {field.name: field for field in fields(cls) if field.name != "mtp_depth"}
        if values.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(f"model_type must be {cls.model_type!r}; got {values['model_type']!r}")
        wrong = [f"{key}={brief(values[key])} (only {only!r})" for key, only in cls._fixed.items()
                 if values.get(key, only) != only]
        unknown = values.keys() - known.keys() - _IGNORED - cls._ignored - cls._fixed.keys()
        wrong += [f"{key}={brief(values[key])} (unknown)" for key in sorted(unknown)]
        if wrong:
            raise UnsupportedModel(f"options that {cls.model_type} does not support here: {', '.join(wrong)}")
        if missing := [name for name, field in known.items() if field.default is MISSING and name not in values]:
            raise ValueError(f"the configuration lacks {', '.join(missing)}")
        cls._check_values(values)  # again, for those that had another name
        return cls(**{name: values[name] for name in known if name in values})

    @classmethod
    def _check_values(cls, values: Mapping[str, Any]) -> None:
        """Refuse types other than the fields', sizes below 1 where there must be some, and absurd ones."""
        kinds = get_type_hints(cls)
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        wrong = [f"{name}={brief(value)}" for name, value in given.items()
                 if not _fits(value, kinds[name], least=name in required)]
        wrong += [f"{name}={brief(value)} (at most {most})" for name, value in given.items()
                  if type(value) is int and kinds[name] is not float and value > (most := _MOST.get(name, 2**20))]
        if wrong:
            raise ValueError(f"values of the wrong type or size: {', '.join(wrong)}")

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The hub's values, under the names of the fields where those differ."""
        return values

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json` from which `from_dict` makes this configuration, and other libraries a model.

        What this library does not know of, such as the longest sequence and special tokens, is not in it.
        """
        names = [field.name for field in fields(self) if field.name not in ("yarn", "mtp_depth")]
        values = {name: getattr(self, name) for name in names}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
        if self.yarn is not None:
            given = {key: value for key, value in asdict(self.yarn).items() if value is not None}
            rope |= {"rope_type": "yarn"} | given
            values["max_position_embeddings"] = int(self.yarn.original_max_position_embeddings * self.yarn.factor)
        # Other libraries take some number of their own where this is missing, whatever the other sizes are.
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        remote = {"auto_map": dict(self.auto_map)} if self.auto_map else {}
        return {"architectures": [self.architecture], **remote, "model_type": self.model_type, **self._fixed, **values,
                "rope_parameters": rope}

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of a head."""
        return Rotary(self.rotary_dim, self.rope_theta, self.yarn)

    def hub_parts(self, name: str, shape: Sequence[int]) -> list[list[HubTensorPart]]:
        """Where a parameter or buffer of ours is on the hub: the parts that make it up, for each way of storing it.

        `save_hf` writes the first. A tied head is the embedding; experts are apart or all in one. Example:
        `layers.0.mlp.experts.gate_up_proj.weight` (E, 2I, H) is `model.layers.0.mlp.experts.7.gate_proj.weight` (I, H)
        in the first half of row 7.
        """
        if name == "lm_head.weight":
            return [[whole("model.embed_tokens.weight" if self.tie_word_embeddings else name, shape)]]
        prefix, found, projection = f"model.{name.removesuffix('.weight')}".partition(".mlp.experts.")
        if not found:
            return [[whole(f"model.{name}", shape)]]
        projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        experts, rows, columns = shape
        rows //= len(projections)
        apart = [HubTensorPart(f"{prefix}{found}{expert}.{single}.weight", (rows, columns),
                      (slice(expert, expert + 1), slice(start, start + rows), slice(0, columns)))
                 for expert in range(experts) for start, single in zip((0, rows), projections)]
        return [apart, [whole(f"{prefix}{found}{projection}", shape)]]

    def with_mtp(self) -> Self:
        """The same model with its layers for multi-token prediction, to be trained; ValueError where it has none."""
        if not (depth := self.mtp_depth or len(self.carried_layers)):
            raise ValueError(f"a {self.model_type} whose config.json announces no layers for multi-token prediction "
                             f"({MTP_LAYERS[0]}) cannot train any: set mtp.weight = 0 (with `dualpipe hf`: leave "
                             "out --mtp), or add them to the config.json of a deepseek_v3")
        return replace(self, mtp_depth=depth)

    @property
    def all_layers(self) -> range:
        """Global indices of all layers that are trained, those for multi-token prediction last."""
        return range(self.num_hidden_layers + self.mtp_depth)

    @property
    def mtp_layers(self) -> range:
        """Global indices of the layers for multi-token prediction that are trained, which are in the last stage."""
        return self.all_layers[self.num_hidden_layers :]

    def mtp_depth_of(self, names: Iterable[str]) -> int:
        """How many layers for multi-token prediction are behind this model's others where it has tensors of these
        names."""
        layers = [int(found[1]) + 1 for name in names if (found := re.match(r"layers\.(\d+)\.", name))]
        return max(0, max(layers, default=0) - self.num_hidden_layers)

    @property
    def carried_layers(self) -> range:
        """Layers that are on the hub and not here, those for multi-token prediction: `save_hf` takes them along."""
        return range(0)

    @property
    def hub_copies(self) -> dict[str, str]:
        """What the hub has once more beside each layer for multi-token prediction that is trained, and which tensor of
        ours it is: the embedding and the head. `save_hf` writes them, `load_hf` passes them by."""
        head = "embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"
        copies = (("embed_tokens.weight", "embed_tokens.weight"), ("shared_head.head.weight", head))
        return {f"model.layers.{layer}.{copy}": name for layer in self.mtp_layers for copy, name in copies}

    def carried_layer(self, name: str) -> int | None:
        """Which one of these layers a tensor on the hub belongs to; None for all others."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return int(found[1]) if found is not None and int(found[1]) in self.carried_layers else None

    def ignored_on_hub(self, name: str) -> bool:
        """Return True if a checkpoint may have this tensor although the model does not."""
        again = name in self.hub_copies or (self.tie_word_embeddings and name == "lm_head.weight")
        return again or name.endswith("rotary_emb.inv_freq") or self.carried_layer(name) is not None


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(HubConfig):
    """A family with grouped-query attention, whose experts have the hub's names.

    Raises `ValueError` for sizes of attention and of the router that do not fit together.
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
        """All dimensions of a head."""
        return self.head_dim


def _fits(value: Any, kind: Any, least: int) -> bool:
    """Whether a field that is annotated with `kind` takes this value: integers from `least`, for fractions too."""
    inside = get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(each, inside[0], 0) for each in value)
    if inside:  # a union
        return any(_fits(value, each, 0) for each in inside)
    if type(value) in (int, float) and kind is float:
        return least <= value < _LARGEST  # neither NaN
    return type(value) is kind and (kind is not int or value >= least)


def whole(name: str, shape: Sequence[int]) -> HubTensorPart:
    """A tensor that is on the hub as it is here."""
    return HubTensorPart(name, tuple(shape), tuple(slice(0, size) for size in shape))


def rope_fields(hub: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and, where there is one, `yarn` from either form of config.json.

    Raises `ValueError` for a type other than "default" and "yarn", and for parameters that are not known.
    """
    scaling = hub.get("rope_parameters") or hub.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_parameters or rope_scaling must be a JSON object; got {brief(scaling)}")
    scaling = {key: value for key, value in scaling.items() if value is not None}
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.setdefault("rope_theta", hub.get("rope_theta", 10_000.0))
    if kind == "yarn" and "max_position_embeddings" in hub:
        scaling.setdefault("original_max_position_embeddings", hub["max_position_embeddings"])
    if wrong := [f"{key}={brief(value)}" for key, value in scaling.items() if key in _LEAST
                 and not (type(value) in (int, float) and _LEAST[key] < value < _LARGEST)]:
        raise ValueError(f"rope parameters that must be positive numbers: {', '.join(wrong)}")
    theta, known = float(scaling.pop("rope_theta")), [field.name for field in fields(Yarn)]
    extra = sorted(scaling.keys() - (known if kind == "yarn" else []))
    if extra or kind not in ("default", "yarn"):
        raise UnsupportedModel(f"rope_type {brief(kind)} with {extra} is not supported; only 'default' with "
                               f"rope_theta, and 'yarn' with {', '.join(known)}")
    if kind == "default":
        return {"rope_theta": theta}
    if missing := [key for key in ("factor", "original_max_position_embeddings") if key not in scaling]:
        raise ValueError(f"rope_type 'yarn' needs {' and '.join(missing)}")
    return {"rope_theta": theta, "yarn": Yarn(**scaling)}
