"""A run that starts from weights: whether its tokens fit, what the summary says, and the arrays that it begins with."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from moezoo.config.build import blueprint_of, blueprint_on
from moezoo.config.compose import as_mapping, from_saved, read_origin, read_run
from moezoo.config.origin import Origin, find_weights
from moezoo.config.run_folders import run_folder
from moezoo.config.settings import TrainConfig
from moezoo.data import PythonStdlib, Synthetic
from moezoo.data.base import naming
from moezoo.data.file_settings import FileSettings
from moezoo.data.tokenizer import is_same_tokenizer, text_tokenizer
from moezoo.errors import UserError
from moezoo.hub.adapters import load_adapter
from moezoo.hub.loading import load_as
from moezoo.models.base import LanguageModel
from moezoo.nn.few_bits import with_pieces_of
from moezoo.parallel import distributed
from moezoo.parallel.axes import is_stored
from moezoo.parallel.execution import Execution
from moezoo.parallel.low_rank import only_pairs, pairs_by_path, with_bases, without_pairs
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.stored import materialise
from moezoo.remote import RunPath
from moezoo.training.checkpoint import read_about, restore
from moezoo.typed import flatten, show

_BYTES = 256


def check_tokens(cfg: TrainConfig) -> None:
    """Raise `UserError` where the tokens of the data cannot be those of the weights that `cfg` starts from."""
    origin, vocab = read_origin(cfg.init_from, cfg.upcycle), cfg.model.vocab
    weights = f"the weights of init_from={cfg.init_from}"
    for name, part in cfg.data.parts.items():
        with naming(name):
            if isinstance(part, FileSettings):  # its tokenizer is set, or that of the weights
                found = text_tokenizer(part.tokenizer, key="data.tokenizer").vocab
                if found > vocab:
                    raise UserError(
                        f"data.tokenizer={show(part.tokenizer)} makes {found} tokens but {weights} have "
                        f"model.vocab={vocab}; set data.tokenizer to the one that they were trained with"
                    )
            elif isinstance(part, PythonStdlib):
                if origin.tokenizer:
                    why = f"have the tokens of {origin.tokenizer}"
                elif not origin.has_tokenizer and vocab != _BYTES:
                    why = f"have {vocab} tokens and no tokenizer.json"
                else:
                    continue
                raise UserError(
                    f"data=python_stdlib is bytes, but {weights} {why}; write data=text data.path=FILE_OR_FOLDER"
                )


def describe_start(cfg: TrainConfig) -> list[tuple[str, str]]:
    """Return the lines of the summary: what the weights are, what they become, and what differs from where they are."""
    origin, how = read_origin(cfg.init_from, cfg.upcycle), cfg.execution.param_dtype
    into = "frozen parameters as they are there, trained ones in float32" if how == "stored" else f"parameters in {how}"
    lines = [f"{cfg.init_from}, stored in {origin.stored}; here {into}"]
    theirs, ours = flatten(origin.model), flatten(as_mapping(cfg)["model"])
    if (up := cfg.upcycle).experts:
        same = f"noise of {up.noise} deviations: not the logits of the dense model" if up.noise else "the same logits"
        lines.append(f"a dense model; each MLP becomes {up.experts} experts, {up.per_token} per token; {same}")
    others = [
        f"model.{key}={show(ours[key])} ({show(theirs[key])} there)" for key in theirs if ours[key] != theirs[key]
    ]
    rate = cfg.optimizer.learning_rate
    usual = ", the default with init_from" * (rate == type(cfg.optimizer).tuning_rate * cfg.adapter.rate_factor)
    lines.append("; ".join([*others, f"optimizer.learning_rate={show(rate)}{usual}"]))
    if origin.run is not None and not cfg.checkpoint_frozen:
        lines.append("checkpoint_frozen=false: this run is read with that checkpoint, so keep it")
    if note := _describe_tokenizer(cfg, origin):
        lines.append(note)
    return [("init_from", line) for line in lines]


def _describe_tokenizer(cfg: TrainConfig, origin: Origin) -> str:
    """Return how the tokens of the data are not those of the weights, as far as both are known."""
    ours, theirs = cfg.data.tokenizer_file(), origin.tokenizer
    if not origin.has_tokenizer:
        return "no tokenizer there: the tokens of the data are taken to be those of the weights"
    there = [path for path in (ours, theirs) if path and path.is_file()]
    if isinstance(cfg.data, Synthetic) or ours == theirs or (len(there) == 2 and is_same_tokenizer(*there)):
        return ""
    return f"the tokens of the data are those of {ours or 'no tokenizer'}, and of the weights {theirs or 'bytes'}"


def load_initial(cfg: TrainConfig, execution: Execution) -> LanguageModel:
    """Return the weights of `cfg.init_from` in the dtypes and containers of the run's model, laid out for `execution`.

    All processes call this. The arrays are the caller's own: a program may donate them.

    Raises:
        UserError: The folder or the checkpoint is missing, damaged, or not the one that `cfg` was composed with.
    """
    blueprint = blueprint_on(cfg, execution)
    loaded = jax.tree.map(_own, _load(cfg, blueprint.shapes, blueprint.shapes, execution))
    if cfg.adapter.init_from is not None:
        return with_bases(_load_pairs(cfg, blueprint.shapes, execution), loaded)
    # What only the adapter has is drawn as for a fresh model.
    shardings = only_pairs(on_mesh(execution).shardings(blueprint.shapes))
    draw = jax.jit(lambda key: only_pairs(blueprint.make(key)), out_shardings=shardings)
    return with_bases(draw(jax.random.key(cfg.seed)), loaded)


def _load_pairs(cfg: TrainConfig, shapes: LanguageModel, execution: Execution) -> PyTree:
    """Return the pairs of `cfg.adapter.init_from`. Raises `UserError` unless they are those of `shapes`."""
    folder = cfg.adapter.init_from
    assert folder is not None
    found = load_adapter(without_pairs(shapes), folder, execution, base_sha256=cfg.init_sha256)
    ours, theirs = ({path: (x.rank, x.scale) for path, x in pairs_by_path(tree)} for tree in (shapes, found))
    for path in dict.fromkeys((*ours, *theirs)):
        has, wants = (
            f"rank {of[path][0]} and scale {of[path][1]:.6g}" if path in of else "no pair" for of in (theirs, ours)
        )
        if has != wants:
            raise UserError(
                f"adapter.init_from={show(folder)}: {path} has {has}, but adapter.rank, .alpha, .scale and .targets "
                f"ask for {wants}; set them to those of the folder"
            )
    return only_pairs(found)


def restore_run(
    cfg: TrainConfig,
    checkpoints: RunPath,
    step: int,
    about: Mapping[str, Any],
    execution: Execution | None = None,
    **targets: Any,
) -> dict[str, Any]:
    """Restore a checkpoint's model, and other trees of arrays, after `read_about`, which returned `about`.

    Args:
        cfg: The configuration of the run, on any mesh.
        checkpoints: The folder `checkpoints` of the run.
        step: The step that was saved.
        about: The checkpoint's about.json.
        execution: The mesh and rules that lay out the model; None for one device.
        targets: Other trees, as in `moezoo.training.checkpoint.restore`.

    Raises:
        UserError: As `restore` does. `cfg.init_from` has frozen arrays that the checkpoint leaves there, and is missing
            or another folder.
    """
    saved = blueprint_of(cfg)
    shapes = saved.shapes if execution is None else blueprint_on(cfg, execution).shapes
    here = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: here, shapes) if execution is None else on_mesh(execution).shardings(shapes)

    def as_saved(have: Any, want: Any, sharding: Any) -> Any:
        whole = sharding if have.shape == want.shape else _on_all(sharding)
        return jax.ShapeDtypeStruct(have.shape, have.dtype, sharding=whole)

    target = jax.tree.map(as_saved, saved.shapes, shapes, shardings)
    elsewhere = load_elsewhere(cfg, execution)
    saved_here = jax.tree.map(_is_none, elsewhere, is_leaf=_is_none)
    found = restore(checkpoints, step, about, model=eqx.filter(target, saved_here), **targets)
    model = _fit_pieces(found["model"], shapes, shardings)
    return {**found, "model": eqx.combine(model, elsewhere)}


def load_elsewhere(cfg: TrainConfig, execution: Execution | None = None) -> PyTree:
    """Return the arrays of a run that its checkpoints leave to `cfg.init_from`, and None in place of the others.

    Args and errors are those of `restore_run`.
    """
    blueprint = blueprint_of(cfg) if execution is None else blueprint_on(cfg, execution)
    if cfg.checkpoint_frozen:
        return jax.tree.map(lambda _: None, blueprint.shapes)
    wanted = eqx.filter(blueprint.shapes, blueprint.constant)
    return with_bases(wanted, jax.tree.map(_own, _load(cfg, blueprint.shapes, wanted, execution)))


def as_saved_pieces(cfg: TrainConfig, model: LanguageModel) -> LanguageModel:
    """Return a run's model as checkpoints have it: with scales of few bits that fit any mesh."""
    return with_pieces_of(model, blueprint_of(cfg).shapes, lambda x: jax.device_put(x, _on_all(x.sharding)))


