"""The smallest random MoE language models of transformers, two MoE layers each where the family allows."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.aria import modeling_aria

_SIZES = {
    "vocab_size": 29, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LESS_HEADS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}

#: Family: what its configuration needs beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "olmoe": {},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": _LATENT,
    "granitemoe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1},
    "qwen3_next": _LINEAR,
    "glm4_moe": _LESS_HEADS,
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1,
    },
    "phimoe": {"head_dim": None},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "nemotron_h": {
        "layers_block_type": ["attention", "moe", "attention", "moe"], "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 8, "mamba_num_heads": 2, "mamba_head_dim": 8, "n_groups": 1,
    },
}  # fmt: skip
_OLDER = not hasattr(modeling_aria, "use_experts_implementation")
if _OLDER:
    del FAMILIES["aria_text"]  # a layout of its own there
#: Jamba's router is a plain linear layer there, and the others name their layers differently.
_ONLY_NEW = {"axk2", "deepseek_v32", "glm_moe_dsa", "jamba"}

#: What a configuration may need beside the sizes, in one of the names that families have for it.
_ANY: dict[str, Any] = {
    **_LATENT, **_LINEAR, **_LESS_HEADS,
    "norm_topk_prob": True, "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse"] * 2,
    "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "num_experts_per_token": 2,
    "moe_num_shared_experts": 1, "num_shared_experts": 1, "num_dense_layers": 0, "moe_layer_freq": 1,
    "moe_layer_start_index": 0, "mlp_only_layers": [], "enable_moe_block": True, "expert_layer_period": 1,
    "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0, "shared_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8, "index_topk": 4, "index_head_dim": 4, "index_n_heads": 2,
    "sliding_window": 4, "vocab_size_per_layer_input": 29, "hidden_size_per_layer_input": 4,
    "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "conv_L_cache": 2,
}  # fmt: skip
#: Further language models of transformers with the experts interface; a release has some of them.
MORE = [
    family
    for family in (
        "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v32",
        "dots1", "exaone_moe", "flex_olmo", "flint", "gemma4_text", "glm4_moe_lite", "glm_moe_dsa",
        "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4",
        "inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "mellum",
        "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "qwen3_5_moe_text", "solar_open",
    )
    if family in transformers.CONFIG_MAPPING and not (_OLDER and family in _ONLY_NEW)
]  # fmt: skip


def _keys(family: str) -> dict[str, Any]:
    """The sizes that the family's configuration knows, by its fields."""
    kind = transformers.CONFIG_MAPPING[family]
    known = set(kind.attribute_map).union(*(getattr(c, "__annotations__", {}) for c in kind.__mro__))
    return {key: value for key, value in {**_SIZES, **_ANY}.items() if key in known}


def tiny_moe(family: str, implementation: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    """A model of the family in eval mode, with weights large enough for every part to matter."""
    wanted = {**_SIZES, **FAMILIES[family]} if family in FAMILIES else _keys(family)
    keys = {k: v for k, v in wanted.items() if v is not None}
    config = transformers.AutoConfig.for_model(family, **keys)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4) if parameter.dim() > 1 else parameter.data.add_(0.1)
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            module.config._experts_implementation = implementation
    return model
