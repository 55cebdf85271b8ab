"""What a file of a folder may not hold: one line with the file, the key and what is expected; no array is made."""

import json
import os
import re
import struct
from typing import Any

import numpy as np
import pytest
from few_bit_folders import FP8_CONFIG, NVFP4_GROUP, fp8_channels_config, int4_config
from refusals import by_table, refused
from safetensors.numpy import load_file, save_file
from tiny_models import keys_of, write_zeros

import moezoo
from moezoo.hub.few_bits import read_quantization
from moezoo.hub.folders import hub_model_config
from moezoo.hub.opening import read_config

TENSORS, CHANNELS = int4_config(), fp8_channels_config()
# Words in the tables: what stands between the brackets of an object.
WORDS: dict[str, dict[str, Any]] = {
    "DELTA": {"num_heads": 2, "head_dim": 5, "short_conv_kernel_size": 4},
    "YARN": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "FP8": FP8_CONFIG | {"weight_block_size": [128, 128]},
    "TENSORS": TENSORS,
    "E2M1": NVFP4_GROUP["weights"],
    "INT4": TENSORS["config_groups"]["group_0"]["weights"],
    "CHANNELS": CHANNELS,
    "E4M3": CHANNELS["config_groups"]["group_0"]["weights"],
}


def read(text: str) -> Any:
    """Return the value of some JSON; of a key that is there twice, the last value."""
    return json.loads(re.sub("|".join(WORDS), lambda word: json.dumps(WORDS[word[0]])[1:-1], text))


