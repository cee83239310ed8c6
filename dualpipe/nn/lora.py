"""Low-rank adapters (LoRA, arXiv:2106.09685) of linear layers, of experts' layers, and of plain matrices.

An adapter is the submodule `adapter` of the layer that it adapts, whose own parameters are frozen:

    y = W x + b + scaling * B A dropout(x)            A: (R, H), B: (N, R)
    y = W[e] x + b[e] + scaling * B[e] A[e] x         for experts: A: (E, R, H), B: (E, N, R), two grouped GEMMs

No merged weight is formed, and the frozen weight may be quantized. A and B are layers of this library: their weight
gradients are deferred, and experts' adapters are sharded over expert-parallel ranks like the experts themselves. The
names of A and B, the scaling and the initial values are those of peft.

Dimension letters: T tokens, M rows, E experts, H in_features, N out_features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dualpipe.kernels import SortedTokens
from dualpipe.nn.grouped_linear import GroupedLinear, grouped_linear
from dualpipe.nn.init import local_part, name_seed
from dualpipe.nn.linear import Linear
from dualpipe.quantized.quantize_model import quantized_part

NAME = "adapter"  # of the adapter in the module that it adapts
STACKED = "adapters"  # of the adapters in a module that owns several stacked weights

InitialValues = Literal["zero", "gaussian", "random"]
"""Initial values, as `init_lora_weights` of peft. "zero": True, B is zero; "gaussian": so it is, and A is normal with a
standard deviation of 1 / rank; "random": False, A and B are uniform."""


class AdapterForm(NamedTuple):
    """Settings of an adapter.

    Attributes:
        rank: inner dimension of the two factors.
        scaling: multiplies the product of the two factors.
        dropout: probability that an element of the adapter's input is zero in training.
        initial: initial values of the factors.
    """

    rank: int
    scaling: float
    dropout: float = 0.0
    initial: InitialValues = "zero"


class Adapter(nn.Module):
    """Base class of adapters: two factors, `lora_A` and `lora_B`.

    Attributes:
        key: name of the adapted layer in peft's files; "" for an adapter that peft does not know.
        form: settings.
    """

    key: str = ""
    lora_A: Linear | GroupedLinear
    lora_B: Linear | GroupedLinear

    def __init__(self, form: AdapterForm, lora_A: Linear | GroupedLinear, lora_B: Linear | GroupedLinear) -> None:
        super().__init__()
        self.form = form
        self.lora_A = lora_A
        self.lora_B = lora_B
        for factor in (lora_A, lora_B):
            factor.quantizable = False  # an instance attribute: a dtype plan must not quantize what is trained here

    def initial_values(self, name: str, seed: int) -> dict[str, SeededFactor]:
        """Return the initial values of both factors by their names, for an adapter that is called `name`."""
        form = self.form
        std = 1 / form.rank if form.initial == "gaussian" else None
        values = {}
        for key, factor in (("lora_A", self.lora_A), ("lora_B", self.lora_B)):
            full_name = f"{name}.{key}.weight"
            shape = tuple(factor.weight.shape)
            bound = 1 / math.sqrt(factor.in_features)  # of torch's linear layers, which peft takes over
            is_zero = key == "lora_B" and form.initial != "random"
            values[full_name] = SeededFactor(
                shape, full_name, seed, 0.0 if is_zero else bound, None if is_zero else std)
        return values

    def extra_repr(self) -> str:
        return f"rank={self.form.rank}, scaling={self.form.scaling:g}"


@dataclass(frozen=True)
class SeededFactor:
    """Initial values of a factor: a function of its name and a seed. Indexing returns a part, in float32.

    Attributes:
        shape: of the whole factor.
        name: of the factor.
        seed: of the run.
        bound: values are uniform in [-bound, bound], unless `std` is set.
        std: standard deviation of normal values; None: they are uniform.
    """

    shape: tuple[int, ...]
    name: str
    seed: int
    bound: float
    std: float | None = None

    dtype: ClassVar[torch.dtype] = torch.float32

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(name_seed(self.seed, self.name))
        values = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        if self.std is not None:
            values.normal_(0, self.std, generator=generator)
        else:
            values.uniform_(-self.bound, self.bound, generator=generator)
        return values[part]


class LinearAdapter(Adapter):
    """Adapter of a linear layer with a weight (N, H)."""

    def __init__(
        self, in_features: int, out_features: int, form: AdapterForm, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            form, Linear(in_features, form.rank, bias=False, device=device, dtype=dtype),
            Linear(form.rank, out_features, bias=False, device=device, dtype=dtype))
        self.dropout = nn.Dropout(form.dropout) if form.dropout else None

    def forward(self, x: Tensor, y: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
        """Return the output (..., N) of the adapted layer.

        Args:
            x: input of the layer (..., H).
            y: its output without the adapter.
            compute_dtype: see `Linear.forward`.
        """
        if self.dropout is not None:
            x = self.dropout(x)
        h_R = self.lora_A(x, compute_dtype) * self.form.scaling
        return y + self.lora_B(h_R, compute_dtype)


class GroupedAdapter(Adapter):
    """Adapter of experts' stacked weights (E, N, H): two grouped GEMMs."""

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, form: AdapterForm,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        if form.dropout:
            raise ValueError(f"dropout {form.dropout} of an adapter of experts: peft has none there, and merged "
                             "weights would have none; leave it out")
        super().__init__(
            form, GroupedLinear(num_groups, in_features, form.rank, device=device, dtype=dtype),
            GroupedLinear(num_groups, form.rank, out_features, device=device, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor, rows: Tensor | SortedTokens) -> Tensor:
        """Return the output (M, N) of the adapted layer.

        Args:
            x, rows: inputs of the layer; see `GroupedLinear.forward`.
            y: its output (M, N) without the adapter.
        """
        offs_E = rows.offs if isinstance(rows, SortedTokens) else rows
        h_MR = self.lora_A(x, rows) * self.form.scaling
        return y + self.lora_B(h_MR, offs_E)


def adapted_grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | SortedTokens, adapter: GroupedAdapter, *,
    is_transposed: bool = False,
) -> Tensor:
    """Return `grouped_linear` of parameters of another module, with an adapter -> (M, N)."""
    return cast(Tensor, adapter(x, grouped_linear(x, weight, bias, rows, is_transposed=is_transposed), rows))


