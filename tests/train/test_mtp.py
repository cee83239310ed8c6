"""Runs that train layers for multi-token prediction: weights, metrics, and the number of accepted drafts."""

import json
import re

import numpy as np
import pytest
import torch

from config_parity import largest_error
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.plan.memory import estimate
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.config.load import load_config
from dualpipe.train.config.model_config import read_model
from dualpipe.train.config.schema import MTPConfig
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.token_stream import NO_TARGET, PackedTokens, TokenStream, shift_targets
from dualpipe.train.evaluate import evaluate
from dualpipe.train.loss import MicroBatchLoss, count_accepted, tokens_ahead
from dualpipe.train.metrics import MetricsWriter, StepMetrics, read_metrics, scalars
from dualpipe.train.parity.command import check_parity
from dualpipe.train.parity.models import ConfigModel
from dualpipe.train.trainer import train
from faults import planting
from hub import FAMILIES
from ranks import run_ranks
from run_files import write_files
from trainers import built_trainer, resolve_job

ALONE = RankInfo(0, 1, 0, 1)
MODEL = FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "vocab_size": 257, "num_hidden_layers": 2,
                                   "num_nextn_predict_layers": 1}
ONE_RANK = ["--parallel.pp", "1"]
WEIGHT = ["--mtp.weight", "0.3"]


def written(folder, **changes):
    return str(write_files(folder, MODEL | changes))


@pytest.fixture
def toml(tmp_path):
    return written(tmp_path)


def made(toml, *options):
    """Build the run of a configuration on one rank, before its first step."""
    return built_trainer(toml, [*ONE_RANK, *options])


def rows_of(toml, tmp_path, name, *options):
    """Return the metrics of a run on one rank, by step."""
    train(load_config(toml, [*ONE_RANK, "--output.dir", str(tmp_path / name), *options]), ALONE)
    return read_metrics(tmp_path / name / "metrics.jsonl")


# -- what is to be predicted


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_targets_are_those_whose_tokens_between_are_known_and_of_one_document(depth, length):
    rows = np.arange(100, 100 + 3 * (length + 1)).reshape(3, -1)
    documents = np.sort(np.random.default_rng(0).integers(0, 3, (3, length + 1)))
    first = (documents[..., None] == documents[:, None]).argmax(-1)
    positions = np.arange(length + 1) - first
    for given in (None, positions):
        found = shift_targets(rows, depth, given)
        for (row, i, k), target in np.ndenumerate(found):
            known = i + k < length and (given is None or documents[row, i] == documents[row, i + k + 1])
            assert target == (rows[row, i + k + 1] if known else NO_TARGET)
        assert np.array_equal(shift_targets(rows, 0, given), found[..., 0])
    assert np.array_equal(shift_targets(rows, 0), rows[:, 1:])


def test_tokens_ahead_are_those_that_something_is_predicted_from():
    targets = torch.from_numpy(shift_targets(np.arange(5)[None], 2))
    assert targets.tolist() == [[[1, 2, 3], [2, 3, 4], [3, 4, -100], [4, -100, -100]]]
    assert tokens_ahead(targets).tolist() == [[[1, 2], [2, 3], [3, -100], [-100, -100]]]
    assert tokens_ahead(targets[..., 0]) is None


@pytest.mark.parametrize("separate", [False, True])
def test_the_loader_gives_the_same_windows_and_ranks_that_share_them_have_targets_across_the_cut(toml, separate):
    with made(toml, "--data.separate_documents", f"{separate}") as run:
        packed = PackedTokens(run.data.sources[0].train.packed.path)
    sizes = {"sequence_length": 16, "batch_size": 16, "seed": 0}
    plain, whole = (Loader([TokenStream(packed)], **sizes, **how).batch(1)
                    for how in ({"separate_documents": separate}, {"depth": 2, "separate_documents": separate}))
    assert all(a.equal(b) for a, b in zip(plain, whole._replace(targets=whole.targets[..., 0])))
    assert (whole.targets[:, :14, 2] == NO_TARGET).any() == separate, "there are documents that end in a window"
    columns = SequenceSplit(0, 2).token_indices(16)
    part = Loader([TokenStream(packed)], **sizes, columns=columns, depth=2, separate_documents=separate).batch(1)
    assert part.targets.equal(whole.targets[:, columns]) and part.positions.equal(whole.positions)


# -- settings


