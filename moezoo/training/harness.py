"""The evaluation harness lm_eval: a model as it calls one, and its tasks. Only this module uses that library."""

import contextlib
import functools
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moezoo.config.settings import TrainConfig
from moezoo.data import load
from moezoo.data.chat import DATE, Chat, folder_format
from moezoo.data.chat_format import ChatFormat
from moezoo.data.chat_records import read_chat
from moezoo.data.chat_template import RefusedError, folder_template, special_tokens
from moezoo.data.tokenizer import Bytes, HuggingFace, folder_tokenizer, one_line
from moezoo.errors import UserError, check_type, nearest
from moezoo.generation.generate import stream
from moezoo.hub.folders import end_of_text
from moezoo.models.base import LanguageModel
from moezoo.nn.few_bits import cut_pieces
from moezoo.parallel.cache import function_cache
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh, place
from moezoo.progress import OnBatch
from moezoo.training.scores import Row, score_rows
from moezoo.typed import Range, convert, counted, show

_RESAMPLES = 1000  # for the standard error of a metric that is no mean, in one process; lm_eval forks for 100,000
_SEED = 1234  # of few-shot examples, as in lm_eval, and of tokens that a task draws
# Settings of generation that a task may have, and values of others that have no effect.
_SETTINGS = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks"}
_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "use_cache": True}


class _Texts(NamedTuple):
    """How a model reads and writes texts.

    - `name`: that of the tokenizer;
    - `begin`, `end`: its tokens at the beginning and the end of a text; None where it has none;
    - `ends`: the tokens that end a text that the model writes;
    - `chats`: returns what renders chats.
    """

    tokenizer: Bytes | HuggingFace
    name: str
    begin: int | None
    end: int | None
    ends: Sequence[int]
    chats: Callable[[], ChatFormat]


