"""Pipelines whose criterion takes the rows of the head, against the plain form: losses and all gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from dualpipe import Pipeline
from dualpipe.models.stages import Recompute
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.accumulators import drop
from dualpipe.nn.head import HeadRows
from dualpipe.parallel.context import ContextParallel
from dualpipe.parallel.fsdp.unit_records import casting_hook
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.pipeline.compiled_stage import plain_head, takes_head_rows
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import build
from dualpipe.train.loss import MicroBatchLoss, tokens_ahead
from dualpipe.train.replay import ResultWatch, checksum_bits
from dualpipe.train.step import build_model, resolve_model_dtypes
from ranks import run_ranks
from tiny_models import tiny

CHUNKS, LENGTH, VOCABULARY = 4, 8, 61
PART_BYTES = 3 * VOCABULARY * 8  # three rows in float64, of eight, or of four on a rank that shares sequences


class Spy(MicroBatchLoss):
    """Loss that counts the calls with rows."""

    calls = 0

    def __call__(self, *tensors):
        self.calls += isinstance(tensors[0], HeadRows)
        return super().__call__(*tensors)


def gradients(stages):
    return {name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad.clone()
            for stage in stages for name, parameter in stage.named_parameters() if parameter.grad is not None}


def steps(rank, sizes, changes, schedule, separate=False):
    """Return the losses and gradients of a step in parts and of one in the plain form, and the calls with rows."""
    changes = dict(changes)
    pp, dp, ep, cp = sizes
    mtp = changes.pop("mtp", False)
    recompute = changes.pop("recompute", ())
    config = tiny(changes.pop("family", "qwen3_moe"), **changes)
    config = config.with_mtp() if mtp else config
    cpu = torch.device("cpu")
    mesh = build_mesh(pp, dp, ep, cpu, cp=cp) if pp * dp * ep * cp > 1 else None
    place = Mesh.of(mesh)
    context = ContextParallel(place.part("cp"))
    model = build_model(
        config, build(schedule, pp, CHUNKS), place.rank("pp"), device=cpu, mesh=mesh, context=context,
        dtypes=resolve_model_dtypes(config, torch.float64, replicas=dp * ep * cp, mesh=mesh))
    for stage in model.stages:
        stage.recompute = Recompute(recompute)
    pipe = Pipeline(model.stages, process_group=place.group("pp"), schedule=schedule)
    generator = torch.Generator().manual_seed(0)
    depth = config.mtp_depth
    tokens = torch.randint(VOCABULARY, (CHUNKS, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (CHUNKS, LENGTH, 1 + depth), generator=generator)
    targets[1] = targets[2, :3] = -100
    targets = targets if depth else targets.squeeze(-1)
    positions = torch.arange(LENGTH).expand(CHUNKS, -1)
    if cp > 1:
        columns = context.split.token_indices(LENGTH)
        tokens, targets = tokens[:, columns], targets[:, columns]
    results = []
    for part_bytes in (PART_BYTES, 0):
        denominator = torch.tensor(5.0) if separate else None
        loss = Spy(CHUNKS, 0.3, denominator=denominator, part_bytes=part_bytes)
        side = {"positions": positions if cp > 1 else None, "ahead": tokens_ahead(targets)}
        losses, _ = pipe.step(
            *[tokens] * model.has_first, num_chunks=CHUNKS, criterion=loss if model.has_last else None,
            labels=(targets,) * model.has_last, side=side if model.has_first else None)
        results.append((losses, loss.depth_losses, gradients(model.stages), loss.calls))
        drop(parameter for stage in model.stages for parameter in stage.parameters())
    return results


LAYOUTS = {
    "one rank": ((1, 1, 1, 1), {}, "dualpipev"),
    "a V of two ranks": ((2, 1, 1, 1), {"num_hidden_layers": 4}, "dualpipev"),
    "a tied embedding": ((2, 1, 1, 1), {"num_hidden_layers": 4, "tie_word_embeddings": True}, "dualpipev"),
    "a tied embedding at the other end": ((2, 1, 1, 1), {"tie_word_embeddings": True}, "1f1b"),
    "sharded": ((1, 2, 1, 1), {"tie_word_embeddings": True}, "zbv"),
    "experts, recomputed": ((1, 1, 2, 1), {"recompute": ("layer",)}, "dualpipev"),
    "context parallelism": ((1, 1, 1, 2), {}, "dualpipev"),
    "multi-token prediction": ((2, 1, 1, 1), {"family": "deepseek_v3", "num_hidden_layers": 4, "mtp": True,
                                              "num_nextn_predict_layers": 2}, "dualpipev"),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("separate", [False, True])
def test_a_step_equals_the_plain_form(name, separate):
    sizes, changes, schedule = LAYOUTS[name]
    arguments = (sizes, changes, schedule, separate)
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    by_rank = [steps(0, *arguments)] if world == 1 else run_ranks(steps, world, *arguments)
    for (losses, depths, found, calls), (plain_losses, plain_depths, expected, plain_calls) in by_rank:
        assert plain_calls == 0
        if plain_losses is not None:
            assert calls == CHUNKS
            torch.testing.assert_close(losses, plain_losses, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(depths, plain_depths, rtol=1e-10, atol=1e-12)
        assert found.keys() == expected.keys()
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-10, atol=1e-12, msg=parameter)


# -- who gets rows


def lone_pipe(**changes):
    config = tiny(**changes)
    model = build_model(config, build("1f1b", 1, 2), 0, dtypes=torch.float64, device=torch.device("cpu"))
    return Pipeline(model.stages, schedule="1f1b"), model.stages[0]


def kind_of_logits(pipe, part_bytes=PART_BYTES, **options):
    """Return the type of what the criterion of a step gets as logits."""
    kinds = set()

    def criterion(logits, labels):
        kinds.add(type(logits))
        return cross_entropy_loss(logits, labels)

    criterion.takes_head_rows = True
    criterion.part_bytes = part_bytes
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    _, outputs = pipe.step(tokens, num_chunks=2, criterion=criterion, labels=(tokens,), **options)
    (kind,) = kinds
    return kind, outputs


def test_logits_are_whole_where_somebody_else_wants_them():
    pipe, stage = lone_pipe()
    assert kind_of_logits(pipe)[0] is HeadRows
    kind, outputs = kind_of_logits(pipe, return_outputs=True)
    assert kind is torch.Tensor and outputs.shape == (2, LENGTH, VOCABULARY)
    with torch.no_grad():
        assert kind_of_logits(pipe)[0] is HeadRows
    for module in (stage, stage.lm_head):
        handle = module.register_forward_hook(lambda *_: None)
        assert kind_of_logits(pipe)[0] is torch.Tensor
        handle.remove()
    handle = stage.lm_head.weight.register_hook(lambda gradient: gradient)
    assert kind_of_logits(pipe)[0] is torch.Tensor
    handle.remove()
    assert kind_of_logits(pipe)[0] is HeadRows
    stage.lm_head = nn.Sequential(stage.lm_head)
    assert kind_of_logits(pipe)[0] is torch.Tensor


@pytest.mark.parametrize("owner", ["the stage", "its head"])
def test_logits_that_are_cast_to_another_dtype_are_whole(owner):
    """The rows would be cast in their place."""
    pipe, stage = lone_pipe()
    module = stage if owner == "the stage" else stage.lm_head
    for dtype, kind in ((torch.float64, HeadRows), (torch.float32, torch.Tensor)):
        handle = module.register_forward_hook(casting_hook(lambda _, args, x, dtype=dtype: x.to(dtype), dtype))
        assert kind_of_logits(pipe)[0] is kind
        handle.remove()


def test_logits_that_are_one_part_are_whole():
    pipe, _ = lone_pipe()
    limit = LENGTH * VOCABULARY * 8
    assert kind_of_logits(pipe, limit)[0] is torch.Tensor
    assert kind_of_logits(pipe, limit - 1)[0] is HeadRows


def test_rows_have_the_limit_of_the_criterion():
    pipe, _ = lone_pipe()
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    limits = []

    class Loss:
        takes_head_rows = True
        part_bytes = PART_BYTES

        def __call__(self, rows, labels, **options):
            limits.append(rows.part_bytes)
            return cross_entropy_loss(rows, labels, **options)

    for criterion in (Loss(), partial(Loss(), z_loss=0.1)):
        pipe.step(tokens, num_chunks=2, criterion=criterion, labels=(tokens,))
    assert limits == [PART_BYTES] * 4


def test_a_step_that_is_watched_has_the_same_bits():
    """The trainer watches every step, and the modules of a stage where it runs a bad step again."""
    pipe, stage = lone_pipe()
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    bits = []
    for stages in (None, (), (stage,)):
        recorder = Recorder.current()
        watch = nullcontext() if stages is None else ResultWatch(recorder, checksum_bits, stages)
        loss = Spy(2, part_bytes=PART_BYTES)
        with watch:
            losses, _ = pipe.step(tokens, num_chunks=2, criterion=loss, labels=(tokens,))
        assert loss.calls == 2
        bits.append((losses, *(parameter.grad for parameter in stage.parameters())))
        drop(stage.parameters())
        assert stages is None or watch.results
    for one in bits[1:]:
        assert all(map(torch.equal, one, bits[0]))


def test_a_stage_gives_logits_again_after_a_failure():
    pipe, stage = lone_pipe()
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)

    def refuse(module, inputs):
        raise RuntimeError("no")

    handle = stage.norm.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no"):
        kind_of_logits(pipe)
    handle.remove()
    assert stage(tokens).shape == (2, LENGTH, VOCABULARY)


def test_criteria_of_others_get_logits():
    assert takes_head_rows(cross_entropy_loss) and takes_head_rows(partial(cross_entropy_loss, denominator=3))
    assert takes_head_rows(MicroBatchLoss(1)) and not takes_head_rows(MicroBatchLoss(1, part_bytes=0))
    assert not takes_head_rows(nn.CrossEntropyLoss()) and not takes_head_rows(None)
    assert plain_head(nn.Linear(2, 2)) is None


def test_the_report_names_the_head_and_does_not_warn(recwarn):
    pipe, _ = lone_pipe(vocab_size=4096)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    pipe.step(tokens, num_chunks=2, criterion=MicroBatchLoss(2, part_bytes=4 * 4096 * 8), labels=(tokens,))
    report = str(pipe.deferral_report())
    assert "lm_head.weight" in report and "computed with the loss, in parts" in report
    assert not any("weight-gradient work" in str(warning.message) for warning in recwarn)
