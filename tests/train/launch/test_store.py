"""The rendezvous of ranks: on one machine no other machine reaches the store, and a port in use is an error."""

import os
import resource
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dualpipe.runtime.rank_process import LISTENER, RankInfo
from dualpipe.train.launch import join as rendezvous
from dualpipe.train.launch.join import confine, connect, interface_address
from sockets import listening

FIRST, SECOND = RankInfo(0, 2, 0, 2), RankInfo(1, 2, 1, 2)
PATIENCE = timedelta(seconds=20)


@pytest.fixture
def set_rendezvous(monkeypatch, free_port):
    """Return a function that sets MASTER_ADDR and MASTER_PORT, and returns the port."""

    def set_(address="127.0.0.1", port=free_port):
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))
        return port

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE", LISTENER):
        monkeypatch.setenv(name, "")  # for it to be restored
        monkeypatch.delenv(name)
    return set_


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_store_that_only_this_machine_reaches(set_rendezvous, address):
    port = set_rendezvous(address)
    store = connect(FIRST, PATIENCE)
    assert listening(port) == ["::1" if address == "::1" else "127.0.0.1"]
    connect(SECOND, PATIENCE).set("key", "value")
    assert store.get("key") == b"value"


def test_a_rank_that_others_have_started_may_open_many_files(set_rendezvous, lowered_limit):
    set_rendezvous()
    connect(FIRST, PATIENCE)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == lowered_limit


def test_a_store_for_several_machines_is_confined_by_an_interface(set_rendezvous, monkeypatch):
    monkeypatch.setattr(rendezvous, "is_loopback", lambda host: False)  # as the name of a machine is not
    port = set_rendezvous("localhost")
    everywhere = connect(FIRST, PATIENCE)
    assert listening(port) == ["::"]
    del everywhere
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    set_rendezvous("a.name.of.no.host", port)
    store = connect(FIRST, PATIENCE, name)
    assert listening(port) == ["127.0.0.1"] == [interface_address(name)]
    set_rendezvous("localhost", port)  # which leads another rank there
    connect(SECOND, PATIENCE, name).set("key", "value")
    assert store.get("key") == b"value"


def test_an_inherited_listener_is_used(set_rendezvous, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = set_rendezvous(port=listener.getsockname()[1])
        monkeypatch.setenv(LISTENER, str(os.dup(listener.fileno())))
    store = connect(FIRST, PATIENCE)
    assert LISTENER not in os.environ, "for no child to take it again"
    connect(SECOND, PATIENCE).set("key", "value")
    assert store.get("key") == b"value" and listening(port) == ["127.0.0.1"]


def test_the_interfaces_of_gloo_and_nccl(set_rendezvous, monkeypatch):
    def found():
        return [os.environ.pop(name, None) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]

    lo = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    set_rendezvous()
    confine(FIRST, "")
    assert found() == [lo, None]
    confine(RankInfo(0, 4, 0, 2), "")
    assert found() == [None, None], "others are on other machines"
    set_rendezvous("a.name")
    confine(FIRST, "")
    assert found() == [None, None]
    confine(RankInfo(0, 4, 0, 2), lo)
    assert found() == [lo, lo]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    confine(FIRST, lo)
    assert found() == ["mine", lo]


def test_an_interface_that_does_not_exist(set_rendezvous):
    set_rendezvous("a.name")
    with pytest.raises(ValueError, match=r"parallel.interface = 'ib7' is no network .* give one of lo.* \(127.0.0.1\)"):
        confine(FIRST, "ib7")
    with pytest.raises(ValueError, match="'ib7' is no network interface"):
        connect(FIRST, PATIENCE, "ib7")


def test_a_restart_by_torchrun_has_new_keys(set_rendezvous, monkeypatch):
    """torchrun's store outlives the ranks: a restart must not read keys of an earlier start."""
    port = set_rendezvous()
    agent = dist.TCPStore("127.0.0.1", port, None, True, PATIENCE, False)  # noqa: F841 - lives as long as this test
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = connect(FIRST, PATIENCE)
        assert not store.check(["key"])
        store.set("key", "value")


def test_groups_that_follow_one_another_have_separate_keys(set_rendezvous, monkeypatch):
    """Groups of a benchmark, one per setting, use the same store one after the other."""
    port = set_rendezvous()
    agent = dist.TCPStore("127.0.0.1", port, None, True, PATIENCE, False)  # noqa: F841 - lives as long as this test
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores = [connect(FIRST, PATIENCE, prefix=f"setting {number}") for number in (1, 2)]
    stores[0].set("key", "value")
    assert not stores[1].check(["key"]) and not connect(FIRST, PATIENCE).check(["key"])
    assert connect(SECOND, PATIENCE, prefix="setting 1").get("key") == b"value"


@pytest.mark.parametrize(
    ("port", "address", "message"),
    [
        ("x", "127.0.0.1", "MASTER_PORT = 'x' must be rank 0's host and a free port"),
        ("70000", "127.0.0.1", "MASTER_PORT = '70000' must be"),
        ("29500", "", "MASTER_ADDR = '' and MASTER_PORT = '29500' must be"),
    ],
)
def test_an_invalid_rendezvous(set_rendezvous, port, address, message):
    set_rendezvous(address, port)
    with pytest.raises(ValueError, match=message):
        connect(FIRST, PATIENCE)


@pytest.mark.parametrize("says", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
@pytest.mark.parametrize("info", [FIRST, SECOND])
def test_a_port_of_another_server(set_rendezvous, info, says):
    """A server that never answers, uses another protocol, or closes the connection at once."""
    kept = []

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed: the test is over
                return
            kept.append(connection)
            if says:
                connection.sendall(says)
            elif says is not None:
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        port, start = set_rendezvous(port=server.getsockname()[1]), time.monotonic()
        where = f"rank {info.rank} cannot reach the store at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}; give rank 0's"
        with pytest.raises(ValueError, match=where) as error:
            connect(info, timedelta(seconds=1))
        assert "\n" not in str(error.value)
        assert time.monotonic() - start < 20, "not by a timeout of torch's own, which is 300 s"
        server.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()
