"""Runs whose ranks share sequences: losses, gradients and checkpoints are those of whole sequences."""

import dataclasses
import json
import re
import signal
import time

import pytest
import torch

from config_parity import largest_error
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.routing import router_set
from dualpipe.plan.communication import context_numbers
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.token_stream import TokenStream
from dualpipe.train.metrics import read_metrics
from dualpipe.train.parity.compare import Comparison
from dualpipe.train.parity.models import ConfigModel
from faults import planting
from hub import FAMILIES
from ranks import run_ranks
from trainers import resolve_job

# A length that no number of chunks divides.
SIZES = ["--train.sequence_length", "19", "--train.micro_batch_size", "2", "--train.num_chunks", "3"]
BY_SEQUENCE = ["--router.balance_level", "sequence"]
TERMS = ["--router.balance", "0.5", "--router.z_loss", "0.1"]


def parity_on_ranks(rank, toml, layouts, options, dtype):
    """The largest relative difference of a step of each layout, by all ranks."""
    found = []
    for pp, dp, cp, ep in layouts:
        sizes = ["--parallel.pp", f"{pp}", "--parallel.dp", f"{dp}", "--parallel.cp", f"{cp}", "--parallel.ep", f"{ep}"]
        found.append(largest_error(*resolve_job(toml, [*sizes, *SIZES, *options]), dtype))
    return found


def worst(toml, layouts, *options, dtype=torch.float64):
    world = torch.tensor(layouts[0]).prod().item()
    return max(map(max, run_ranks(parity_on_ranks, world, str(toml), layouts, options, dtype, timeout=180)))


def test_gradients_of_two_ranks(run_toml):
    assert worst(run_toml, [(1, 1, 2, 1)], *TERMS, *BY_SEQUENCE) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("level", ["microbatch", "sequence", "global"])
@pytest.mark.parametrize("layouts", [[(2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2)], [(2, 1, 2, 2)]], ids=str)
def test_gradients_of_layouts(run_toml, layouts, level):
    assert worst(run_toml, layouts, *TERMS, "--router.balance_level", level) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_gradients_of_methods_and_dtypes(run_toml, method):
    (run_toml.parent / "model.json").write_text(json.dumps(FAMILIES["deepseek_v2"] | {"model_type": "deepseek_v2"}))
    options = ["--parallel.cp_method", method, "--model.config", str(run_toml.parent / "model.json")]
    assert worst(run_toml, [(1, 1, 2, 1)], *options, "--memory.recompute", "layer", "dispatch") < 1e-10
    assert worst(run_toml, [(2, 1, 2, 1)], *options, dtype=torch.float32) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_gradients_of_families(run_toml, family):
    file = run_toml.parent / f"{family}.json"
    file.write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
    assert worst(run_toml, [(2, 1, 2, 1), (1, 1, 2, 2)], *TERMS, *BY_SEQUENCE, "--model.config", str(file)) < 1e-10


def one_rank_alone(rank, toml):
    """The balance loss on a rank's own tokens, whose gradient is another."""
    router_set.RouterStep.add_losses = alone(router_set.RouterStep.add_losses)
    return parity_on_ranks(rank, toml, [(1, 1, 2, 1)], [*TERMS, *BY_SEQUENCE], torch.float64)


def alone(right):
    return lambda self, *arguments: right(dataclasses.replace(self, sequence_group=None), *arguments)


@pytest.mark.slow
def test_a_balance_loss_on_a_part_of_a_sequence_is_seen(run_toml):
    assert min(map(max, run_ranks(one_rank_alone, 2, str(run_toml), fresh=True))) > 1e-6


@pytest.mark.slow
def test_the_command_names_the_layout(run_folder, dualpipe):
    done = dualpipe(run_folder, "parity", "run.toml", "--pp", "1", "--cp", "2", *SIZES)
    assert done.returncode == 0 and "pp 1, dp 1, cp 2, ep 1" in re.sub(r"\s+", " ", done.stdout), done.stdout
    refused = dualpipe(run_folder, "parity", "run.toml", "--pp", "1", "--cp", "2", "--train.sequence_length", "3")
    assert "at least 4 tokens" in refused.stderr


def sent(rank, toml, options, cp):
    """Bytes that attention sends in a step, and what `context_numbers` says of them."""
    resolved, job = resolve_job(toml, ["--parallel.pp", "1", "--parallel.cp", f"{cp}", *options])
    config, train = resolved.config, resolved.config.train
    length = train.sequence_length
    comparison = Comparison(ConfigModel(resolved), job, torch.float64, 1e-10)
    report = comparison.run()
    assert [error.name for error in report.errors if error.stage < 0] == ["loss of the micro-batches"], "of both ranks"
    stages = [stage.module for stage in comparison.pipeline.stages]
    contexts = {layer.self_attn.context_parallel for stage in stages for layer in stage.layers.values()}
    model, tokens = resolved.model, train.micro_batch_size * train.num_chunks * length // cp
    numbers = (context_numbers(model, i, length, cp, config.parallel.cp_method) for i in range(model.num_hidden_layers))
    expected = sum(each.forward + each.backward for each in numbers) * tokens * 8
    (context,) = contexts
    return context.sent_bytes, expected


@pytest.mark.parametrize("method", ["ring", *(pytest.param(m, marks=pytest.mark.slow) for m in ("all_to_all", "auto"))])
def test_the_bytes_that_are_planned_for_are_sent(run_toml, method):
    (run_toml.parent / "model.json").write_text(json.dumps(FAMILIES["deepseek_v2"] | {"model_type": "deepseek_v2"}))
    options = ["--train.sequence_length", "16", "--parallel.cp_method", method, "--model.config",
               str(run_toml.parent / "model.json")]
    for got, expected in run_ranks(sent, 2, str(run_toml), options, 2):
        assert abs(got - expected) <= 64, "what ranks tell each other of a first micro-batch apart"


