"""Tiny models of every causal LM of transformers: do stages compute what the whole model does, or are they refused?

    python tests/support/hf_sweep.py [MODEL_TYPE ...]     prints the outcome of each
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dualpipe.hf import load_stages
from dualpipe.hf.cut import stage_layers
from dualpipe.hf.structure import check_structure
from hf_families import VOCAB, batch_of, error_of, loss_fn

TOLERANCE = 1e-6  # routers and scans that compute in float32 whatever the model does
LARGEST = 100_000_000
CUTS = [(1, 2, 1), (0, 2, 2, 0)]
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 8,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "shared_expert_intermediate_size": 16, "sliding_window": 4, "n_embd": 32, "n_layer": 4, "n_head": 4, "d_model": 32,
    "n_heads": 4, "n_layers": 4, "ffn_hidden_size": 48, "embedding_size": 32, "n_positions": 64, "ffn_dim": 48,
    "word_embed_proj_dim": 32, "attention_probs_dropout_prob": 0.0, "mamba_d_state": 8, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1,
    "ssm_state_size": 8, "state_size": 8, "num_heads": 4, "moe_num_experts": 8, "moe_k": 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "n_inner": 48, "rotary_dim": 4,
    "attention_window_size": 4, "lru_width": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "laurel_rank": 4, "num_kv_shared_layers": 2,
    "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "expert_ffn_hidden_size": 16,
    "moe_topk": 2, "zero_expert_num": 2, "shared_intermediate_size": 16, "swa_num_attention_heads": 4, "chunk_size": 4,
    "mlp_expansion_factor": 1,
    "d_ff": 48, "d_kv": 8, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "attention_dropout": 0.0, "residual_dropout": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
    "hidden_dropout_prob": 0.0, "hidden_dropout": 0.0,
}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 4}
_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "youtu",
         "minicpm3"), _LATENT),
    "longcat_flash": {**_LATENT, "num_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "inkling_text": {"swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16},
    "inkling2_text": {"swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16},
    "mamba2": {"num_heads": 8},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "dots1": {"n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
}
_AS_THEY_ARE: dict[str, set[str]] = {  # what a configuration computes itself, or takes from others
    "falcon": {"head_dim"}, "falcon_h1": {"mamba_n_heads", "mamba_d_head", "mamba_num_heads"},
    "minicpm3": {"logits_scaling"}, "xlstm": {"v_head_dim"},
    "gemma4_text": {"head_dim", "num_key_value_heads", "num_attention_heads"},
    "gemma4_unified_text": {"head_dim", "num_key_value_heads", "num_attention_heads"},
    "dots3_note_text": {"num_attention_heads", "head_dim", "num_key_value_heads", "swa_num_attention_heads"},
}


def sweep_config(model_type: str, **changes: Any) -> Any:
    """Return a tiny configuration, as small as the model's own rules allow without more knowledge of it."""
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config()
    small = _small_fields(default, model_type)
    if text is not default:
        small["text_config"] = {"model_type": text.model_type, **_small_fields(text, text.model_type)}
    return AutoConfig.for_model(model_type, **small | changes)


def _small_fields(config: Any, model_type: str) -> dict[str, Any]:
    """Return small values for the fields that a configuration has."""
    fields = set(vars(config)) | set(getattr(type(config), "__dataclass_fields__", ()))
    kept = _AS_THEY_ARE.get(model_type, set())
    small = {name: value for name, value in _SMALL.items() if name in fields - kept}
    return small | _CHANGES.get(model_type, {})


