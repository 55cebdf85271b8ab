"""Run transformers' model of a Hugging Face folder and record the input and output of its modules.

In moezoo only this module imports PyTorch and transformers.
"""

import contextlib
import functools
import importlib.util
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moezoo.errors import UserError
from moezoo.host.files import INFINITY, read_json
from moezoo.hub.few_bits import MODELOPT_FILE, read_modelopt_file
from moezoo.hub.formats.base import CONFIG
from moezoo.hub.other_names import NESTED, TEXT
from moezoo.tools.recording import ModuleRecord

# transformers renames these parts of a module's name when it loads a folder: name in the folder -> name in memory.
_RENAMED = {".block_sparse_moe": ".mlp", ".mlp.router.gate": ".mlp.gate", ".shared_mlp": ".shared_experts"}
_RENAMED |= {"backbone.": "model."}  # Nemotron-H
_RENAMED |= {"word_embeddings": "embed_tokens", ".attention": ".self_attn", ".dense": ".o_proj"}  # Sarvam
_RENAMED |= {".query_layernorm": ".q_norm", ".key_layernorm": ".k_norm"}
_OF_TYPE = {"afmoe": {".mlp.router.gate": ".mlp.router"}}  # the gate there has logits alone

# Model types whose norms of heads read [batch, heads, seq, head_dim] in transformers.
_HEADS_FIRST = ("exaone_moe", "hy_v3")


def require_peers() -> None:
    """Raise `UserError` unless PyTorch and transformers are installed."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise UserError(f"not installed: {', '.join(missing)}; pip install 'moezoo[peers]'")


def require_class(folder: Path, kind: str, same: str) -> None:
    """Raise `UserError` where transformers has no class for a folder of the model type `kind`.

    `same`: the type that moezoo writes of such a model.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        advice = f"; a copy of the folder with model_type={same} in config.json can be, as it computes the same"
        raise UserError(
            f"{folder}: transformers {transformers.__version__} has no class for model_type={kind}, so there is "
            f"nothing to compare it with{advice if same != kind and same in CONFIG_MAPPING else ''}"
        )


def load_peer(folder: Path, *, attention: str = "eager", experts: str = "eager") -> Any:
    """Load a folder with transformers, in float32 on the CPU. Nothing is downloaded and no code from the folder runs.

    `attention` and `experts` name transformers' implementations.

    Raises `UserError` if transformers cannot load the folder, or finds no value for one of its weights.
    """
    try:
        with _quiet():
            model, info = class_of(folder).from_pretrained(
                folder,
                dtype="float32",
                attn_implementation=attention,
                experts_implementation=experts,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **_widening(folder),
            )
    except Exception as error:  # transformers and huggingface_hub have many error classes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{folder}: transformers cannot load it ({reason}), so it cannot be compared") from error
    # Our folders have no index of sparse attention. A random one is as good: it selects all tokens of such short texts.
    if lacking := sorted(name for name in info["missing_keys"] if ".indexer." not in name):
        raise UserError(f"{folder}: transformers finds no values for {len(lacking)} weights: {lacking[0]}, ...")
    return model.eval()


def _widening(folder: Path) -> dict[str, Any]:
    """Return the arguments with which transformers widens weights of few bits, as its products differ from ours.

    Raises `ValueError` for a method that it does not have, and for a format that config.json does not state: it would
    take bits for numbers.
    """
    import transformers
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    config = read_json(folder / "config.json", constants=INFINITY)
    advice = "compare what convert FOLDER NEW dtype=float32 writes"
    method = (config.get(CONFIG) or {}).get("quant_method")
    if method not in (None, *AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise ValueError(f"it has no quant_method={method}; {advice}")
    inner = config.get(TEXT) or {}
    if not (config.get(CONFIG) or inner.get(CONFIG)) and (stated := read_modelopt_file(folder)) is not None:
        raise ValueError(f"it does not read {MODELOPT_FILE}, which alone states {stated.NAME}; {advice}")
    kinds = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config", "compressed-tensors": "CompressedTensorsConfig"}
    return {"quantization_config": getattr(transformers, kinds[method])(dequantize=True)} if method in kinds else {}


def class_of(folder: Path) -> Any:
    """Return transformers' class for a folder: the one that config.json names, as Mistral 4 has no automatic one."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type in NESTED:
        return transformers.AutoModelForImageTextToText
    name = next(iter(config.architectures or ()), "")
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warnings and progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def record_modules(model: Any, tokens: np.ndarray, names: Collection[str]) -> dict[str, ModuleRecord]:
    """Let `model` read `tokens` and return the input and output of each module of `names`.

    They are names as in the folder of a text model.
    """
    import torch

    records: dict[str, ModuleRecord] = {}
    # That of Llama 4 for images has its text model with its head, and in transformers 5.24 does not run without images.
    model = model if hasattr(model, "model") else model.language_model

    renamed = _RENAMED | _OF_TYPE.get(model.config.model_type, {})

    def keep(name: str, module: Any, positional: Any, named: Any, output: Any) -> None:
        first = positional[0] if positional else named.get("hidden_states")
        before, after = None if first is None else _array(first), _output(output, model.config)
        if model.config.model_type in _HEADS_FIRST and after.ndim == 4:
            before, after = None if before is None else before.swapaxes(1, 2), after.swapaxes(1, 2)
        if name == "model.embed_tokens" and getattr(model.config, "mup_enabled", False):  # AFMoE multiplies it later
            after = after * model.config.hidden_size**0.5
        if name.endswith(".experts") and len(after) > tokens.size:  # rows of Llama 4, for each expert and token
            after = after.reshape(-1, tokens.size, after.shape[-1]).sum(0)
        records[name] = ModuleRecord(before, after)

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in names:
            inside = functools.reduce(lambda path, part: path.replace(part, renamed[part]), renamed, name)
            if hasattr(model.model, "language_model"):  # a model for images
                inside = re.sub(r"^model\.", "model.language_model.", inside)
            hook = functools.partial(keep, name)
            hooks.callback(model.get_submodule(inside).register_forward_hook(hook, with_kwargs=True).remove)
        model(torch.tensor(tokens.astype(np.int64)), use_cache=False)
    return records


def _array(x: Any) -> np.ndarray:
    return x.detach().float().numpy().copy()


def _output(output: Any, config: Any) -> np.ndarray:
    """Return a module's result as one array; for a router, each token's gate for each expert, zero if not chosen."""
    import torch

    if isinstance(output, tuple) and len(output) in (2, 3) and getattr(output[-1], "dtype", None) == torch.int64:
        gates, expert_ids = output[-2:]
        experts = output[0].shape[1] if len(output) == 3 else config.num_experts  # otherwise logits are first
        output = torch.zeros((len(gates), experts), dtype=gates.dtype).scatter(1, expert_ids, gates)
    return _array(output[0] if isinstance(output, tuple) else output)