def adapt_matrix(module: nn.Module, key: str, form: AdapterForm) -> None:
    """Give a module that owns a matrix and is no linear layer, such as a router of transformers, an adapter of it.

    The module's own forward runs with `W + scaling * B A` in place of its parameter `key` (N, H). Only the class of the
    module changes, to a subclass: see `dualpipe.nn.conversion`.
    """
    weight = module._parameters[key]
    assert weight is not None and weight.dim() == 2, "a matrix is adapted"
    out_features, in_features = weight.shape
    module.add_module(NAME, LinearAdapter(in_features, out_features, form, weight.device, weight.dtype))
    original: Any = type(module)  # Any: mypy considers module classes unhashable, and @cache needs hashable arguments
    module.__class__ = _adapted_class(original, key)


@cache
def _adapted_class(original: Any, key: str) -> type[nn.Module]:
    """Create a subclass whose forward runs with an adapted parameter; it has the name of `original`."""
    attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__, "_adapted_key": key}
    return new_class(original.__name__, (_AdaptedMatrix, original), exec_body=lambda body: body.update(attributes))


class _AdaptedMatrix(nn.Module):
    """Mixin of modules whose forward reads a matrix as an attribute."""

    _adapted_key: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with the adapted matrix."""
        adapter = cast("LinearAdapter | None", self._modules.get(NAME))
        if adapter is None:  # it has been merged
            return super().forward(*args, **kwargs)
        key = self._adapted_key
        weight = cast(Tensor, self._parameters[key])
        change = adapter.lora_B.weight @ adapter.lora_A.weight * adapter.form.scaling
        # An entry of the instance's dictionary is found before the parameter, which stays registered.
        self.__dict__[key] = weight + change.to(weight.dtype)
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__[key]


class AdapterPlace(NamedTuple):
    """An adapter in a module: its name, the module that it adapts, the parameter there, and the adapter."""

    name: str
    owner: nn.Module
    key: str
    adapter: Adapter

    @property
    def parameter(self) -> Tensor:
        """The frozen parameter that is adapted."""
        return cast(Tensor, self.owner._parameters[self.key])


def adapter_places(root: nn.Module) -> Iterator[AdapterPlace]:
    """Yield all adapters inside of a module."""
    for path, owner in root.named_modules():
        adapter = owner._modules.get(NAME)
        if isinstance(adapter, Adapter):
            yield AdapterPlace(f"{path}.{NAME}".lstrip("."), owner, getattr(owner, "_adapted_key", "weight"), adapter)
        stacked = owner._modules.get(STACKED)
        for key, child in stacked.named_children() if isinstance(stacked, nn.ModuleDict) else ():
            if isinstance(child, Adapter):
                yield AdapterPlace(f"{path}.{STACKED}.{key}".lstrip("."), owner, key, child)


def merged_factors(root: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the factors inside of a module that are multiplied with each other in every forward; see `adapt_matrix`."""
    for place in adapter_places(root):
        if isinstance(place.owner, _AdaptedMatrix):
            yield cast(nn.Parameter, place.adapter.lora_A.weight)
            yield cast(nn.Parameter, place.adapter.lora_B.weight)


