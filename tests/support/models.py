"""Helpers of the tests of model families: a batch, a training step, and transformers' model as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.models import Stage
from dualpipe.models.hub import HubConfig, HubTensorPart
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import local
from dualpipe.train.parity.errors import difference


class Float64Torch:
    """`torch` as seen by transformers' model file, with its float32 casts turned into float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def whole(config, seed=0, dtype=torch.float32):
    """Build the unpipelined model."""
    stage = Stage(config, range(config.num_hidden_layers), first=True, last=True)
    stage.init_weights(seed)
    return stage.to(dtype)


def batch(config, sequence=11):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (3, sequence + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model, config, **inputs):
    """Return logits and loss of our model or transformers', after its backward."""
    tokens, labels = batch(config)
    logits = model(tokens, **inputs)
    logits = getattr(logits, "logits", logits)
    loss = cross_entropy_loss(logits, labels)
    loss.backward()
    return logits.detach(), loss.detach()


def grads(model):
    return {name: param.grad for name, param in model.named_parameters()}


def ours(config, tensors, hub):
    """Convert a hub state dict, or its gradients, to the names and shapes of our `tensors`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if "lm_head.weight" not in hub:  # tied
        shapes.pop("lm_head.weight", None)
    return from_hub(config, shapes, hub)


def from_hub(config: HubConfig, shapes: Mapping[str, Sequence[int]], hub: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a hub state dict in memory, such as a model's gradients, to our tensors with these names and shapes.

    Raises `ValueError` for a name that has no form there.
    """
    return {name: _assembled(config.hub_parts(name, shape), shape, hub) for name, shape in shapes.items()}


def _assembled(forms: list[list[HubTensorPart]], shape: Sequence[int], hub: Mapping[str, Tensor]) -> Tensor:
    parts = next((parts for parts in forms if all(part.name in hub for part in parts)), None)
    if parts is None:
        raise ValueError(f"{forms[0][0].name} is missing")
    ours = hub[parts[0].name].new_empty(*shape)
    for part in parts:
        tensor = hub[part.name]
        into = ours[part.where]
        into.copy_((tensor.mT if part.transposed else tensor).reshape(into.shape))
    return ours


def split_experts(fused):
    """Return a hub state dict with each expert's own tensors instead of stacked ones."""
    split = {}
    for name, tensor in fused.items():
        layer, found, rest = name.partition(".mlp.experts.")
        for e, weight in enumerate(tensor if found else ()):
            gate_up = dict(zip(("gate_proj", "up_proj"), weight.chunk(2)))
            for projection, part in ({"down_proj": weight} if rest == "down_proj" else gate_up).items():
                split[f"{layer}{found}{e}.{projection}.weight"] = part
        if not found:
            split[name] = tensor
    return split


def relative(actual, expected, floor=1e-30):
    """Return the error over the norm of `expected`, or over `floor` where that norm is almost zero."""
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm().clamp(min=floor)).item()


def randomize_vectors(model):
    """Change norms, biases and correction biases: their initial ones or zeros would hide a mix-up."""
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)


def compare_gradients(stages, whole):
    """Compare the gradients of all parameters of `stages` with those of the same names in `whole`. Collective."""
    reference = dict(whole.named_parameters(remove_duplicate=False))
    own = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    return [difference(name, _gradient(parameter), _gradient(reference[name])) for name, parameter in own.items()]


def _gradient(parameter):
    """Return the unsharded gradient of a parameter, zeros for none."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else local(grad)