def test_the_weight_changes_for_the_last_steps():
    plain, two = MTPConfig(0.3), MTPConfig(0.3, last_weight=0.1, last_steps=2)
    assert [plain.weight_of(step, 4) for step in range(1, 5)] == [0.3] * 4
    assert [two.weight_of(step, 4) for step in range(1, 5)] == [0.3, 0.3, 0.1, 0.1]


def test_what_cannot_be_is_refused(tmp_path, toml):
    with pytest.raises(ValueError, match=r"mtp\.last_steps = 2"):
        load_config(toml, ["--mtp.last_steps", "2"])
    with pytest.raises(ValueError, match=r"set mtp\.weight = 0"):
        read_model(load_config(written(tmp_path, num_nextn_predict_layers=0), WEIGHT))
    assert read_model(load_config(written(tmp_path, num_nextn_predict_layers=2), WEIGHT)).config.mtp_depth == 2
    assert read_model(load_config(toml)).config.mtp_depth == 0
    two = written(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match=r"train\.sequence_length = 2: .* give at least 3"):
        read_model(load_config(two, [*WEIGHT, "--train.sequence_length", "2"]))
    assert estimate(load_config(toml, [*WEIGHT, "--memory.recompute", "experts:2"]),
                    read_model(load_config(toml, WEIGHT)).config), "the layer counts"


# -- a run


@pytest.mark.slow
def test_a_run_tells_the_losses_of_each_depth_and_its_weight_changes(tmp_path, capsys):
    toml = written(tmp_path, num_nextn_predict_layers=2)
    steps = ["--train.steps", "3", "--train.eval_interval", "3", "--train.eval_batches", "1"]
    without = rows_of(toml, tmp_path, "without", *steps)
    first = rows_of(toml, tmp_path, "first", *WEIGHT, *steps)
    said = capsys.readouterr().out
    changed = rows_of(toml, tmp_path, "changed", *WEIGHT, "--mtp.last_weight", "0", "--mtp.last_steps", "1", *steps)
    last = rows_of(toml, tmp_path, "last", "--mtp.weight", "1", "--mtp.last_weight", "0.3", "--mtp.last_steps", "3",
                   *steps)
    assert first[0]["loss"] == without[0]["loss"], "the loss is that of the next token alone"
    assert all(row["loss"] != other["loss"] for row, other in zip(first[1:], without[1:]))
    assert all(len(row["mtp_loss"]) == 2 and min(row["mtp_loss"]) > 2 for row in first)
    assert not any("mtp" in key or "acceptance" in key for row in without for key in row)
    norms = [[row["grad_norm"] for row in rows] for rows in (first, changed, last)]
    assert norms[0][:2] == norms[1][:2] and norms[1][2] < norms[0][2] and norms[2] == norms[0]
    evaluated = first[-1]
    assert len(evaluated["eval_mtp_loss"]) == 2 and 1 <= evaluated["acceptance_length"] <= 3
    mtp = ", ".join(f"{loss:.4f}" for loss in evaluated["eval_mtp_loss"])
    assert f"validation loss {evaluated['eval_loss']:.4f} (MTP {mtp})  acceptance length " in said


def test_losses_are_the_cross_entropies_over_all_next_tokens(toml):
    with made(toml, *WEIGHT, "--data.separate_documents", "True", "--parallel.schedule", "1f1b") as run:
        batch = run.data.loader.batch(0)
        runner, criterion = run.runner, run.runner.criterion(1, batch)
        losses = runner.mean_losses(runner.forward_backward(batch, criterion), criterion)
        (stage,) = run.runner.model.stages
        logits = stage(batch.tokens, positions=batch.positions, ahead=tokens_ahead(batch.targets))
        num_targets = (batch.targets[..., 0] != NO_TARGET).sum()
        expected = [torch.nn.functional.cross_entropy(each.flatten(0, 1), batch.targets[..., k].flatten(),
                                                      ignore_index=NO_TARGET, reduction="sum") / num_targets
                    for k, each in enumerate(logits)]
    torch.testing.assert_close(losses, torch.stack(expected).detach())


INFINITE = """
import torch
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.loss import MicroBatchLoss
real = vars(MicroBatchLoss).get("real", MicroBatchLoss.__call__)
def infinite(self, *tensors):
    loss = real(self, *tensors)
    if Recorder.current().step == 2:  # as it is told, not in its gradients
        self.depth_losses[-1][{depth}] = float("inf")
    return loss
MicroBatchLoss.real, MicroBatchLoss.__call__ = real, infinite
"""


