"""AdamW with moments in host memory: the bits of AdamW in buckets of any size, and no fault on a pretend device."""

import math

import pytest
import torch
from torch import nn

from device_steps import as_process, as_training, write_run
from dualpipe.checkpoint import training_state
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import OptimizerConfig, OptimizerGroup
from dualpipe.train.metrics import read_metrics
from dualpipe.train.optim import offload
from dualpipe.train.optim.offload import HostMoments
from dualpipe.train.optim.optimizer import MOMENTS, Optimizer
from pretend_cuda import pretend_cuda
from ranks import run_ranks
from run_files import write_files

ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GROUPS = [OptimizerGroup("0", lr=0.02), OptimizerGroup("4.weight", weight_decay=0.0)]
CUDA = torch.device("cuda", 0)
KINDS = [(dtype, moments) for dtype in (torch.float32, torch.bfloat16) for moments in (torch.float32, torch.bfloat16)]


def make_model(dtype=torch.float32, device="cpu"):
    """Sizes that are no multiples of a vector or of the alignment, an empty tensor, and one that is not contiguous."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 51), nn.LayerNorm(51), nn.Linear(51, 19), nn.Identity(), nn.Linear(19, 301))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("transposed", nn.Parameter(torch.randn(7, 33).T))
    return model.to(dtype).to(device)


def make_optimizer(model, *, on_host, moments=torch.float32):
    return Optimizer([model], **ADAMW, moments=moments, offload=on_host, groups=GROUPS)


def run_step(model, optimizer, seed, norm=1.0):
    """One step with gradients of a seed, of which every third parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = None if number % 3 == seed % 3 else gradient
    optimizer.step(0.01 / seed, torch.tensor(norm, dtype=torch.float64).to(parameter.device))
    optimizer.zero_grad()


def bits(optimizer):
    """Copies of all that an optimizer keeps, in the order of parameters."""
    return [(name, tensor.detach().clone()) for tensors in optimizer.state_tensors().values()
            for name, tensor in sorted(tensors.items())]


def assert_same(ones, others):
    assert [name for name, _ in ones] == [name for name, _ in others]
    for (name, one), (_, other) in zip(ones, others):
        assert one.dtype is other.dtype and one.stride() == other.stride() and torch.equal(one, other), name


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 2**27], ids=["one", "some", "all"])
@pytest.mark.parametrize(("dtype", "moments"), KINDS, ids=str)
def test_has_the_bits_of_adamw(monkeypatch, dtype, moments, bucket_bytes):
    monkeypatch.setattr(offload, "BUCKET_BYTES", bucket_bytes)
    models = [make_model(dtype) for _ in range(2)]
    optimizers = [make_optimizer(model, on_host=on_host, moments=moments) for model, on_host in zip(models, (0, 1))]
    for step in range(1, 8):
        for model, optimizer in zip(models, optimizers):
            run_step(model, optimizer, step, norm=math.inf if step == 4 else 1.0)  # which changes nothing
        assert_same(*map(bits, optimizers))
        for one, other in zip(*(model.parameters() for model in models)):
            assert torch.equal(one, other)
    assert all(tensor.any() for name, tensor in bits(optimizers[1]) if name in MOMENTS and tensor.numel())


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_continues_what_was_kept_in_the_other_way(before, after):
    reference, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    expected, optimizer = make_optimizer(reference, on_host=False), make_optimizer(model, on_host=before)
    for step in range(1, 6):
        if step == 3:  # as a resumed run
            saved = {name: tensor.detach().clone() for name, tensor in training_state([model], optimizer).items()}
            model = make_model(torch.bfloat16)
            optimizer = make_optimizer(model, on_host=after)
            state = training_state([model], optimizer)
            assert state.keys() == saved.keys()
            for name, tensor in state.items():
                tensor.detach().copy_(saved[name])
            optimizer.round_parameters()
        run_step(reference, expected, step)
        run_step(model, optimizer, step)
    assert_same(bits(expected), bits(optimizer))