def _fit_pieces(model: Any, shapes: Any, shardings: Any) -> Any:
    model = with_pieces_of(model, shapes)
    return jax.tree.map(lambda x, to: x if x is None else jax.device_put(x, to), model, shardings, is_leaf=_is_none)


def _load(cfg: TrainConfig, shapes: LanguageModel, wanted: PyTree, execution: Execution | None) -> Any:
    """Return `wanted`, of the shapes of the run's model, with the numbers of `cfg.init_from`; without pairs."""
    shapes, wanted = without_pairs(shapes), without_pairs(wanted)
    assert cfg.init_from is not None
    assert cfg.init_sha256 is not None
    path = Path(cfg.init_from)
    if not (run_folder(path) / "config.yaml").exists():
        return load_as(path, shapes, wanted, execution, cfg.init_sha256, cfg.upcycle)
    run = dataclasses.replace(from_saved(read_run(path, "init_from")), model=cfg.model)
    checkpoints, step = distributed.first(lambda: _verify(path, cfg))
    about = distributed.first(lambda: read_about(Path(checkpoints), step))
    model = restore_run(run, Path(checkpoints), step, about, execution)["model"]
    shardings = jax.tree.map(lambda _: None, shapes) if execution is None else on_mesh(execution).shardings(shapes)
    fitted = jax.tree.map(_fit, shapes, model, shardings, is_leaf=is_stored)
    return jax.tree.map(lambda want, have: None if want is None else have, wanted, fitted, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _verify(path: Path, cfg: TrainConfig) -> list[Any]:
    """Return the folder `checkpoints` and the weights' step. Raises `UserError` if they are not those of `cfg`."""
    found = find_weights(path)
    if found.sha256 != cfg.init_sha256:
        raise UserError(
            f"init_from={path} is not the checkpoint that the run began with (sha256 {cfg.init_sha256}, and now "
            f"{found.sha256}); name that one"
        )
    return [str(found.checkpoints), found.step]


def _fit(want: Any, have: Any, sharding: Any) -> Any:
    """Return a parameter of another run in the dtype of this one, which widens a container that it does not keep."""
    if is_stored(want):
        assert is_stored(have), "a form describes only what that run did not train"
        return have
    if not is_stored(have) and have.dtype == want.dtype:
        return have
    return jax.jit(lambda x: materialise(x, want.dtype).astype(want.dtype), out_shardings=sharding)(have)


def _own(x: jax.Array) -> jax.Array:
    """Return a copy of an array in memory of its own, and delete the array: loading hands over memory that it wrote."""
    copy = jax.block_until_ready(jnp.copy(x))
    x.delete()
    return copy


def _on_all(sharding: Any) -> Any:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