# -- data


class Numbers(TokenStream):
    """A stream of the numbers from 0, in documents of ten."""

    has_loss_mask = False

    def __init__(self):
        self.num_tokens = 200

    def read(self, start, stop):
        return torch.arange(start, stop).numpy()

    def positions(self, start, stop):
        return self.read(start, stop) % 10


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_read_their_tokens_of_the_same_rows(size):
    def batch(columns):
        return Loader([Numbers()], sequence_length=13, batch_size=4, seed=1, rows=range(2), columns=columns).batch(2)

    whole, splits = batch(None), [SequenceSplit(rank, size) for rank in range(size)]
    for own in (split.token_indices(13) for split in splits):
        part = batch(own)
        assert torch.equal(part.tokens, whole.tokens[:, own]) and torch.equal(part.targets, whole.targets[:, own])
        assert torch.equal(part.targets, part.tokens + 1), "also behind the last token of a chunk"
        assert torch.equal(part.positions, whole.positions)


# -- runs


TRAIN = ["train", "run.toml", "--parallel.pp", "1", "--train.steps", "4", "--train.sequence_length", "31",
         "--train.eval_batches", "2", "--train.eval_interval", "2", "--data.separate_documents", "True",
         "--optimizer.schedule", "constant", "--checkpoint.interval", "2", "--checkpoint.keep_last", "0"]


def losses(folder, output):
    rows = read_metrics(folder / output / "metrics.jsonl")
    return torch.tensor([[row.get(name) or 0.0 for name in ("step", "loss", "grad_norm", "eval_loss")] for row in rows])


def train(dualpipe, folder, output, *options):
    done = dualpipe(folder, *TRAIN, "--output.dir", output, *options, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_layers_and_attention_in_other_dtypes_than_what_is_around_them(run_folder, dualpipe, method):
    """They are cast where they begin and where they end, though their parts run apart."""
    model = FAMILIES["deepseek_v2"] | {"model_type": "deepseek_v2", "vocab_size": 257}
    (run_folder / "model.json").write_text(json.dumps(model))
    narrow = ["--train.dtype", "bf16", "--train.steps", "2", "--memory.recompute", "attention:0", "--dtypes.rules",
              "layers.0.self_attn,compute=fp32", "layers.1.self_attn,compute=fp32", "layers.2,compute=fp32",
              "--model.config", "model.json"]
    train(dualpipe, run_folder, "whole16", *narrow, "--parallel.dp", "2")
    train(dualpipe, run_folder, "shared16", *narrow, "--parallel.cp", "2", "--parallel.cp_method", method,
          "--train.micro_batch_size", "4")  # the same global batch
    close = {"rtol": 0.02, "atol": 0.0}  # 8 bits
    torch.testing.assert_close(losses(run_folder, "shared16"), losses(run_folder, "whole16"), **close)
    train(dualpipe, run_folder, "experts16", *narrow, "--parallel.ep", "2")
    torch.testing.assert_close(losses(run_folder, "experts16"), losses(run_folder, "whole16"), **close)


@pytest.mark.slow
def test_losses_are_those_without_and_checkpoints_go_on_in_either_layout(run_folder, dualpipe):
    train(dualpipe, run_folder, "whole")
    said = train(dualpipe, run_folder, "shared", "--parallel.cp", "2")
    assert "sequences over 2 (15 or 16 tokens each)" in said
    torch.testing.assert_close(losses(run_folder, "shared"), losses(run_folder, "whole"), rtol=1e-4, atol=0)
    for output, here, there in (("shared", "2", "1"), ("whole", "1", "2")):
        (run_folder / output / "metrics.jsonl").unlink()
        options = ["--parallel.cp", there, "--train.steps", "6"]
        said = train(dualpipe, run_folder, output, *options)
        assert ("saved by pp 1 x dp 1 x cp 2 x ep 1" if here == "2" else "saved by pp 1 x dp 1 x ep 1") in said
    assert losses(run_folder, "shared")[:, 0].tolist() == [5, 6]
    torch.testing.assert_close(losses(run_folder, "shared"), losses(run_folder, "whole"), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 2), (1, 2))], ids=str)
def test_what_is_loaded_in_another_layout_has_the_same_bits(run_folder, dualpipe, layouts, tmp_path):
    exported = []
    for number, (cp, ep) in enumerate(layouts):
        target = tmp_path / f"export-{number}"
        said = train(dualpipe, run_folder, str(tmp_path / "run"), "--parallel.cp", f"{cp}", "--parallel.ep", f"{ep}",
                     "--train.steps", "1", "--checkpoint.interval", "1", "--train.eval_batches", "0",
                     "--train.micro_batch_size", f"{2 // ep}", "--export.to_hf", str(target))
        exported.append(b"".join(path.read_bytes() for path in sorted(target.glob("*.safetensors"))))
    assert "nothing is left to do" in said and exported[0] == exported[1] and len(exported[0]) > 100_000


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_in_time(run_folder, dualpipe):
    began = time.monotonic()
    done = dualpipe(run_folder, *TRAIN, "--output.dir", "killed", "--parallel.cp", "2",
                    before=planting("kill rank=1 step=2 action=B"))
    assert done.returncode not in (0, -signal.SIGKILL) and time.monotonic() - began < 60
    assert "rank 1 (cp 1)" in done.stderr
