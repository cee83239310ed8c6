"""Models that `--model` names, and names that lead to none."""

import pytest
import torch
from torch import nn

import own_model
from dualpipe.train.parity import CutModel
from dualpipe.train.parity.models import find_model


def test_a_function_is_found_and_called():
    model = find_model("own_model:right")
    assert isinstance(model, CutModel)
    other = find_model("own_model:right")
    for a, b in zip(model.whole.parameters(), other.whole.parameters()):
        assert torch.equal(a, b), "the same weights on every rank"


@pytest.mark.parametrize(("text", "error"), [
    ("nothing", "'nothing' is no directory and no module:function; give a function"),
    ("own_model:", "is no directory and no module:function"),
    ("no_such_module:build", "there is no module 'no_such_module' in "),
    ("own_model.nothing:build", "there is no module 'own_model.nothing'"),
    ("own_model:righ", "module 'own_model' has no function 'righ'; did you mean 'right'?"),
    ("own_model:VOCAB", "module 'own_model' has no function 'VOCAB'"),
    ("own_model:no_model", "returned a str; it must return a dualpipe.train.parity.CutModel"),
])
def test_what_is_no_model_is_refused(text, error):
    with pytest.raises(ValueError, match="--model ") as raised:
        find_model(text)
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_fields_of_a_wrong_type_are_refused(monkeypatch):
    monkeypatch.setattr(own_model, "right", lambda: CutModel(nn.Linear, own_model.cut, own_model.batch, own_model.loss))
    with pytest.raises(ValueError, match=r"CutModel.whole must be an nn.Module; got type"):
        find_model("own_model:right")
    monkeypatch.setattr(own_model, "right", lambda: CutModel(nn.Linear(1, 1), [], own_model.batch, own_model.loss))
    with pytest.raises(ValueError, match=r"CutModel.cut must be a function; got list"):
        find_model("own_model:right")


def test_an_error_of_the_module_itself_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import no_such_module_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        find_model("needs_another:build")


def test_a_directory_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no \*.safetensors"):
        find_model(str(tmp_path))
