"""`moezoo convert`: write the model of a run, or of a Hugging Face folder, as a new Hugging Face folder."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    source: str = key("the folder of a run, one of its checkpoints/STEP, or a Hugging Face folder", "SOURCE")
    target: str = key("the Hugging Face folder to write, which must not exist yet", "TARGET")
    checkpoint: Literal["newest", "best"] = key(
        "of a run: newest, or best for that of the lowest validation loss", "newest|best", default="newest"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        "dtype of the parameters; without it, that of the source, and weights of few bits stay so",
        "float32|bfloat16|float16",
        default=None,
    )
    format: Literal["fp8", "mxfp4"] | None = key(
        "round the weights of layers to few bits: fp8 in blocks of 128 x 128, or mxfp4 for the experts of gpt-oss",
        "fp8|mxfp4",
        default=None,
    )
    like: str | None = key(
        "a Hugging Face folder of the same model: the target has its files and its tokenizer, and tensors that the "
        "source lacks",
        "FOLDER",
        default=None,
    )
    adapter: str | None = key(
        "a folder with low-rank pairs for the model of a Hugging Face folder, which are merged into its weights: "
        "adapter/ of a run, or one that PEFT wrote",
        "FOLDER",
        default=None,
    )
    max_shard_size: str | None = key(
        "the most bytes of tensors in one file, such as 500MB; for a run, without like", "5GB", default=None
    )
    init_from: str | None = key(
        "where the folder is now that a run with checkpoint_frozen=false began with", "FOLDER", default=None
    )


def main(arguments: Sequence[str]) -> None:
    """Print what will be written, and write it."""
    from moezoo.parallel.mesh import cpu_devices, has_started
    from moezoo.training.exporting import plan_export
    from moezoo.training.metrics import best_checkpoint

    keys = read(Keys, arguments)
    if not has_started():
        cpu_devices(1)  # nothing runs on a device
    source = str(best_checkpoint(keys.source, "source")) if keys.checkpoint == "best" else keys.source
    export = plan_export(
        source, keys.target, keys.dtype, keys.like, keys.max_shard_size, keys.format, keys.init_from, keys.adapter
    )
    print("\n".join(export.describe()), flush=True)
    for warning in export.write():
        print(f"warning: {keys.target}: {warning}", file=sys.stderr)
    print(f"{'written':<12}{keys.target}")


COMMAND = KeysCommand(
    "convert",
    "write a run or a folder as a new Hugging Face folder",
    main,
    description="Write the model of a run, of its newest checkpoint or its best, as a Hugging Face folder, or copy "
    "a Hugging Face folder in another dtype. No device holds the model: it is read and written tensor by tensor.\n"
    "A copy has the tokenizer and all else that moezoo.save_pretrained copies with like=. The folder of a run has the "
    "tokenizer of its data. Every folder has a model card, README.md, and names no path.",
    keys=Keys,
    examples=(
        "runs/NAME FOLDER",
        "runs/NAME FOLDER checkpoint=best",
        "runs/NAME/checkpoints/500 FOLDER dtype=bfloat16",
        "FOLDER OTHER dtype=bfloat16",
        "FOLDER OTHER format=fp8",
        "FOLDER OTHER adapter=runs/NAME/adapter",
    ),
    positions=("source", "target"),
)
