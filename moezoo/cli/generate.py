"""`moezoo generate`: continue texts with the model of a run or of a Hugging Face folder."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from moezoo.cli.command import ConfiguredCommand
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.options import check_keys, take
from moezoo.config.settings import TrainConfig
from moezoo.data import load
from moezoo.data.tokenizer import HuggingFace, Numbers
from moezoo.errors import UserError
from moezoo.generation.generate import generate
from moezoo.hub.folders import end_of_text, from_pretrained, hub_model_config
from moezoo.models.base import LanguageModel
from moezoo.parallel.execution import Execution
from moezoo.training.saved import load_run, saved_config


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
    execution: Execution
    tokenizer: Any
    stops: list[int]


def configure(*arguments: str) -> TrainConfig:
    """How the model will run: the run's configuration, or the default one with the folder's model."""
    request, changes = take(Request, arguments)
    where = f"folder={request.folder}" if request.folder else f"run_dir={request.run_dir}"
    check_keys(changes, Request, TrainConfig)
    for change in changes:
        if re.match(r"model\b", change):
            raise UserError(f"{change}: the model is the one in {where}; leave it out")
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
        execution=loaded.execution,
        mask=mask,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        vocab=min(loaded.tokenizer.vocab, loaded.model.vocab),
        key=jax.random.key(cfg.seed),
    )
    rows = [row[length - len(text) :] for row, text in zip(longer, texts, strict=True)]
    return [loaded.tokenizer.decode(_until_stop(row, len(text), stops)) for row, text in zip(rows, texts, strict=True)]


def _until_stop(ids: np.ndarray, prompt: int, stops: list[int]) -> np.ndarray:
    """Up to the first token that ends a text, which is not shown."""
    ends = np.flatnonzero(np.isin(ids[prompt:], stops))
    return ids[: prompt + ends[0]] if len(ends) else ids


def _from_run(folder: str, changes: Sequence[str]) -> _Loaded:
    model, cfg = load_run(folder, *changes)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=model.vocab)
    return _Loaded(model, build_execution(cfg, batches="any"), source, [])


def _from_folder(folder: str, cfg: TrainConfig) -> _Loaded:
    execution = build_execution(cfg, batches="any")
    model = from_pretrained(folder, execution)
    path = Path(folder).expanduser() / "tokenizer.json"
    tokenizer = HuggingFace(path, key="tokenizer") if path.exists() else Numbers(model.vocab, folder)
    return _Loaded(model, execution, tokenizer, end_of_text(folder))


def main(arguments: Sequence[str]) -> None:
    """Print every prompt with its continuation; several are numbered."""
    texts = continuations(arguments)
    for number, text in enumerate(texts, 1):
        print(f"{'' if number == 1 else chr(10)}[{number} of {len(texts)}]\n{text}" if len(texts) > 1 else text)


COMMAND = ConfiguredCommand(
    "generate",
    "continue texts",
    main,
    description="""Continue texts with the model of a run or of a Hugging Face folder, and print them.

Its own keys:
  run_dir=FOLDER      a run, or
  folder=FOLDER       config.json and safetensors, with tokenizer.json; without, prompts are numbers parted by spaces
  prompt="TEXT"       once for each text of a batch
  max_new_tokens=64   tokens to add
  temperature=0       0 takes the likeliest token; above it, seed decides what is drawn
  top_k=N top_p=P     only from the N likeliest; only from the fewest whose probabilities reach P
  eos_token_id=ID     where a text ends; otherwise as the folder says
  stop=length         do not stop there

How to run is set by mesh, rules, dispatch and execution; what concerns training alone changes nothing.""",
    configure=configure,
    examples=(
        'run_dir=runs/NAME prompt="def main(" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1',
        'folder=FOLDER prompt="Once" prompt="Then" mesh=ep8 dispatch=gather execution.dtype=bfloat16',
    ),
)
