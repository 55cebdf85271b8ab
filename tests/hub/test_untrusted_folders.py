"""Folders from anywhere: the keys of published ones are known, and other spellings; what none has is not written."""

import dataclasses
import inspect
import itertools
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from few_bit_folders import MODELOPT_CONFIG, NVFP4_CONFIG
from refusals import refused
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, PLAIN, YARN, deepseek_v3, keys_of, write_zeros

import moezoo
from moezoo.hub.few_bits import read_quantization
from moezoo.hub.formats.base import Format
from moezoo.hub.formats.fp8 import FP8Blocks
from moezoo.hub.formats.fp8_channels import FP8Channels
from moezoo.hub.formats.int4 import Int4Groups
from moezoo.hub.formats.mxfp4 import MXFP4Groups
from moezoo.hub.formats.nvfp4 import NVFP4ModelOpt, NVFP4Packed
from moezoo.models import FAMILIES, DeepSeek, family_of
from moezoo.moe.router import Choice
from moezoo.nn.rotary import QueryScale

# The keys of published folders that the family's first release has, without those of a family's sizes.
_ALL = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False}
_ALL |= {"torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True, "eos_token_id": 2}
_MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "rope_theta": 1e6}
_MIXTRAL |= {"num_experts_per_tok": 2, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False}
_MIXTRAL |= {"rms_norm_eps": 1e-05, "sliding_window": None, "router_aux_loss_coef": 0.02}
_DEEPSEEK = {"attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}}
_DEEPSEEK |= {"aux_loss_alpha": 0.001, "bos_token_id": 0, "kv_lora_rank": 512, "moe_layer_freq": 1, "seq_aux": True}
_DEEPSEEK |= {"pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK |= {"rms_norm_eps": 1e-06, "rope_theta": 10000, "max_position_embeddings": 163840}
_ROPE = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
_V2 = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax"}
_V2 |= {"rope_scaling": _ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}, "vocab_size": 102400}
_V2 |= {"first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6}
_V3 = {"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
_V3 |= {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61}
_V3 |= {"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "q_lora_rank": 1536}
_V3_ROPE = _ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}
_GLM_LITE = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False}
_GLM_LITE |= {"hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47}
_GLM_LITE |= {"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512}
_GLM_LITE |= {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "topk_method": "noaux_tc"}
_GLM_LITE |= {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
_GLM_LITE |= {"norm_topk_prob": True, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "vocab_size": 154880}
_GLM_LITE |= {"max_position_embeddings": 202752, "rms_norm_eps": 1e-05, "num_nextn_predict_layers": 1}
_GLM_LITE |= {"partial_rotary_factor": 1.0, "rope_scaling": None, "rope_theta": 1000000}
_QWEN = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "head_dim": 128}
_QWEN |= {"bos_token_id": 151643, "decoder_sparse_step": 1, "max_position_embeddings": 40960, "mlp_only_layers": []}
_QWEN |= {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}
_QWEN |= {"output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0}
_QWEN |= {"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936}
_QWEN3_VL = {"model_type": "qwen3_vl_moe_text", "attention_bias": False, "bos_token_id": 151643, "dtype": "bfloat16"}
_QWEN3_VL |= {"decoder_sparse_step": 1, "head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": []}
_QWEN3_VL |= {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}
_QWEN3_VL |= {"rms_norm_eps": 1e-06, "rope_theta": 5000000, "vocab_size": 151936}
_QWEN2 = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1}
_QWEN2 |= {"bos_token_id": 151643, "norm_topk_prob": False, "output_router_logits": False, "rms_norm_eps": 1e-06}
_QWEN2 |= {"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "use_sliding_window": False, "vocab_size": 151936}
_OLMOE = {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None}
_OLMOE |= {"max_position_embeddings": 4096, "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8}
_OLMOE |= {"output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None}
_GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64}
_GPT_OSS |= {"experts_per_token": 4, "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880}
_GPT_OSS |= {"initial_context_length": 4096, "max_position_embeddings": 131072, "num_attention_heads": 64}
_GPT_OSS |= {"num_key_value_heads": 8, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05}
_GPT_OSS |= {"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0}
_GPT_OSS |= {"rope_scaling": {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0}}
_GPT_OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096, "truncate": False}
_GPT_OSS |= {"vocab_size": 201088}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_GLM = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128}
_GLM |= {"max_position_embeddings": 131072, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_scaling": None}
_GLM |= {"norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_key_value_heads": 8}
_GLM |= {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 1000000}
_GLM |= {"vocab_size": 151552}
_DELTA = {"attention_bias": False, "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4}
_DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
_DELTA |= {"linear_num_value_heads": 32, "max_position_embeddings": 262144, "mlp_only_layers": [], "hidden_size": 2048}
_DELTA |= {"moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-06}
_DELTA |= {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512}
_QWEN3_5 = _DELTA | {"model_type": "qwen3_5_moe_text", "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
_QWEN3_5 |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "vocab_size": 248320}
_QWEN3_5 |= {"num_experts": 256, "num_experts_per_tok": 8, "rope_parameters": {"mrope_interleaved": True}}
_QWEN3_5["rope_parameters"] |= {"mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000}
_QWEN3_5["rope_parameters"] |= {"partial_rotary_factor": 0.25}
_PERIOD = ["linear_attention"] * 3 + ["full_attention"]
_NEMOTRON = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "attention_bias": False}
_NEMOTRON |= {
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "norm_eps": 1e-5,
}
_NEMOTRON |= {"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_proj_bias": False}
_NEMOTRON |= {"mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": False, "n_group": 1}
_NEMOTRON |= {"mlp_hidden_act": "relu2", "moe_shared_expert_overlap": False, "n_groups": 8, "n_shared_experts": 1}
_NEMOTRON |= {"norm_topk_prob": True, "num_key_value_heads": 2, "num_logits_to_keep": 1, "num_nextn_predict_layers": 1}
_NEMOTRON |= {"partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False}
_NEMOTRON |= {"rope_theta": 10000, "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 0.0001}
_NEMOTRON |= {"time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_conv_bias": True}
_NEMOTRON |= {"use_mamba_kernels": True, "vocab_size": 131072}
_NANO = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME"
_ULTRA = "MEMEMEM*" + ("EMEMEM*" + "EMEMEMEM*" * 2) * 3 + "EMEMEM*EMEMEMEM*EMEMEMEME"
_OLDER_PARTS = {"M": "mamba", "E": "moe", "*": "attention"}

# Preset -> the keys of its published config.json, without those of quantization.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral_8x7b": _MIXTRAL
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"max_position_embeddings": 32768, "vocab_size": 32000},
    "mixtral_8x22b": _MIXTRAL
    | {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
    | {"max_position_embeddings": 65536, "vocab_size": 32768, "router_jitter_noise": 0.0},
    "deepseek_v2_lite": _DEEPSEEK
    | _V2
    | {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "q_lora_rank": None}
    | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v2": _DEEPSEEK
    | _V2
    | {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60}
    | {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 160, "q_lora_rank": 1536}
    | {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "deepseek_v3": _DEEPSEEK
    | _V3
    | {"model_type": "deepseek_v3", "vocab_size": 129280, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    | {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "routed_scaling_factor": 2.5}
    | {"n_group": 8, "topk_group": 4, "rope_scaling": _V3_ROPE},
    "kimi_k2": _DEEPSEEK
    | _V3
    | {"model_type": "kimi_k2", "vocab_size": 163840, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    | {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "routed_scaling_factor": 2.827}
    | {"n_group": 1, "topk_group": 1, "max_position_embeddings": 131072, "rope_theta": 50000.0}
    | {"rope_scaling": _V3_ROPE | {"beta_fast": 1.0, "factor": 32.0}},
    "moonlight_16b_a3b": _DEEPSEEK
    | _V3
    | {"model_type": "deepseek_v3", "vocab_size": 163840, "first_k_dense_replace": 1, "hidden_size": 2048}
    | {"intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "q_lora_rank": None}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-05}
    | {"max_position_embeddings": 8192, "rope_theta": 50000.0, "rope_scaling": None},
    "glm4_7_flash": _GLM_LITE,
    "qwen3_30b_a3b": _QWEN
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "max_window_layers": 48},
    # Keys of later releases too: shared experts of no size, and biases and norms that are as in the first ones.
    "qwen3_235b_a22b": _QWEN
    | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
    | {"num_attention_heads": 64, "max_window_layers": 94, "shared_expert_intermediate_size": 0, "qkv_bias": False}
    | {"use_qk_norm": True},
    "qwen3_omni_30b_a3b": _QWEN
    | {"model_type": "qwen3_omni_moe_text", "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48}
    | {"moe_intermediate_size": 768, "num_attention_heads": 32, "max_position_embeddings": 65536, "vocab_size": 152064}
    | {"rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default", "type": "default"}}
    | {"shared_expert_intermediate_size": 0, "use_qk_norm": True},
    # Of the smaller one as VeOmni has it beside its tests, with the number of layers and of experts that were released.
    "qwen3_vl_30b_a3b": _QWEN3_VL
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
    "qwen3_vl_235b_a22b": _QWEN3_VL
    | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
    | {"num_attention_heads": 64},
    "qwen1_5_moe_a2_7b": _QWEN2
    | {"hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
    | {"max_position_embeddings": 8192, "max_window_layers": 21, "sliding_window": 32768}
    | {"shared_expert_intermediate_size": 5632},
    "qwen2_57b_a14b": _QWEN2
    | {"hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8}
    | {"max_position_embeddings": 131072, "max_window_layers": 28, "sliding_window": 131072}
    | {"shared_expert_intermediate_size": 20480},
    "olmoe_1b_7b": _OLMOE
    | {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "vocab_size": 50304},
    "gpt_oss_20b": _GPT_OSS | {"layer_types": _TWO_KINDS * 12, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt_oss_120b": _GPT_OSS | {"layer_types": _TWO_KINDS * 18, "num_hidden_layers": 36, "num_local_experts": 128},
    "glm4_5_air": _GLM
    | {"first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408}
    | {"n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0, "use_qk_norm": False},
    "glm4_5": _GLM
    | {"first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    "minimax_m2": {"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62}
    | {"auto_map": {}, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536, "mtp_transformer_layers": 1}
    | {"max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62}
    | {"num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer"}
    | {"rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "use_mtp": True}
    | {"shared_intermediate_size": 0, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064},
    "lfm2_8b_a1b": {"model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "hidden_act": None}
    | {"conv_L_cache": 3, "conv_bias": False, "hidden_size": 2048, "intermediate_size": 7168, "norm_eps": 1e-05}
    | {"layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]}
    | {"max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_topk_prob": True, "num_experts": 32}
    | {"num_attention_heads": 32, "num_dense_layers": 2, "num_experts_per_tok": 4, "num_hidden_layers": 24}
    | {"num_key_value_heads": 8, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "tie_embedding": True}
    | {"tie_word_embeddings": True, "use_expert_bias": True, "vocab_size": 65536},
    "qwen3_next_80b_a3b": _DELTA
    | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1}
    | {"intermediate_size": 5120, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}
    | {"num_hidden_layers": 48, "output_router_logits": False, "partial_rotary_factor": 0.25, "rope_scaling": None}
    | {"rope_theta": 10000000, "use_sliding_window": False, "vocab_size": 151936},
    "qwen3_5_35b_a3b": _QWEN3_5 | {"num_hidden_layers": 40, "layer_types": _PERIOD * 10},
    "qwen3_5_122b_a10b": _QWEN3_5
    | {"hidden_size": 3072, "layer_types": _PERIOD * 12, "linear_num_value_heads": 64, "moe_intermediate_size": 1024}
    | {"num_attention_heads": 32, "num_hidden_layers": 48, "shared_expert_intermediate_size": 1024},
    "qwen3_5_397b_a17b": _QWEN3_5
    | {"hidden_size": 4096, "layer_types": _PERIOD * 15, "linear_num_value_heads": 64, "moe_intermediate_size": 1024}
    | {"num_attention_heads": 32, "num_hidden_layers": 60, "shared_expert_intermediate_size": 1024}
    | {"num_experts": 512, "num_experts_per_tok": 10},
    "nemotron_3_nano_30b_a3b": _NEMOTRON
    | {"hidden_size": 2688, "hybrid_override_pattern": _NANO, "intermediate_size": 1856, "mamba_num_heads": 64}
    | {"moe_intermediate_size": 1856, "moe_latent_size": None, "moe_shared_expert_intermediate_size": 3712}
    | {"n_routed_experts": 128, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52}
    | {"routed_scaling_factor": 2.5},
    "nemotron_3_super_120b_a12b": _NEMOTRON
    | {"hidden_size": 4096, "hybrid_override_pattern": _SUPER, "intermediate_size": 2688, "mamba_num_heads": 128}
    | {"moe_intermediate_size": 2688, "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376}
    | {"n_routed_experts": 512, "num_attention_heads": 32, "num_experts_per_tok": 22, "num_hidden_layers": 88}
    | {"routed_scaling_factor": 5.0, "mtp_hybrid_override_pattern": "*E", "time_step_limit": [0.0, float("inf")]},
    "nemotron_3_ultra_550b_a55b": _NEMOTRON
    | {"hidden_size": 8192, "intermediate_size": 5120, "mamba_num_heads": 256, "moe_intermediate_size": 5120}
    | {"layers_block_type": [_OLDER_PARTS[part] for part in _ULTRA], "mtp_layers_block_type": ["attention", "moe"]}
    | {"moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10240, "n_routed_experts": 512}
    | {"num_attention_heads": 64, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0}
    | {"time_step_limit": [0.0, 1e308]},
}


def config_of(mapping) -> Any:
    """Return the configuration that a config.json describes."""
    family = next(family for family in FAMILIES.values() if mapping["model_type"] in family.hub.types)
    return family.hub.read(family.config, mapping)


def test_published_keys_are_the_presets():
    """All of them are known. Settings of initial weights and of routing losses are those of the papers in presets."""
    apart = {"init_std": 1.0, "load_balance": 0.0, "load_balance_over": "batch", "z_loss": 0.0}
    for preset, keys in PUBLISHED.items():
        wanted: Any = moezoo.compose(f"model={preset}").model
        found = config_of(_ALL | keys)
        assert dataclasses.replace(found, **apart) == dataclasses.replace(wanted, **apart), preset


# quantization_config of published folders, and what is read of it.
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
_INT4 |= {"block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
_E4M3 = _INT4 | {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
_PER_TOKEN = _E4M3 | {"strategy": "token", "dynamic": True, "observer": None}
_GROUP = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
_TENSORS = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
_TENSORS |= {"ignore": ["lm_head", "re:.*self_attn.*"]}
FEW_BITS: dict[str, tuple[dict[str, Any], Format]] = {
    "DeepSeek-V3": (_FP8, FP8Blocks((128, 128))),
    "DeepSeek-V3.1": (_FP8 | {"scale_fmt": "ue8m0"}, FP8Blocks((128, 128))),
    "MiniMax-M2": (
        _FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]},
        FP8Blocks((128, 128)),
    ),
    "Mistral Large 3": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        FP8Blocks(None),
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        MXFP4Groups(),
    ),
    "Kimi K2 Thinking": (
        _TENSORS | {"format": "pack-quantized", "config_groups": {"group_0": _GROUP | {"weights": _INT4}}},
        Int4Groups(32),
    ),
    "GLM-4.5-FP8": (
        _TENSORS
        | {"format": "float-quantized", "global_compression_ratio": None}
        | {"config_groups": {"group_0": _GROUP | {"weights": _E4M3, "input_activations": _PER_TOKEN}}},
        FP8Channels(),
    ),
    "NVFP4 of compressed-tensors": (NVFP4_CONFIG, NVFP4Packed()),
    "GLM-5.2-NVFP4": (MODELOPT_CONFIG, NVFP4ModelOpt()),
}


@pytest.mark.parametrize("name", FEW_BITS)
def test_published_tables_of_few_bits_are_known(name):
    table, wanted = FEW_BITS[name]
    assert read_quantization({"quantization_config": table}) == wanted


NO_MODEL_TYPE = (
    {"query_scale": QueryScale(0.1)},
    {"index_topk": 8, "rope_pairs": "halves"},
    {"router": Choice("sigmoid")},
    {"router": Choice(groups=4, group_score="max", kept_groups=2)},
    {"router": Choice(gates="scores"), "index_topk": 8},
)


@pytest.mark.parametrize("changes", NO_MODEL_TYPE, ids=str)
def test_what_no_model_type_has_is_not_written(changes):
    with refused("no model type of transformers has these together: model.router.score=", "deepseek_v2, deepseek_v3"):
        DeepSeek.hub.write(deepseek_v3(**changes))


def test_the_two_lengths_of_mistral_4_are_one():
    config = dataclasses.replace(PLAIN["mistral4"], query_scale=QueryScale(0.1, 9))
    with refused("model.yarn.length=8 and model.query_scale.length=9: ", "make them equal"):
        DeepSeek.hub.write(config)


# (tiny model, what is changed, parts of the message).
UNWRITTEN: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("qwen3", {"norm_over": "nothing"}, ("model.norm_over=nothing: a qwen3_moe folder of it", "read as head")),
    ("qwen3", {"attention_bias": "inputs"}, ("model.attention_bias=inputs: a qwen3_moe folder", "read as all")),
    ("qwen3", {"shared_experts": 1}, ("model.shared_experts=1: a qwen3_moe folder", "read as 0")),
    ("qwen3", {"router": Choice(least_sum=0.1)}, ("model.router.least_sum=0.1: a qwen3_moe folder", "read as 0")),
    ("qwen3", {"model_type": "hy_v3"}, ("model.shared_experts=0: hy_v3", "at least 1")),
    ("qwen2", {"attention_bias": "all"}, ("model.attention_bias=all: a qwen2_moe folder", "read as inputs")),
    ("qwen2", {"norm_over": "head"}, ("model.norm_over=head: a qwen2_moe folder", "read as nothing")),
    ("qwen2", {"shared_mlp": 0}, ("model.shared_mlp=0: qwen2_moe", "at least 1")),
    ("glm", {"attention_bias": "all"}, ("model.attention_bias=all: a glm4_moe folder", "read as inputs")),
    ("glm", {"mlp_layers": (1,)}, ("model.mlp_layers=[1]: a glm4_moe folder", "read as []")),
    ("glm", {"window": 4}, ("model.window=4: a glm4_moe folder", "read as null")),
    ("minimax", {"mlp_layers": (0,)}, ("model.mlp_layers=[0]: a minimax_m2 folder",)),
    ("minimax", {"router": Choice()}, ("model.router.score=softmax: a minimax_m2 folder", "read as sigmoid")),
    ("solar", {"rotary_dims": 4}, ("model.rotary_dims=4: a solar_open folder", "read as null")),
    ("hy", {"rotary_dims": 4}, ("model.rotary_dims=4: a hy_v3 folder", "read as null")),
    ("ernie", {"rope_pairs": "halves"}, ("model.rope_pairs=halves: a ernie4_5_moe folder", "read as interleaved")),
    ("sarvam", {"attention_bias": "inputs"}, ("model.attention_bias=inputs: a sarvam_moe folder", "read as none")),
    ("v3", {"router": Choice("sigmoid", choice_bias="learned", least_sum=0.1)}, ("model.router.least_sum=0.1",)),
    (
        "v3",
        {"router": Choice("sigmoid", choice_bias="learned", added_to_sum=0.1)},
        ("model.router.added_to_sum=0.1", "only 1e-20"),
    ),
    ("qwen3", {"router": Choice(added_to_sum=0.1)}, ("model.router.added_to_sum=0.1: a qwen3_moe", "read as 1e-20")),
    ("mimo", {"sinks": "none"}, ("model.sinks=none: mimo_v2_flash in transformers has only windows",)),
    ("mimo", {"full_kv_heads": 2}, ("model.kv_heads=2: mimo_v2_flash in transformers has only 4",)),
    ("mimo", {"full_rope_base": None}, ("model.full_rope_base=null: all layers of MiMo-V2-Flash rotate",)),
    ("mimo", {"attention_bias": "all"}, ("model.attention_bias=all: mimo_v2_flash in transformers has only inputs",)),
    ("exaone", {"value_dim": 6}, ("model.value_dim=6: exaone_moe in transformers has only 8",)),
    ("exaone", {"full_rope_base": 9.0}, ("model.full_rope_base=9.0: exaone_moe in transformers has only null",)),
    ("afmoe", {"norms": "before"}, ("model.norms=before: afmoe in transformers has only around",)),
    ("afmoe", {"mlp_layers": (1,)}, ("model.mlp_layers=[1]: afmoe in transformers has only []",)),
]


@pytest.mark.parametrize(("name", "changes", "parts"), UNWRITTEN, ids=[f"{n} {next(iter(c))}" for n, c, _ in UNWRITTEN])
def test_models_that_transformers_lacks_are_not_written(name, changes, parts):
    config = dataclasses.replace(PLAIN[name], **changes)
    with refused(*parts):
        family_of(config).hub.write(config)


def test_layers_of_multi_token_prediction_are_not_loaded():
    """They follow the last layer, or have names of their own."""
    hub = family_of(PLAIN["glm"]).hub
    further = {"model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.weight", "model.mtp_block.0.weight"}
    left = {*further, "model.layers.1.extra"}
    found = hub.find_unused(left, {"model.layers.1.input_layernorm.weight"})
    assert found == dict.fromkeys(further, "multi-token prediction")
    further = {"model.mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.weight"}
    found = family_of(PLAIN["mimo"]).hub.find_unused({*further, "model.layers.1.extra"}, set())
    assert found == dict.fromkeys(further, "multi-token prediction")


def test_unknown_keys_without_a_value_are_harmless():
    for name, config in PLAIN.items():
        keys: dict[str, Any] = {"_unknown": 1, "unknown": None, "quantization_config": None}
        keys |= {} if name in ("gemma4", "llama4") else {"num_experts_per_tok": 2}  # another name of the key, in some
        assert config_of(keys_of(name) | keys) == config


def test_keys_of_glm_5_2_change_nothing():
    """The types of its layers have an older name too, and its router computes in float32, as all do here."""
    keys = {"index_share_for_mtp_iteration": True, "moe_router_dtype": "float32", "indexer_types": ["full", "shared"]}
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        assert config_of(keys_of("v3.2") | keys | {"layer_types": [kind] * 2}) == PLAIN["v3.2"]


def test_an_attention_factor_is_written_and_read_again():
    """Also without another factor; Mistral 4 always has the table of YaRN."""
    for name, factor in itertools.product(("qwen3", "v3", "gpt_oss", "mistral 4"), (1.0, 4.0)):
        yarn = dataclasses.replace(CONFIGS[name].yarn, factor=factor, length=8, attention_factor=1.7)
        config = dataclasses.replace(CONFIGS[name], yarn=yarn)
        assert config_of(family_of(config).hub.write(config)).yarn == yarn, name


TWO_BASES = ("gemma4", "mimo")  # of which one key at the top is not enough


def test_older_keys_of_rotary_positions_mean_the_same():
    """`rope_scaling` and `rope_theta` at the top, in the spelling of the first releases."""
    longer = {name: dataclasses.replace(PLAIN[name], yarn=YARN) for name in ("qwen3", "v2", "v3")}
    rotated = [config for name, config in PLAIN.items() if hasattr(config, "rope_base") and name not in TWO_BASES]
    for config in [*rotated, *longer.values()]:
        keys = family_of(config).hub.write(config)
        rope = keys.pop("rope_parameters")
        older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
        if (kind := rope.pop("rope_type")) != "default":
            older["rope_scaling"] = {"type": kind, **rope}
        assert config_of(keys | older) == config


def test_older_keys_of_rotary_positions_are_written_too():
    """They alone are as much, so that transformers 4 finds everything."""
    longer = {name: dataclasses.replace(PLAIN[name], yarn=YARN) for name in ("glm", "qwen3", "v2", "v3")}
    rotated = [config for name, config in PLAIN.items() if hasattr(config, "rope_base") and name not in TWO_BASES]
    for config in [*rotated, *longer.values()]:
        keys = family_of(config).hub.write(config)
        assert keys.pop("rope_parameters").keys() - {"rope_type"} <= keys.keys() | (keys["rope_scaling"] or {}).keys()
        assert config_of(keys) == config


def test_float64_becomes_float32(tmp_path):
    """Without a warning. A number that the dtype cannot hold is reported."""
    write_zeros(tmp_path, "mixtral")
    file, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    wide = {name: rng.standard_normal(array.shape) for name, array in load_file(file).items()}
    save_file(wide, file)
    model = moezoo.from_pretrained(tmp_path)
    assert model.embedding.weight.dtype == jnp.float32
    np.testing.assert_array_equal(model.embedding.weight, wide["model.embed_tokens.weight"].astype(np.float32))
    save_file(wide | {"lm_head.weight": np.full_like(wide["lm_head.weight"], 1e39)}, file)
    for dtype in ("bfloat16", "float16", None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moezoo.from_pretrained(tmp_path, dtype=dtype)
        (warning,) = caught
        assert str(warning.message).endswith("NaN or infinities: lm_head.weight")


def test_only_models_are_saved(tmp_path):
    with refused("save_pretrained: the first argument is a dict"):
        inspect.unwrap(moezoo.save_pretrained)({"model": 1}, tmp_path / "m")  # without the suite's check of types
    assert not (tmp_path / "m").exists()


def test_a_window_counts_only_where_it_is_used():
    """Released folders of Qwen3 name one that is not."""
    read = family_of(PLAIN["qwen3"]).hub.read
    for used, window in (({"use_sliding_window": False}, None), ({}, None), ({"use_sliding_window": True}, 8)):
        keys = {key: value for key, value in keys_of("qwen3").items() if key != "use_sliding_window"}
        config = read(type(PLAIN["qwen3"]), keys | {"sliding_window": 8, "max_window_layers": 0} | used)
        assert config.window == window


def test_missing_keys_of_hunyuan_have_the_numbers_of_its_published_configuration():
    """Those of transformers' class too; there is one shared expert, and gates are scaled."""
    missing = ("router_scaling_factor", "num_shared_experts", "rope_parameters", "initializer_range", "head_dim")
    keys = {key: value for key, value in keys_of("hy").items() if key not in missing}
    config = family_of(PLAIN["hy"]).hub.read(type(PLAIN["hy"]), keys)
    found = (config.router.scale, config.shared_experts, config.rope_base, config.init_std, config.head_dim)
    assert found == (2.826, 1, 11_158_840.0, 0.006, 128)


def test_missing_keys_of_a_router_have_the_numbers_of_deepseek_v3():
    """As in transformers."""
    missing = {"n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"}
    keys = {key: value for key, value in (_ALL | PUBLISHED["deepseek_v3"]).items() if key not in missing}
    wanted: Any = moezoo.compose("model=deepseek_v3").model
    assert config_of(keys).router == wanted.router
