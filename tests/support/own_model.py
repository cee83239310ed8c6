"""A small mixture-of-experts model of a user's own, cut by hand, and faults to plant into its training.

A function without parameters returns a `CutModel`, as `dualpipe parity --model own_model:function` calls it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import Communicate, Compute
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, defer_weight_grads, run_segments
from dualpipe.parallel import DTypePolicy, ExpertParallel, resolve_dtypes, run_experts, shard_experts, shard_stages
from dualpipe.parallel.mesh import Mesh
from dualpipe.train.parity import CutModel

VOCAB, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 32, 16, 24, 4, 2, 4
ROWS, LENGTH, CHUNKS = 8, 6, 4


class Router(nn.Module):
    """Tokens (T, H) -> weights (T, K) and experts (T, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = self.proj(x_TH).softmax(-1).topk(TOP_K)
        return weights_TK / weights_TK.sum(-1, keepdim=True), experts_TK


class Experts(nn.Module):
    """SwiGLU experts in stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE)
        self.down = GroupedLinear(EXPERTS, INTERMEDIATE, HIDDEN)

    def forward(self, rows, tokens, weights_M):
        return self.down(self.gate_up(rows, tokens, weights_M), tokens.offs)


class Layer(nn.Module):
    """Experts behind a norm, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = Router()
        self.experts = Experts()
        self.dispatcher = ExpertParallel(EXPERTS).dispatcher()

    def route(self, x):
        normed_TH = self.norm(x).flatten(0, -2)
        return x, *self.dispatcher.plan(normed_TH, *self.router(normed_TH))

    def finish(self, residual, rows, plan):
        return residual + self.dispatcher.finish(rows, plan).view_as(residual)

    def segments(self):
        run = partial(run_experts, self.experts)
        route = Compute(self.route, "x", ("residual", "rows", "weights", "plan"))
        finish = Compute(self.finish, ("residual", "rows", "plan"), "x")
        if self.dispatcher.dispatch is None:
            return [route, Compute(run, ("rows", "weights", "plan"), "rows"), finish]
        return [
            route,
            Communicate(self.dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
            Compute(run, ("rows", "weights", "received"), "rows"),
            Communicate(self.dispatcher.combine, ("rows", "received"), "rows"),
            finish,
        ]

    def forward(self, x):
        return run_segments(self.segments(), {"x": x})["x"]


class Model(nn.Module):
    """Tokens (B, S) -> logits (B, S, V)."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Some layers; the embedding and the head where it has them."""

    def __init__(self, model: Model, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = model.embed if is_first else None
        self.layers = nn.ModuleList(model.layers[number] for number in layers)
        self.norm = model.norm if is_last else nn.Identity()
        self.head = model.head if is_last else nn.Identity()

    def begin(self, x):
        return x if self.embed is None else self.embed(x)

    def end(self, x):
        return self.head(self.norm(x))

    def forward(self, x):
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


class SegmentedStage(Stage):
    """Runs by the segments of its layers, which are not called as modules."""

    def segments(self):
        return [Compute(self.begin, "x", "x"), *(part for layer in self.layers for part in layer.segments()),
                Compute(self.end, "x", "x")]


class UnnormedStage(Stage):
    """Leaves out the norm before the head."""

    def end(self, x):
        return self.head(x)


class TiedStage(Stage):
    """Says that the embedding is the head."""

    def tied_parameters(self):
        ends = [self.embed, self.head if isinstance(self.head, nn.Linear) else None]
        return [end.weight for end in ends if end is not None]


def cut(model: Model, num_stages: int, kind: type[Stage] = SegmentedStage) -> list[Stage]:
    """Stages with as many layers each."""
    size = LAYERS // num_stages
    last = num_stages - 1
    return [kind(model, range(size * number, size * (number + 1)), is_first=number == 0, is_last=number == last)
            for number in range(num_stages)]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and those to predict."""
    tokens, labels = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, labels


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A micro-batch's share of the mean over the batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / CHUNKS


def place(
    stages: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> None:
    """Experts over "ep", and everything over all ranks with the same stages."""
    where = Mesh.of(mesh)
    wide = reduce_dtype or torch.promote_types(dtype, torch.float32)
    plan = resolve_dtypes(stages, DTypePolicy(dtype, wide, dtype), group=where.group("pp"))
    experts = ExpertParallel(EXPERTS, mesh["ep"])
    for stage in stages:
        defer_weight_grads(stage)
        for layer in stage.layers:
            layer.dispatcher = experts.dispatcher()
        shard_experts(stage, mesh["ep"])
    shard_stages(stages, where.dense if where.replicas > 1 else None, plan, expert_mesh=where.experts)


def right() -> CutModel:
    """Everything as it should be."""
    return CutModel(Model(), cut, batch, loss, place=place, num_chunks=CHUNKS)


def defaults() -> CutModel:
    """No more than what must be given."""
    return CutModel(Model(), cut, batch, loss)


def close_scores() -> CutModel:
    """Routers that give all experts nearly the same scores, so that rounding turns choices."""
    model = Model()
    with torch.no_grad():
        for layer in model.layers:
            layer.router.proj.weight.mul_(0.02)
    return replace(right(), whole=model)


class DropoutLayer(Layer):
    """Drops a part of what it adds, in a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def finish(self, residual, rows, plan):
        added = self.dispatcher.finish(rows, plan).view_as(residual)
        return residual + F.dropout(self.dropout(added), 0.1, self.training)


def dropout(kind: type[Layer] = DropoutLayer) -> CutModel:
    """Layers draw random numbers in training."""
    model = Model()
    model.layers = nn.ModuleList(kind() for _ in range(LAYERS))
    return replace(right(), whole=model)


class AlwaysDroppingLayer(Layer):
    """Draws random numbers in eval mode too."""

    def finish(self, residual, rows, plan):
        return residual + F.dropout(self.dispatcher.finish(rows, plan).view_as(residual), 0.1)


def always_dropping() -> CutModel:
    """Layers draw random numbers in training and in evaluation."""
    return dropout(AlwaysDroppingLayer)


class PositionedModel(Model):
    """Reads positions (B, S) and a scale (B, 1, 1), and every layer is scaled."""

    def forward(self, tokens, positions, scale):
        x = self.embed(tokens) + self.embed(positions)
        for layer in self.layers:
            x = layer(x) * scale
        return self.head(self.norm(x))


class PositionedStage(Stage):
    """Takes positions where it embeds them, and the scale."""

    def forward(self, x, positions, scale):
        if self.embed is not None:
            x = self.embed(x) + self.embed(positions)
        for layer in self.layers:
            x = layer(x) * scale
        return self.end(x)


class ScaledStage(Stage):
    """Takes the scale alone."""

    def forward(self, x, *, scale):
        for layer in self.layers:
            x = layer(x) * scale
        return self.end(x)


def cut_positioned(model: Model, num_stages: int) -> list[Stage]:
    """Stages of which the first alone takes positions."""
    first, *rest = cut(model, num_stages, PositionedStage)
    for stage in rest:
        stage.__class__ = ScaledStage
    return [first, *rest]


def batch_with_positions(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens and labels, and side inputs that differ from row to row."""
    tokens, labels = batch(seed)
    positions = (torch.arange(LENGTH) + torch.arange(ROWS)[:, None]) % VOCAB
    return tokens, labels, {"positions": positions, "scale": torch.linspace(0.5, 1.5, ROWS).view(-1, 1, 1)}


def side_inputs() -> CutModel:
    """Stages read side inputs."""
    return replace(right(), whole=PositionedModel(), cut=cut_positioned, batch=batch_with_positions)


def side_inputs_swapped() -> CutModel:
    """The second stage reads the scale upside down."""

    class WrongStage(ScaledStage):
        def forward(self, x, *, scale):
            return super().forward(x, scale=scale.flip(0))

    def cut_wrongly(model, num_stages):
        stages = cut_positioned(model, num_stages)
        stages[1].__class__ = WrongStage
        return stages

    return replace(side_inputs(), cut=cut_wrongly)


# -- faults


def with_fault(plant) -> CutModel:
    """`plant(stage)` is called for the stages of a rank, after they are placed."""

    def place_and_plant(stages, mesh, dtype):
        place(stages, mesh, dtype)
        for stage in stages:
            plant(stage)

    return replace(right(), place=place_and_plant)


class Forgetful(nn.Module):
    """A norm whose weight gets no gradient from the third of every four micro-batches."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.calls = 0

    def forward(self, x):
        weight = self.weight.detach() if self.calls % CHUNKS == 2 else self.weight
        self.calls += 1
        return F.layer_norm(x, (HIDDEN,), weight, self.bias)


def lost_microbatch() -> CutModel:
    """The last norm forgets a micro-batch."""

    def plant(stage):
        if isinstance(stage.norm, nn.LayerNorm):
            stage.norm = Forgetful(stage.norm)

    return with_fault(plant)


def bf16_accumulation() -> CutModel:
    """The gradient of the last norm is rounded after each addition."""

    def round_gradient(parameter):
        parameter.grad.copy_(parameter.grad.bfloat16())

    def plant(stage):
        if isinstance(stage.norm, nn.LayerNorm):
            stage.norm.weight.register_post_accumulate_grad_hook(round_gradient)

    return with_fault(plant)


def bf16_reduction() -> CutModel:
    """Gradients accumulate, and are reduced, in bfloat16."""
    return replace(right(), place=partial(place, reduce_dtype=torch.bfloat16))


def no_policy() -> CutModel:
    """Weight gradients are deferred, and nothing is said about dtypes."""

    def place_alone(stages, mesh, dtype):
        for stage in stages:
            defer_weight_grads(stage)

    return replace(right(), place=place_alone)


def float32_stages() -> CutModel:
    """The stages compute in float32, whatever they are asked for."""

    def place_wide(stages, mesh, dtype):
        for stage in stages:
            defer_weight_grads(stage.float())

    return replace(right(), place=place_wide)


class SortingRouter(Router):
    """Chooses by a sort."""

    def forward(self, x_TH):
        sorted_TE = self.proj(x_TH).softmax(-1).sort(descending=True)
        weights_TK, experts_TK = sorted_TE.values[:, :TOP_K], sorted_TE.indices[:, :TOP_K]
        return weights_TK / weights_TK.sum(-1, keepdim=True), experts_TK


def without_top_k() -> CutModel:
    """No router calls torch.topk."""
    model = Model()
    for layer in model.layers:
        layer.router.__class__ = SortingRouter
    return replace(right(), whole=model)


def sorting_pipeline() -> CutModel:
    """The unpipelined model's routers call torch.topk, and the pipeline's do not."""

    def plant(stage):
        for layer in stage.layers:
            layer.router.__class__ = SortingRouter

    return with_fault(plant)


class WideRouter(Router):
    """Chooses one expert more than it uses."""

    def forward(self, x_TH):
        weights_TK, experts_TK = self.proj(x_TH).softmax(-1).topk(TOP_K + 1)
        weights_TK, experts_TK = weights_TK[:, :TOP_K], experts_TK[:, :TOP_K]
        return weights_TK / weights_TK.sum(-1, keepdim=True), experts_TK


def wide_choice() -> CutModel:
    """A router of the second stage calls torch.topk otherwise than in the unpipelined model."""

    def plant(stage):
        if stage.number == 1:
            stage.layers[0].router.__class__ = WideRouter

    return replace(with_fault(plant), cut=numbered_cut)


class WrongRouter(Router):
    """Chooses other experts than its scores say."""

    def forward(self, x_TH):
        probs_TE = self.proj(x_TH).softmax(-1)
        experts_TK = (probs_TE.flip(-1)).topk(TOP_K).indices
        weights_TK = probs_TE.gather(1, experts_TK)
        return weights_TK / weights_TK.sum(-1, keepdim=True), experts_TK


def wrong_router() -> CutModel:
    """The choices of the pipeline's routers are wrong, which replaying hides."""

    def plant(stage):
        for layer in stage.layers:
            layer.router.__class__ = WrongRouter

    return with_fault(plant)


def swapped_experts() -> CutModel:
    """Tokens of expert 1 of the second stage go to expert 2, and the other way round."""

    def plant(stage):
        if stage.number != 1:
            return
        dispatcher = stage.layers[0].dispatcher
        plan = dispatcher.plan

        def swapped(tokens, weights, experts):
            order = torch.tensor([0, 2, 1, 3])
            return plan(tokens, weights, order[experts])

        stage.layers[0].route = lambda x: route(stage.layers[0], swapped, x)

    def route(layer, swapped, x):
        normed_TH = layer.norm(x).flatten(0, -2)
        return x, *swapped(normed_TH, *layer.router(normed_TH))

    return replace(with_fault(plant), cut=numbered_cut)


def swapped_weights() -> CutModel:
    """The weights of two experts of the second stage are swapped when they are placed."""

    def plant(stage):
        if stage.number == 1:
            weight = stage.layers[0].experts.down.weight
            with torch.no_grad():
                weight.copy_(weight[[0, 2, 1, 3]].clone())

    return replace(with_fault(plant), cut=numbered_cut)


def numbered_cut(model: Model, num_stages: int) -> list[Stage]:
    """Stages that know their numbers."""
    stages = cut(model, num_stages)
    for number, stage in enumerate(stages):
        stage.number = number
    return stages


def silent_hook() -> CutModel:
    """A layer has a hook that halves its output, and the pipeline runs the layer's segments without it."""
    model = Model()
    model.layers[2].register_forward_hook(halve)
    return replace(right(), whole=model)


def halve(module, inputs, output):
    return output / 2


def tied() -> CutModel:
    """The head is the embedding; in "1f1b" they are on two ranks."""
    return replace(right(), whole=Model(is_tied=True), cut=partial(cut, kind=TiedStage), schedule="1f1b")


def tied_without_sum() -> CutModel:
    """Two layers share a norm, and the gradients of its copies on two ranks are not summed."""
    model = Model()
    model.layers[1].norm = model.layers[0].norm
    return replace(right(), whole=model)


def wrong_cut() -> CutModel:
    """The cut leaves the last norm out of the computation."""
    return replace(right(), cut=partial(cut, kind=UnnormedStage))


def copied_cut() -> CutModel:
    """A cut that copies the modules, whose parameters keep their names by `names`."""

    def name(stage, own):
        head, _, rest = own.partition(".")
        if head != "layers":
            return own
        number, _, rest = rest.partition(".")
        return f"layers.{stage + int(number)}.{rest}"

    return replace(right(), cut=lambda model, num_stages: copy.deepcopy(cut(model, num_stages)), names=name)


def missing_parameter() -> CutModel:
    """The cut loses a layer."""
    return replace(right(), cut=lambda model, num_stages: [cut(model, num_stages)[0] for _ in range(num_stages)])


def no_model() -> str:
    """Not what it should return."""
    return "a model"