@pytest.mark.slow
@pytest.mark.parametrize("pp, depth", [("1", 0), ("2", 1)])
def test_a_loss_of_any_depth_that_is_not_finite_ends_the_run(run_folder, dualpipe, pp, depth):
    """The ends of pp 2 both have copies of the embedding, which the norm leaves out."""
    written(run_folder)
    options = ["--parallel.pp", pp, "--parallel.schedule", "1f1b", "--train.steps", "4", "--train.eval_batches", "0",
               "--output.dir", f"infinite{pp}{depth}", *WEIGHT]
    done = dualpipe(run_folder, "train", "run.toml", *options, before=INFINITE.format(depth=depth))
    assert done.returncode == 1 and "at step 2" in done.stderr and "other values" not in done.stderr, done.stderr
    assert len(read_metrics(run_folder / f"infinite{pp}{depth}" / "metrics.jsonl")) == 1


@pytest.mark.slow
def test_computing_twice_gives_the_same_bits_and_counts_no_scores_for_qk_clip(toml, tmp_path):
    options = ["--mtp.weight", "1", "--mtp.last_weight", "0.1", "--mtp.last_steps", "1", "--optimizer.qk_clip", "1e-5",
               "--optimizer.lr", "0.03", "--optimizer.schedule", "constant", "--train.steps", "5",
               "--train.eval_batches", "0", "--parallel.schedule", "1f1b"]
    plain, twice = (rows_of(toml, tmp_path, f"every{interval}", *options, "--guard.recheck_interval", interval)
                    for interval in ("0", "1"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in twice]


@pytest.mark.slow
@pytest.mark.parametrize("pp", ["1", "2"])
def test_a_step_is_replayed_with_the_weight_that_it_had(run_folder, dualpipe, pp):
    written(run_folder)
    options = ["--parallel.pp", pp, "--parallel.schedule", "1f1b", "--mtp.weight", "1", "--mtp.last_weight", "0.1",
               "--mtp.last_steps", "2", "--train.steps", "3", "--output.dir", f"poisoned{pp}"]
    poison = planting("nan rank=0 step=2 action=F")
    done = dualpipe(run_folder, "train", "run.toml", *options, before=poison)
    assert done.returncode == 1 and "the gradient norm is nan at step 2" in done.stderr, done.stderr
    (bundle,) = (run_folder / f"poisoned{pp}" / "bundles").glob("step-*")
    again = dualpipe(run_folder, "replay", str(bundle), before=poison)
    assert again.returncode == 0 and again.stdout.endswith("reproduced\n"), again.stdout + again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [("0.3", "0"), ("0", "0.3")])
def test_a_run_goes_on_with_layers_that_its_checkpoint_lacks_or_without_them_where_that_is_said(
        toml, tmp_path, before, after):
    first, then = (["--train.steps", steps, "--train.eval_batches", "0", "--mtp.weight", weight,
                    "--checkpoint.interval", "1"] for steps, weight in (("1", before), ("2", after)))
    rows_of(toml, tmp_path, "out", *first)
    with pytest.raises(ValueError, match=r"checkpoint\.allow \(\*layers\.2\.\*\)"):
        rows_of(toml, tmp_path, "out", *then)
    rows = rows_of(toml, tmp_path, "out", *then, "--checkpoint.allow", "*layers.2.*")
    assert ["mtp_loss" in row for row in rows] == [before != "0", after != "0"]