class LmEval:
    """A model for the evaluation harness `lm_eval`, an instance of its `lm_eval.api.model.TemplateLM`.

        lm = moezoo.LmEval(moezoo.from_pretrained(folder), folder)
        lm_eval.simple_evaluate(lm, tasks=["hellaswag"])

    It answers `loglikelihood`, `loglikelihood_rolling` and `generate_until`, and renders chats, as lm_eval's class for
    transformers does (docs/harness.md). Needs the extra `lm_eval`.

    Args:
        model: The model.
        texts: How it reads texts: its Hugging Face folder, or the configuration of its run.
        execution: How the model runs; by default on one device.
        batch_size: The texts that are read, or written, at once.
        max_length: The tokens that the model reads at most, of longer texts the last ones; by default
            `config.max_length`, as in lm_eval's class for transformers, and at most `config.longest`.
        prefix_token_id: The token before the first of a text that has none before it; by default the one that begins
            texts, or else the one that ends them.
        variables: Variables of the chat template, such as {"enable_thinking": False}.
        on_batch: `on_batch(done, total)` is called before each batch and at the end.

    Raises:
        UserError: The library lm_eval is not installed, the folder or run has no tokenizer, or an argument is out of
            its range.
    """

    cache_hook: Any

    def __new__(cls, *arguments: Any, **settings: Any) -> "LmEval":
        """Return an instance of a class that also derives from `TemplateLM`, which is imported here."""
        del arguments, settings
        return object.__new__(_joined(cls))

    def __init__(
        self,
        model: LanguageModel,
        texts: str | Path | TrainConfig,
        *,
        execution: Execution | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        variables: Mapping[str, Any] | None = None,
        on_batch: OnBatch = lambda done, total: None,
    ):
        super().__init__()
        check_type("model", model, LanguageModel, "load one with moezoo.load_run or moezoo.from_pretrained")
        execution = Execution() if execution is None else execution
        check_type("execution", execution, Execution, "write execution=moezoo.execution(cfg)")
        self.batch_size = convert(int, batch_size, "batch_size", valid=Range(at_least=1))
        longest, given = model.config.longest.tokens, max_length
        if given is None:
            given = min(model.config.max_length, longest)
        self.max_length: int = convert(int, given, "max_length", valid=Range(at_least=2, at_most=longest))
        inside = Range(at_least=0, at_most=model.vocab - 1)
        self._prefix = convert(int | None, prefix_token_id, "prefix_token_id", valid=inside)
        self._texts = _texts_of_run(texts) if isinstance(texts, TrainConfig) else _texts_of_folder(texts)
        if self._texts.tokenizer.vocab > model.vocab:
            sizes = f"{self._texts.tokenizer.vocab} tokens but the model {model.vocab}"
            raise UserError(f"texts: the tokenizer has {sizes}; they belong to different models")
        self._execution = on_mesh(execution.exact.in_turn).for_rows(self.batch_size)
        self._model = model if execution.mesh is None else place(cut_pieces(model, execution), self._execution)
        self._variables, self._on_batch = dict(variables or {}), on_batch
        self._chats: ChatFormat | None = None
        self._cut = 0

    @property
    def max_gen_toks(self) -> int:
        """The most tokens that are written where a task does not say."""
        return 256

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text; None where there is none."""
        return self._texts.end

    @property
    def prefix_token_id(self) -> int:
        """The token before the first of a text. Raises `UserError` where there is none."""
        if (found := self._find_prefix()) is not None:
            return found
        raise UserError(
            f"{self._texts.name} has no token that begins or ends a text, and a task scores a first token; set "
            "prefix_token_id=ID, such as that of a line end"
        )

    def _find_prefix(self) -> int | None:
        known = (self._prefix, self._texts.begin, self._texts.end)
        return next((token for token in known if token is not None), None)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for caches of requests."""
        return self._texts.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer adds.

        By default they are not added to a text that begins with the text of `prefix_token_id`.
        """
        tokenizer = self._texts.tokenizer
        if isinstance(tokenizer, Bytes):
            return tokenizer.encode(string)
        if add_special_tokens is None:
            prefix = self._find_prefix()
            add_special_tokens = prefix is None or not string.startswith(tokenizer.decode_special([prefix]))
        return tokenizer.encode(string) if add_special_tokens else tokenizer.encode_places(string).ids.tolist()

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return log p of each continuation of a context in nats, and whether it is the greedy one."""
        inherited: Any = super()
        return inherited.loglikelihood(requests, disable_tqdm=disable_tqdm)  # `on_batch` shows progress instead

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each text in nats, in windows of `max_length` tokens, of which each scores new ones."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        del disable_tqdm
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text)
            cut = get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            own = [(None, *make_disjoint_window(window)) for window in cut]
            windows += own
            owners += [owner] * len(own)
        sums = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += log_likelihood
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    @function_cache()
    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return log p of each continuation, and whether it is the greedy one; contexts are cut on the left."""
        for key, _, continuation in requests:
            if not continuation:
                raise UserError(
                    f"the continuation '{show(key[1])}' makes no token of its own behind its context, so nothing is "
                    "scored; leave the task out, or let its choices begin with a space"
                )
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation to score has {len(continuation)} tokens, but the model reads at most "
                    f"max_length={self.max_length}; leave the task out, or score it by its rolling likelihood"
                )
        whole = [([*context, *more], len(more)) for _, context, more in requests]
        self._cut += sum(len(ids) > self.max_length + 1 for ids, _ in whole)
        rows = [Row(ids[-(self.max_length + 1) :], count) for ids, count in whole]
        scores = score_rows(self._model, rows, self._execution, self.batch_size, self._on_batch)
        for (key, _, _), score in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, tuple(score))
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to the first of the task's texts `until`."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        del disable_tqdm
        end = None if self._texts.end is None else self._decode_special([self._texts.end])
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        batches = []
        for numbers in alike.values():
            given: Any = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            settings = _Writing.of(given, handle_stop_sequences(given["until"], eos=end), self.max_length)
            contexts = {number: self._context(requests[number].args[0], settings) for number in numbers}
            numbers.sort(key=lambda number: -len(contexts[number]))
            for first in range(0, len(numbers), self.batch_size):
                batches.append((settings, {n: contexts[n] for n in numbers[first : first + self.batch_size]}))
        written = [""] * len(requests)
        for done, (settings, contexts) in enumerate(batches):
            self._on_batch(done, len(batches))
            for number, text in zip(contexts, self._write([*contexts.values()], settings, done), strict=True):
                written[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        self._on_batch(len(batches), len(batches))
        return written

    def _context(self, text: str, settings: "_Writing") -> list[int]:
        """Return the tokens that the model continues, the last ones of a long text."""
        ids, room = self.tok_encode(text) or [self.prefix_token_id], self.max_length - settings.most
        self._cut += len(ids) > room
        return ids[-room:]

    @function_cache()
    def _write(self, contexts: list[list[int]], settings: "_Writing", number: int) -> list[str]:
        """Return what the model writes after each context of batch `number`."""
        count, length = len(contexts), len(contexts[0])
        rows = contexts + contexts[:1] * (self.batch_size - count)  # of one size, so few programs are compiled
        mask = np.arange(length)[None] >= length - np.array([len(row) for row in rows])[:, None]
        ids = np.zeros(mask.shape, np.int32)
        ids[mask] = np.concatenate(rows)
        stops = sorted({*self._texts.ends, *(() if self._texts.end is None else (self._texts.end,))})
        written: list[list[int]] = [[] for _ in contexts]
        for columns in stream(
            self._model,
            ids,
            max_new_tokens=settings.most,
            eos_token_id=stops or None,
            execution=self._execution,
            mask=mask,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            key=jax.random.fold_in(jax.random.key(_SEED), number),
        ):
            for row, more in zip(written, columns[:count].tolist(), strict=True):
                row += more
            if all(self._is_finished(row, stops, settings.until) for row in written):
                break
        texts = []
        for row in written:
            text = self._texts.tokenizer.decode(row[: next((at for at, i in enumerate(row) if i in stops), None)])
            for stop in filter(None, settings.until):
                text = text.split(stop)[0]
            texts.append(text)
        return texts

    def _is_finished(self, row: list[int], stops: Sequence[int], until: Sequence[str]) -> bool:
        text = self._decode_special(row)
        return any(stop in row for stop in stops) or any(stop in text for stop in until if stop)

    def _decode_special(self, ids: Sequence[int]) -> str:
        tokenizer = self._texts.tokenizer
        return tokenizer.decode(ids) if isinstance(tokenizer, Bytes) else tokenizer.decode_special(ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat and of the beginning of an answer, or up to the end of its last message.

        Messages of the system are left out where the template refuses them.
        """
        if self._chats is None:
            self._chats = self._texts.chats()
            self._chats.check_variables(self._variables)
        chats = self._chats

        def render(messages: list[dict[str, str]]) -> str:
            chat = read_chat({"messages": messages, "chat_template_kwargs": self._variables})
            return chats.prompt(chat).text if add_generation_prompt else chats.unfinished(chat)

        try:
            return render(chat_history)
        except RefusedError:
            others = [message for message in chat_history if message["role"] != "system"]
            if others == chat_history:
                raise
            return render(others)

    def notes(self) -> list[str]:
        """Return what a user should know of the texts that were read, in lines."""
        cut = f"{counted(self._cut, 'text')} had more than max_length={self.max_length} tokens and lost the first ones"
        return [cut] if self._cut else []

    def close(self) -> None:
        """End the processes that render chats."""
        if self._chats is not None:
            self._chats.close()


