"""`moezoo.train` with the arguments before "then", and in the same process the command with those after it."""

import os
import sys

import moezoo
from moezoo.cli import run_script

if __name__ == "__main__":
    at = sys.argv.index("then")
    if "MOEZOO_SUPERVISED" in os.environ:  # not in the process that only watches this one
        try:
            moezoo.train(moezoo.compose(*sys.argv[1:at]))
        except moezoo.UserError as error:
            print(error, file=sys.stderr)
    del sys.argv[1 : at + 1]
    run_script("train")