ENDS_APART = ["--parallel.pp", "2", "--parallel.schedule", "1f1b", "--train.steps", "3", "--train.eval_batches", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_end_that_fails_in_the_exchange_with_the_other_is_named(run_folder, dualpipe, rank):
    written(run_folder)
    faults = f"raise rank={rank} step=2 action=exchange"
    done = dualpipe(run_folder, "train", "run.toml", *WEIGHT, *ENDS_APART, before=planting(faults))
    error = f"error: rank {rank} (pp {rank}): at the beginning or end of the step: PlantedFault: {faults}: planted\n"
    assert done.returncode == 1 and error in done.stderr, done.stderr


FLIP = """
import os
import torch
from dualpipe.train.optim.optimizer import Optimizer

step = Optimizer.step

def flipping(self, lr, norm):
    step(self, lr, norm)
    for parameter, kept in self.state_tensors().items() if os.environ.get("RANK") == "1" else ():
        if parameter.shape[0] == 257:
            kept["exp_avg"].view(-1).view(torch.int32)[5] |= 1 << 20

Optimizer.step = flipping
"""


@pytest.mark.slow
def test_a_flipped_bit_in_one_end_s_copy_is_found(run_folder, dualpipe):
    written(run_folder, tie_word_embeddings=True)
    options = (*WEIGHT, *ENDS_APART, "--parallel.schedule", "interleaved_1f1b", "--guard.checksum_interval", "2")
    done = dualpipe(run_folder, "train", "run.toml", *options)
    assert done.returncode == 0, done.stderr
    done = dualpipe(run_folder, "train", "run.toml", *options, "--output.dir", "flipped", before=FLIP)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: after step 2: rank 0 (pp 0) or rank 1 (pp 1) has wrong bits"), done.stderr


# -- drafts


def greedy(stage, tokens, ahead=None):
    """Return the most likely token after each one, for every depth."""
    with torch.no_grad():
        logits = stage(tokens, ahead=ahead)
    return torch.stack([each.argmax(-1) for each in (logits if isinstance(logits, tuple) else (logits,))], -1)


@pytest.mark.slow
def test_the_evaluation_accepts_what_a_verification_of_each_token_of_the_text_would(toml, tmp_path):
    """After training until the model has learnt something."""
    with made(toml, *WEIGHT, "--train.steps", "30", "--parallel.schedule", "1f1b", "--optimizer.lr", "1e-2",
              "--output.dir", str(tmp_path / "out"), "--train.eval_batches", "1") as run:
        run.train()
        found = evaluate(run.runner, run.data, run.done)
        with run.data.validation_batches() as batches:
            (batch,) = batches
        (stage,) = run.runner.model.stages
    stage.eval()
    right = []
    for row in batch.tokens.tolist():
        for i in range(len(row) - 1):  # token i + 1 is known, and the one after it is drafted
            draft = greedy(stage, torch.tensor([row[: i + 1]]), torch.tensor([row[1 : i + 2]])[..., None])[0, -1, 1]
            right.append(bool(draft == greedy(stage, torch.tensor([row[: i + 2]]))[0, -1, 0]))
    assert found["acceptance_length"] == pytest.approx(1 + sum(right) / len(right)) and 0 < sum(right) < len(right)
    assert found["eval_loss"] < 4 and len(found["eval_mtp_loss"]) == 1


def test_a_chain_ends_with_its_first_wrong_draft():
    main = torch.tensor([[1, 2, 3, 4, 5]])
    drafts = torch.tensor([[[2, 3], [9, 4], [4, 9], [5, 0], [0, 0]]])  # both; neither counts; one
    targets = torch.from_numpy(shift_targets(np.arange(6)[None], 2))
    assert count_accepted(torch.cat((main[..., None], drafts), -1), targets, main, torch.arange(5)).tolist() == [3, 3]
    columns = torch.tensor([0, 2])  # another rank's columns are there by main alone
    part = torch.cat((main[..., None], drafts), -1)[:, columns], targets[:, columns]
    assert count_accepted(*part, main, columns).tolist() == [3, 2]


def test_without_a_token_that_counts_there_is_no_acceptance_length(tmp_path):
    """Documents of three tokens have no token with three more after it."""
    toml, text = written(tmp_path, num_nextn_predict_layers=2), tmp_path / "short.jsonl"
    text.write_text("".join(json.dumps({"text": 2 * letter}) + "\n" for letter in 300 * "ab"))
    *_, row = rows_of(toml, tmp_path, "short", *WEIGHT, "--data.path", str(text), "--data.separate_documents", "True",
                      "--data.validation_path", str(text), "--train.steps", "1", "--train.eval_batches", "1")
    assert row["acceptance_length"] is None and row["mtp_loss"][0] > 0
    assert row["mtp_loss"][1] == row["eval_mtp_loss"][1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    (*ONE_RANK, "--parallel.cp", "2"), *(pytest.param(each, marks=pytest.mark.slow) for each in (
        ("--parallel.pp", "2", "--parallel.dp", "2", "--train.num_chunks", "2"),
        ("--parallel.pp", "2", "--parallel.schedule", "1f1b")))
], ids=str)
def test_the_metrics_and_the_number_of_parameters_are_those_of_one_rank(toml, tmp_path, dualpipe, layout, capsys):
    written(tmp_path, num_nextn_predict_layers=2)
    options = [*WEIGHT, "--train.steps", "3", "--data.separate_documents", "True", "--train.sequence_length", "19",
               "--optimizer.lr", "1e-2"]
    one = rows_of(toml, tmp_path, "one", *options)
    done = dualpipe(tmp_path, "train", "run.toml", *options, *layout, "--output.dir", "several")
    assert done.returncode == 0, done.stderr
    several = read_metrics(tmp_path / "several" / "metrics.jsonl")
    counts = [re.findall(r"([\d,]+) parameters in", said) for said in (capsys.readouterr().out, done.stdout)]
    assert counts[0] == counts[1] != [], "a copy of the embedding at the other end is none more"
    assert one[-1]["acceptance_length"] > 1.2
    for row, other in zip(one, several, strict=True):
        for key in row.keys() & {"loss", "grad_norm", "mtp_loss", "eval_loss", "eval_mtp_loss", "acceptance_length"}:
            assert row[key] == pytest.approx(other[key], rel=1e-4), key


