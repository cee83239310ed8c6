"""Helpers of the tests of models: a batch, a training step, and two references: transformers, and the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe import Pipeline
from dualpipe.models import Stage
from dualpipe.models.hub import HubConfig, HubTensorPart
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.accumulators import local
from dualpipe.nn.attention import packed_positions
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, MemoryConfig
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.parity.errors import difference
from dualpipe.train.step import build_model, build_whole


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
    """Change norms, biases, sinks and correction biases: their initial ones or zeros would hide a mix-up."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("_bias"):
                param.add_(torch.randn_like(param) * (1.0 if name.endswith("sinks") else 0.1))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)


def errors_against_whole(
    config, shape, *, schedule="dualpipev", num_chunks=5, overlap=True, recompute=(), dtype=torch.float64,
    prepare=lambda model, num_chunks: None, is_packed=False,
):
    """Run a step; return the worst errors of this rank's gradients and losses against the whole model. Collective.

    shape: sizes of the mesh (pp, dp, ep). prepare: called with each stage, or the whole model, and the number of
    micro-batches of its step. is_packed: rows are documents one after the other.
    """
    cpu = torch.device("cpu")
    mesh = build_mesh(*shape, cpu)
    place = Mesh.of(mesh)
    model = build_model(config, build(schedule, shape[0], num_chunks), place.rank("pp"), mesh=mesh, dtypes=dtype,
                        device=cpu, settings=Config(memory=MemoryConfig(recompute=recompute)))
    whole = build_whole(config, dtypes=dtype, device=cpu)
    for stage in model.stages:
        prepare(stage, num_chunks)
    prepare(whole, num_chunks * place.replicas)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(config.vocab_size, (2 * num_chunks * place.replicas, 8), generator=generator)
    tokens, labels = rows[:, :-1], rows[:, 1:].contiguous()
    starts = torch.randperm(tokens.numel(), generator=generator)[: tokens.numel() // 4]
    cuts = torch.cat((torch.tensor([0, tokens.numel()]), starts)).unique()
    positions = packed_positions(cuts, *tokens.shape)
    mine = slice(place.replica * 2 * num_chunks, (place.replica + 1) * 2 * num_chunks)
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule=schedule, overlap=overlap)
    losses, _ = pipe.step(
        tokens[mine] if model.has_first else None, num_chunks=num_chunks, criterion=MicroBatchLoss(num_chunks),
        labels=labels[mine] if model.has_last else None,
        side={"positions": positions[mine]} if is_packed and model.has_first else None,
    )
    criterion, of_whole = MicroBatchLoss(num_chunks * place.replicas), []
    for xs, ys, of_rows in zip(tokens.split(2), labels.split(2), positions.split(2)):
        loss = criterion(whole(xs, of_rows if is_packed else None), ys)
        loss.backward()
        of_whole.append(loss.detach())
    expected = torch.stack(of_whole).split(num_chunks)[place.replica] * place.replicas
    gradients = max(d.relative for d in compare_gradients(model.stages, whole))
    return gradients, 0.0 if losses is None else difference("loss", losses, expected).relative


def compare_gradients(stages, whole):
    """Compare the gradients of all parameters of `stages` with those of the same names in `whole`. Collective."""
    reference = dict(whole.named_parameters(remove_duplicate=False))
    own = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    return [difference(name, _gradient(parameter), _gradient(reference[name])) for name, parameter in own.items()]


def _gradient(parameter):
    """Return the unsharded gradient of a parameter, zeros for none."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else local(grad)
