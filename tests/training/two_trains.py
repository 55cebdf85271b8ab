"""`moezoo.train` with the arguments before each "then", and then the command with those after the last.

The former append the step of each row that they receive to the file `received`.
"""

import os
import sys

import moezoo
from moezoo.__main__ import run_script
from moezoo.parallel import distributed


def receive(row):
    """Append the step of a row."""
    with open("received", "a") as file:
        print(row["step"], file=file)


if __name__ == "__main__":
    distributed._SHARED_SECONDS = 0.1  # the processes of a test are on one machine
    while "then" in sys.argv:
        at = sys.argv.index("then")
        if "MOEZOO_SUPERVISED" in os.environ:  # not in the process that only watches this one
            try:
                moezoo.train(moezoo.compose(*sys.argv[1:at]), on_row=receive)
            except moezoo.UserError as error:
                print(error, file=sys.stderr)
        del sys.argv[1 : at + 1]
    run_script("train")
