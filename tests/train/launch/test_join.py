"""Joining ranks: different settings raise the same error on all of them, and every process group of the mesh has the
configured timeout."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dualpipe import cli
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.config.load import load_config
from dualpipe.train.launch import join as join_module
from dualpipe.train.launch.join import all_ranks_agree, connect, join, run_settings
from ports import free_ports
from ranks import run_ranks

# Settings that keep every shape, what rank 1 of 2 has them as, and what is then said.
DIFFERENT = [
    ("train.seed", 1, "train.seed is 0 on rank 0, 1 on rank 1;"),
    ("optimizer.lr", 1e-3, "optimizer.lr is 0.003 on rank 0, 0.001 on rank 1;"),
    ("optimizer.clip_norm", 2.0, "optimizer.clip_norm is 1.0 on"),
    ("train.sequence_length", 8, "train.sequence_length is 16 on"),
    ("train.dtype", "bf16", "train.dtype is 'fp32' on rank 0, 'bf16' on rank 1;"),
    ("optimizer.betas", (0.5, 0.6), "optimizer.betas is [0.9, 0.95] on"),
    ("memory.recompute", ("layer",), "memory.recompute is [] on"),
    ("parallel.pp", 1, "parallel.pp is 2 on rank 0, 1 on rank 1;"),
    ("parallel.ep", 2, "parallel.ep is 1 on rank 0, 2 on rank 1;"),
    ("checkpoint.dir", "b", "the directory of checkpoints is 'a' on rank 0, 'b' on rank 1"),
    ("model.config", "theta.json", "the model's rope_parameters is {'rope_theta': 10000.0"),
    ("model.config", "top1.json", "the model's num_experts_per_tok is 2 on rank 0, 1 on rank 1;"),
    # what one rank alone refuses
    ("parallel.pp", 3, "parallel.pp is 2 on rank 0, 3 on rank 1;"),
    ("model.config", "none.json", "rank 1: model.config: there is no file"),
    ("parallel.device", "cuda", "rank 1: parallel.device = 'cuda', but torch finds 0 CUDA devices"),
    # what may differ
    ("output.dir", "elsewhere", ""),
    ("model.config", "copy.json", ""),
]


def _join(rank, cases):
    """Return the text of the error in each case, "" if all ranks have joined."""
    dist.destroy_process_group()
    said = []
    for config, odd, port in cases:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            with join(odd if rank == 1 else config, RankInfo(rank, 2, rank, 2)):
                said.append("")
        except ValueError as error:
            said.append(f"{error}")
    return said


def changed(config, name, value):
    table, field = name.split(".")
    return replace(config, **{table: replace(getattr(config, table), **{field: value})})


def test_ranks_with_different_settings_do_not_join(run_toml):
    folder = run_toml.parent
    model = json.loads((folder / "config.json").read_text())
    for name, change in {"theta": {"rope_theta": 5e3}, "top1": {"num_experts_per_tok": 1}, "copy": {}}.items():
        (folder / f"{name}.json").write_text(json.dumps(model | change))
    config = changed(changed(load_config(run_toml), "checkpoint.interval", 1), "checkpoint.dir", "a")
    odd = [changed(config, name, str(folder / value) if name == "model.config" else value)
           for name, value, _ in DIFFERENT]
    said = run_ranks(_join, 2, [(config, each, port) for each, port in zip(odd, free_ports(len(odd)))], fresh=True)
    for (name, value, expected), texts in zip(DIFFERENT, zip(*said)):
        assert len(set(texts)) == 1, f"{name} = {value}: not the same on every rank"
        assert (expected in texts[0]) if expected else not texts[0], f"{name} = {value}: {texts[0]}"


def environment(rank, config, port):
    """Return the environment at the first call into CUDA."""
    dist.destroy_process_group()
    names = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for name in names:
        os.environ.pop(name, None)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "CUDA_MODULE_LOADING": "LAZY"}
    found, count = {}, join_module.cuda.count

    def counted():
        found.update(os.environ)
        return count()

    join_module.cuda.count = counted
    with join(config, RankInfo(rank, 2, rank, 2)):
        return [found.get(name) for name in names]


def test_the_environment_is_set_before_cuda_starts(run_toml):
    config = changed(load_config(run_toml), "parallel.device", "auto")
    found = run_ranks(environment, 2, config, free_ports(1)[0], fresh=True)
    assert found == [["32", "LAZY", "expandable_segments:True", None]] * 2, "LAZY is the user's"


def agree_in_threads(prepare, world_size, *, seconds=20, absent=()):
    """Return the result of `prepare` or the error on each of several ranks, and the ranks that sent a record."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=seconds))

    def rank(number):
        info = RankInfo(number, world_size, number, world_size)
        try:
            with all_ranks_agree(store, info, timedelta(seconds=seconds)) as settings:
                result = prepare(number, settings)
            return result
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(rank, [r for r in range(world_size) if r not in absent]))
    # The third messages are the records, after the digests and rank 0's answer.
    return results, [r for r in range(world_size) if store.check([f"settings/3/{r}"])]


