"""Damaged or malicious checkpoints of one process never load wrongly, and never run code."""

import json
import os
import pickle
import random
import re
import warnings
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save as to_safetensors

from dualpipe.checkpoint import latest, load, save, verify
from dualpipe.checkpoint.commands import ls, show
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.quantized import QuantizedTensor
from dualpipe.runtime.dtypes import dtype_of
from native import FILES, is_step, state_of


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file, at, bit):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def link_out(file):
    outside = file.parents[2] / f"{file.parents[1].name} outside"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)


@pytest.mark.parametrize("damage", [truncate, Path.unlink, link_out])
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
    (two / "step-00000001" / "rank-00000.safetensors").unlink()
    with pytest.raises(ValueError, match="has no complete checkpoint"):
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
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for path, message in (("none", "does not exist"), ("run", "give .*checkpoints$"), ("", "has no checkpoints; give")):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / path, state_of(0))
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
    manifest["files"][name] = [len(content), xxhash.xxh3_128(content).hexdigest()]
    sign(path, manifest)


def sign(path, manifest):
    digest = sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"format": 1, "sha256": digest, "manifest": manifest}))


def signed(path, **changes):
    sign(path, json.loads((path / "manifest.json").read_text())["manifest"] | changes)


class Harm:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [lambda harm: pickle.dumps(harm), lambda harm: b"cos\nsystem\n(S'true'\ntR."])
def test_a_pickle_in_place_of_a_file_is_never_run(two, tmp_path, name, content):
    path, harm = two / "step-00000002", tmp_path / "harmed"
    if name == "manifest.json":
        (path / name).write_bytes(content(Harm(harm)))
    else:
        forge(path, name, content(Harm(harm)))
    with pytest.raises((ValueError, RuntimeError)):
        load(path, state_of(0))
    list(ls(two))
    assert not harm.exists()


def described(path):
    return json.loads((path / "tensors.json").read_text())


def changed(*keys, to):
    """Return a function that changes the value at `keys` of the description."""

    def change(content):
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to(inner[keys[-1]]) if callable(to) else to
        return content

    return change


A, B, BOX = "a.weight", "b.weight", ("b.weight", 2, 0)


@pytest.mark.parametrize("change, message", [
    (changed(A, 2, to=[]), "0 of 8 elements"), (changed(A, 2, to=None), "cannot be read"),
    (changed(A, to=None), "cannot be read"),
    (changed(A, 2, to=lambda boxes: [*boxes, [[0, 0], [4, 1], 0]]), "12 of 8 elements"),
    (changed(A, 2, to=[[[0, 0], [3, 2], 0], [[2, 0], [1, 2], 0]]), "a.weight .* overlap"),
    (changed(*BOX, 1, to=[3]), "3 of 7 elements"),
    (changed(*BOX, 0, to=[1]), "not inside a tensor of shape"), (changed(*BOX, 0, to=[-1]), "not numbers"),
    (changed(*BOX, 0, to=[0, 0]), "cannot be read"), (changed(*BOX, 2, to=-5), "not numbers"),
    (changed(*BOX, 2, to=True), "not numbers"), (changed(*BOX, 2, to=1.5), "not numbers"),
    (changed(*BOX, 2, to="../../secret"), "not numbers"), (changed(*BOX, 2, to=7), "rank 7, of which there is no file"),
    (changed(*BOX, to=[]), "cannot be read"), (lambda content: content | {A: ["fp32", "42", []]}, "not numbers"),
    (changed(A, 1, to=[4, 3]), "8 of 12 elements"), (changed(A, 1, to="42"), "not numbers"),
    (changed(A, 0, to="load"), "is stored in load, which this release"),
    (changed(A, 0, to=[]), "cannot be read|no dtype"),
    (lambda content: [content], "cannot be read"), (lambda content: "x" * 9, "cannot be read"),
    (lambda content: None, "cannot be read"),
])
def test_a_description_that_is_not_sound(two, change, message):
    path = two / "step-00000002"
    forge(path, "tensors.json", json.dumps(change(described(path))).encode())
    state = state_of(0)
    assert re.search(message, verify(path)[0])
    with pytest.raises(ValueError, match=message):
        load(path, state)
    assert is_step(state, 0)
    with pytest.warns(UserWarning, match="step-00000002"):
        assert load(two, state).manifest.step == 1
    assert is_step(state, 1)
    with pytest.raises(ValueError, match=message):
        list(show(path))


def test_a_file_that_holds_something_else_than_is_said(two):
    path = two / "step-00000002"
    for dtype in ("fp16", "int16"):  # of as many bytes
        forge(path, "tensors.json", json.dumps(changed(B, 0, to=dtype)(described(path))).encode())
        with pytest.raises(RuntimeError, match="does not hold torch"):
            load(path, state_of(0) | {B: torch.zeros(7, dtype=dtype_of(dtype))})


W = "w.weight"


