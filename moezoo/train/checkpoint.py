"""Checkpoints: orbax, wrapped here alone."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from moezoo.errors import UserError

_KEPT = 2


class Checkpoints:
    """The checkpoints of one run folder: `save` is asynchronous and atomic, the last two are kept."""

    def __init__(self, folder: Path):
        # orbax tells every save at length; a run's own lines say what a user needs.
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, model: Any, training: Any, loader: dict[str, Any]) -> None:
        """Start saving: `model` and `training` (optimiser and counters) are trees of arrays, `loader` is JSON."""
        if self._manager.latest_step() == step:
            return
        arguments = ocp.args.Composite(
            model=ocp.args.StandardSave(model),
            training=ocp.args.StandardSave(training),
            loader=ocp.args.JsonSave(loader),
        )
        self._manager.save(step, args=arguments)

    def close(self) -> None:
        """Wait for saves under way, whose errors would be lost otherwise."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()


def has_checkpoint(folder: Path) -> bool:
    """Whether a run's `checkpoints` folder holds a finished one."""
    return bool(_steps(folder))


def latest_step(folder: Path) -> int:
    """The last step saved in a run's `checkpoints` folder. Raises `UserError` when there is none."""
    if not (steps := _steps(folder)):
        raise UserError(
            f"{folder} holds no checkpoint (a run saves one every checkpoint_every steps and at its end); name a run "
            "that has one"
        )
    return max(steps)


def _steps(folder: Path) -> list[int]:
    return [int(p.name) for p in folder.iterdir() if p.name.isdecimal()] if folder.is_dir() else []


def restore(folder: Path, step: int, **targets: Any) -> dict[str, Any]:
    """What was saved at `step`: `loader`, and the items `model` and `training` where `targets` has them.

    A target is a tree of `jax.ShapeDtypeStruct` with the shardings that arrays shall have.

    Raises `UserError` when the folder cannot be read, or holds another model's arrays.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    manager = ocp.CheckpointManager(
        folder.absolute(),
        options=ocp.CheckpointManagerOptions(read_only=True),
        item_handlers={  # without these a manager that saved nothing reads no metadata
            "loader": ocp.JsonCheckpointHandler(),
            **{item: ocp.StandardCheckpointHandler() for item in targets},
        },
    )
    try:
        metadata = manager.item_metadata(step)
        for item, target in targets.items():
            _check_arrays(metadata[item].tree, step, target)
        arguments = {item: ocp.args.StandardRestore(target) for item, target in targets.items()}
        restored = manager.restore(step, args=ocp.args.Composite(loader=ocp.args.JsonRestore(), **arguments))
        return {item: restored[item] for item in ("loader", *targets)}
    except UserError:
        raise
    except Exception as error:  # orbax raises a dozen kinds for damaged files
        first = (str(error).splitlines() or [""])[0][:120]
        raise UserError(
            f"{folder / str(step)} cannot be read ({type(error).__name__}: {first}); name another run folder"
        ) from None
    finally:
        manager.close()


def _check_arrays(tree: Any, step: int, target: Any) -> None:
    """Compare names, shapes and dtypes: orbax casts silently and does not say which array differs."""
    saved = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(target)}
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the checkpoint" if name in saved else "this model"
        raise UserError(f"checkpoint at step {step}: array {name} exists only in {where}; use the run's own settings")
    for name, leaf in wanted.items():
        have = saved[name]
        if (tuple(have.shape), have.dtype) != (tuple(leaf.shape), leaf.dtype):
            raise UserError(
                f"checkpoint at step {step}: {name} is {have.dtype}{list(have.shape)} but this model has "
                f"{leaf.dtype}{list(leaf.shape)}; use the run's own settings"
            )


def _name(path: Any) -> str:
    """A leaf's path, alike for modules and for the dictionaries that orbax makes of them."""
    return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)
