"""`moezoo sharding`: print what each device stores, computes and receives."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Literal

from moezoo.cli.command import ConfiguredCommand
from moezoo.config import overrides
from moezoo.config.options import key, take, take_switches
from moezoo.errors import UserError
from moezoo.typed import show, types_of


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's own keys."""

    folder: str | None = key(
        "instead of model: a Hugging Face folder, of which config.json is read and no weight, or a config.json",
        "FOLDER",
        default=None,
    )


@dataclasses.dataclass(frozen=True)
class Switches:
    """The command's options."""

    call: Literal["train", "evaluate", "prefill", "decode"] = key(
        "what runs: a training step (the default), a batch of an evaluation, the reading of batch_size prompts of "
        "seq_len tokens, or of one more token of each",
        "train|evaluate|prefill|decode",
        default="train",
    )
    parameters_only: bool = key(
        "only parameters; nothing is traced, and batch_size and seq_len are not checked", default=False
    )
    few_bits: str | None = key(
        "weights of few bits, kept as folders of this format have them, so not trained",
        "fp8_channels|fp8|mxfp4|int4",
        default=None,
    )
    against: str | None = key(
        "print the difference to the configuration with these overrides besides", '"KEY=VALUE ..."', default=None
    )
    json: bool = key("print the rows as JSON, with all numbers", default=False)

    def __post_init__(self):
        overrides.words_of("--against", self.against or "", types_of(Keys))


def main(arguments: Sequence[str]) -> None:
    """Print the layout, or the difference between two."""
    from moezoo.config.compose import compose_described
    from moezoo.parallel.mesh import cpu_devices, has_started
    from moezoo.tools.described import folder_lines
    from moezoo.tools.sharding import text
    from moezoo.tools.sharding.describe import describe, find_differences
    from moezoo.training.report import unsplit_lines

    switches, words = take_switches(Switches, arguments)
    for word in words:
        if word.startswith("run_dir="):
            raise UserError(f"{show(word)}: sharding writes no run; to describe a saved one, write resume=FOLDER")
    take(Keys, words)
    every = [words]
    if switches.against is not None:
        changes = overrides.words_of("--against", switches.against, types_of(Keys))
        every.append(_against(words, changes))
    configurations = [compose_described(*each) for each in every]
    if not has_started():
        cpu_devices(1)  # tracing must not occupy an accelerator
    parts = "parameters" if switches.parameters_only else "all"
    blueprints = [_blueprint(cfg, switches.few_bits) for cfg in configurations]
    pairs = list(zip(configurations, blueprints, strict=True))
    layouts = [describe(cfg, switches.call, parts=parts, blueprint=blueprint) for cfg, blueprint in pairs]
    titles = []
    for each, (cfg, blueprint) in zip(every, pairs, strict=True):
        notes = [*folder_lines(each), *unsplit_lines(cfg.rules, cfg.mesh.sizes)]
        if switches.few_bits is not None:
            notes.append(f"weights of layers in {switches.few_bits}, as its folders have them, kept and not trained")
        notes += [] if switches.parameters_only else _notes(cfg, blueprint, switches.call)
        titles.append("\n".join([text.describe_run(cfg, switches.call), *notes]))
    if switches.json:
        print("\n".join(titles), file=sys.stderr)
    if switches.against is None:
        print(text.as_json(layouts[0]) if switches.json else text.render(titles[0], layouts[0]))
        return
    differences = find_differences(*layouts)
    print(text.as_json(differences) if switches.json else text.render_differences(titles, layouts, differences))


def _against(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return `words` with `changes`; of folder and model, the one that these name takes the place of the other."""
    named = {change.partition("=")[0] for change in changes} & {"folder", "model"}
    kept = [word for word in words if not named or word.partition("=")[0].partition(".")[0] not in ("folder", "model")]
    return overrides.replace(kept, changes)


def _configure(*words: str) -> Any:
    """Return the configuration that `--cfg job` prints."""
    from moezoo.config.compose import compose_described

    return compose_described(*words)


def _blueprint(cfg: Any, few_bits: str | None) -> Any:
    """Return the model of a configuration, with weights in few bits if wanted."""
    import jax
    import jax.numpy as jnp

    from moezoo.config.build import blueprint_of, blueprint_on, build_execution
    from moezoo.hub.kept import in_format
    from moezoo.nn.few_bits import cut_pieces
    from moezoo.parallel.mesh import abstract_mesh

    if few_bits is None:
        return blueprint_on(cfg)
    blueprint = blueprint_of(cfg)
    execution = build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")

    def change(model: Any) -> Any:
        kept = in_format(model, few_bits)
        return cut_pieces(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept), execution)

    return dataclasses.replace(blueprint, change=change)


def _notes(cfg: Any, blueprint: Any, call: Any) -> list[str]:
    """Return what a choice between strategies chose, with the bytes that it compared, and much unused room."""
    from moezoo.models.choice import compare_strategies
    from moezoo.tools.calls import CALLS
    from moezoo.training.report import choice_lines, room_lines

    program = CALLS[call](cfg, blueprint)
    execution = dataclasses.replace(program.execution, dispatch=cfg.dispatch)
    found = compare_strategies(blueprint.shapes.stacks, program.rows, program.length, execution, call, blueprint.mask)
    return choice_lines(cfg.dispatch, {call: found}) + room_lines(found)


COMMAND = ConfiguredCommand(
    "sharding",
    "show what each device stores, computes and receives",
    main,
    keys=Keys,
    configure=_configure,
    description="Show how a configuration is laid out, on a mesh of any size without its devices: every parameter, the "
    "main activations, and every collective of the traced program with the bytes that one device receives from it.",
    switches=Switches,
    examples=(
        "model=mixtral mesh=fsdp2_ep4",
        "model=deepseek_v3 mesh.fsdp=64 mesh.expert=8 batch_size=512 seq_len=4096 --against rules=shard_exp_on_fsdp",
        "model=deepseek_v3 mesh.fsdp=64 mesh.expert=8 batch_size=512 seq_len=4096 --call=decode --json",
        "folder=FOLDER mesh.expert=8 execution.dtype=bfloat16 execution.param_dtype=bfloat16",
        "model=gpt_oss_120b rules=serve mesh.expert=8 batch_size=8 seq_len=4096 --call=decode --few-bits=mxfp4",
    ),
    groups=("model", "mesh", "rules", "dispatch"),
)