def test_settings_travel_only_where_they_differ():
    """Three of 40 ranks differ, in two ways, and are named. Without a difference no record is exchanged."""

    def prepare(rank, settings):
        settings |= {"a": 1, "b": "x" if rank in (3, 4) else "z" if rank == 9 else "y", "c": 2.0}

    errors, sent = agree_in_threads(prepare, 40)
    assert {str(error) for error in errors} == {
        "the ranks were started with different settings: b is 'y' on ranks 0-2, 5-8, 10-39, 'x' on ranks 3-4, 'z' on "
        "rank 9; start all with the same command, files and versions"
    }
    assert sent == list(range(40))
    assert agree_in_threads(lambda rank, settings: settings.update(a=1) or rank, 40) == (list(range(40)), [])


def test_long_values_that_differ_at_their_end():
    errors, _ = agree_in_threads(lambda rank, settings: settings.update(path=100 * "x" + str(rank)), 2)
    assert all("different settings: path is 'xxx" in str(error) for error in errors)


def test_what_a_rank_cannot_prepare_is_told_to_all():
    def prepare(rank, settings):
        settings["a"] = 1
        if rank == 2:
            raise KeyError("a fault of ours")

    *others, own = agree_in_threads(prepare, 3)[0]
    assert [type(error) for error in (*others, own)] == [ValueError, ValueError, KeyError]
    assert str(others[0]) == "rank 2: KeyError('a fault of ours')"


def test_an_error_of_all_ranks_is_said_once():
    def prepare(rank, settings):
        raise ValueError("no model")

    assert [str(error) for error in agree_in_threads(prepare, 3)[0]] == ["no model"] * 3


def test_ranks_that_do_not_come_are_named():
    errors, _ = agree_in_threads(lambda rank, settings: settings.update(a=1), 4, seconds=0.5, absent=(1, 3))
    assert all(isinstance(error, TimeoutError) for error in errors), errors
    assert "waited 0.5 s for ranks 1, 3 of 4; they were not started or have failed" in str(errors[0])


@pytest.mark.parametrize("command, local_rank, message", [
    ("train none.toml", "1", r"cannot read the config none\.toml"),
    ("replay none", "1", ".*none has no manifest.json"),
    ("train none.toml", "2", "got rank 1 of 2 as rank 2 of 2 on its machine"),
    ("train none.toml", "x", "LOCAL_RANK = 'x' must be a number"),
])
def test_a_rank_that_cannot_read_its_settings_tells_the_others(monkeypatch, capsys, command, local_rank, message):
    """An error on one node alone, such as a missing file, is raised on all: otherwise they would wait for minutes."""
    port = str(free_ports(1)[0])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": local_rank}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    info, patience = RankInfo(0, 2, 0, 2), timedelta(seconds=20)

    def agree():
        with all_ranks_agree(connect(info, patience), info, patience):
            pass

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(agree)
        assert cli.main(command.split()) == 2
        assert re.search(message, capsys.readouterr().err)
        with pytest.raises(ValueError, match=f"rank 1: {message}"):
            other.result()


