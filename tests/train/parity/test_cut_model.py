"""The stages that a `CutModel` makes of its model, and cuts that are refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import own_model
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.steps import Names, UnpipelinedModel, make_batches

CPU = torch.device("cpu")


def stages_of(model):
    return model.build_pipeline(Job(CPU), torch.float64).stages


def train_whole(model, dtype):
    """Run a step of the unpipelined model."""
    whole = model.build_whole(dtype, CPU)
    return UnpipelinedModel(model, whole, make_batches(model, 1, dtype, CPU), Names(whole), CPU).train()


def test_parameters_are_recognised_as_those_of_the_model():
    first, last = stages_of(own_model.right())
    assert first.names["layers.1.norm.weight"] == "layers.1.norm.weight"
    assert last.names["layers.1.norm.weight"] == "layers.3.norm.weight" and last.names["head.weight"] == "head.weight"
    assert all(parameter.dtype is torch.float64 for parameter in first.module.parameters())


def test_the_model_itself_is_not_changed():
    model = own_model.right()
    first, _ = stages_of(model)
    assert first.module.embed.weight is not model.whole.embed.weight
    assert model.whole.embed.weight.dtype is torch.float32


@pytest.mark.parametrize(("change", "error"), [
    ({"cut": lambda model, count: [model]}, r"returned \['Model'\]; it must return 2 nn.Modules"),
    ({"cut": lambda model, count: ["a", "b"]}, r"returned \['str', 'str'\]; it must return 2 nn.Modules"),
    ({"cut": lambda model, count: [nn.Linear(1, 1)] * 2},
     "stage 0 has a parameter 'weight', which the unpipelined model lacks"),
    ({"names": lambda stage, name: "embed.weight"}, "of stage 0 has shape .* shard parameters in"),
])
def test_invalid_cuts_are_refused(change, error):
    with pytest.raises(ValueError, match=error):
        stages_of(replace(own_model.right(), **change))


def test_invalid_batches_are_refused():
    model = replace(own_model.right(), batch=lambda seed: 3)
    with pytest.raises(ValueError, match=r"batch\(0\) returned a int; it must return \(inputs, labels\)"):
        make_batches(model, 1, torch.float64, CPU)
    model = replace(own_model.right(), batch=lambda seed: (None, torch.zeros(8)))
    with pytest.raises(ValueError, match=r"the inputs of the batch are NoneType; give a tensor or a tuple"):
        make_batches(model, 1, torch.float64, CPU)
    model = replace(own_model.right(), batch=lambda seed: (*own_model.batch(seed), {"positions": 3}))
    with pytest.raises(ValueError, match=r"side input 'positions' must be a tensor, got int"):
        make_batches(model, 1, torch.float64, CPU)
    model = replace(own_model.right(), num_chunks=9)
    with pytest.raises(ValueError, match=r"shape \[8, 6\], whose first dimension must be at least the 9 micro-batches"):
        make_batches(model, 1, torch.float64, CPU)


@pytest.mark.parametrize(("loss", "error"), [
    (lambda *tensors: own_model.loss(*tensors).detach(), r"tensor of shape \[\] that requires no gradient; loss"),
    (lambda *tensors: own_model.loss(*tensors).expand(3), r"tensor of shape \[3\] that requires gradient; loss"),
    (lambda *tensors: 1.0, r"the loss of a micro-batch is a float; loss\(\*outputs, \*labels\) must return a scalar"),
])
def test_invalid_losses_are_refused(loss, error):
    model = replace(own_model.right(), loss=loss)
    with pytest.raises(ValueError, match=error):
        train_whole(model, torch.float64)


def test_gradients_of_a_narrow_model_accumulate_in_float32():
    step = train_whole(own_model.right(), torch.bfloat16)
    assert {gradient.dtype for gradient in step.gradients.values()} == {torch.float32}
    gradient = step.gradients["head.weight"]
    assert not torch.equal(gradient, gradient.bfloat16().float())