# -- parity


def test_parity_of_one_rank_sees_another_weight(toml, capsys, monkeypatch):
    config = load_config(toml, [*ONE_RANK, *WEIGHT])
    assert check_parity(config, ALONE, model=None, dtype="float64", tolerance=None, worst=3) == 0
    right = ConfigModel.build_pipeline

    def build_pipeline(self, job, dtype):
        return right(self, job, dtype)._replace(criterion=MicroBatchLoss(self.num_chunks, 0.3 + 1e-8))

    monkeypatch.setattr(ConfigModel, "build_pipeline", build_pipeline)
    assert check_parity(config, ALONE, model=None, dtype="float64", tolerance=None, worst=3) == 1
    assert "parity FAILED: 51 of 51" in capsys.readouterr().out


def parity_on_ranks(rank, toml, layout, options):
    """Return the largest relative difference of a step, over all ranks."""
    pp, dp, cp, ep = layout
    sizes = ["--parallel.pp", f"{pp}", "--parallel.dp", f"{dp}", "--parallel.cp", f"{cp}", "--parallel.ep", f"{ep}"]
    return largest_error(*resolve_job(toml, [*sizes, "--train.sequence_length", "19", *options]))


@pytest.mark.parametrize("layout", [
    (1, 1, 2, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in (
        (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 1)))
], ids=str)
@pytest.mark.parametrize("schedule", ["dualpipev", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_gradients_of_layouts(toml, layout, schedule):
    options = [*WEIGHT, "--router.balance", "0.5", "--router.z_loss", "0.1", "--parallel.schedule", schedule]
    world = torch.tensor(layout).prod().item()
    assert max(run_ranks(parity_on_ranks, world, toml, layout, options, timeout=180)) < 1e-10


# -- what else there is for layers


def test_optimizer_routers_and_recomputation_know_the_layers(toml):
    options = ["--optimizer.name", "muon", "--optimizer.layer_decay", "0.5", "--optimizer.lr", "1e-3",
               "--optimizer.qk_clip", "0.01", "--router.balance", "0.1", "--router.bias_update_rate", "0.1",
               "--memory.recompute", "experts:2", "--parallel.schedule", "1f1b"]
    with made(toml, *WEIGHT, *options) as run:
        prefix, last = "layers.2.", run.runner.model.stages[-1]
        optimizer = run.state.optimizer
        shares = {name: optimizer._groups[optimizer._masters[last.get_parameter(name)]] for name in (
            "layers.1.self_attn.q_b_proj.weight", "layers.2.self_attn.q_b_proj.weight", "layers.2.eh_proj.weight",
            "layers.2.enorm.weight", "lm_head.weight", "embed_tokens.weight")}
        assert [(algorithm, group["lr_factor"]) for algorithm, group in shares.values()] == [
            ("muon", 0.5), ("muon", 1.0), ("muon", 1.0), ("adamw", 1.0), ("adamw", 1.0), ("adamw", 0.125)]
        assert len(run.runner.qk_clip._layers) == 3
        assert last.recompute("experts", 2) and not last.recompute("experts", 1)
        assert f"{prefix}mlp.gate" in run.runner.routers.totals
        before = last.get_parameter(f"{prefix}self_attn.q_b_proj.weight").detach().clone()
        run.train()
        assert not last.get_parameter(f"{prefix}self_attn.q_b_proj.weight").equal(before)
        assert last.get_buffer(f"{prefix}mlp.gate.e_score_correction_bias").any()


# -- how they are written


def test_a_list_is_written_as_one_and_drawn_by_its_numbers(tmp_path):
    values = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0, "tflops_per_rank": 1.0,
              "memory_bytes": 1, "mtp_loss": [2.0, float("nan")]}
    with MetricsWriter(tmp_path, total_steps=1) as writer:
        writer.write(StepMetrics(**values))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["mtp_loss"] == [2.0, None] and "eval_mtp_loss" not in row
    assert scalars({"loss": 1.0, "mtp_loss": [2.0, 3.0]}) == {"loss": 1.0, "mtp_loss/1": 2.0, "mtp_loss/2": 3.0}
