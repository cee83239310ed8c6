"""LoRA adapters in a pipeline of real ranks, against peft on the whole model of transformers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dualpipe import DualPipeV, Pipeline
from dualpipe.hf import load_stages
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.pipeline.p2p import Link
from hf_families import MICROBATCHES, PP2, PP2_DP2, PP2_EP2, batch_of, loss_fn, save_tiny
from ranks import run_ranks

peft = pytest.importorskip("peft", reason='needs peft: pip install "dualpipe[hf]"')

from dualpipe.hf.lora import load_adapter  # noqa: E402
from lora_cases import TARGETS, assert_small, config_of, save_case, step_errors  # noqa: E402

FAST = {("qwen3_moe", PP2_EP2), ("gpt_oss", PP2)}
CASES = [pytest.param(family, layout, marks=[] if (family, layout) in FAST else pytest.mark.slow)
         for family in TARGETS for layout in (PP2, PP2_EP2, PP2_DP2)]


def load_pipeline(folder, family, layout, options):
    """Return the mesh, this rank's adapted stages of a V with the adapters of the folder, and their pipeline."""
    pp, dp, ep = layout
    mesh = build_mesh(pp, dp, ep, torch.device("cpu"))
    place = Mesh.of(mesh)
    number = place.rank("pp")
    stages = load_stages(folder / "base", 2 * pp, (number, 2 * pp - 1 - number), mesh=mesh, dtype=torch.float64,
                         lora=config_of(family, **options))
    load_adapter(stages, folder / "adapter")
    return mesh, stages, DualPipeV(stages, process_group=place.group("pp"))


def errors_of(rank, folder, family, layout, options):
    mesh, stages, pipe = load_pipeline(folder, family, layout, options)
    return step_errors(mesh, stages, pipe, folder, family, options)


@pytest.mark.parametrize("family, layout", CASES)
def test_losses_and_gradients_are_those_of_peft(family, layout, tmp_path):
    save_case(tmp_path, family)
    assert_small(run_ranks(errors_of, layout[0] * layout[1] * layout[2], tmp_path, family, layout, {}, timeout=120))


def sent_back(rank, folder, layers):
    """Train two stages, one per rank, with adapters in some layers; return the errors, and the tensors sent."""
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=layers)
    (stage,) = load_stages(folder, 2, (rank,), mesh=mesh, dtype=torch.float64, lora=config, layers_per_stage=(2, 2))
    pipe = Pipeline([stage], process_group=mesh["pp"].get_group())
    tokens, labels = batch_of(0)
    sent = []
    send = Link.send

    def recorded_send(link, tensor):
        sent.append(tensor.dtype)
        return send(link, tensor)

    with mock.patch.object(Link, "send", recorded_send):
        pipe.step(*(() if rank else (tokens,)), num_chunks=MICROBATCHES, criterion=loss_fn if rank else None,
                  labels=(labels,) if rank else ())
    trained = {name: p.grad for name, p in stage.named_parameters() if p.requires_grad}
    return {name: grad is not None for name, grad in trained.items()}, sent.count(torch.float64)


@pytest.mark.parametrize("layers, gradients", [([0, 2, 3], MICROBATCHES), ([2, 3], 0)])
def test_nothing_is_sent_back_to_stages_without_adapters(layers, gradients, tmp_path):
    save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=False)
    (first, activations), (second, sent) = run_ranks(sent_back, 2, tmp_path, layers)
    assert activations == MICROBATCHES and sent == gradients
    assert bool(first) is (0 in layers) and second and all({**first, **second}.values())
