"""`moezoo generate`: continue texts, or answer in chats, with the model of a run or of a Hugging Face folder."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moezoo.cli.command import ConfiguredCommand
from moezoo.cli.model_keys import ModelKeys, configure_model, load_model
from moezoo.config.options import key, take
from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class Request(ModelKeys):
    """The command's own options; those about tokens are arguments of `moezoo.generate`."""

    prompt: tuple[str, ...] = key(
        "a text to continue, or @FILE to read it from a file, to the last byte (@@... begins with an @); repeat it for "
        "several texts; for a folder without a tokenizer.json, token ids separated by spaces",
        '"TEXT"',
        default=(),
    )
    chat: tuple[str, ...] = key(
        "instead of prompt: a message of a user to answer, in the chat template of the folder, or of a run on "
        "data=chat; @FILE as for prompt; repeat it for several chats",
        '"TEXT"',
        default=(),
    )
    max_new_tokens: int = key("tokens to add to each text", default=64)
    temperature: float = key("0 takes the most likely token; above 0, seed decides what is drawn", default=0.0)
    top_k: int | None = key("draw from the N most likely tokens only", "N", default=None)
    top_p: float | None = key("draw from the fewest tokens whose probabilities reach P", "P", default=None)
    eos_token_id: int | None = key("the token that ends a text; by default as in the folder", "ID", default=None)
    stop: Literal["eos", "length"] = key("eos, or length to continue after the end of a text", default="eos")


class _Loaded(NamedTuple):
    model: Any
    execution: Any
    tokenizer: Any
    stops: list[int]
    chats: Callable[[], Any]  # returns the format of chats


def configure(*arguments: str) -> Any:
    """Return the configuration that the model runs with: the run's, or the default one with the folder's model."""
    return configure_model(*take(Request, arguments))


def continuations(arguments: Sequence[str]) -> list[str]:
    """Return every prompt with its continuation, or the answer to every message.

    Raises `UserError` for mistakes in the arguments.
    """
    import jax
    import numpy as np

    from moezoo.generation.generate import calls, generate
    from moezoo.models.choice import compare_strategies
    from moezoo.parallel.cache import use_cache
    from moezoo.training.report import choice_lines
    from moezoo.training.waiting import Waiting

    request, changes = take(Request, arguments)
    if request.prompt and request.chat:
        raise UserError("prompt= continues a text, and chat= answers a message; leave one of them out")
    if not (request.prompt or request.chat):
        raise UserError('prompt is missing; write prompt="some text", once for each text, or chat="a message"')
    prompts = [_read_text("prompt", prompt) for prompt in request.prompt]
    messages = [_read_text("chat", message) for message in request.chat]
    cfg = configure(*arguments)
    loaded = _load(request, changes, cfg)
    use_cache(cfg.cache_dir, loaded.execution.mesh)
    texts = _ask(loaded, messages) if messages else [loaded.tokenizer.encode(prompt) for prompt in prompts]
    if empty := [prompt for prompt, text in zip(request.prompt or request.chat, texts, strict=True) if not text]:
        raise UserError(f"prompt={show(empty[0])}: the tokenizer makes no token of it; write another text")
    length = max(map(len, texts))
    mask = np.array([[False] * (length - len(text)) + [True] * len(text) for text in texts])
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate(texts)
    here, sizes = loaded.execution.exact.for_rows(len(texts)), calls(len(texts), length)
    stacks = loaded.model.stacks
    compared: dict[Any, Any] = {call: compare_strategies(stacks, *size, here, call) for call, size in sizes.items()}
    say = functools.partial(print, file=sys.stderr)
    for line in choice_lines(cfg.dispatch, compared):
        say(line)
    stops = loaded.stops if request.eos_token_id is None else [request.eos_token_id]
    stops = stops if request.stop == "eos" else []
    with Waiting(loaded.execution.mesh, say, again="start it again") as waiting, waiting.on("new tokens"):
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
    continued = []
    for row, text in zip(longer, texts, strict=True):
        ends = np.flatnonzero(np.isin(row[length:], stops))
        until = length + ends[0] if len(ends) else None  # the first new token that ends the text
        begin = length if messages else length - len(text)
        continued.append(loaded.tokenizer.decode(row[begin:until]))
    return continued


def _ask(loaded: _Loaded, messages: Sequence[str]) -> list[list[int]]:
    """Return the tokens of a chat with each message of a user, up to the beginning of the answer."""
    from moezoo.data.chat_records import read_chat

    with loaded.chats() as chats:
        asked = [read_chat({"messages": [{"role": "user", "content": message}]}) for message in messages]
        return [chats.prompt(chat).ids.tolist() for chat in asked]


def _read_text(name: str, prompt: str) -> str:
    """Return the text that the value of the key `name` is or names. Raises `UserError` for a file that is no text."""
    if not prompt.startswith("@") or prompt.startswith("@@"):
        return prompt.removeprefix("@")
    shown, advice = f"{name}={show(prompt)}", "name a UTF-8 text file; a text that begins with @ is written @@..."
    path = Path(os.path.expanduser(prompt[1:]))
    check_file(path, shown, advice)
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror}); {advice}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{shown} is not UTF-8 text (byte {error.start}); {advice}") from error


def _load(request: Request, changes: Sequence[str], cfg: Any) -> _Loaded:
    from moezoo.config.build import build_execution
    from moezoo.data import load
    from moezoo.data.chat import folder_ends, folder_format
    from moezoo.data.tokenizer import Numbers, folder_tokenizer
    from moezoo.hub.folders import end_of_text, find_tokenizer

    execution = build_execution(cfg, batches="any").in_turn
    model = load_model(request, changes, execution)
    if not (folder := request.folder):
        source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=model.vocab)
        return _Loaded(model, execution, source, list(source.ends), lambda: _run_chats(cfg))
    tokenizer = folder_tokenizer(folder) if find_tokenizer(folder) else Numbers(model.vocab, folder)
    ends = [*end_of_text(folder), *(folder_ends(folder) if request.chat else ())]
    return _Loaded(model, execution, tokenizer, ends, lambda: folder_format(folder))


def _run_chats(cfg: Any) -> Any:
    from moezoo.data import Chat

    chats = next((source for source in cfg.data.parts.values() if isinstance(source, Chat)), None)
    if chats is None:
        raise UserError("chat= needs a run on data=chat, which has a template; write prompt=TEXT, or name a folder")
    return chats.format()


def main(arguments: Sequence[str]) -> None:
    """Print every prompt with its continuation, or every answer; number them if there are several."""
    texts = continuations(arguments)
    for number, text in enumerate(texts, 1):
        print(f"{'' if number == 1 else chr(10)}[{number} of {len(texts)}]\n{text}" if len(texts) > 1 else text)


COMMAND = ConfiguredCommand(
    "generate",
    "continue texts, or answer in chats",
    main,
    description="Continue texts, or answer messages, with the model of a run or of a Hugging Face folder, and print "
    "them.\n"
    "Keys of training alone have no effect.",
    keys=Request,
    configure=configure,
    examples=(
        'run_dir=runs/NAME prompt="def main(" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1',
        "run_dir=runs/NAME prompt=@FILE",
        'folder=FOLDER prompt="Once" prompt="Then" mesh=ep8 dispatch=gather execution.dtype=bfloat16',
        'folder=FOLDER prompt="Once" mesh=ep8 dtype=stored',
        'folder=FOLDER chat="What is the capital of France?"',
    ),
    groups=("mesh", "rules", "dispatch"),
)
