"""Predicted time of a training step, simulated by its schedule."""

from dataclasses import replace

import pytest

from dualpipe.models import read_config
from dualpipe.models.flops import parameter_counts
from dualpipe.models.stages import meta_stages
from dualpipe.plan.machines import read_machine
from dualpipe.plan.predict import PARTS, Prediction, simulate_long
from dualpipe.schedule import Costs, build, simulate
from dualpipe.train.config.fit import fit_world
from dualpipe.train.config.load import load_config
from plans import EXAMPLES, prediction
from schedules import SCHEDULES


def test_products_in_fp8_take_their_rate_and_rows_their_bytes():
    """Experts are in blocks of 128 x 128, with input gradients in FP8 too; in mxfp8, the forward alone."""
    def run(gpu: str, *options: str) -> Prediction:
        config = load_config(EXAMPLES / "qwen3-30b-a3b.toml", ("--parallel.dp", "1", "--parallel.ep", "8", *options))
        return Prediction(config, read_config(config.model.config), read_machine(gpu))

    plain, rows = run("h100"), run("h100", "--dtypes.fp8_dispatch", "True")
    for format, share in (("fp8_block", 2 / 3), ("mxfp8", 1 / 3)):
        fp8 = run("h100", "--dtypes.rules", f"*.experts,gather={format}")
        of = fp8.spent["fp8 grouped"]
        assert of.flops == pytest.approx(share * plain.spent["grouped"].flops)
        assert of.flops + fp8.spent["grouped"].flops == pytest.approx(plain.spent["grouped"].flops)
        assert of.seconds == pytest.approx(of.flops / (1979e12 * 0.6), rel=0.1)
        assert fp8.spent["memory"].bytes > plain.spent["memory"].bytes, "rows are quantized"
        assert sum(fp8.parts.values()) == pytest.approx(fp8.step_seconds)
    sent, less = (sum(stage.sent for stage in each.stages) for each in (plain, rows))
    assert less == pytest.approx(sent * (1 - 0.484 / 4), rel=0.02), "of four ways, that to the experts forward"
    assert run("a100", "--dtypes.rules", "*.experts,gather=fp8_block").spent.keys() == plain.spent.keys()