def test_buckets_hold_as_much_as_they_may(monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 1024)
    sizes = [32, 64, 1, 1000, 31, 40]  # 256, 512, 256, 8192, 256 and 512 bytes of two moments, each padded to 128
    parameters = [torch.zeros(size) for size in sizes]
    moments = HostMoments(parameters, dtype=None, num_moments=2)
    assert [bucket.memory.numel() for bucket in moments.buckets] == [1024, 8192, 768]
    assert [len(bucket.parameters) for bucket in moments.buckets] == [3, 1, 2]
    starts = [place.start for bucket in moments.buckets for places in bucket.places for place in places]
    assert all(start % offload.ALIGNMENT == 0 for start in starts)


def test_no_parameters():
    HostMoments([], dtype=None, num_moments=2).update(lambda parameter, moments: None)


# -- on a pretend device


def test_no_wait_is_missing_and_two_buffers_are_all_that_the_device_has(monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 20_000)
    with pretend_cuda() as device:
        models = [make_model(device=CUDA) for _ in range(2)]
        expected = make_optimizer(models[0], on_host=False)
        before = device.allocated
        optimizer = make_optimizer(models[1], on_host=True)
        buckets = optimizer._host_moments.buckets
        assert len(buckets) > 3
        assert device.allocated - before < 500, "counts of steps"
        assert {device.kind(bucket.memory) for bucket in buckets} == {"pinned"}
        with device.watched():
            for step in range(1, 5):
                run_step(models[0], expected, step)
                device.peak = before = device.allocated
                run_step(models[1], optimizer, step)
                largest = max(bucket.memory.numel() for bucket in buckets)
                gradients = sum(p.numel() * 4 for p in models[1].parameters())
                assert device.peak - before < 2 * largest + gradients + 1000
        waits = dict(device.waits)
        on_host = [tensor for name, tensor in bits(optimizer) if name in MOMENTS]
        on_device = [tensor.cpu() for name, tensor in bits(expected) if name in MOMENTS]
        assert all(map(torch.equal, on_host, on_device))
        del optimizer, buckets
    assert waits.keys() == {"copy in tests/train/optim/test_offload.py: run_step"}, "only the test itself waits"
    assert device.report(waits=waits) == []


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_has_the_bits_of_adamw_on_a_gpu(monkeypatch, moments):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 20_000)
    models = [make_model(device=CUDA) for _ in range(2)]
    optimizers = [make_optimizer(model, on_host=on_host, moments=moments) for model, on_host in zip(models, (0, 1))]
    assert all(bucket.memory.is_pinned() for bucket in optimizers[1]._host_moments.buckets)
    for step in range(1, 8):
        for model, optimizer in zip(models, optimizers):
            run_step(model, optimizer, step)
        assert all(map(torch.equal, *(model.parameters() for model in models)))
    for (name, one), (_, other) in zip(*map(bits, optimizers)):
        assert torch.equal(one.cpu(), other.cpu()), name


@pytest.mark.parametrize(("function", "fault"), [("wait", "race"), ("record_stream", "free")])
def test_the_pretend_device_finds_what_is_left_out(monkeypatch, function, fault):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(f"dualpipe.runtime.device.{function}", lambda *_: None)
    with pretend_cuda() as device:
        model = make_model(device=CUDA)
        optimizer = make_optimizer(model, on_host=True)
        for step in range(1, 4):
            run_step(model, optimizer, step)
        del optimizer
    assert any(found.startswith(fault) and "offload" in found for found in device.report(waits=dict(device.waits)))


def test_a_host_that_reads_without_a_wait_is_found(monkeypatch):
    monkeypatch.setattr(HostMoments, "wait", lambda self: None)
    with pretend_cuda() as device:
        model = make_model(device=CUDA)
        optimizer = make_optimizer(model, on_host=True)
        run_step(model, optimizer, 1)
        bits(optimizer)
    assert any(found.startswith("race") for found in device.report(waits=dict(device.waits)))


