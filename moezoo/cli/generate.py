"""`moezoo generate`: continue texts, or answer in chats, with the model of a run or of a Hugging Face folder."""

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moezoo.cli.command import ConfiguredCommand
from moezoo.cli.model_keys import ModelKeys, configure_model, load_model
from moezoo.config.options import key, take
from moezoo.errors import UserError
from moezoo.host import read_text
from moezoo.typed import Size, show


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
    system: str | None = key(
        "with chat: a message of the system before all others; @FILE as for prompt", '"TEXT"', default=None
    )
    history: str | None = key(
        "with chat: a file with one chat, as data=chat reads it, to which the message is added; without chat, its last "
        "message is answered",
        "FILE.jsonl",
        default=None,
    )
    template: Mapping[str, Any] | None = key(
        "with chat: a variable of the template, such as template.enable_thinking=false; repeat it for several",
        "VALUE",
        default=None,
    )
    max_new_tokens: Size | None = key(
        "tokens to add to each text, by default 64; to a chat 512, or as many as the model allows",
        "N",
        default=None,
    )
    temperature: float = key("0 takes the most likely token; above 0, seed decides what is drawn", default=0.0)
    top_k: int | None = key("draw from the N most likely tokens only", "N", default=None)
    top_p: float | None = key("draw from the fewest tokens whose probabilities reach P", "P", default=None)
    eos_token_id: int | None = key("the token that ends a text; by default as in the folder", "ID", default=None)
    stop: Literal["eos", "length"] = key("eos, or length to continue after the end of a text", default="eos")
    stream: bool = key("print one text while it is written; false waits for its end", default=True)

    def __post_init__(self):
        super().__post_init__()
        for name in ("chat", "system", "history", "template"):
            if self.prompt and getattr(self, name) not in (None, ()):
                raise UserError(f"prompt= continues a text, and {name}= is for a chat; leave one of them out")


class _Loaded(NamedTuple):
    model: Any
    execution: Any
    tokenizer: Any
    stops: list[int]


def configure(*arguments: str) -> Any:
    """Return the configuration that the model runs with: the run's, or the default one with the folder's model."""
    return configure_model(*take(Request, arguments))


class Generator:
    """Continues texts, or answers chats, with the model and the settings of a command."""

    def __init__(self, request: Request, changes: Sequence[str], cfg: Any):
        """Load the model. Raises `UserError` for mistakes in the settings."""
        from moezoo.generation.sampling import Sampling
        from moezoo.parallel.cache import use_cache

        Sampling(request.temperature, request.top_k, request.top_p)  # checks them
        self._request, self._cfg = request, cfg
        self.loaded = _load(request, changes, cfg)
        use_cache(cfg.cache_dir, self.loaded.execution.mesh)
        stops = self.loaded.stops if request.eos_token_id is None else [request.eos_token_id]
        self._stops = stops if request.stop == "eos" else []
        self._said, self._turn = set(), 0

    def write(self, texts: Sequence[list[int]]) -> list[str]:
        """Return every text with its continuation, or for chats the continuation alone."""
        import numpy as np

        from moezoo.generation.generate import generate
        from moezoo.training.waiting import Waiting

        settings, say = self._settings(texts), functools.partial(print, file=sys.stderr)
        length, continued = settings["ids"].shape[1], []
        with Waiting(self.loaded.execution.mesh, say, again="start it again") as waiting, waiting.on("new tokens"):
            rows = generate(**settings)
        for row, text in zip(rows, texts, strict=True):
            ends = np.flatnonzero(np.isin(row[length:], self._stops))
            until = length + ends[0] if len(ends) else None  # the first new token that ends the text
            begin = length - len(text) if self._request.prompt else length
            continued.append(self.loaded.tokenizer.decode(row[begin:until]))
        return continued

    def stream(self, text: list[int]) -> Iterator[str]:
        """Return the parts of what `write` returns for one text, which come as they are written."""
        from moezoo.data.token_text import pieces
        from moezoo.generation.generate import stream

        if not self._request.stream:
            return iter(self.write([text]))
        columns, tokenizer = stream(**self._settings([text])), self.loaded.tokenizer

        def tokens() -> Iterator[list[int]]:
            yield text if self._request.prompt else []
            for some in columns:
                row = some[0].tolist()
                end = next((at for at, token in enumerate(row) if token in self._stops), None)
                yield row[:end]
                if end is not None:
                    return

        return pieces(tokens(), tokenizer.decode, tokenizer.unsettled())

    def _settings(self, texts: Sequence[list[int]]) -> dict[str, Any]:
        """Return the arguments of `moezoo.generate`, and print what `dispatch` chooses for texts of new lengths."""
        import jax
        import numpy as np

        from moezoo.generation.generate import calls
        from moezoo.models.choice import compare_strategies
        from moezoo.parallel.mesh_execution import on_mesh
        from moezoo.training.report import choice_lines

        request, (model, execution, tokenizer, _) = self._request, self.loaded
        length = max(map(len, texts))
        mask = np.array([[False] * (length - len(text)) + [True] * len(text) for text in texts])
        ids = np.zeros(mask.shape, np.int32)
        ids[mask] = np.concatenate(texts)
        here, sizes = on_mesh(execution.exact).for_rows(len(texts)), calls(len(texts), length)
        compared: dict[Any, Any] = {
            call: compare_strategies(model.stacks, *size, here, call) for call, size in sizes.items()
        }
        lines = [line for line in choice_lines(self._cfg.dispatch, compared) if line not in self._said]
        self._said.update(lines)
        for line in lines:
            print(line, file=sys.stderr)
        usual = 64 if request.prompt else max(1, min(512, model.config.longest.tokens - length))
        key, self._turn = jax.random.key(self._cfg.seed), self._turn + 1
        return {
            "model": model,
            "ids": ids,
            "max_new_tokens": usual if request.max_new_tokens is None else request.max_new_tokens,
            "eos_token_id": self._stops or None,
            "execution": execution,
            "mask": mask,
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "vocab": min(tokenizer.vocab, model.vocab),
            # With the same draws, all answers of a conversation would tend to the same words.
            "key": key if self._turn == 1 else jax.random.fold_in(key, self._turn),
        }