@functools.cache
def _joined(own: type) -> type:
    """Return the class that derives from `own` and lm_eval's `TemplateLM`. Raises `UserError` without the library."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise UserError(f"tasks need the library lm_eval ({one_line(error)}); pip install 'moezoo[lm_eval]'") from error
    if issubclass(own, TemplateLM):
        return own
    return type(own.__name__, (own, TemplateLM), {"__module__": own.__module__, "__doc__": own.__doc__})


class _Writing(NamedTuple):
    """How texts are written: at `most` so many tokens, up to the first of the texts `until`."""

    most: int
    until: list[str]
    temperature: float
    top_k: int | None
    top_p: float | None

    @classmethod
    def of(cls, given: Mapping[str, Any], until: list[str], longest: int) -> "_Writing":
        """Return what a task's `generation_kwargs`, normalised, ask for. Raises `UserError` for what is not known."""
        for name, value in given.items():
            if name not in _SETTINGS and value not in (None, _WITHOUT_EFFECT.get(name)):
                known = ", ".join(sorted(_SETTINGS))
                raise UserError(f"generation_kwargs: {name}={show(value)} is not supported; expected some of {known}")
        most, drawn = given["max_gen_toks"], given["do_sample"]
        if not 0 < most < longest:
            raise UserError(
                f"generation_kwargs: max_gen_toks={most} leaves no room for a context in max_length={longest}; set "
                "fewer in the task"
            )
        if not drawn:
            return cls(most, until, 0.0, None, None)
        if not (temperature := float(given.get("temperature") or 0)) > 0:
            raise UserError("generation_kwargs: do_sample=true needs a temperature above 0; set both in the task")
        return cls(most, until, temperature, given.get("top_k"), given.get("top_p"))


def _texts_of_folder(folder: str | Path) -> _Texts:
    tokenizer = folder_tokenizer(folder)
    assert isinstance(tokenizer, HuggingFace)
    path, ends = Path(os.path.expanduser(folder)), end_of_text(folder)
    begin, end = _special_ids(path, tokenizer)
    end = ends[0] if end is None and ends else end
    return _Texts(tokenizer, str(folder), begin, end, ends, lambda: folder_format(str(folder)))


