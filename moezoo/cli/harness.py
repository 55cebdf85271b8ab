"""The part of `moezoo evaluate` that runs tasks of the evaluation harness lm_eval."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from moezoo.cli.model_keys import configure_model, load_model
from moezoo.cli.text_keys import TextKeys
from moezoo.config.options import key
from moezoo.errors import UserError
from moezoo.typed import Count, Range, Size, counted


@dataclasses.dataclass(frozen=True)
class EvaluateKeys(TextKeys):
    """The options of `moezoo evaluate`; all after `tasks` are for tasks."""

    tasks: str | None = key(
        "instead of data: tasks of lm_eval, or patterns such as mmlu_*; batch_size texts are read at once",
        "NAME,NAME",
        default=None,
    )
    tasks_path: str | None = key("with tasks: a folder with YAML files of tasks of your own", "FOLDER", default=None)
    num_fewshot: Count | None = key(
        "with tasks: examples before each question, except in tasks that say 0; by default as each task says",
        "N",
        default=None,
    )
    limit: Size | None = key("with tasks: ask the first N documents of each", "N", default=None)
    chat: bool = key("with tasks: ask in the chat template of the folder, or of a run on data=chat", default=False)
    template: Mapping[str, Any] | None = key(
        "with chat=true: a variable of the template, such as template.enable_thinking=false; repeat it for several",
        "VALUE",
        default=None,
    )
    max_length: Annotated[int, Range(at_least=2)] | None = key(
        "with tasks: of longer texts the model reads the last N tokens; by default as many as it can",
        "N",
        default=None,
    )
    prefix_token_id: int | None = key(
        "with tasks: the token before the first of a text; by default the one that begins, or else ends, texts",
        "ID",
        default=None,
    )
    download: bool = key("with tasks: let lm_eval download data that are not on this machine", default=False)
    out: str | None = key("with tasks: the file to write or to replace with all results", "FILE.json", default=None)

    def __post_init__(self):
        super().__post_init__()
        if self.tasks is None:
            own = [field for field in dataclasses.fields(self) if field.name in _OF_TASKS]
            for field in own:
                if getattr(self, field.name) != field.default:
                    raise UserError(f"{field.name}= is for tasks of lm_eval; name some, such as tasks=hellaswag")
        elif self.split is not None:
            raise UserError(f"split={self.split}: tasks name their documents themselves; leave it out")
        if self.template and not self.chat:
            raise UserError("template. is of the chat template, which chat=true asks in; add it")


_OF_TASKS = {field.name for field in dataclasses.fields(EvaluateKeys)} - {
    "tasks",
    *(field.name for field in dataclasses.fields(TextKeys)),
}


def configure_tasks(keys: EvaluateKeys, changes: Sequence[str]) -> Any:
    """Return the configuration that the model runs with. Raises `UserError` for data, which a folder does not need."""
    for change in changes:
        if keys.folder and change.startswith("data"):
            raise UserError(f"{change}: tasks bring their own data; leave it out")
    return configure_model(keys, changes)


@contextlib.contextmanager
def showing_batches(mesh: Any) -> Iterator[Any]:
    """Yield an `OnBatch` that shows how far an evaluation on `mesh` is, and what it waits for, on stderr."""
    from moezoo.terminal.progress import BatchCounter, bar_on
    from moezoo.training.waiting import Waiting

    say: Any = functools.partial(print, file=sys.stderr)
    with bar_on(sys.stderr) as bar, Waiting(mesh, say, again="start it again") as waiting:
        counter = BatchCounter(bar, say)

        def on_batch(done: int, total: int) -> None:
            counter(done, total)
            waiting.begin(f"batch {min(done + 1, total)} of {total}")

        yield on_batch


def evaluate_tasks(keys: EvaluateKeys, changes: Sequence[str]) -> None:
    """Load the model, run the tasks and print their metrics."""
    from moezoo.config.build import build_execution
    from moezoo.parallel.cache import use_cache
    from moezoo.training.files import check_writable, replace_text, writing_to
    from moezoo.training.harness import LmEval, load_tasks, prepare_harness, run_tasks

    names = [name for name in (keys.tasks or "").split(",") if name]
    if not names:
        raise UserError("tasks= is empty; name tasks of lm_eval, such as tasks=hellaswag,arc_easy")
    cfg = configure_tasks(keys, changes)
    out = None if keys.out is None else Path(keys.out).expanduser()
    if out is not None:
        with writing_to("out", out):
            check_writable(out.parent)
    prepare_harness(download=keys.download)
    tasks = load_tasks(names, folder=keys.tasks_path, num_fewshot=keys.num_fewshot)  # before the model, which is large
    execution: Any = build_execution(cfg, batches="any").in_turn
    model = load_model(keys, changes, execution)
    use_cache(cfg.cache_dir, execution.mesh)
    with showing_batches(execution.mesh) as on_batch:
        lm = LmEval(
            model,
            keys.folder or cfg,
            execution=execution,
            batch_size=cfg.batch_size,
            max_length=keys.max_length,
            prefix_token_id=keys.prefix_token_id,
            variables=keys.template,
            on_batch=on_batch,
        )
        try:
            results = run_tasks(lm, tasks, limit=keys.limit, as_chats=keys.chat)
        finally:
            lm.close()
    for line in describe(results):
        print(line)
    for note in lm.notes():
        print(f"note: {note}")
    if out is not None:
        with writing_to("out", out):
            replace_text(out, json.dumps({**_about(keys, changes), **results}, indent=2) + "\n")
        print(f"wrote {out}")


def _about(keys: EvaluateKeys, changes: Sequence[str]) -> dict[str, Any]:
    """Return what was asked for, and the versions of both programs."""
    asked = {field.name: getattr(keys, field.name) for field in dataclasses.fields(keys)}
    versions = {name: importlib.metadata.version(name) for name in ("moezoo", "lm_eval")}
    return {"asked": asked, "overrides": [*changes], **versions}


def describe(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about each task and group: its metrics, each with its standard error."""
    for name, metrics in {**results["results"], **results.get("groups", {})}.items():
        size = results["n-samples"].get(name)
        documents = "" if size is None else f", {size['effective']:,} of {counted(size['original'], 'document')}"
        whole = results["configs"].get(name, {}).get("output_type") == "loglikelihood_rolling"  # texts without examples
        shots = 0 if whole else results["n-shot"].get(name) or 0
        yield f"{name}{documents}" + f", {counted(shots, 'example')} before each" * bool(shots)
        shown = {each.removesuffix(",none"): value for each, value in metrics.items() if "," in each}
        values = {each: value for each, value in shown.items() if "_stderr" not in each}
        width = max(map(len, values), default=0)
        for each, value in values.items():
            metric, comma, filtered = each.partition(",")
            error = shown.get(f"{metric}_stderr{comma}{filtered}")
            yield f"  {each:{width}}  {_number(value)}" + f" ± {_number(error)}" * isinstance(error, float)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