def continuations(arguments: Sequence[str]) -> list[str]:
    """Return every prompt with its continuation, or the answer to every message.

    Raises `UserError` for mistakes in the arguments.
    """
    generator, texts = prepare(arguments)
    return generator.write(texts)


def prepare(arguments: Sequence[str]) -> tuple[Generator, list[list[int]]]:
    """Return what generates, and the tokens of every prompt, or of every chat up to the beginning of its answer."""
    request, changes = take(Request, arguments)
    if not (request.prompt or request.chat or request.history):
        raise UserError(
            'prompt is missing; write prompt="some text", once for each text, or chat="a message"; in a terminal, '
            "without both, a conversation begins"
        )
    prompts = [_read_text("prompt", prompt) for prompt in request.prompt]
    cfg = configure(*arguments)
    texts = [] if prompts else _ask(request, cfg)
    generator = Generator(request, changes, cfg)
    texts = texts or [generator.loaded.tokenizer.encode(prompt) for prompt in prompts]
    if empty := [prompt for prompt, text in zip(request.prompt, texts, strict=False) if not text]:
        raise UserError(f"prompt={show(empty[0])}: the tokenizer makes no token of it; write another text")
    return generator, texts


def _ask(request: Request, cfg: Any) -> list[list[int]]:
    """Return the tokens of each chat up to the beginning of its answer."""
    from moezoo.cli.chats import add_message, is_asked, tokens_of

    messages = [_read_text("chat", message) for message in request.chat]
    with _chat_format(request, cfg) as chats:
        begin = _begin_chat(request, cfg, chats)
        if is_asked(begin) == bool(messages):
            ends = f"history={show(request.history)} ends with a message of the {begin.messages[-1]['role']}"
            raise UserError(
                f"{ends}, and chat= is another; leave chat= out, or add the answer to the file"
                if messages
                else f'{ends}, which nobody answers; write chat="a message"'
            )
        asked = [add_message(begin, "user", message) for message in messages] or [begin]
        return [tokens_of(chat, chats) for chat in asked]


