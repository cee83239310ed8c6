"""Checkpoints of one process that are damaged, or made to do harm: never a wrong load, and no code is run."""

import json
import os
import pickle
import random
import warnings
from hashlib import sha256
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dualpipe.checkpoint import latest, load, save, verify
from dualpipe.checkpoint.native_folder import read_manifest
from native import FILES, is_step, state_of


@pytest.fixture
def two(tmp_path):
    """A directory with steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, state_of(step), step=step)
    return tmp_path


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def empty(file):
    os.truncate(file, 0)


def flip(file, at=None, bit=0):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    file.write_bytes(content)


def link_out(file):
    outside = file.parents[2] / f"{file.parents[1].name} outside"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink, link_out])
@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file(two, name, damage):
    damage(two / "step-00000002" / name)
    assert verify(two / "step-00000002") and not verify(two / "step-00000001")
    state = state_of(0)
    with pytest.raises(ValueError, match=f"step-00000002.*{name}" if name != "manifest.json" else "manifest"):
        load(two / "step-00000002", state)
    assert is_step(state, 0)
    with pytest.warns(UserWarning, match="step-00000002"):
        loaded = load(two, state)
    assert loaded.manifest.step == 1 and is_step(state, 1) and len(loaded.damaged) == 1
    (two / "step-00000001" / "rank-00000.json").unlink()
    with pytest.raises(ValueError, match="has no checkpoint that is whole"):
        load(two, state)
    assert is_step(state, 1)


def test_no_flipped_bit_is_loaded(two):
    generator = random.Random(0)
    path = two / "step-00000002"
    for name in FILES:
        sound = (path / name).read_bytes()
        for _ in range(40):
            flip(path / name, generator.randrange(len(sound)), generator.randrange(8))
            state = state_of(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = load(two, state).manifest.step
            assert is_step(state, step) and (step == 1 or name == "manifest.json")  # between two tokens nothing is lost
            (path / name).write_bytes(sound)


def test_latest_and_load_where_there_is_nothing(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None
    with pytest.raises(ValueError, match="there is none at all"):
        load(tmp_path, state_of(0))
    save(tmp_path, state_of(1), step=1)
    (tmp_path / "latest").write_text("step-00000077\n")
    assert latest(tmp_path).name == "step-00000001"
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no complete checkpoint"):  # not None: a run would start anew
        latest(tmp_path)


def test_a_link_in_place_of_a_checkpoint(two, tmp_path_factory):
    outside = save(tmp_path_factory.mktemp("outside"), state_of(3), step=3)
    (two / "step-00000003").symlink_to(outside)
    with pytest.warns(UserWarning, match="is a link out of its directory"):
        assert load(two, state_of(0)).manifest.step == 2
    (two / "mine").symlink_to(outside)  # one that the caller names
    assert load(two / "mine", state_of(0)).manifest.step == 3


# -- files that are made to do harm: with checksums that are right


def forge(path, name, content, **changes):
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())["manifest"] | changes
    manifest["files"][name] = [len(content), sha256(content).hexdigest()]
    digest = sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": manifest}))


class Harm:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


def metadata_with(path, change):
    metadata = FileSystemReader(path).read_metadata()
    change(metadata)
    return pickle.dumps(metadata)


@pytest.mark.parametrize("make, message", [
    (lambda path, harm: pickle.dumps(harm), "asks for posix.system"),
    (lambda path, harm: b"cos\nsystem\n(S'true'\ntR.", "asks for os.system"),
    (lambda path, harm: b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'true'\ntR.", "asks for"),
    (lambda path, harm: b"ctorch.distributed.checkpoint.metadata\nos\n.", "asks for"),
    (lambda path, harm: b"ctorch\nload\n.", "asks for torch.load"),
    (lambda path, harm: pickle.dumps([1]), "holds no description"),
    (lambda path, harm: metadata_with(path, lambda m: m.state_dict_metadata.update(
        count=BytesStorageMetadata())), "'count' is no tensor but a pickle"),
    (lambda path, harm: metadata_with(path, lambda m: [setattr(place, "relative_path", "../../secret")
        for place in m.storage_data.values()]), "'../../secret', none of its files"),
])  # fmt: skip
def test_metadata_that_would_do_harm(two, tmp_path, make, message):
    path, harm = two / "step-00000002", tmp_path / "harmed"
    forge(path, ".metadata", make(path, Harm(harm)))
    with pytest.raises(ValueError, match=message):
        load(path, state_of(0))
    assert message.replace("\\", "") in verify(path)[0]
    with pytest.warns(UserWarning, match="step-00000002"):
        assert load(two, state_of(0)).manifest.step == 1
    assert not harm.exists()


def test_a_tensor_that_would_do_harm(two, tmp_path):
    path, harm = two / "step-00000002", tmp_path / "harmed"
    content = bytearray((path / "__0_0.distcp").read_bytes())
    evil = pickle.dumps(Harm(harm), protocol=2)
    for place in FileSystemReader(path).read_metadata().storage_data.values():
        content[place.offset : place.offset + len(evil)] = evil
    forge(path, "__0_0.distcp", bytes(content))
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        load(path, state_of(0))
    assert not harm.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "a/b"])
def test_a_manifest_that_leads_out(two, name):
    path = two / "step-00000002"
    forge(path, ".metadata", (path / ".metadata").read_bytes(), files={name: [0, ""]})
    with pytest.raises(ValueError, match="not the plain name of a file; refused"):
        read_manifest(path)
