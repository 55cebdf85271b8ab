"""Read folders with the transformers that Python finds; a program, because a process has one version of it.

    python read_folders.py TOKENS TEXT FOLDER...

The last line of the output is JSON: the version, and for each folder the logits of TOKENS, a JSON list of rows, and the
ids of TEXT.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def read(folder: str, tokens: torch.Tensor, text: str) -> dict[str, list]:
    """Return the logits and the ids."""
    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(tokens).logits.float().tolist()
    return {"logits": logits, "ids": transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]}


if __name__ == "__main__":
    TOKENS, TEXT, *FOLDERS = sys.argv[1:]
    found = [read(folder, torch.tensor(json.loads(TOKENS)), TEXT) for folder in FOLDERS]
    print(json.dumps({"version": transformers.__version__, "folders": found}))
