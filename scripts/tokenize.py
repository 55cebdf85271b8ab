"""Turn text into a file of token ids for `data=tokens`: python scripts/tokenize.py PATH OUT.npy [--tokenizer FILE]."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

import argparse

from moezoo.data import tokenize_files
from moezoo.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Turn text into a file of token ids for data=tokens.",
        epilog="Also written: OUT.offsets.npy (where documents begin), OUT.json, and OUT.tokenizer.json where used.",
    )
    parser.add_argument("path", metavar="PATH", help="a UTF-8 text file, or a folder of them: every file is a document")
    parser.add_argument("out", metavar="OUT.npy", help="where the ids go, uint16 or uint32; must not exist yet")
    parser.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json (default: raw bytes)")
    arguments = parser.parse_args()
    try:
        print(tokenize_files(arguments.path, arguments.out, arguments.tokenizer))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
