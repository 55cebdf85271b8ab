"""Whether a model is the one that a configuration describes, where the two meet."""

import jax

from moezoo.errors import UserError
from moezoo.models.base import LanguageModel
from moezoo.models.config import differing_settings
from moezoo.parallel.axes import is_stored, parameter_table
from moezoo.typed import show


def describe_difference(model: LanguageModel, expected: LanguageModel) -> str:
    """Return the settings in which `model` is not `expected`, or else the first array; empty if there is none.

    Both may be shapes. Dtypes are not compared, and a container counts as the array that it stands for.
    """
    if settings := differing_settings(model.config, "the model", expected.config):
        return settings
    ours, theirs = ({path: shape for path, _, shape in parameter_table(each)} for each in (model, expected))
    for path in dict.fromkeys((*theirs, *ours)):
        if ours.get(path) != theirs.get(path):
            here, there = (show(shapes.get(path, "absent")) for shapes in (ours, theirs))
            return f"{path} is {here} in the model, {there} by cfg.model"
    return ""


def check_model(model: LanguageModel, expected: LanguageModel) -> None:
    """Raise `UserError` unless `model` has the settings, arrays, containers and dtypes of `expected`, a step's model.

    A released folder is loaded in bfloat16 and a step has float32 unless it is configured otherwise, and steps in
    bfloat16 lose small updates.
    """
    if found := describe_difference(model, expected):
        raise UserError(
            f"the model is not that of the step: {found}; make the step with dataclasses.replace(cfg, "
            "model=model.config), or give the model that the configuration describes"
        )
    leaves = (jax.tree_util.tree_leaves_with_path(each, is_leaf=is_stored) for each in (model, expected))
    for (path, ours), (_, theirs) in zip(*leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if is_stored(ours) != is_stored(theirs) or (is_stored(ours) and type(ours) is not type(theirs)):
            here, there = (type(each).__name__ if is_stored(each) else "an array" for each in (ours, theirs))
            raise UserError(
                f"{name} is {here} in the model, {there} in the step; make both with the same blueprint.change"
            )
        here, there = ([part.shape for part in jax.tree.leaves(each)] for each in (ours, theirs))
        if here != there:  # the arrays that containers stand for are equal in shape
            raise UserError(
                f"{name} has parts of shapes {show(here)} in the model, {show(there)} in the step; make both with the "
                "same blueprint.change"
            )
        if ours.dtype != theirs.dtype:
            dtype = expected.embedding.weight.dtype  # that of choice biases is always float32
            other = f", or make the step with execution.param_dtype={ours.dtype}" * (ours.dtype != dtype)
            raise UserError(
                f"{name} is {ours.dtype} in the model, {theirs.dtype} in the step (execution.param_dtype={dtype}); "
                f'load the model with dtype="{dtype}"{other}'
            )