def outcome_of(model_type: str, **changes: Any) -> str:
    """Return "equal", "refused: ...", "untried: ..." for a tiny model that transformers cannot run, or a fault."""
    try:
        config = sweep_config(model_type, **changes)
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if num_parameters > LARGEST:
            raise RuntimeError(f"{num_parameters / 1e6:.0f} million parameters in the smallest form known")
        torch.manual_seed(0)
        whole = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
        for module in whole.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for parameter in whole.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
        tokens, labels = batch_of(0, rows=2)
        expected_loss = loss_fn(whole(tokens, use_cache=False).logits, labels)
        expected_loss.backward()
    except Exception as error:  # a configuration that does not fit, or a model that needs more than tokens
        return _refusal_of_default(model_type) or f"untried: {_first_line(error)}"
    for cut in CUTS:
        fault = _fault_of_cut(whole, config, cut, tokens, labels, expected_loss)
        if fault:
            return fault
    return "equal"


def _refusal_of_default(model_type: str) -> str:
    """Return why the model of transformers' default configuration is refused; "" where it is not."""
    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    except Exception:
        return ""
    try:
        check_structure(whole, stage_layers(whole, 2))
    except ValueError as error:
        return f"refused: {_first_line(error)}"
    return ""


def _fault_of_cut(whole: Any, config: Any, cut: tuple[int, ...], tokens: Any, labels: Any, expected_loss: Any) -> str:
    """Return "" where stages compute what the whole model does, run as modules and in segments."""
    try:
        stages = load_stages(
            config, len(cut), range(len(cut)), dtype=torch.float64, layers_per_stage=cut)
    except ValueError as error:
        return f"refused: {_first_line(error)}"
    except Exception as error:
        return f"fault in load_stages, cut {cut}: {type(error).__name__}: {_first_line(error)}"
    state = whole.state_dict()
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        own = stage.state_dict()
        stage.load_state_dict({name: state[name] for name in own})
    for run in (_call, _run_segments):
        for stage in stages:
            stage.zero_grad()
        try:
            x = tokens
            for stage in stages:
                x = run(stage, x)
            loss = loss_fn(x, labels)
            loss.backward()
        except Exception as error:
            return f"fault in a step, cut {cut}, {run.__name__}: {type(error).__name__}: {_first_line(error)}"
        error = _largest_error(whole, stages, loss, expected_loss)
        if error > TOLERANCE:
            return f"fault: differs by {error:.1e}, cut {cut}, {run.__name__}"
    return ""


def _largest_error(whole: Any, stages: Any, loss: Any, expected_loss: Any) -> float:
    """Return the largest error of the loss and of all gradients, relative to the largest gradient."""
    errors = [error_of(loss.detach(), expected_loss.detach())]
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    largest = max(grad.abs().max().item() for grad in expected.values() if grad is not None)
    sums: dict[str, Any] = {}
    tied = stages[0].is_tied and len(stages) > 1
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                sums[name] = parameter.grad
    if tied:
        del_name = next((name for name in sums if name.endswith("lm_head.weight")), None)
        embed = next((name for name in sums if name.endswith("embed_tokens.weight")), None)
        if del_name and embed and stages[-1].causal_lm.lm_head.weight is not stages[0].base.embed_tokens.weight:
            sums[embed] = sums[embed] + sums.pop(del_name)
    for name, grad in expected.items():
        got = sums.get(name)
        if tied and name.endswith("lm_head.weight"):
            continue
        if grad is None and got is None:
            continue
        zeros = torch.zeros_like(grad if got is None else got)
        difference = (zeros if got is None else got) - (zeros if grad is None else grad)
        errors.append(difference.abs().max().item() / largest)
    return max(errors)


def _call(stage: Any, x: Any) -> Any:
    return stage(x)


def _run_segments(stage: Any, x: Any) -> Any:
    carry = {"x": x, "position_ids": None}
    for segment in stage.segments():
        values = segment.fn(*(carry[name] for name in segment.reads))
        carry.update(zip(segment.writes, values if len(segment.writes) > 1 else (values,)))
    return carry["x"]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """Print the outcome of each model type, and how many there are of each kind."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        outcome = outcome_of(model_type)
        counts[outcome.partition(":")[0]] += 1
        print(f"{model_type:24} {outcome}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
