"""Modules of stages are recognised as those of the unpipelined model by the parameters inside them."""

from torch import nn

from dualpipe.train.parity.steps import Names


class Layer(nn.Module):
    """A norm, a router, and a module without parameters in the router."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.router = nn.Sequential(nn.Linear(2, 4), nn.Softmax(-1))


def whole_model():
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(4))
    model.head = nn.Linear(2, 4)
    return model


def names_in(whole, stage, names):
    """The names in the unpipelined model of the stage's modules, by those in the stage."""
    found = Names(whole).of_modules(stage, names)
    return {path: found[module] for path, module in stage.named_modules() if module in found}


def test_a_stage_may_call_its_modules_otherwise():
    whole = whole_model()
    stage = nn.Module()
    stage.blocks = nn.ModuleDict({"a": whole.layers[2], "b": whole.layers[3]})
    known = {id(parameter): name for name, parameter in whole.named_parameters()}
    names = {own: known[id(parameter)] for own, parameter in stage.named_parameters()}
    found = names_in(whole, stage, names)
    assert found["blocks.a.router"] == "layers.2.router" and found["blocks.b.norm"] == "layers.3.norm"
    assert "blocks.b.router.1" not in found, "it has no parameters"
    assert "blocks" not in found, "the stage has other layers in it than the model"


def test_modules_that_the_uncut_model_does_not_have_are_left_out():
    whole = whole_model()
    stage = nn.ModuleDict({"pair": nn.ModuleList([whole.layers[0].norm, whole.layers[1].norm])})
    names = {"pair.0.weight": "layers.0.norm.weight", "pair.0.bias": "layers.0.norm.bias",
             "pair.1.weight": "layers.1.norm.weight", "pair.1.bias": "layers.1.norm.bias"}
    assert names_in(whole, stage, names) == {"pair.0": "layers.0.norm", "pair.1": "layers.1.norm"}


def test_a_module_with_tied_parameters_may_go_by_any_of_their_names():
    whole = nn.ModuleDict({"embed": nn.Embedding(4, 2), "norm": nn.LayerNorm(2), "head": nn.Linear(2, 4, bias=False)})
    whole["head"].weight = whole["embed"].weight
    stage = nn.ModuleDict({"last": whole["head"]})
    assert names_in(whole, stage, {"last.weight": "head.weight"})["last"] == "embed"


def test_a_wrapper_has_the_name_of_what_is_around():
    whole = nn.ModuleDict({"router": nn.Sequential(nn.Linear(2, 4)), "other": nn.Linear(2, 2)})
    names = Names(whole)
    found = names.of_modules(whole, names.first)
    assert found[whole["router"]] == found[whole["router"][0]] == "router"
