"""Continue texts: `python scripts/generate.py run_dir=runs/NAME prompt="def main("`; `--help` lists what can be set."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

from collections.abc import Sequence

from moezoo import cli


def configure(*arguments: str):
    """How the model will run."""
    from moezoo import prompting

    return prompting.configure(*arguments)


def main(arguments: Sequence[str]) -> None:
    """Print every prompt with its continuation; several are numbered."""
    from moezoo import prompting

    texts = prompting.continuations(arguments)
    for number, text in enumerate(texts, 1):
        print(f"{'' if number == 1 else chr(10)}[{number} of {len(texts)}]\n{text}" if len(texts) > 1 else text)


if __name__ == "__main__":
    cli.run(
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
