"""Modules with vectors of two dtypes: a float32 A_log among bfloat16 siblings, as in state-space models."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dualpipe import Pipeline
from dualpipe.nn import Router
from dualpipe.parallel import DTypePolicy, Rule, assert_contract, resolve_dtypes, shard
from ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = DTypePolicy(BF16, FP32, BF16)
WIDTH, RANKS = 32, 2

MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "expand": 2, "n_groups": 1, "chunk_size": 4}
CLASSES = {  # tiny configurations of transformers' classes, by model_type
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "layer_types": ["linear_attention"], "num_experts": 2},
    "qwen3_5_moe_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                         "linear_value_head_dim": 8, "layer_types": ["linear_attention"], "num_experts": 2},
    "mamba2": MAMBA,
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 8, "attn_layer_offset": 4,
              "use_mamba_kernels": False},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
                         "mamba_chunk_size": 4, "layer_types": ["mamba"]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4,
                   "layers_block_type": ["mamba"]},
}
COMMON = {"vocab_size": 61, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2}


class Layer(nn.Module):
    """A norm and a mixer of transformers' model."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mixer = mixer

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Stage(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(mixer)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mixer_of(model_type: str) -> nn.Module:
    """Build the transformers module that owns A_log; it is in float32, with values that bfloat16 can represent."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **COMMON | CLASSES[model_type]))
    mixer = next(module for module in model.modules() if "A_log" in module._parameters)
    return mixer.to(BF16).float()


class Decay(nn.Module):
    """A state-space layer in one line, which casts as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dt_bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.A_log = nn.Parameter(torch.linspace(0, 1, WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        assert self.dt_bias.dtype is BF16 and self.A_log.dtype is FP32
        h = torch.nn.functional.softplus(self.in_proj(x) + self.dt_bias)
        return self.out_proj((h.float() * -self.A_log.exp()).to(x.dtype))


def own_mix(stage: Stage) -> Stage:
    """Return a copy in the dtypes of its checkpoint."""
    mixed = copy.deepcopy(stage).to(BF16)
    mixed.layers[0].mixer.A_log.data = stage.layers[0].mixer.A_log.detach().clone()
    return mixed


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank)).to(BF16)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def make(model_type: str) -> Stage:
    torch.manual_seed(1)
    stage = Stage(Decay() if model_type == "decay" else mixer_of(model_type))
    return stage.to(BF16).float()


def against_own_mix(rank: int, model_type: str) -> tuple[bool, dict[str, float]]:
    """Return whether the outputs equal those of the unsharded module in its own dtypes, and each gradient's error."""
    stage = make(model_type)
    reference = own_mix(stage)
    sources = {name: param.dtype for name, param in reference.named_parameters()}
    plan = resolve_dtypes(stage, POLICY, sources)
    assert {name: dtypes.save for name, dtypes in plan.tensors.items()} == sources
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("pp", "dp"))
    shard(stage, mesh["dp"], plan)
    pipe = Pipeline([stage], process_group=mesh["pp"].get_group(), schedule="1f1b")

    def run():
        return pipe.step(batch(rank), num_chunks=1, criterion=loss, return_outputs=True)

    outputs = [run()[1]]
    expected = []
    for other in range(RANKS):
        output = reference(batch(other))
        (loss(output) / RANKS).backward()
        expected.append(output)
    found = {name: param.grad.full_tensor() for name, param in stage.named_parameters()}
    wanted = {name: param.grad.float() for name, param in reference.named_parameters()}
    errors = {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in wanted.items()}
    pipe.zero_grad()
    assert_contract(stage, plan, run=run)
    return torch.equal(outputs[0], expected[rank]), errors


def check(model_type: str) -> None:
    for same, errors in run_ranks(against_own_mix, RANKS, model_type, timeout=120):
        assert same, f"{model_type} returns other values than in its own mix"
        assert "layers.0.mixer.A_log" in errors
        for name, error in errors.items():
            assert error < 2**-7, (name, error)  # of the reference: its gradients are in bfloat16


def test_a_float32_vector_beside_bfloat16_ones_trains_as_unsharded():
    check("decay")


def test_the_plan_says_which_vectors_are_stored_wider_and_why():
    model = nn.ModuleDict({"mixer": Decay()}).to(BF16)
    plan = resolve_dtypes(model, DTypePolicy(BF16, BF16, BF16, [Rule("*.A_log", FP32)]))
    dtypes = plan.of("mixer.dt_bias")
    assert (dtypes.storage, dtypes.compute, dtypes.save, dtypes.unsharded) == (FP32, BF16, BF16, FP32)
    assert plan.reduce_dtype("mixer.dt_bias") is plan.reduce_dtype("mixer.A_log") is FP32
    assert dtypes.reason == "policy; stored in fp32 beside A_log"
    assert plan.of("mixer.in_proj.weight").storage is BF16
    assert resolve_dtypes(model, plan.policy, sharded=False).of("mixer.dt_bias").storage is BF16


def test_without_a_mesh_a_forward_sees_each_vector_in_its_dtype():
    model = Stage(Decay()).to(BF16)
    plan = resolve_dtypes(model, DTypePolicy(BF16, FP32, BF16, [Rule("*.A_log", FP32)]))
    shard(model, None, plan)

    def run():
        loss(model(batch(0))).backward()

    assert_contract(model, plan, run=run)
    mixer = model.layers[0].mixer
    assert mixer.dt_bias.dtype is FP32 and mixer.dt_bias.grad.dtype is FP32 and "dt_bias" not in vars(mixer)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.layers[0].mixer(torch.zeros(1, 3, dtype=BF16))
    assert "dt_bias" not in vars(mixer)


@pytest.mark.parametrize("rule", [Rule("*.dt_bias", storage=BF16), Rule("*.dt_bias", reduce=BF16)])
def test_a_rule_that_says_otherwise_is_refused(rule):
    policy = DTypePolicy(BF16, FP32, BF16, [Rule("*.A_log", FP32), rule])
    with pytest.raises(ValueError, match=r"mixer \(Decay\) directly owns parameters that FSDP2 cannot keep apart"):
        resolve_dtypes(nn.ModuleDict({"mixer": Decay()}).to(BF16), policy)


def test_torchs_own_modules_take_one_dtype():
    with pytest.raises(ValueError, match=r"norm \(LayerNorm\) directly owns parameters that FSDP2 cannot keep apart"):
        resolve_dtypes(nn.ModuleDict({"norm": nn.LayerNorm(4)}), DTypePolicy(BF16, FP32, BF16, [Rule("*.bias", FP32)]))


def test_our_own_modules_take_one_dtype():
    """The router of gpt-oss takes one dtype: one GEMM uses its weight and its bias."""
    policy = DTypePolicy(BF16, FP32, BF16, [Rule("gate.weight", FP32)])
    with pytest.raises(ValueError, match=r"gate \(Router\) directly owns parameters that FSDP2 cannot keep apart"):
        resolve_dtypes(nn.ModuleDict({"gate": Router(8, 4, 2, bias=True)}).to(BF16), policy)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CLASSES)
def test_classes_of_transformers_train_sharded_as_in_their_own_mix(model_type):
    check(model_type)