def check_merge(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if an adapter cannot be merged, because its weight is quantized, or also the embedding's."""
    for module in modules:
        names = [id(param) for _, param in module.named_parameters(remove_duplicate=False)]
        tied = {id(param) for param in getattr(module, "tied_parameters", list)()}
        for place in adapter_places(module):
            if names.count(id(place.parameter)) > 1 or id(place.parameter) in tied:
                raise ValueError(f"the weight of {place.name} is also that of the embedding, which a sum would change; "
                                 "export the adapters alone, or leave the head out of the targets")
            if quantized_part(place.parameter) is not None:
                raise ValueError(f"the weight of {place.name} is stored in blocks with scales, which a sum would be "
                                 "rounded to; export the adapters, and let peft merge them into weights without scales")


@torch.no_grad()
def merge_adapters(modules: Sequence[nn.Module]) -> None:
    """Add every adapter to the weight that it adapts, and remove it. Collective over the ranks of sharded weights.

    The sum is computed in float32 and rounded to the dtype of the weight. Training cannot go on after that: FSDP2 and
    an optimizer know the removed adapters. Raises ValueError like `check_merge`, before anything is changed.
    """
    check_merge(modules)
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()  # the root stays unsharded after a forward
    places = [place for module in modules for place in adapter_places(module)]
    for place in places:
        delta = _full(place.adapter.lora_B.weight) @ _full(place.adapter.lora_A.weight) * place.adapter.form.scaling
        if getattr(place.owner, "is_transposed", False):
            delta = delta.mT
        local, part = local_part(place.parameter)
        local.copy_(local.to(delta.dtype) + delta[part].to(local.device))
        place.owner._modules.pop(NAME, None)
    for module in modules:
        for inner in module.modules():
            inner._modules.pop(STACKED, None)


def full_factors(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return both factors in the layout of peft's files, gathered on the CPU: A (R, H) or (E * R, H), B (N, R * E).

    Collective over the ranks of sharded factors.
    """
    a, b = (_gathered(factor.weight).cpu() for factor in (adapter.lora_A, adapter.lora_B))
    if a.dim() == 3:
        return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1, 2).contiguous()
    return a.contiguous(), b.contiguous()


def unpack_factors(place: AdapterPlace, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return the factors of an adapter by their names, from the layout of peft's files; see `full_factors`.

    Raises ValueError for factors of another shape.
    """
    adapter = place.adapter
    if adapter.lora_A.weight.dim() == 3 and a.dim() == b.dim() == 2:
        num_experts = adapter.lora_A.weight.shape[0]
        if a.shape[0] % num_experts == 0 and b.shape[1] % num_experts == 0:
            a = a.unflatten(0, (num_experts, -1))
            b = b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    values = {}
    for key, factor, whole in (("lora_A", adapter.lora_A, a), ("lora_B", adapter.lora_B, b)):
        if tuple(whole.shape) != tuple(factor.weight.shape):
            raise ValueError(f"the adapter of {adapter.key} has a factor of shape {tuple(whole.shape)}, expected "
                             f"{tuple(factor.weight.shape)}; give the adapter of this model, with the same rank")
        values[f"{place.name}.{key}.weight"] = whole
    return values


def _gathered(param: Tensor) -> Tensor:
    """Return the whole tensor of a parameter that may be sharded."""
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def _full(param: Tensor) -> Tensor:
    """Return the whole tensor of a parameter in at least float32."""
    whole = _gathered(param)
    return whole.to(torch.promote_types(whole.dtype, torch.float32))


def has_adapters(modules: Sequence[nn.Module]) -> bool:
    """Return True if any of the modules contains an adapter."""
    return any(True for module in modules for _ in adapter_places(module))


def freeze_all_but_adapters(root: nn.Module) -> None:
    """Make the parameters of adapters the only trainable ones of a module."""
    root.requires_grad_(False)
    for place in adapter_places(root):
        place.adapter.requires_grad_()


def initial_values(root: nn.Module, seed: int) -> dict[str, SeededFactor]:
    """Return the initial values of all adapters' factors by name; they do not depend on how the model is divided.

    Factors of experts have the shape of all ranks' experts, if the module is sharded over them.
    """
    values: dict[str, SeededFactor] = {}
    for place in adapter_places(root):
        values |= place.adapter.initial_values(place.name, seed)
    return values


@torch.no_grad()
def fill_adapters(root: nn.Module, seed: int) -> None:
    """Fill all adapters inside of a module with their initial values."""
    parameters = dict(root.named_parameters())
    for name, values in initial_values(root, seed).items():
        local, part = local_part(parameters[name])
        local.copy_(values[part])