def change_keys(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model in `PLAIN`, or of one inside a model for images, with other keys."""
    if not name.startswith("kimi_k25"):
        return keys_of(name) | keys
    text = keys_of("v3") | {"model_type": "kimi_k2"} | (keys if name.endswith("text") else {})
    outer = {"model_type": "kimi_k25", "text_config": text, "ignore_index": -100, "tie_word_embeddings": False}
    return outer if name.endswith("text") else outer | keys


@by_table(
    r"""
    name => keys => line
    mixtral => {"model_type": ["mixtral"]} => unknown model_type '[mixtral]' ... valid:
    mixtral => {"model_type": {"a": 1}} => unknown model_type '{a: 1}' ... valid: afmoe
    mixtral => {"num_attention_heads": 0, "head_dim": null} => num_attention_heads=0 ... at least 1
    olmoe => {"num_attention_heads": 0} => num_attention_heads=0 ... at least 1
    qwen3 => {"num_attention_heads": "2", "head_dim": null} => num_attention_heads=2: expected a whole number
    mixtral => {"vocab_size": 1000000000000} => vocab_size=1000000000000 ... at most 2147483647
    mixtral => {"vocab_size": 1000000000000000000000000000000}
        => vocab_size=1000000000000000000000000000000 ... at most 2147483647
    qwen3 => {"num_hidden_layers": 2147483648} => num_hidden_layers=2147483648 ... at most 10000
    mixtral => {"vocab_size": true} => vocab_size=true: expected a whole number
    mixtral => {"max_position_embeddings": 0} => max_position_embeddings=0 ... at least 1
    v2 => {"max_position_embeddings": 0} => max_position_embeddings=0 ... at least 1
    mixtral => {"head_dim": 0} => head_dim=0 ... at least 1
    mixtral => {"head_dim": 7} => head_dim=7 must be ... a multiple of 2
    mixtral => {"num_attention_heads": 3} => num_attention_heads=3 ... num_key_value_heads=2 ... multiple of 2
    mixtral => {"rope_theta": 7.0} => rope_theta=7.0 and rope_parameters.rope_theta=100.0 are one setting ... delete
    qwen3 => {"rope_scaling": {YARN, "factor": 8.0}, "rope_parameters": {YARN}}
        => rope_scaling.factor=8.0 and rope_parameters.factor=4.0 are one setting ... delete
    mixtral => {"num_experts": 9} => num_local_experts=8 and num_experts=9 are one setting ... delete
    mixtral => {"router_jitter_noise": 0.1} => router_jitter_noise=0.1 ... only 0
    mixtral => {"attention_bias": true} => attention_bias=true ... only false
    mixtral => {"attention_dropout": 0.1} => attention_dropout=0.1 ... only 0
    mixtral => {"tie_word_embeddings": 0} => tie_word_embeddings=0: expected true or false
    mixtral => {"quantization_config": {"quant_method": "awq"}}
        => quantization_config.quant_method=awq ... another version
    mixtral => {"partial_rotary_factor": 0.5} => partial_rotary_factor=0.5 ... only 1
    mixtral => {"rope_parameters": {YARN}} => rope_type=yarn ... only default and llama3
    mixtral => {"\u001b[31mkey": 1} => '\x1b[31mkey'=1 ... does not know this key ... delete
    olmoe => {"head_dim": 8} => head_dim=8 ... only 4
    qwen3 => {"layer_types": ["full_attention"]} => layer_types=['full_attention'] ... does not know this key
    qwen3 => {"use_qk_norm": false} => use_qk_norm=false ... only true
    qwen3 => {"shared_expert_intermediate_size": 8} => shared_expert_intermediate_size=8 ... only 0
    qwen3 => {"use_sliding_window": true, "max_window_layers": 2} => max_window_layers=2 ... only 0
    qwen2 => {"use_sliding_window": true, "sliding_window": 5, "layer_types": null} => layer_types= ... only one window
    qwen2 => {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
        => layer_types names sliding_attention, and use_sliding_window=false
    qwen2 => {"shared_expert_intermediate_size": 0} => shared_expert_intermediate_size=0 ... at least 1
    qwen3 => {"mlp_only_layers": [0, 1, 2]} => decoder_sparse_step=1 ... mlp_only_layers=[0, 1, 2]
    qwen3 => {"mlp_only_layers": [1.0]} => mlp_only_layers[0]=1.0: expected a whole number
    gpt_oss => {"layer_types": ["full_attention", "full_attention"]}
        => layer_types names 2 layers ... num_hidden_layers=5
    gpt_oss => {"layer_types": ["chunked", "chunked", "chunked", "chunked", "chunked"]}
        => layer_types names 'chunked' ... full_attention
    gpt_oss => {"sliding_window": null} => sliding_window=null, but layer 0 of layer_types is sliding_attention
    gpt_oss => {"swiglu_limit": -1.0} => swiglu_limit=-1.0 ... above 0
    gemma4 => {"enable_moe_block": false, "num_experts": null}
        => enable_moe_block=false: a Gemma 4 without experts is not supported ... 26B-A4B
    gemma4 => {"enable_moe_block": null} => enable_moe_block=false: a Gemma 4 without experts is not supported
    gemma4 => {"hidden_size_per_layer_input": null} => hidden_size_per_layer_input=256: a Gemma 4 with an embedding per
    gemma4 => {"num_kv_shared_layers": 1} => num_kv_shared_layers=1: a Gemma 4 whose layers share keys and values is not
    gemma4 => {"use_bidirectional_attention": "all"} => use_bidirectional_attention=all ... only vision
    gemma4 => {"hidden_activation": "silu"} => hidden_activation=silu ... only gelu_pytorch_tanh
    gemma4 => {"per_layer_config": {"0": {"head_dim": 4}}}
        => per_layer_config gives layers of one kind other heads ... head_dim=8 and num_key_value_heads=2
    gemma4 => {"per_layer_config": {"1": {"sliding_window": 4}}} => per_layer_config.1.sliding_window=4: moezoo does not
    gemma4 => {"global_head_dim": 24}
        => global_head_dim=24 and per_layer_config, which has 16, are one setting ... delete
    gemma4 => {"num_global_key_value_heads": 4}
        => num_global_key_value_heads=4 and per_layer_config, which has 1, are one setting ... delete
    gemma4 => {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 9.0}}}
        => rope_parameters.sliding_attention is missing
    gemma4 => {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "rope_theta": 9.0}}}
        => rope_parameters.sliding_attention.rope_type=yarn: this family supports only default there
    llama4 => {"no_rope_layers": [1, 1, 1]} => no_rope_layers names 3 layers, but num_hidden_layers=2
    llama4 => {"no_rope_layers": [1, 2]} => no_rope_layers[1]=2: expected one of 0, 1
    llama4 => {"attention_chunk_size": null}
        => attention_chunk_size=null, but layer 0 of layer_types is chunked_attention
    llama4 => {"layer_types": ["chunked_attention", "sliding_attention"]} => layer_types names 'sliding_attention'
    llama4 => {"attn_temperature_tuning": "yes"} => attn_temperature_tuning=yes: expected true or false
    llama4 => {"attn_scale": -0.1} => attn_scale=-0.1 ... at least 0
    llama4 => {"moe_layers": []} => moe_layers=[] leaves no layer of num_hidden_layers=2 with experts
    llama4 => {"moe_layers": null, "interleave_moe_layer_step": 3} => interleave_moe_layer_step=3 leaves no layer of
    llama4 => {"interleave_moe_layer_step": 0} => interleave_moe_layer_step=0 ... at least 1
    llama4 => {"rope_parameters": {YARN}} => rope_type=yarn ... only default and llama3
    llama4 => {"use_qk_norm": 1} => use_qk_norm=1: expected true or false
    mimo => {"hybrid_layer_pattern": [1, 1, 0, 1]} => hybrid_layer_pattern=[1, 1, 0, 1] ... one setting; delete
    mimo => {"hybrid_layer_pattern": [0, 2, 0, 1]} => hybrid_layer_pattern=[0, 2, 0, 1]: expected 0 or 1
    mimo => {"layer_types": null, "hybrid_layer_pattern": [0, 1]}
        => layer_types or hybrid_layer_pattern names 2 layers, but num_hidden_layers=4
    mimo => {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]} => moe_layer_freq=[0, 1, 1, 1] ... delete
    mimo => {"sliding_window": 6} => sliding_window=6 and sliding_window_size=4 ... one setting; delete
    mimo => {"attention_chunk_size": 8} => attention_chunk_size=8 ... only 4
    mimo => {"swa_num_key_value_heads": 1} => swa_num_key_value_heads=1 ... only 2
    mimo => {"swa_num_attention_heads": 2} => swa_num_attention_heads=2 ... only 4
    mimo => {"swa_head_dim": 6} => swa_head_dim=6 ... only 8
    mimo => {"swa_v_head_dim": 8} => swa_v_head_dim=8 ... only 6
    mimo => {"add_full_attention_sink_bias": true} => add_full_attention_sink_bias=true ... only false
    mimo => {"add_swa_attention_sink_bias": false} => add_swa_attention_sink_bias=false ... only true
    mimo => {"n_shared_experts": 1} => n_shared_experts=1 ... only 0
    mimo => {"swa_rope_theta": 9.0} => swa_rope_theta=9.0 and rope_parameters.sliding_attention.rope_theta=50.0 are one
    mimo => {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}, "rope_theta": null}
        => rope_parameters.sliding_attention is missing
    mimo => {"partial_rotary_factor": 0.25} => partial_rotary_factor has the values [0.25, 0.5] ... one value
    mimo => {"rope_parameters": null, "partial_rotary_factor": 0.4} => partial_rotary_factor=3 ... a multiple of 2
    mimo => {"rope_parameters": null, "partial_rotary_factor": 1.5} => partial_rotary_factor=1.5 ... at most 1
    mimo => {"rope_scaling": {"type": "linear"}} => rope_scaling= ... another version
    mimo => {"layernorm_epsilon": 0.1} => rms_norm_eps=1e-05 and layernorm_epsilon=0.1 are one setting ... delete
    mimo => {"num_key_value_heads": 4} => swa_num_key_value_heads=2 ... only 8
    exaone => {"layer_types": null, "sliding_window_pattern": "LLG"} => sliding_window_pattern=LLG: expected a whole
    exaone => {"sliding_window": null} => sliding_window=null
    exaone => {"mlp_layer_types": ["dense"]} => mlp_layer_types names 1 layers, but num_hidden_layers=3
    exaone => {"num_shared_experts": 0} => num_shared_experts=0 ... at least 1
    exaone => {"rope_parameters": {YARN}} => rope_type=yarn ... only default
    exaone => {"attention_bias": true} => attention_bias=true ... only false
    afmoe => {"attention_bias": true} => attention_bias=true ... only false
    afmoe => {"n_group": 2} => n_group=2 ... only 1
    afmoe => {"route_norm": false} => route_norm=false ... only true
    afmoe => {"num_dense_layers": 3} => num_dense_layers=[0, 1, 2] leaves no layer of num_hidden_layers=3 with experts
    sarvam => {"use_qkv_bias": true} => use_qkv_bias=true ... only false
    gpt_oss => {"experts_per_token": 3} => experts_per_token=3 ... only 2
    glm => {"use_qk_norm": 1} => use_qk_norm=1: expected true or false
    glm => {"n_shared_experts": 0} => n_shared_experts=0 ... at least 1
    glm => {"n_group": 3} => n_routed_experts=8 ... n_group=3
    glm => {"first_k_dense_replace": 2} => first_k_dense_replace=2 ... no layer of num_hidden_layers=2
    glm => {"rope_parameters": {"partial_rotary_factor": 0.4}} => partial_rotary_factor=3 ... a multiple of 2
    glm => {"rope_parameters": {"partial_rotary_factor": 1.5}} => partial_rotary_factor=1.5 ... at most 1
    minimax => {"rotary_dim": 6} => rotary_dim=6 and partial_rotary_factor=0.5 are one setting ... delete
    minimax => {"attn_type_list": [1, 0]} => attn_type_list=[1, 0] ... only [1, 1]
    minimax => {"qk_norm_type": "per_head"} => qk_norm_type=per_head ... only per_layer
    minimax => {"use_routing_bias": false} => use_routing_bias=false ... only true
    minimax => {"shared_intermediate_size": 8} => shared_intermediate_size=8 ... only 0
    minimax => {"sliding_window": 8} => sliding_window=8 ... another version
    hy => {"mlp_layer_types": ["dense"]} => mlp_layer_types names 1 layers ... num_hidden_layers=3
    hy => {"first_k_dense_replace": 2} => first_k_dense_replace=2 contradicts mlp_layer_types ... delete
    hy => {"expert_hidden_dim": 8} => expert_hidden_dim=8 ... only 12
    hy => {"route_norm": false} => route_norm=false ... only true
    dots => {"layer_types": ["full_attention", "sliding_attention"]} => layer_types= ... only one window
    dots => {"layer_types": null, "max_window_layers": 1} => layer_types= ... max_window_layers=1
    dots => {"moe_layer_freq": 2} => moe_layer_freq=2 ... only 1
    ernie => {"use_bias": true} => use_bias=true ... only false
    ernie => {"moe_norm_min": -1.0} => moe_norm_min=-1.0 ... at least 0
    ernie => {"moe_layer_start_index": 2} => moe_layer_interval=1 ... moe_layer_start_index=2 ... no layer
    v3 => {"n_group": 0} => n_group=0 ... at least 1
    v3 => {"n_group": 3} => n_routed_experts=8 ... n_group=3
    v3 => {"topk_group": 0} => topk_group=0 ... at least 1
    v3 => {"first_k_dense_replace": 2} => first_k_dense_replace=2 must be below num_hidden_layers=2
    v3 => {"n_shared_experts": false} => n_shared_experts=false: expected a whole number
    v3 => {"norm_topk_prob": "no"} => norm_topk_prob=no: expected true or false
    v3 => {"moe_layer_freq": 2} => moe_layer_freq=2 ... only 1
    v3 => {"scoring_func": "softmax"} => scoring_func=softmax ... only sigmoid
    v3 => {"topk_method": "greedy"} => topk_method=greedy ... only noaux_tc
    v3 => {"num_key_value_heads": 1} => num_key_value_heads=1 ... only 4
    v3 => {"gated_attention": true} => gated_attention=true ... does not know this key
    v3 => {"gated_attention": true, "stem": 2, "hidden_act": "gelu", "_a": 1, "b": null}
        => hidden_act=gelu: this family supports only silu or swish
    v3 => {"gated_attention": true, "stem": 2, "attention_bias": true, "_a": 1, "b": null}
        => attention_bias=true: this family
    v3 => {"gated_attention": true, "stem": 2, "mlp_bias": true, "_a": 1, "b": null}
        => gated_attention=true, stem=2: moezoo does not know these keys ... delete those that do not
    v3 => {"qk_head_dim": 15} => qk_head_dim=15 ... only 14
    v3 => {"mlp_layer_types": ["dense", "sparse"]} => mlp_layer_types=['dense', 'sparse'] ... does not know this key
    v3 => {"index_topk": 8} => index_topk=8 ... does not know this key
    v3 => {"model_type": "glm4_moe_lite", "first_k_dense_replace": 0} => first_k_dense_replace=0 ... only 1
    v3 => {"model_type": "glm4_moe_lite", "head_dim": 14} => head_dim=14 ... only 8
    v3.2 => {"mlp_layer_types": ["sparse", "dense"]} => mlp_layer_types=[sparse, dense] ... dense before all sparse
    v3.2 => {"mlp_layer_types": ["sparse", "moe"]} => mlp_layer_types[1]=moe: expected one of dense, sparse
    v3.2 => {"mlp_layer_types": ["sparse", "sparse"]} => first_k_dense_replace=1 contradicts mlp_layer_types=[sparse, sp
    kimi linear => {"mlp_layer_types": ["dense", "dense"]} => first_k_dense_replace=1 contradicts ... the wrong one
    v3 => {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense"], "first_k_dense_replace": 2}
        => mlp_layer_types=2 must be below num_hidden_layers=2
    v3.2 => {"layer_types": ["full_attention", "full_attention"]}
        => layer_types names 'full_attention' ... expected indexed_attention
    v3.2 => {"layer_types": ["indexed_attention"]} => layer_types names 1 layers, but num_hidden_layers=2
    v3.2 => {"moe_router_dtype": "bfloat16"} => moe_router_dtype=bfloat16 ... only float32
    v3.2 => {"rope_interleave": false} => rope_interleave=false ... only true
    kimi linear => {"linear_attn_config": {"full_attn_layers": [0], "kda_layers": [1], DELTA}}
        => linear_attn_config.full_attn_layers and kda_layers name layer 0 1 times ... from 1 to num_hidden_layers=2
    kimi linear => {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2], DELTA}}
        => linear_attn_config.full_attn_layers and kda_layers name layer 1 2 times
    kimi linear => {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [], DELTA}}
        => linear_attn_config.full_attn_layers and kda_layers name layer 2 0 times
    kimi linear => {"linear_attn_config": {"full_attn_layers": [], "kda_layers": [1, 2, 3], DELTA}}
        => linear_attn_config.full_attn_layers and kda_layers name layer 3 1 times
    kimi linear => {"linear_attn_config": {"kda_layers": [1, 2], DELTA}}
        => linear_attn_config has kda_layers alone ... write both
    kimi linear => {"linear_attn_config": {DELTA}}
        => linear_attn_config.full_attn_layers and kda_layers name layer 1 0 times
    kimi linear => {"layer_types": ["linear_attention", "full_attention"]}
        => linear_attn_config.full_attn_layers=[1], from 1, contradicts layer_types ... delete
    kimi linear => {"layer_types": ["full_attention"]} => layer_types names 1 layers
    kimi linear => {"linear_head_dim": 7} => linear_attn_config.head_dim and linear_head_dim are one setting ... delete
    kimi linear => {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}}
        => linear_attn_config.num_heads and linear_num_heads are missing
    kimi linear => {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2], DELTA, "lowest": -5}}
        => linear_attn_config.lowest=-5: moezoo does not know this key
    kimi linear => {"mla_use_nope": false} => mla_use_nope=false ... only true
    kimi linear => {"moe_router_activation_func": "softmax"} => moe_router_activation_func=softmax ... only sigmoid
    kimi linear => {"use_grouped_topk": false} => use_grouped_topk=false with num_expert_group=4
    kimi linear => {"tie_word_embeddings": true} => tie_word_embeddings=true ... only false
    kimi linear => {"num_key_value_heads": 1} => num_key_value_heads=1 ... only 4
    solar => {"partial_rotary_factor": 0.5} => partial_rotary_factor=0.5 ... only 1
    solar => {"first_k_dense_replace": 1} => first_k_dense_replace=1 ... only 0
    nemotron => {"hybrid_override_pattern": "MEM-"} => hybrid_override_pattern=MEM- contradicts layers_block_type
    nemotron => {"layers_block_type": ["moe", "rnn"]} => layers_block_type names rnn: expected linear_attention or
    nemotron => {"num_hidden_layers": 5} => num_hidden_layers=5, but hybrid_override_pattern names 4 layers
    nemotron => {"hybrid_override_pattern": "M*--", "layers_block_type": null}
        => hybrid_override_pattern=M*-- has no layer with experts (E) ... load another model
    nemotron => {"hybrid_override_pattern": "MExE", "layers_block_type": null}
        => hybrid_override_pattern names x ... expected M for Mamba-2
    nemotron => {"time_step_limit": [0.0]} => time_step_limit=[0.0]: expected one list of two numbers
    nemotron => {"n_groups": 3} => mamba_num_heads=4 is not a multiple of n_groups=3
    nemotron => {"use_bias": true} => use_bias=true ... only false
    nemotron => {"mlp_hidden_act": "silu"} => mlp_hidden_act=silu ... only relu2
    nemotron => {"n_shared_experts": 2} => n_shared_experts=2 ... only 1
    lfm2 => {"layer_types": null} => layer_types is missing; write 'full_attention' or 'conv' for each layer
    lfm2 => {"layer_types": ["conv", "sliding_attention"]} => layer_types names 'sliding_attention' ... or conv
    lfm2 => {"num_dense_layers": 2} => num_dense_layers=2 must be below num_hidden_layers=2
    lfm2 => {"tie_embedding": false} => tie_word_embeddings=True and tie_embedding=False are one setting
    lfm2 => {"rms_norm_eps": 1e-06} => rms_norm_eps=1e-06: moezoo does not know this key
    lfm2 => {"rope_parameters": {"rope_type": "llama3"}} => rope_type=llama3 ... only default and yarn
    lfm2 => {"conv_L_cache": 0} => conv_L_cache=0 ... at least 1
    v3.2 => {"q_lora_rank": null} => index_topk=8 needs q_lora_rank
    v3.2 => {"index_topk": 0} => index_topk=0 ... at least 1
    mistral4 => {"scoring_func": "sigmoid"} => scoring_func=sigmoid ... only softmax
    mistral4 => {"head_dim": 8} => head_dim=8 ... only 14
    mistral4 => {"rope_parameters": {YARN}} => rope_parameters.llama_4_scaling_beta is missing
    mistral4 => {"rope_parameters": {"llama_4_scaling_beta": 0.1}} => rope_type=default ... only yarn
    mistral4 => {"rope_parameters": {YARN, "llama_4_scaling_beta": -1}} => llama_4_scaling_beta=-1.0 ... at least 0
    mistral4 => {"rope_parameters": {YARN, "llama_4_scaling_beta": 0}, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": false} => llama_4_scaling_beta=0, n_group=1 and norm_topk_prob=false are not built together
    mistral4 => {"rope_parameters": {YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}}
        => partial_rotary_factor=0.5: expected 0.571 ... qk_rope_head_dim=8
    v2 => {"scoring_func": "sigmoid"} => scoring_func=sigmoid ... only softmax
    v2 => {"topk_method": "noaux_tc"} => topk_method=noaux_tc: expected one of greedy, group_limited_greedy
    v2 => {"norm_topk_prob": true} => norm_topk_prob=true ... only false
    v3 => {"rope_parameters": {YARN, "rope_theta": 1}} => rope_theta=1.0 ... greater than 1
    v3 => {"rope_parameters": {YARN, "beta_fast": 0}} => beta_fast=0.0 ... above 0
    v3 => {"rope_parameters": {YARN, "factor": 0}} => factor=0.0 ... at least 1
    v3 => {"rope_parameters": {YARN, "truncate": null}} => rope_parameters.truncate=null: expected true or false
    v3 => {"rope_parameters": {YARN, "long_factor": [1]}} => rope_parameters.long_factor=[1] ... does not know
    v3 => {"rope_scaling": {YARN, "partial_rotary_factor": 0.5}, "rope_parameters": null}
        => rope_scaling.partial_rotary_factor=0.5
    kimi_k25 => {"text_config": null} => text_config is missing ... kimi_k25
    kimi_k25 => {"text_config": [1]} => text_config=[1]: expected a table
    kimi_k25 text => {"model_type": null} => text_config has no model_type ... deepseek_v3
    kimi_k25 text => {"model_type": "kimi_k25"} => text_config: unknown model_type 'kimi_k25'
    kimi_k25 text => {"n_group": 3} => text_config.n_routed_experts=8 ... n_group=3
    kimi_k25 text => {"hidden_size": "x"} => text_config.hidden_size=x: expected a whole number
    kimi_k25 text => {"gated_attention": true} => text_config.gated_attention=true ... does not know
    kimi_k25 text => {"quantization_config": {"bits": 4}} => text_config.quantization_config.quant_method is missing
    kimi_k25 => {"quantization_config": {"bits": 4}} => quantization_config.quant_method is missing
    kimi_k25 => {"tie_word_embeddings": "x"} => tie_word_embeddings=x: expected true or false
    kimi_k25 => {"n_group": 2} => n_group=2: moezoo does not know this key
    kimi_k25 => {"model_type": "mistral3"} => ignore_index=-100: moezoo does not know this key
    kimi_k25 => {"model_type": "mistral33"} => unknown model_type 'mistral33'; deepseek_v3 knows all of the keys of its
        text_config, which does not make it the same model; docs/model_types.md
    """
)
def test_keys(tmp_path, name, keys, line):
    (tmp_path / "config.json").write_text(json.dumps(change_keys(name, read(keys))))
    with refused(f"{tmp_path}/config.json: {line}"):
        moezoo.from_pretrained(tmp_path)


def test_a_long_list_of_keys_is_cut(tmp_path):
    keys = {f"stem_kernel_{number:02}": number for number in range(40)}
    (tmp_path / "config.json").write_text(json.dumps(keys_of("v3") | keys))
    with refused(
        f"{tmp_path}/config.json: stem_kernel_00=0, ", ", stem_kernel_12=12 and 27 more: moezoo does not know"
    ):
        read_config(tmp_path)


@by_table(
    """
    name => keys => line
    mixtral => {} => mixtral knows all of its keys, which does not make it the same model; docs/model_types.md
    v3.2 => {} => deepseek_v32 knows all of its keys
    gpt_oss => {} => gpt_oss knows all of its keys
    qwen3.5 => {} => qwen3_5_moe_text knows all of its keys
    qwen3 => {"linear_dim": 8, "linear_heads": [1, 2]}
        => it is a model of its own: qwen3_moe knows most of its keys, but not linear_dim, linear_heads; docs
    qwen3 => {"mlp_bias": true, "hidden_act": "gelu"}
        => it is a model of its own: qwen3_moe knows most of its keys, has no hidden_act=gelu, mlp_bias=true; docs
    qwen3 => {"num_experts": null, "num_experts_per_tok": null} => moezoo finds no experts in its keys, and
    qwen3 => {"num_experts": {"a": 1}, "rope_parameters": [1], "hidden_size": "x"} => qwen3_moe knows all of its keys
    qwen3 => {"text_config": {"num_experts": 4, "window": 3}} => valid: afmoe
    qwen3 => {"text_config": {"hidden_size": 4}} => moezoo finds no experts in the keys of its text_config
    """
)
def test_a_type_that_is_not_read(tmp_path, name, keys, line):
    """The keys beside those of the nearest type are named; none of the messages proposes another type."""
    (tmp_path / "config.json").write_text(json.dumps(keys_of(name) | {"model_type": "qwen3_moe_2"} | json.loads(keys)))
    with refused(f"{tmp_path}/config.json: unknown model_type 'qwen3_moe_2'; {line}"):
        read_config(tmp_path)


@by_table(
    """
    table => line
    {"quant_method": "bitsandbytes", "load_in_4bit": true} => .quant_method=bitsandbytes: READ
    {"quant_method": "gptq", "bits": 4} => .quant_method=gptq: READ ... another version
    {"quant_method": "awq", "bits": 4} => .quant_method=awq: READ ... to bfloat16 first
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"} => .quant_algo=MIXED_PRECISION: READ
    {"quant_method": "modelopt"} => .quant_algo=null: READ
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32} => .group_size=32 ... only 16
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "quantized_layers": {"a": 1}} => .quantized_layers= ... know
    {"quant_method": 8} => .quant_method=8: expected
    {"bits": 4} => .quant_method is missing
    ["fp8"] => =['fp8']: expected a table
    {FP8, "fmt": "e5m2"} => .fmt=e5m2 ... only e4m3
    {FP8, "weight_block_size": [128]} => .weight_block_size=[128]: expected two sizes
    {FP8, "weight_block_size": [0, 128]} => .weight_block_size= ... at least 1
    {FP8, "weight_block_size": "128"} => .weight_block_size=128: expected
    {FP8, "expert_dtype": "fp4"} => .expert_dtype=fp4: moezoo does not know this key
    {TENSORS, "num_bits": 4} => .num_bits=4: moezoo does not know
    {TENSORS, "format": "float-quantized"} => .config_groups.group_0.weights.num_bits=4: READ
    {TENSORS, "format": "naive-quantized"} => .format=naive-quantized: READ
    {TENSORS, "format": "nvfp4-pack-quantized"} => .config_groups.group_0.weights.type=int: READ
    {TENSORS, "format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": {E2M1, "group_size": 32}}}}
        => .config_groups.g.weights.group_size=32: READ
    {TENSORS, "format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": {E2M1, "symmetric": false}}}}
        => .config_groups.g.weights.symmetric=false: READ
    {TENSORS, "format": "nvfp4-pack-quantized", "kv_cache_scheme": {"num_bits": 8}} => .kv_cache_scheme=
    {TENSORS, "format": "mxfp4-pack-quantized"} => .format=mxfp4-pack-quantized: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "num_bits": 3}}}} => .config_groups.g.weights.num_bits=3: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "num_bits": 5}}}} => .config_groups.g.weights.num_bits=5: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "num_bits": 8}}}} => .config_groups.g.weights.num_bits=8: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "symmetric": false}}}}
        => .config_groups.g.weights.symmetric=false: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "type": "float", "group_size": 16}}}}
        => .config_groups.g.weights.type=float: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "strategy": "channel", "group_size": -1}}}}
        => .config_groups.g.weights.strategy=channel: READ
    {TENSORS, "config_groups": {"g": {"weights": {INT4, "group_size": 0}}}}
        => .config_groups.g.weights.group_size=0 must be at least 1
    {TENSORS, "config_groups": null} => .config_groups has 0 sizes of groups: READ
    {TENSORS, "config_groups": {"a": {"weights": null}}} => .config_groups.a has no weights: READ
    {TENSORS, "config_groups": {"a": {"weights": {INT4}}, "b": {"weights": {INT4, "group_size": 64}}}}
        => .config_groups has 2 sizes of groups
    {TENSORS, "config_groups": {"a": {"weights": {INT4}, "input_activations": {"num_bits": 8}}}}
        => .config_groups.a.input_activations=
    {TENSORS, "kv_cache_scheme": {"num_bits": 8}} => .kv_cache_scheme=
    {CHANNELS, "kv_cache_scheme": {"num_bits": 8}} => .kv_cache_scheme=
    {CHANNELS, "config_groups": {}} => .config_groups has no group: READ
    {CHANNELS, "config_groups": {"a": {"weights": {E4M3}}, "b": {"weights": {E4M3, "strategy": "tensor"}}}}
        => .config_groups.b.weights.strategy=tensor: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "strategy": "block", "block_structure": [128, 128]}}}}
        => .config_groups.g.weights.strategy=block: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "type": "int"}}}} => .config_groups.g.weights.type=int: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "symmetric": false}}}}
        => .config_groups.g.weights.symmetric=false: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "dynamic": true}}}}
        => .config_groups.g.weights.dynamic=true: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "group_size": 128}}}}
        => .config_groups.g.weights.group_size=128: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "block_structure": [128, 128]}}}}
        => .config_groups.g.weights.block_structure=[128, 128]: READ
    {CHANNELS, "config_groups": {"g": {"weights": {E4M3, "rotation": "hadamard"}}}}
        => .config_groups.g.weights.rotation=hadamard: moezoo does not know this key
    """
)
def test_schemes_of_few_bits(table, line):
    reads = (
        "moezoo reads fp8, mxfp4, nvfp4, and compressed-tensors with pack-quantized integers of 4 bits or FP8 per "
        "channel"
    )
    with refused(f"config.json: quantization_config{line.replace('READ', reads)}"):
        read_quantization({"quantization_config": read(table)})


@by_table(
    """
    file => line
    {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}} => : quantization.quant_algo=FP8: moezoo reads
    {"quantization": {"quant_algo": "NVFP4", "group_size": 32}} => : quantization.group_size=32 ... only 16
    {"quantization": {"quant_algo": "NVFP4_AWQ", "group_size": 16}} => : quantization.quant_algo=NVFP4_AWQ: moezoo reads
    {"quantization": {"quant_algo": ["FP8"]}} => : quantization.quant_algo=[FP8]: moezoo reads
    {"quantization": "NVFP4"} => has no table quantization; download it again
    {"quant_algo": "NVFP4"} => has no table quantization; download it again
    """
)
def test_schemes_in_a_file_of_their_own(tmp_path, file, line):
    """Beside a config.json that says nothing of few bits, for folders of language models and those around them."""
    for name, keys in (("mixtral", keys_of("mixtral")), ("kimi", change_keys("kimi_k25", {}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(keys))
        (tmp_path / name / "hf_quant_config.json").write_text(file)
        with refused(f"{tmp_path / name}/hf_quant_config.json", line):
            hub_model_config(tmp_path / name)


@pytest.mark.parametrize("algorithm", ['{"quant_algo": null, "kv_cache_quant_algo": "FP8"}', "{}"])
def test_a_file_that_states_no_scheme_of_weights(tmp_path, algorithm):
    write_zeros(tmp_path, "mixtral")
    (tmp_path / "hf_quant_config.json").write_text(f'{{"quantization": {algorithm}}}')
    moezoo.from_pretrained(tmp_path)


@by_table(
    """
    name => keys => line
    mixtral => {"num_hidden_layers": 10000} => num_hidden_layers=10000 ... 2 layers
    qwen3 => {"num_hidden_layers": 1000000000} => num_hidden_layers=1000000000 ... at most 10000
    gpt_oss => {"num_hidden_layers": 10001} => num_hidden_layers=10001 must be ... at most 10000
    v3 => {"num_hidden_layers": 10000} => num_hidden_layers=10000 ... 2 layers
    mixtral => {"num_local_experts": 100000000} => num_local_experts=100000000 ... 8 experts
    mixtral => {"vocab_size": 2000000000} => embed_tokens.weight ... [40, 16] ... [2000000000, 16]
    v3 => {"intermediate_size": 2000000000} => gate_proj.weight ... [20, 16] ... [2000000000, 16]
    mixtral => {"num_attention_heads": 2000000000, "head_dim": 2000000000}
        => q_proj.weight ... [32, 16] ... [4000000000000000000, 16]
    """
)
def test_sizes_are_compared_before_anything_is_built(tmp_path, name, keys, line):
    write_zeros(tmp_path, name, **read(keys))
    for load in (moezoo.from_pretrained, hub_model_config) if "layers" in line else (moezoo.from_pretrained,):
        with refused(f"{tmp_path} ... {line}"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
        (b'{"model_type": ' + b"[" * 400 + b"]" * 400 + b"}", "is nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON (Exceeds the limit (4300 digits)"),
        (b'{"rms_norm_eps": NaN}', "is not JSON (NaN is no number"),
        (b'{"rope_theta": -Infinity}', "is not JSON (-Infinity is no number"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "is not JSON (an object has the key vocab_size twice)"),
        (b'{"\\u001b[1m": 1, "\\u001b[1m": 2}', "is not JSON (an object has the key '\\x1b[1m' twice)"),
        (bytes(range(128, 256)), "is binary data, expected JSON in UTF-8"),
        ('{"model_type": "mixtral"}'.encode("utf-16"), "is UTF-16 text, expected JSON in UTF-8"),
        (b"[1]", "is not a JSON object"),
    ],
)
def test_text_that_is_no_configuration(tmp_path, text, line):
    (tmp_path / "config.json").write_bytes(text)
    with refused(f"{tmp_path}/config.json {line}", "download it again"):
        moezoo.from_pretrained(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_only_regular_files_are_opened(tmp_path, file):
    """A pipe would never end."""
    write_zeros(tmp_path, "mixtral")
    path = tmp_path / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with refused(f"{path} is a pipe, not a file"):
        moezoo.from_pretrained(tmp_path)
    path.unlink()
    path.mkdir()
    with refused(f"{path} is a folder"):
        moezoo.from_pretrained(tmp_path)


def change(edit):
    """Return what changes the tensors of a file by a function of them."""
    return lambda path: save_file(edit(load_file(path)), path)


def add(*names):
    return change(lambda tensors: tensors | dict.fromkeys(names, np.ones(2, np.float32)))


def cut(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def change_header(edit):
    """Return what changes the text of a safetensors header."""

    def write(path):
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = edit(data[8:end].decode().rstrip()).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])

    return write


def repeat_a_tensor(header):
    """Return a header whose tensor lm_head.weight is there twice."""
    start = header.index('"lm_head.weight"')
    return f"{header[:-1]},{header[start : header.index('}', start) + 1]}}}"


def index(**where):
    """Return what writes an index that places some tensors in other files."""

    def write(path):
        names = dict.fromkeys(load_file(path), path.name) | where
        (path.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return write


def deepen(header):
    return '{"__metadata__":' + "[" * 10**5 + "]" * 10**5 + "," + header[1:]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (change(lambda tensors: {}), "hold no tensor ... download"),
        (cut(0), "cannot be read ... 0 bytes ... download"),
        (cut(40), "cannot be read ... 40 bytes"),
        (lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"), "cannot be read ... 10 bytes"),
        (change_header(repeat_a_tensor), "lm_head.weight twice"),
        (change_header(deepen), "header is nested too deeply"),
        (change_header(lambda header: header.replace('"F32"', '"\\u001b[1m"', 1)), "cannot be read ... download"),
        (add("\x1b[31mred"), "1 tensor is not in the model ... '\\x1b[31mred'"),
        (add(f"model.layers.{'9' * 5000}.norm"), "1 tensor is not in the model ... model.layers.999"),
        (add(*(f"extra_{i}" for i in range(100))), "100 tensors are not in the model ... extra_0 ... and 40 more"),
        (
            index(**{"lm_head.weight": "\ud800.safetensors"}),
            "places lm_head.weight in '\\ud800.saf ... do not trust it",
        ),
        (index(**{"\ud800": "model.safetensors"}), "has no '\\ud800' but the index"),
    ],
)
def test_damaged_safetensors(tmp_path, spoil, line):
    write_zeros(tmp_path, "mixtral")
    spoil(tmp_path / "model.safetensors")
    with refused(f"{tmp_path} ... {line}"):
        moezoo.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["foo", "int8", "float64", "float8_e4m3fn", "", np.complex64, np.bool_])
def test_parameters_have_a_dtype_of_weights(tmp_path, dtype):
    write_zeros(tmp_path, "mixtral")
    shown = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    with refused(f"dtype={shown}: expected one of bfloat16, float16, float32"):
        moezoo.from_pretrained(tmp_path, dtype=dtype)