def _talk(arguments: Sequence[str]) -> None:
    """Hold a conversation in the terminal."""
    from moezoo.cli.chats import converse, tokens_of

    request, changes = take(Request, arguments)
    cfg = configure(*arguments)
    with _chat_format(request, cfg) as chats:
        begin = _begin_chat(request, cfg, chats)
        generator = Generator(request, changes, cfg)
        converse(begin, lambda chat: generator.stream(tokens_of(chat, chats)))


def _begin_chat(request: Request, cfg: Any, chats: Any) -> Any:
    from moezoo.cli.chats import begin_chat

    source, variables = _chat_source(cfg), request.template or {}
    chats.check_variables(variables)
    system = None if request.system is None else _read_text("system", request.system)
    field, roles = (source.field, source.roles) if source else ("messages", {})
    return begin_chat(request.history, system, variables, field=field, roles=roles)


def _read_text(name: str, prompt: str) -> str:
    """Return the text that the value of the key `name` is or names. Raises `UserError` for a file that is no text."""
    if not prompt.startswith("@") or prompt.startswith("@@"):
        return prompt.removeprefix("@")
    shown, advice = f"{name}={show(prompt)}", "name a UTF-8 text file; a text that begins with @ is written @@..."
    return read_text(Path(os.path.expanduser(prompt[1:])), shown, advice)


def _load(request: Request, changes: Sequence[str], cfg: Any) -> _Loaded:
    from moezoo.config.build import build_execution
    from moezoo.data import load
    from moezoo.data.chat import folder_ends
    from moezoo.data.tokenizer import Numbers, folder_tokenizer
    from moezoo.hub.folders import end_of_text, find_tokenizer

    execution = build_execution(cfg, batches="any").in_turn
    model = load_model(request, changes, execution)
    if not (folder := request.folder):
        source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=model.vocab)
        return _Loaded(model, execution, source, list(source.ends))
    tokenizer = folder_tokenizer(folder) if find_tokenizer(folder) else Numbers(model.vocab, folder)
    ends = [*end_of_text(folder), *(() if request.prompt else folder_ends(folder))]
    return _Loaded(model, execution, tokenizer, ends)


def _chat_format(request: Request, cfg: Any) -> Any:
    """Return what renders chats: that of the folder, or of the run's data."""
    from moezoo.data.chat import folder_format

    if request.folder:
        return folder_format(request.folder)
    if (source := _chat_source(cfg)) is None:
        raise UserError("chat= needs a run on data=chat, which has a template; write prompt=TEXT, or name a folder")
    return source.format()


def _chat_source(cfg: Any) -> Any:
    from moezoo.data import Chat

    return next((source for source in cfg.data.parts.values() if isinstance(source, Chat)), None)


def main(arguments: Sequence[str]) -> None:
    """Print every prompt with its continuation, or every answer; number them if there are several.

    In a terminal, without any, hold a conversation.
    """
    from moezoo.cli.chats import print_pieces

    request, _ = take(Request, arguments)
    if not (request.prompt or request.chat) and all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout)):
        return _talk(arguments)
    generator, texts = prepare(arguments)
    if len(texts) == 1:
        print_pieces(generator.stream(texts[0]))
        return
    for number, text in enumerate(generator.write(texts), 1):
        print(f"{'' if number == 1 else chr(10)}[{number} of {len(texts)}]\n{text}")


COMMAND = ConfiguredCommand(
    "generate",
    "continue texts, or answer in chats",
    main,
    description="Continue texts, or answer messages, with the model of a run or of a Hugging Face folder, and print "
    "them. In a terminal, without prompt= and chat=, hold a conversation: each line is a message, and Ctrl-D ends it.\n"
    "Keys of training alone have no effect.",
    keys=Request,
    configure=configure,
    examples=(
        'run_dir=runs/NAME prompt="def main(" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1',
        "run_dir=runs/NAME checkpoint=best prompt=@FILE",
        'folder=FOLDER prompt="Once" prompt="Then" mesh=ep8 dispatch=gather execution.dtype=bfloat16',
        'folder=FOLDER prompt="Once" mesh=ep8 dtype=stored',
        'folder=FOLDER chat="What is the capital of France?"',
        'folder=FOLDER system="Be brief." history=FILE.jsonl template.enable_thinking=false',
    ),
    groups=("mesh", "rules", "dispatch"),
)
