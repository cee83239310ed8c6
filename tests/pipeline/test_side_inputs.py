"""Side inputs reach the stages that name them, and the gradients are those of the model without a pipeline."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import DualPipeV, Pipeline
from dualpipe.nn import defer_weight_grads
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.pipeline.compiled_stage import SideSpec
from ranks import run_ranks
from schedules import SCHEDULES
from threads import run_threads
from toys import Rolled, Stage, caught, gradient_error, num_stages, relative_error, stages_of_rank, use_own_groups

WIDTH, LENGTH = 8, 3


class Positioned(nn.Module):
    """A stage (B, S, width) -> (B, S, width), scaled by the position of each token."""

    wants: tuple[str, ...] = ("positions",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.down = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * positions[..., None])


class Everything(Positioned):
    """A stage that takes all side inputs."""

    wants = ("mask", "positions", "scale")

    def forward(self, x: Tensor, **side: Tensor) -> Tensor:
        assert sorted(side) == ["mask", "positions", "scale"], sorted(side)
        assert (side["mask"].dtype, side["scale"].dtype) == (torch.bool, torch.float32)
        return super().forward(x * side["mask"][..., None], side["positions"]) * side["scale"][..., None]


class Greedy(Positioned):
    """A stage that requires a gradient of a side input, which the next stage must not see."""

    wants = ("positions", "scale")

    def forward(self, x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x, positions) * scale.requires_grad_()[..., None]


class Nothing(Stage):
    """A stage that names no side input, and still passes them on."""

    wants = ()


class Segmented(Positioned):
    """A stage in segments: a compute segment, a communication and a recomputed segment read the positions."""

    wants = ("positions", "scale")
    recompute = ""  # "compute", or "all": the communication too

    def before(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) * positions[..., None]

    def after(self, x: Tensor, rows: Tensor, rolled: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(rows) * rolled[..., None] * scale[..., None]

    def forward(self, x: Tensor, scale: Tensor, positions: Tensor) -> Tensor:
        return self.after(x, self.before(x, positions).roll(1, 1), positions.roll(1, 1), scale)

    def segments(self) -> list:
        return [
            Compute(self.before, ("x", "positions"), "rows", self.recompute != ""),
            Communicate(Rolled(dim=1), ("rows", "positions"), ("rows", "rolled"), self.recompute == "all"),
            Compute(self.after, ("x", "rows", "rolled", "scale"), "x", self.recompute != ""),
        ]


MIXED = "Nothing Positioned Everything Segmented"


def make(count: int, kinds: str = MIXED) -> list[nn.Module]:
    """Return stages of alternating kinds, the same on all ranks."""
    torch.manual_seed(0)
    made = itertools.islice(itertools.cycle(kinds.split()), count)
    return [defer_weight_grads(globals()[kind]()) for kind in made]


def wanted(stages: list[nn.Module], side: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in side.items() if any(name in stage.wants for stage in stages)}


def problem(size: int, dim: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return x and y (B, S, width), and side inputs (B, S) of three dtypes."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, LENGTH) if dim == 0 else (LENGTH, size)
    x, y = (torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    side = {
        "scale": torch.rand(shape, generator=generator) + 0.5,
        "positions": torch.randint(5, shape, generator=generator),
        "mask": torch.rand(shape, generator=generator) > 0.3,
    }
    return x, y, side


def expect(stages, x, y, side, num_chunks, dim=0):
    """Return losses and outputs without a pipeline; gradients accumulate."""
    losses, outputs = [], []
    parts = {name: t.tensor_split(num_chunks, dim) for name, t in side.items()}
    for i, (xs, ys) in enumerate(zip(x.tensor_split(num_chunks, dim), y.tensor_split(num_chunks, dim))):
        for stage in stages:
            xs = stage(xs, **{name: parts[name][i] for name in stage.wants if name in parts})
        losses.append(F.mse_loss(xs, ys))
        if torch.is_grad_enabled():
            losses[-1].backward()
        outputs.append(xs.detach())
    return torch.stack(losses).detach(), torch.cat(outputs, dim)


def compare(rank, world, name, num_chunks, size, kinds=MIXED, dim=0, overlap=True, recompute=""):
    """Return the largest error of a step and of an evaluation after it, on this rank."""
    total, own = num_stages(name, world), stages_of_rank(name, world, rank)
    stages, expected = make(total, kinds), make(total, kinds)
    for stage in stages:
        stage.recompute = recompute
    pipe = Pipeline([stages[s] for s in own], schedule=name, batch_dim=dim, overlap=overlap)
    x, y, side = problem(size, dim)
    side = wanted(stages, side)
    inputs, given = ((x,), side) if 0 in own else ((), None)
    call = dict(num_chunks=num_chunks, criterion=F.mse_loss, labels=(y,), return_outputs=True, side=given)
    found = pipe.step(*inputs, **call)
    with torch.no_grad():
        evaluated = pipe.step(*inputs, **call)
    losses, outputs = expect(expected, x, y, side, num_chunks, dim)
    errors = [gradient_error(stages[s], expected[s]) for s in own]
    if total - 1 in own:
        errors += [relative_error(a, b) for pair in (found, evaluated) for a, b in zip(pair, (losses, outputs))]
    return max(errors)


def matrix(rank, world, kinds):
    sizes = [(1, 2), (2 * world + 1, 5 * world + 4)]
    cases = [(name, *both, kind) for name, both, kind in itertools.product(SCHEDULES, sizes, kinds)]
    worst = {case: compare(rank, world, *case) for case in cases}
    worst["Greedy"] = compare(rank, world, "dualpipev", 6, 11, "Greedy Positioned")
    for overlap, recompute in itertools.product((True, False), ("", "compute", "all")):
        for name, kinds in itertools.product(("dualpipev", "1f1b"), ("Segmented", "Segmented Positioned")):
            case = (name, kinds, overlap, recompute)
            worst[case] = compare(rank, world, name, 5, 12, kinds, overlap=overlap, recompute=recompute)
    worst["dim 1"] = compare(rank, world, "dualpipev", 4, 7, "Positioned Nothing", dim=1)
    return worst


@pytest.mark.parametrize("world, kinds", [
    (2, [MIXED]),
    *(pytest.param(world, [MIXED, "Everything", "Positioned Nothing"], marks=pytest.mark.slow)
      for world in (1, 2, 3, 4)),
])
def test_gradients_losses_and_outputs(world, kinds):
    for worst in run_ranks(matrix, world, world, kinds, timeout=120):
        assert {case: error for case, error in worst.items() if not error < 1e-10} == {}


def bytes_only(rank, world):
    use_own_groups()
    return compare(rank, world, "dualpipev", 5, 9)


def test_links_that_send_bytes():
    assert max(run_ranks(bytes_only, 2, 2)) < 1e-10


def test_no_process_group():
    assert compare(0, 1, "dualpipev", 3, 7) < 1e-10


# -- stages that can do without


class Optional(Segmented):
    """A stage that runs without positions, as segments or as a whole."""

    wants = ("positions",)

    def before(self, x: Tensor, positions: Tensor | None) -> Tensor:
        y = torch.tanh(self.up(x))
        return y if positions is None else y * positions[..., None]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return x + self.down(self.before(x, positions).roll(1, 1))

    def segments(self) -> list:
        return [
            Compute(self.before, ("x", "positions"), "rows", recompute=True),
            Communicate(Rolled(dim=1), ("rows", "positions"), ("rows", "unused")),
            Compute(lambda x, rows: x + self.down(rows), ("x", "rows"), "x"),
        ]


def given_or_not(rank, world):
    stages, expected = make(2 * world, "Optional"), make(2 * world, "Optional")
    own = stages_of_rank("dualpipev", world, rank)
    pipe = DualPipeV([stages[s] for s in own])
    x, y, side = problem(7)
    for given in ({}, {"positions": side["positions"]}, {"positions": None}):
        expect(expected, x, y, {n: t for n, t in given.items() if t is not None}, 4)
        pipe.step(x, num_chunks=4, criterion=F.mse_loss, labels=(y,), side=given if rank == 0 else None)
    return max(gradient_error(stages[s], expected[s]) for s in own)


@pytest.mark.parametrize("world", [1, 2])
def test_a_missing_side_input_is_none_in_the_carry(world):
    assert max(run_ranks(given_or_not, world, world)) < 1e-10


# -- who takes what


class Signatures(nn.Module):
    def first_only(self, positions): ...

    def some(self, x, positions, *, mask=None): ...

    def behind_several(self, *xs, positions): ...

    def all_of_them(self, *xs, **side): ...

    def by_place(self, x, positions, /, mask): ...

    def reserved(self, x0, x1, label0, positions): ...


@pytest.mark.parametrize("name, names, every", [
    ("first_only", (), False), ("some", ("positions", "mask"), False), ("behind_several", ("positions",), False),
    ("all_of_them", (), True), ("by_place", ("mask",), False), ("reserved", ("positions",), False),
])
def test_what_a_forward_takes(name, names, every):
    module = Signatures()
    module.forward = getattr(module, name)
    assert SideSpec.of(module) == SideSpec(names, every)


def test_a_compiled_module_takes_what_the_module_takes():
    assert SideSpec.of(torch.compile(Positioned())) == SideSpec(("positions",), False)


class Wordy(Stage):
    """A stage with as many parameters as one of transformers."""

    def forward(
        self, x, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None,
        output_attentions=None, output_hidden_states=None, output_router_logits=None, cache_position=None,
    ):
        return super().forward(x)


def wordy(rank):
    stages = [Wordy(2) for _ in range(50)]
    pipe = Pipeline(stages, process_group=rank.group("pp", (0, 1)), schedule="interleaved_1f1b")
    with torch.no_grad():
        pipe.step(torch.randn(2, 2).double(), num_chunks=1, return_outputs=True)


def test_many_stages_on_a_rank_may_name_much():
    run_threads(wordy, 2)


class Resident(Positioned):
    """A stage that counts the live positions of micro-batches when it runs."""

    alive: list = []  # noqa: RUF012 (of the process that runs it)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        storage = positions.untyped_storage()
        if all(ref() is not storage for ref in self.alive):
            self.alive.append(weakref.ref(storage))
        self.most = max(getattr(self, "most", 0), sum(ref() is not None for ref in self.alive))
        return x + self.down(torch.tanh(self.up(x)))  # keeps none of them


def positions_alive(rank, world):
    stages = make(2 * world, "Resident")
    pipe = DualPipeV([stages[s] for s in stages_of_rank("dualpipev", world, rank)])
    x, y, side = problem(20)
    side = {"positions": side["positions"]}
    pipe.step(x, num_chunks=10, criterion=F.mse_loss, labels=(y,), side=side if rank == 0 else None)
    return max(module.most for module in pipe.module)


def test_side_inputs_leave_with_the_result():
    """Free the side inputs of a micro-batch after its forward.

    Those of the running micro-batch live, and of two in each of two stages whose sends are not finished; kept for the
    backward they would be 8.
    """
    _, middle, _ = run_ranks(positions_alive, 3, 3)
    assert middle <= 1 + 2 * 2, middle


# -- mistakes

_, _, SIDE = problem(10)
MISTAKES = {
    # side inputs of rank 0, of rank 1, what every rank must be told
    "no mapping": ([SIDE["mask"]], None, "got list"),
    "not named": ({3: SIDE["mask"]}, None, "got ['int']"),
    "not a tensor": (SIDE | {"mask": [1]}, None, "'mask' must be a tensor"),
    "grad": (SIDE | {"scale": torch.ones(10, requires_grad=True)}, None, "'scale' requires grad"),
    "sparse": (SIDE | {"mask": torch.eye(10).to_sparse()}, None, "'mask' must be dense"),
    "carry name": (SIDE | {"x": SIDE["mask"]}, None, "['x']"),
    "names": (dict.fromkeys(["x1", "loss", "label0", "mask"], SIDE["mask"]), None, "['label0', 'loss', 'x1']"),
    "unknown": (SIDE | {"position": SIDE["mask"]}, None, "['position']"),
    "few": (SIDE | {"mask": SIDE["mask"][:4]}, None, "'mask' of shape [4, 3]"),
    "differ": (SIDE | {"mask": SIDE["mask"][:8]}, None, "rank 0: side inputs differ in size"),
    "size": ({n: t[:8] for n, t in SIDE.items()}, None, "inputs have batch size 10, side inputs"),
    "scalar": (SIDE | {"mask": torch.tensor(1)}, None, "'mask' of shape []"),
    "device": (SIDE | {"mask": SIDE["mask"].to("meta")}, None, "rank 0: side input 'mask' is on meta"),
    "other rank's": (None, SIDE, "ranks disagree about the side inputs"),
    "other shape": (SIDE, {"mask": SIDE["mask"][:8]}, "ranks disagree about the side inputs"),
    "other mistake": (SIDE, 3, "rank 1: side must be a mapping"),
}


class Masked(Positioned):
    """A stage that takes the mask, unlike all other stages."""

    wants = ("mask",)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask)


def mistakes(rank, world):
    kinds = "Nothing Positioned Segmented Masked"
    stages, expected = make(4, kinds), make(4, kinds)
    own = stages_of_rank("interleaved_1f1b", world, rank)
    pipe = Pipeline([stages[s] for s in own], schedule="interleaved_1f1b")
    x, y, _ = problem(10)
    call = dict(num_chunks=5, criterion=F.mse_loss, labels=(y,))
    told = {n: caught(lambda s=sides[rank]: pipe.step(x, side=s, **call))[:2] for n, (*sides, _) in MISTAKES.items()}
    pipe.zero_grad()
    same = SIDE if rank == 0 else dict(reversed(SIDE.items()))  # on all ranks, in any order: no mistake
    pipe.step(x, side=same, **call)
    expect(expected, x, y, SIDE, 5)
    return told, max(gradient_error(stages[s], expected[s]) for s in own)


def test_mistakes_raise_on_every_rank():
    for told, error in run_ranks(mistakes, 2, 2):
        for name, (*_, text) in MISTAKES.items():
            assert told[name][0] == "ValueError" and text in told[name][1], (name, told[name])
        assert error < 1e-10


class Hooked(Stage):
    @classmethod
    def overlapped_forward_backward(cls, *args):
        raise AssertionError("not to be called")


def hooked(rank, world):
    """Return the error if only the stages of rank 1 have `overlapped_forward_backward`."""
    kind = Hooked if rank == 1 else Positioned
    pipe = DualPipeV([kind(), kind()])
    x, y, side = problem(4)
    return caught(lambda: pipe.step(x, num_chunks=4, criterion=F.mse_loss, labels=(y,), side=side))


def test_modules_that_overlap_by_themselves_take_none():
    for kind, text, _ in run_ranks(hooked, 2, 2):
        assert kind == "ValueError" and "overlapped_forward_backward" in text


def over_new_group(stages, world):
    """Return a pipeline over a new process group, which a failure ends."""
    return DualPipeV(stages, process_group=dist.new_group(list(range(world))))


class Missing(Nothing):
    """A stage that needs a missing side input."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x)


def missing(rank, world):
    stages = make(4, "Nothing Missing")
    own = [stages[s] for s in stages_of_rank("dualpipev", world, rank)]
    x, y, side = problem(4)
    call = dict(num_chunks=4, criterion=F.mse_loss, labels=(y,))
    told = caught(lambda: over_new_group(own, world).step(x, **call))
    over_new_group(own, world).step(x, side={"positions": side["positions"]}, **call)
    return told


def test_a_stage_without_a_needed_side_input_raises_on_every_rank():
    for kind, text, _ in run_ranks(missing, 2, 2):
        assert kind == "PipelineError" and "positions" in text