def _texts_of_run(cfg: TrainConfig) -> _Texts:
    """Return how a run's model reads texts; of a mixture, as its first source does."""
    settings = next(iter(cfg.data.parts.values()))
    if (file := settings.tokenizer_file()) is None:
        source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab, use="validation")
        if source.unit != "byte":
            raise UserError(
                f"data={source.name} has no tokenizer, and tasks are texts; name a run on text, or a folder"
            )
        tokenizer, name, begin, end = Bytes(), "bytes", None, None
    else:
        tokenizer, name = HuggingFace(file, key="data.tokenizer"), str(file.parent)
        begin, end = _special_ids(file.parent, tokenizer)

    def chats() -> ChatFormat:
        if isinstance(settings, Chat):
            return settings.format()
        if not isinstance(tokenizer, HuggingFace):
            raise UserError("chat: a run on bytes has no chat template; name a run on data=chat, or a folder")
        template = folder_template(name, key="data.tokenizer", advice="name a run on data=chat, or a folder")
        return ChatFormat(template, tokenizer, DATE)

    ends = settings.text_ends()
    return _Texts(tokenizer, name, begin, ends[0] if end is None and ends else end, ends, chats)


def _special_ids(folder: Path, tokenizer: HuggingFace) -> tuple[int | None, int | None]:
    """Return the tokens that begin and end texts by the files beside a tokenizer.json."""
    texts = special_tokens(folder)
    begin, end = (tokenizer.token_id(texts.get(name) or "") for name in ("bos_token", "eos_token"))
    return begin, end


def prepare_harness(*, download: bool) -> None:
    """Import lm_eval without its bars and lines of log; unless `download`, nothing that it does reaches the network.

    Call it before anything imports Hugging Face's libraries, which read the environment once.

    Raises:
        UserError: It is not installed.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ["DISABLE_MULTIPROC"] = "1"  # forks, which can hang where JAX has threads
    if not download:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1")
    _joined(LmEval)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def load_tasks(names: Sequence[str], *, folder: str | None = None, num_fewshot: int | None = None) -> Any:
    """Return lm_eval's tasks of these names or patterns, such as `mmlu_*`, with their groups.

    Args:
        names: Names of tasks, groups or tags.
        folder: A folder with further tasks, as YAML files.
        num_fewshot: The examples before each question, in place of what a task says, except where it says 0.

    Raises:
        UserError: There is no such task, it runs code that a model writes or shows pictures, or it cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(os.path.expanduser(folder)).is_dir():
        raise UserError(f"tasks_path={folder} is not a folder; name one with the YAML files of tasks")
    own = None if folder is None else TaskManager(include_path=os.path.expanduser(folder), include_defaults=False)
    # Reading lm_eval's own 14,000 tasks takes seconds.
    tasks = own if own and {*names} <= {*own.all_subtasks} else TaskManager(include_path=own and own.include_path)
    found = []
    for name in names:
        if not (matching := tasks.match_tasks([name])):
            near = nearest(name, tasks.all_tasks)
            near = (
                near if near.startswith("did") else "lm_eval ls tasks lists lm_eval's, and tasks_path=FOLDER adds yours"
            )
            raise UserError(f"tasks={name}: there is no such task; {near}")
        found += matching
    for name in dict.fromkeys(found):
        if ((tasks.task_index[name].cfg or {}).get("unsafe_code")) is True:
            raise _unsafe(name)
    # Some tasks draw examples when they are loaded.
    random.seed(0)
    np.random.seed(_SEED)
    try:
        loaded: Any = tasks.load([*dict.fromkeys(found)])
    except Exception as error:  # of the task's own code, or of what loads its data
        raise UserError(
            f"tasks={','.join(names)} cannot be loaded ({type(error).__name__}: {one_line(error)}); where its data "
            "have to be downloaded first, add download=true"
        ) from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise _unsafe(name)
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"tasks={name} shows pictures or sounds, and moezoo's models read text; leave it out")
        shots = task.get_config("num_fewshot")
        if shots is None or (num_fewshot is not None and shots != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=_SEED)
    return loaded


def _unsafe(name: str) -> UserError:
    return UserError(f"tasks={name} runs code that the model writes, which moezoo never does; leave it out")


def run_tasks(lm: Any, tasks: Any, *, limit: int | None = None, as_chats: bool = False) -> dict[str, Any]:
    """Return the results of the tasks that `load_tasks` returned, as `lm_eval.evaluate` does, as JSON holds them.

    Args:
        lm: The model.
        tasks: The tasks.
        limit: The documents of each task that are asked, the first ones; by default all.
        as_chats: Whether contexts are chats, with examples as turns of their own.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.utils import handle_non_serializable

    asked: Any = {"lm": lm, "task_dict": tasks, "limit": limit, "log_samples": False}
    asked |= {"apply_chat_template": as_chats, "fewshot_as_multiturn": as_chats, "bootstrap_iters": _RESAMPLES}
    with contextlib.redirect_stdout(sys.stderr):  # lm_eval prints what it is at
        results = evaluate(**asked)
    return json.loads(json.dumps(results, default=handle_non_serializable))
