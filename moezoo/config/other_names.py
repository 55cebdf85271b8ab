"""The names that other programs and older versions have for our keys and meshes, so that an error can name ours."""

import re
from collections.abc import Collection

from moezoo.errors import UserError

# The version that wrote the old keys. It can read and continue runs that have them.
BEFORE = "0.1"
# Old key -> new key: settings of the router and of YaRN were beside the others.
_ROUTER = ("score", "groups", "kept_groups", "group_score", "choice_bias", "bias_rate")
_YARN = ("factor", "length", "beta_fast", "beta_slow", "mscale", "mscale_all")
RENAMED = {f"model.{name}": f"model.router.{name}" for name in _ROUTER}
RENAMED |= {"model.expert_weights": "model.router.gates", "model.expert_scale": "model.router.scale"}
RENAMED |= {f"model.yarn_{name}": f"model.yarn.{name}" for name in _YARN}
# What other programs call a key -> our key.
_KEYS = {
    word: key
    for key, words in {
        "epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs",
        "steps": "iters iterations max_iters max_steps num_steps total_steps train_steps",
        "seed": "random_seed rng",
        "batch_size": "batch batchsize bs global_batch_size",
        "seq_len": "block_size context_length ctx max_len max_seq_len n_ctx seqlen sequence_length",
        "run_dir": "exp_dir log_dir logdir name out out_dir output output_dir save_dir",
        "init_from": "base_model finetune_from folder from_pretrained init model_name_or_path pretrained",
        "resume": "checkpoint ckpt from_checkpoint load restore",
        "log_every": "log log_interval logging_steps",
        "eval_every": "eval eval_interval eval_steps",
        "eval_patience": "early_stopping early_stopping_patience patience",
        "checkpoint_every": "save save_every save_interval save_steps",
        "data": "dataset",
        "data.path": "data_path dataset_path path",
        "execution.dtype": "amp bf16 compute_dtype fp16 precision",
        "execution.pipeline.chunks": "circular_repeats num_pipeline_repeats virtual_pipeline_model_parallel_size",
        "execution.microbatches": "accumulate accumulation grad_accum gradient_accumulation "
        "gradient_accumulation_steps micro_batches num_microbatches",
        "optimizer.learning_rate": "learningrate lr max_lr peak_lr",
        "optimizer.weight_decay": "decay wd",
        "optimizer.clip_norm": "clip grad_clip gradient_clipping max_grad_norm",
        "optimizer.epsilon": "eps",
        "schedule.warmup_steps": "warmup warmup_iters",
        "model.vocab": "n_vocab vocab_size",
        "model.embed": "d_model dim hidden hidden_dim hidden_size n_embd width",
        "model.layers": "depth n_layer n_layers num_hidden_layers num_layers",
        "model.heads": "n_head n_heads num_attention_heads num_heads",
        "model.kv_heads": "n_kv_heads num_key_value_heads",
        "model.experts": "n_experts num_experts num_local_experts",
        "model.experts_per_token": "num_experts_per_tok top_k topk",
        "model.expert_mlp": "d_ff ffn intermediate_size",
        "model.max_length": "max_position_embeddings",
        "model.tied_embeddings": "tie_embeddings tie_word_embeddings",
        "mesh": "device devices gpus",
        "mesh.stage": "pipeline pipeline_parallel_size pp",
        "mesh.data": "dp",
        "mesh.expert": "ep",
        "mesh.context": "cp sp",
        "mesh.tensor": "tp",
    }.items()
    for word in words.split()
}
# How mesh axes are called in names such as ep4_dp2 -> our key.
_AXES = {word: key for word, key in _KEYS.items() if key.startswith("mesh.")}
_AXES |= {axis: f"mesh.{axis}" for axis in ("stage", "data", "fsdp", "expert", "context", "tensor")}
_PART = re.compile(rf"({'|'.join(_AXES)})(\d+)")


def check_name(key: str, top: Collection[str]) -> None:
    """Raise `UserError` for a key that other programs have and we call otherwise; `top` are our keys at the top."""
    section, _, name = key.rpartition(".")
    ours = _KEYS.get(name, "")
    elsewhere = ours.startswith(f"{section}.") if section else name not in top
    if ours not in ("", key) and elsewhere:
        meaning = ", the folder or run to start from" * (ours == "init_from")
        raise UserError(f"{key}: there is no key '{key}'; did you mean '{ours}'{meaning}?")


def suggest_axes(name: str) -> str:
    """Return the keys and values that the unknown name of a mesh stands for; empty if it does not name axes."""
    parts = [_PART.fullmatch(part) for part in name.split("_")]
    return " ".join(f"{_AXES[part[1]]}={part[2]}" for part in parts if part) if all(parts) else ""