@pytest.mark.slow
def test_a_run_on_a_device_saves_and_resumes_with_either_kind(tmp_path):
    write_run(tmp_path)
    short = ("--train.num_chunks", "1", "--checkpoint.interval", "2", "--train.eval_batches", "0")
    losses = {}
    for out, switches in {"never": (0, 0), "first": (1, 0), "then": (0, 1), "always": (1, 1)}.items():
        for steps, switch in zip(("2", "4"), switches):
            device = as_training(0, tmp_path, *short, "--train.steps", steps, "--output.dir", out,
                                 "--optimizer.offload", str(bool(switch)))
            in_offload = {name: number for name, number in device.waits.items() if "offload" in name}
            wait = "Event.synchronize in dualpipe/train/optim/offload.py: HostMoments.wait"
            assert in_offload == ({wait: 1} if switch else {}), "one bucket and one checkpoint"
            assert device.report(waits=dict(device.waits)) == []
        losses[out] = [(row["step"], row["loss"], row["grad_norm"])
                       for row in read_metrics(tmp_path / out / "metrics.jsonl")]
    assert [step for step, *_ in losses["never"]] == [1, 2, 3, 4]
    assert all(of_run == losses["never"] for of_run in losses.values())


def trained_with_shards(rank, shape):
    device, _ = as_process(rank, shape, torch.bfloat16, offload=True)
    waits = dict(device.waits)
    return device.report(waits), [wait for wait in waits if "optim" in wait]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), pytest.param((1, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_shards_on_devices(shape):
    assert run_ranks(trained_with_shards, 2, shape) == [([], [])] * 2


# -- runs of several ranks


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [
    (("--parallel.pp", "1", "--parallel.dp", "2"), ("--parallel.pp", "2")),
    pytest.param(("--parallel.pp", "1", "--parallel.ep", "2", "--parallel.dp_replicate", "2", "--parallel.dp", "2"),
                 ("--parallel.pp", "1", "--parallel.dp", "2"), marks=pytest.mark.slow),
])
def test_a_sharded_run_has_the_same_losses_and_its_checkpoint_fits_another_layout(tmp_path, dualpipe, first, then):
    write_files(tmp_path)
    batch = ("--train.batch_size", "16", "--train.eval_batches", "0", "--checkpoint.interval", "2",
             "--guard.checksum_interval", "1")
    runs = {}
    for out, switches in {"never": ("False", "False"), "first": ("True", "False"), "then": ("False", "True")}.items():
        for steps, switch, layout in zip(("2", "4"), switches, (first, then)):
            done = dualpipe(tmp_path, "train", "run.toml", *batch, *layout, "--train.steps", steps, "--output.dir", out,
                            "--optimizer.offload", switch)
            assert done.returncode == 0, done.stderr
        runs[out] = [(row["step"], row["loss"], row["grad_norm"])
                     for row in read_metrics(tmp_path / out / "metrics.jsonl")]
    assert len(runs["never"]) == 4
    assert all(run == runs["never"] for run in runs.values())


# -- refused


def test_what_it_cannot_serve_is_refused(run_toml):
    with pytest.raises(ValueError, match=r"optimizer\.offload = True: only adamw supports it, optimizer\.name is muon"):
        OptimizerConfig(name="muon", offload=True)
    with pytest.raises(ValueError, match=r"optimizer\.name is torch\.optim\.NAdam; leave it out"):
        OptimizerConfig(name="torch.optim.NAdam", offload=True)
    with pytest.raises(ValueError, match=r"optimizer\.offload serves adamw only; leave out algorithm, or offload"):
        OptimizerConfig(groups=(OptimizerGroup("*.mlp", algorithm="muon"),), offload=True)
    with pytest.raises(ValueError, match="got parameters for adamw, muon, but only the moments of adamw can be there"):
        Optimizer([make_model()], **ADAMW, name="muon", offload=True)
    assert load_config(run_toml, ["--optimizer.offload", "True"]).optimizer.offload
