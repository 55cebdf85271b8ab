"""Continue texts with a run's model or a Hugging Face folder's: what scripts/generate.py does."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from moezoo.compose import compose
from moezoo.convert import types_of
from moezoo.data import load
from moezoo.data.tokenizer import HuggingFace, Numbers
from moezoo.errors import UserError, nearest
from moezoo.execution import Execution
from moezoo.generation import generate
from moezoo.nn.language_model import LanguageModel
from moezoo.options import take
from moezoo.pretrained import end_of_text, from_pretrained, hub_model_config
from moezoo.settings import TrainConfig
from moezoo.train.saved import load_run, saved_config
from moezoo.train.setup import layout


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for besides how to run: `run_dir` or `folder` holds the model; `prompt` are the texts.

    `stop`: at `eos` (`eos_token_id`, by default the folder's) or only at `length`, `max_new_tokens`. The others as in
    `moezoo.generate`.
    """

    run_dir: str | None = None
    folder: str | None = None
    prompt: tuple[str, ...] = ()
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: Literal["eos", "length"] = "eos"
    eos_token_id: int | None = None

    def __post_init__(self):
        if (self.run_dir is None) == (self.folder is None):
            raise UserError("name one model: run_dir=FOLDER of a run, or folder=FOLDER in Hugging Face's format")


class _Loaded(NamedTuple):
    model: LanguageModel
    run: Execution
    tokenizer: Any
    stops: list[int]


def configure(*arguments: str) -> TrainConfig:
    """How the model will run: the run's configuration, or the default one with the folder's model."""
    request, changes = take(Request, arguments)
    where = f"folder={request.folder}" if request.folder else f"run_dir={request.run_dir}"
    known = (*types_of(Request), *types_of(TrainConfig))
    for change in changes:
        key = change.partition("=")[0]
        if key.partition(".")[0] == "model":
            raise UserError(f"{change}: the model is the one in {where}; leave it out")
        if "." not in key and key not in known:
            raise UserError(f"{change}: there is no key '{key}'; {nearest(key, known)}")
    if request.run_dir is not None:
        return saved_config(request.run_dir, *changes)
    return dataclasses.replace(compose(*changes), model=hub_model_config(request.folder))


def continuations(arguments: Sequence[str]) -> list[str]:
    """Every prompt with its continuation. Raises `UserError` for what cannot be."""
    request, changes = take(Request, arguments)
    if not request.prompt:
        raise UserError('prompt is missing; write prompt="some text", once for each text')
    cfg = configure(*arguments)
    loaded = _from_folder(request.folder, cfg) if request.folder else _from_run(request.run_dir or "", changes)
    texts = [loaded.tokenizer.encode(prompt) for prompt in request.prompt]
    if not all(texts):
        raise UserError("a prompt is empty; write at least one token")
    length = max(map(len, texts))
    mask = np.array([[False] * (length - len(text)) + [True] * len(text) for text in texts])
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate(texts)
    stops = loaded.stops if request.eos_token_id is None else [request.eos_token_id]
    stops = stops if request.stop == "eos" else []
    longer = generate(
        loaded.model,
        ids,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=stops or None,
        run=loaded.run,
        mask=mask,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        vocab=min(loaded.tokenizer.vocab, loaded.model.vocab),
        key=jax.random.key(cfg.seed),
    )
    rows = [row[length - len(text) :] for row, text in zip(longer, texts, strict=True)]
    return [loaded.tokenizer.decode(_cut(row, len(text), stops)) for row, text in zip(rows, texts, strict=True)]


def _cut(ids: np.ndarray, prompt: int, stops: list[int]) -> np.ndarray:
    """Up to the first token that ends a text, which is not shown."""
    ends = np.flatnonzero(np.isin(ids[prompt:], stops))
    return ids[: prompt + ends[0]] if len(ends) else ids


def _from_run(folder: str, changes: Sequence[str]) -> _Loaded:
    model, cfg = load_run(folder, *changes)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=model.vocab)
    return _Loaded(model, layout(cfg), source, [])


def _from_folder(folder: str, cfg: TrainConfig) -> _Loaded:
    run = layout(cfg)
    model = from_pretrained(folder, run)
    path = Path(folder).expanduser() / "tokenizer.json"
    tokenizer = HuggingFace(path, key="tokenizer") if path.exists() else Numbers(model.vocab, folder)
    return _Loaded(model, run, tokenizer, end_of_text(folder))
