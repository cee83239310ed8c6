"""Checkpoints by the S3 protocol: s3fs, and moto's server on a free port of this host."""

import importlib
import logging
import os

import pytest
import torch

from dualpipe.checkpoint import Checkpoints, latest, load, verify
from dualpipe.checkpoint.commands import check, clean, ls, show
from dualpipe.checkpoint.directory import scan
from dualpipe.checkpoint.manifest import MARKER
from dualpipe.runtime import storage
from native import is_of_step
from ports import free_ports

pytestmark = pytest.mark.slow
MISSING = "{} is not installed; make test installs it, or pip install --no-deps -r tests/s3-requirements.txt"
BUCKET = "s3://bucket"
ELEMENTS = 3 * 2**20  # 12 MB: an upload of several parts, of which S3 takes none below 5 MiB


@pytest.fixture(scope="module")
def endpoint():
    """Start the server as a thread of this process; yield its URL."""
    for package in ("moto", "s3fs", "flask", "flask_cors"):
        pytest.importorskip(package, reason=MISSING.format(package))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = importlib.import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def bucket(endpoint, monkeypatch):
    """Make an empty bucket, and name the endpoint in the environment."""
    from s3fs import S3FileSystem

    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(storage, "_BLOCK", 5 * 2**20)
    S3FileSystem.clear_instance_cache()
    store = S3FileSystem()
    store.mkdir("bucket")
    yield store
    store.rm("bucket", recursive=True)
    S3FileSystem.clear_instance_cache()


def state_of(step):
    return {"weight": torch.full((ELEMENTS,), float(step)), "bias": torch.full((3,), float(step))}


def saves_in(store, url):
    return {key.split("/")[2] for key in store.find(url.removeprefix("s3://")) if key.split("/")[2].startswith("step-")}


def test_save_list_resume_verify_and_clean(bucket):
    url = f"{BUCKET}/run"
    with Checkpoints(url, keep_last=2) as checkpoints:
        assert latest(url) is None
        for step in (1, 2, 3):
            checkpoints.save_async(state_of(step), step=step)
        path = checkpoints.wait()
    state = state_of(0)
    loaded = load(url, state)
    assert loaded.path == path == latest(url) and is_of_step(state, 3) and not verify(path)
    _, *rows = ls(url)
    assert [row.split()[-2:] for row in rows] == [[str(checkpoint.path), "complete"] for checkpoint in
                                                  scan(url).committed]
    assert len(rows) == 2 and saves_in(bucket, url) == {row.split()[-2].rpartition("/")[2] for row in rows}
    assert next(show(url)).startswith(f"{path}: step 3")
    assert all(line.endswith("verified") for line in check(url))
    bucket.rm_file(f"bucket/run/{path.name}/{MARKER}")
    assert list(ls(url))[-1].split()[1:4] == [str(path), "not", "complete:"]
    assert list(clean(url)) == [f"{path}: removed", f"{url}: 1 removed"]
    assert saves_in(bucket, url) == {latest(url).name}
    bucket.pipe_file(f"bucket/run/{latest(url).name}/tensors.json", b"{}")
    with pytest.raises(ValueError, match=r"tensors\.json has 2 bytes, expected"):
        list(check(url))
    with Checkpoints(url, keep_last=1) as checkpoints:  # replaces the damaged one
        checkpoints.save(state_of(2), step=2)
        assert len(list(ls(url))) == 2
    assert not [key for key in bucket.find("bucket/run", withdirs=True) if "step-00000003" in key]


def test_an_upload_that_was_completed_before(bucket, monkeypatch):
    """S3 has completed an upload without an answer, and answers NoSuchUpload when s3fs tries again."""
    from s3fs import S3FileSystem

    url = f"{BUCKET}/twice"
    call = S3FileSystem.call_s3
    completed = []

    def refuse_after_completing(self, method, *arguments, **options):
        answer = call(self, method, *arguments, **options)
        if method == "complete_multipart_upload":
            completed.append(answer)
            raise FileNotFoundError("The specified multipart upload does not exist.")
        return answer

    monkeypatch.setattr(S3FileSystem, "call_s3", refuse_after_completing)
    with Checkpoints(url) as checkpoints:
        path = checkpoints.save(state_of(1), step=1)
    assert len(completed) == 1 and not verify(path)


def test_a_server_that_cannot_be_reached(bucket, monkeypatch):
    from s3fs import S3FileSystem

    url = f"{BUCKET}/unreachable"
    with Checkpoints(url) as checkpoints:
        path = checkpoints.save(state_of(1), step=1)
    S3FileSystem.clear_instance_cache()
    refusing = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{refusing}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(storage, "_ATTEMPTS", 1)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    with pytest.raises(OSError, match=rf"{path}/{MARKER} could not be read: .*{refusing}"):
        verify(path)
    for command in (check, ls):
        with pytest.raises((OSError, ValueError), match=refusing):
            list(command(url))
    with pytest.raises((OSError, ValueError), match=refusing):
        load(url, state_of(0))


def test_a_bucket_that_does_not_exist(bucket):
    assert latest("s3://none/run") is None
    with pytest.raises(ValueError, match=r"checkpoints cannot be saved to s3://none/run: .* bucket does not exist"):
        Checkpoints("s3://none/run")