@pytest.mark.slow
def test_deepseek_v3_has_room_for_its_layer_for_multi_token_prediction():
    """The last stage has no other layer, so a step takes no longer; only rank 0 has more in memory."""
    config = load_config(EXAMPLES / "deepseek-v3.toml")
    config = fit_world(config, config.parallel.world_size)
    model, gpu = read_config(config.model.config), read_machine("h100")
    plain, trained = Prediction(config, model, gpu), Prediction(config, model.with_mtp(), gpu)
    assert trained.step_seconds == pytest.approx(plain.step_seconds, rel=0.005) and trained.mfu > 1.03 * plain.mfu
    assert sum(trained.parts.values()) == pytest.approx(trained.step_seconds)
    experts = 256 * 3 * 7168 * 2048
    dense = parameter_counts(model.with_mtp()).total - parameter_counts(model).total - experts
    more = [after.parameters - before.parameters for before, after in zip(plain.memory, trained.memory)]
    assert more == [pytest.approx(4 * (experts + dense) / 64, rel=1e-3), *[0] * 15]
    assert trained.memory[0].activations > plain.memory[0].activations
    assert [rank.total for rank in trained.memory[1:]] == pytest.approx([rank.total for rank in plain.memory[1:]], 1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_middle_of_a_long_step_need_not_be_played(schedule):
    run = prediction("--parallel.schedule", schedule, "--train.num_chunks", "43", "--parallel.ep", "2")
    played = simulate(build(schedule, 2, 43), run.costs()).makespan
    assert run.step_seconds - run.gather - run.optimizer == pytest.approx(played, rel=1e-3)


@pytest.mark.parametrize("schedule, too_short", [("interleaved_1f1b", 0.0456), ("zbv", 0.0019)])
def test_stages_that_differ_take_some_periods_until_the_middle_repeats_itself(schedule, too_short):
    """The second period is shorter than later ones; extrapolated from it, the whole would be `too_short`."""
    stages = [Costs(F=size, B=2 * size, W=0.6 * size, FB=2.9 * size, R=2) for size in (1.17, *[1] * 7)]
    costs = Costs(p2p=0.05, per_stage=stages)
    one, two, whole = (simulate(build(schedule, 4, count), costs).makespan for count in (8 + 3, 16 + 3, 64 + 3))
    assert one + 7 * (two - one) == pytest.approx(whole * (1 - too_short), rel=1e-4)
    assert simulate_long(schedule, 4, 67, costs).makespan == pytest.approx(whole, rel=1e-6)


def test_the_parts_of_a_step_add_up():
    run = prediction("--parallel.dp", "2", "--parallel.ep", "2", "--memory.recompute", "layer", "dispatch")
    assert tuple(run.parts) == PARTS and sum(run.parts.values()) == pytest.approx(run.step_seconds)
    assert min(run.parts.values()) > -1e-3 * run.step_seconds
    assert run.parts["recomputation"] > 0 < run.parts["all-to-all"]
    assert run.bound <= run.step_seconds and run.limit in PARTS
    assert prediction("--parallel.pp", "1", "--parallel.schedule", "1f1b").parts["bubble"] == pytest.approx(0, abs=1e-9)


def test_muons_products_take_their_time():
    adamw, muon = (prediction("--optimizer.name", name, "--parallel.dp", "2") for name in ("adamw", "muon"))
    (stage, *_) = meta_stages(muon.model)
    each = [10 * p.numel() * min(p.shape[-2:]) * (2 * max(p.shape[-2:]) + min(p.shape[-2:])) / max(p.shape[-2:])
            for name, p in stage.named_parameters() if name.split(".")[-2].endswith("_proj")]
    assert muon.muon_flops == pytest.approx(sum(each) / 2 / 2, rel=1e-6), "two ranks of a pipeline that are alike"
    less = (muon.memory[0].optimizer - adamw.memory[0].optimizer) * 2 / (3350e9 * 0.75)
    assert muon.optimizer - adamw.optimizer == pytest.approx(muon.muon_flops / (989e12 * 0.7) + less, rel=0.2)


def test_moments_in_host_memory_take_the_time_of_their_link():
    on_device, on_host = (prediction("--optimizer.offload", value, "--parallel.dp", "2") for value in ("False", "True"))
    host = max(rank.host for rank in on_host.memory)
    assert all(rank.host == 0 for rank in on_device.memory) and on_device.optimizer > 0
    assert on_host.optimizer == pytest.approx(host / 20e9) and on_host.optimizer > on_device.optimizer
    fast = replace(on_host.machine, host_link=1e6)
    # The optimizer has nothing else on the device than the buffers, whose traffic is that of the moments.
    assert all(rank.optimizer == rank.moment_buffers > 0 for rank in on_host.memory)
    traffic = max(2 * (rank.parameters + rank.gradients) + 4 * rank.host for rank in on_host.memory)
    assert replace(on_host, machine=fast).optimizer == pytest.approx(traffic / (3350e9 * 0.75))


def test_memory_is_for_the_nodes_of_the_machine():
    run = prediction("--parallel.ep", "4", "--parallel.device", "auto")
    pairs = replace(run, machine=replace(run.machine, node=2))
    assert run.memory[0].nccl - pairs.memory[0].nccl == 2 * 16 * 12 * 2**20


def test_parts_of_dp_gather_within_a_node_and_sum_over_nodes():
    """16 ranks of two nodes form 2 parts of 8.

    The rings are those of 8 ranks. A rank's share of the gradients is reduced over the two nodes, and gathered again.
    """
    base = ("--parallel.pp", "1", "--parallel.schedule", "1f1b", "--parallel.dp")
    whole, one = prediction(*base, "16"), prediction(*base, "8")
    parts, m = prediction(*base, "16", "--parallel.dp_replicate", "2"), whole.machine
    ((gather, reduce),), ((gather_8, reduce_8),), ((gather_16, _),) = parts.shards, one.shards, whole.shards
    assert gather == gather_8 < gather_16
    size = 4 * parameter_counts(parts.model).total / 8
    one_way = size / 2 / (m.network * m.networks * 1e9) + m.network_latency * 1e-6
    assert reduce - reduce_8 == pytest.approx(2 * one_way)
    assert parts.tokens == whole.tokens == 2 * one.tokens
    assert parts.memory[0].parameters == one.memory[0].parameters


def test_merged_weight_gradients_read_and_write_accumulators_once():
    """Merging makes a step shorter at 256 rows for each expert: in zbv all ranks except the first end sooner."""
    def run(*options: str) -> Prediction:
        layout = {"dp": 1, "ep": 1, "pp": 4, "schedule": "zbv"}
        config = load_config(EXAMPLES / "qwen3-30b-a3b.toml", (
            *[word for name, value in layout.items() for word in (f"--parallel.{name}", f"{value}")],
            "--train.num_chunks", "16", "--train.sequence_length", "4096", "--train.micro_batch_size", "1", *options))
        return Prediction(config, read_config(config.model.config), read_machine("h100"))

    merged = run()
    plain = run("--parallel.merge_weight_grads", "false")
    two, *_, last = merged.stages[1].merged_w
    assert last <= two < 0.75 * merged.stages[1].costs.W
    assert merged.step_seconds < plain.step_seconds
    assert sum(merged.parts.values()) == pytest.approx(merged.step_seconds)
    saved = plain.parts["GEMMs"] - merged.parts["GEMMs"]
    assert saved == pytest.approx(merged.merged_seconds) and saved > 0
    assert merged.parts["all-to-all"] == pytest.approx(plain.parts["all-to-all"])
    assert merged.bound <= plain.bound
    for off in (plain, run("--dtypes.fp8_weight_grad", "true")):
        assert off.merged_w == {} and off.merged_seconds == 0.0