def test_ranks_that_see_one_device_each_do_not_share_it(run_toml, monkeypatch):
    """Only the UUIDs of the devices tell whether a launcher shows every rank a device of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=names.pop()))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: 1 / 0)  # as far as it gets here
    config = changed(load_config(run_toml), "parallel.device", "auto")

    def start(rank):
        with pytest.raises((ValueError, ZeroDivisionError)) as raised, join(config, RankInfo(rank, 2, rank, 2)):
            pass
        return str(raised.value)

    refused = "but torch finds 1 CUDA devices here for 2 ranks"
    names = []
    for found, expected in ((["a", "b"], "division by zero"), (["a", "a"], refused)):
        names[:] = found
        monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
        with ThreadPoolExecutor(2) as pool:
            assert all(expected in said for said in pool.map(start, range(2)))


def test_nodes_with_unequal_numbers_of_ranks_do_not_share_experts(run_toml, monkeypatch):
    """As torchrun starts them with another --nproc-per-node on each node: the dispatch would differ between ranks."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    config = changed(changed(load_config(run_toml), "parallel.ep", 3), "parallel.pp", 1)

    def start(info):
        with pytest.raises(ValueError) as raised, join(config, info):
            pass
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(start, [RankInfo(0, 3, 0, 2), RankInfo(1, 3, 1, 2), RankInfo(2, 3, 0, 1)]))
    assert len(set(said)) == 1 and "parallel.ranks_per_node (else LOCAL_WORLD_SIZE) is 2 on ranks 0-1, 1 on" in said[0]


def settings_of(config):
    return dict(run_settings(config))


def test_directories_may_differ_where_nothing_is_saved(run_toml):
    config = changed(load_config(run_toml), "checkpoint.interval", 1)
    assert "the directory of checkpoints" in settings_of(config)
    assert "the directory of checkpoints" not in settings_of(changed(config, "checkpoint.mode", "off"))


def test_versions_and_sources_are_compared(run_toml, monkeypatch, tmp_path):
    config = load_config(run_toml)
    before = settings_of(config)
    assert {"version of torch", "version of dualpipe", "sources of dualpipe (digest)"} <= set(before)
    (tmp_path / "dualpipe").mkdir()
    (tmp_path / "dualpipe" / "changed.py").write_text("x = 1\n")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "dualpipe")]})
    monkeypatch.setattr(join_module, "find_spec", lambda name: spec)
    changed = settings_of(config)
    (tmp_path / "dualpipe" / "changed.py").write_text("x = 2\n")
    again = settings_of(config)
    digests = {settings["sources of dualpipe (digest)"] for settings in (before, changed, again)}
    assert len(digests) == 3


def _wait_for_nobody(rank, config, dimension, port):
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with join(config, RankInfo(rank, 4, rank, 4)) as (job, _):
        if rank in (0, 3):  # each alone in its row and its column
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=job.place.group(dimension))
            waited = time.monotonic() - start
            return waited
        time.sleep(6)
        os._exit(0)


@pytest.mark.parametrize("dimension", ["pp", pytest.param("dp", marks=pytest.mark.slow)])
def test_the_timeout_holds_in_the_groups_of_the_mesh(run_toml, dimension, free_port):
    config = load_config(run_toml)
    config = replace(config, parallel=replace(config.parallel, dp=2, timeout=3))
    results = run_ranks(_wait_for_nobody, 4, config, dimension, free_port, check=False, timeout=40, fresh=True)
    assert 2 < results[0] < 10 and 2 < results[3] < 10, results