@pytest.mark.parametrize("change, message", [
    (changed(W, 0, to="fp8_block 64x64"), "w.weight is stored in fp8_block 64x64, and .* has fp8_block 128x128"),
    (changed(W, 0, to="fp7 1x32"), "is stored in fp7 1x32, which this release does not have"),
    (changed(W, 2, to=[[[0, 0], [100, 32], 0], [[100, 0], [200, 32], 0]]), "cuts through blocks of fp8_block"),
    (changed(W, 2, to=[[[0, 0], [300, 16], 0], [[0, 16], [300, 16], 0]]), "cuts through blocks of fp8_block"),
    (lambda content: content | {W: ["fp8_block 128x128", [7], [[[0], [7], 0]]]}, "must be a matrix"),
    (lambda content: content | {W: ["mxfp8 1x32", [2, 2, 2, 2], [[[0] * 4, [2] * 4, 0]]]}, "must be a matrix"),
])
def test_a_description_of_other_blocks(tmp_path, change, message):
    """The description is refused before anything is changed, also where there is no older checkpoint to go back to."""
    values = torch.randn(300, 32)
    save(tmp_path, {W: QuantizedTensor.quantize(values, "fp8_block")}, step=1)
    path = tmp_path / "step-00000001"
    forge(path, "tensors.json", json.dumps(change(described(path))).encode())
    weight = QuantizedTensor.quantize(-values, "fp8_block")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {W: weight})
    assert torch.equal(weight, QuantizedTensor.quantize(-values, "fp8_block"))


def test_files_of_another_format_than_is_said(tmp_path):
    weight = QuantizedTensor.quantize(torch.randn(300, 32), "mxfp8")
    save(tmp_path, {W: weight}, step=1)
    forge(path := tmp_path / "step-00000001", "tensors.json",
          json.dumps(changed(W, 0, to="nvfp4 1x16")(described(path))).encode())
    for target in (QuantizedTensor.quantize(torch.randn(300, 32), "nvfp4"), torch.zeros(300, 32)):
        with pytest.raises(RuntimeError, match=r"does not hold nvfp4 \(300, 32\) of w.weight"):
            load(tmp_path, {W: target}, allow=["*"])


def test_a_fifo_in_place_of_a_file_stops_nobody(two):
    path = two / "step-00000002" / "tensors.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a plain file"):
        list(show(two / "step-00000002"))
    assert verify(two / "step-00000002") and any("DAMAGED" in line for line in ls(two))


@pytest.mark.parametrize("change", [
    lambda tensors: tensors | {B: torch.zeros(8, dtype=torch.bfloat16)}, lambda tensors: {A: tensors[A]},
])
def test_a_file_of_other_tensors(two, change):
    path = two / "step-00000002"
    tensors = {name: tensor.contiguous() for name, tensor in state_of(2).items()}
    forge(path, "rank-00000.safetensors", to_safetensors(change(tensors)))
    with pytest.raises(RuntimeError, match=r"rank-00000\.safetensors does not hold torch\..*, as tensors.json says"):
        load(path, state_of(0))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "a/b", "a\0b", "\ud800"])
def test_a_manifest_that_leads_out(two, name):
    path = two / "step-00000002"
    signed(path, files={name: [0, ""]})
    with pytest.raises(ValueError, match="not the plain name of a file; refused"):
        Checkpoint.read(path)


@pytest.mark.parametrize("changes", [
    {"sequence": None}, {"sequence": "9"}, {"step": -1}, {"step": True}, {"layout": {}}, {"layout": None},
    {"layout": {"world": 1, "pp": 1, "dp": 1, "ep": "1"}}, {"dtypes": {"a": {"save": 3}}}, {"dtypes": []},
    {"versions": None}, {"saved_at": 5}, {"checksum": 3}, {"own_dimensions": [1]},
    {"own_dimensions": None}, {"more": 1}, {"files": {"a": [-1, ""]}}, {"files": {"a": [1]}}, {"files": 3},
])
def test_a_manifest_of_odd_types_hides_no_other(two, changes):
    path = two / "step-00000002"
    signed(path, **changes)
    assert "is damaged" in verify(path)[0] and latest(two).name == "step-00000001"
    with pytest.warns(UserWarning, match="step-00000002"):
        assert load(two, state_of(0)).manifest.step == 1
    save(two, state_of(3), step=3)
    assert latest(two).name == "step-00000003"


@pytest.mark.parametrize("change, said", [
    (lambda text: text.replace('"format": 1', '"format": 2'), "format 2"), (lambda text: "[" * 10**5 + "]" * 10**5, ""),
])
def test_a_manifest_of_another_form_hides_no_other(two, change, said):
    path = two / "step-00000002" / "manifest.json"
    path.write_text(change(path.read_text()))
    assert said in verify(path.parent)[0] and latest(two).name == "step-00000001"


def test_checksums_of_later_are_named(two):
    signed(two / "step-00000002", checksum="xxh5")
    assert "'xxh5'" in verify(two / "step-00000002")[0]


@pytest.mark.parametrize("name", ["tensors.json", "rank-00000.safetensors"])
def test_a_manifest_lists_all_that_is_read(two, name):
    """A file without a checksum would be loaded otherwise."""
    path = two / "step-00000002"
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    del manifest["files"][name]
    sign(path, manifest)
    assert f"manifest.json is damaged: it does not list {name}" in verify(path)[0]
    with pytest.warns(UserWarning, match="step-00000002"):
        assert load(two, state_of(0)).manifest.step == 1


def test_a_layout_of_later_is_named(two):
    path = two / "step-00000002"
    signed(path, layout={"world": 1, "pp": 1, "dp": 1, "ep": 1, "xp": 1})
    assert "dimension 'xp'" in verify(path)[0]
    with pytest.raises(ValueError, match="dimension 'xp'"):
        load(path, state_of(0))
    with pytest.raises(ValueError, match="dimension 'xp'"):  # no fallback to the older one, which lacks the dimension
        load(two, state_of(0))
    assert any("dimension 'xp'" in line for line in ls(two))


def test_a_layout_without_a_dimension_is_of_one(two):
    path = two / "step-00000002"
    signed(path, layout={"world": 1, "dp": 1})
    loaded = load(path, state_of(0))
    assert loaded.manifest.layout == {"world": 1, "pp": 1, "dp": 1, "ep": 1} and loaded.random_restored
