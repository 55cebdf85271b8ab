"""What the pages call FOLDER, runs/NAME and the like: small files of these names."""

import gzip
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
from chat_styles import QWEN, save_tokenizer
from dense_folders import write_dense
from pages import Page

import moezoo
from moezoo.config.compose import as_mapping, to_yaml

# A run of seconds, which every mesh of the pages divides; its last checkpoint is that of step 500.
RUN = (
    *(
        "model.layers=2",
        "model.embed=64",
        "model.heads=8",
        "model.kv_heads=4",
        "model.head_dim=8",
        "model.expert_mlp=16",
    ),
    *("seq_len=64", "batch_size=16", "eval_every=0", "steps=500", "checkpoint_every=250", "schedule=constant"),
)
TEXT = "Once upon a time there was a mixture of experts. Each token went to two of them, and all were glad. " * 40


def make_files(folder: Path) -> None:
    """Make texts, chats, token ids, a tokenizer, Hugging Face folders, and configurations of runs, in a new folder."""
    folder.mkdir(parents=True)
    for name in (
        "notes/a.txt",
        "notes/b.txt",
        "TEXTS/a.txt",
        "TEXTS/b.txt",
        "OTHER_FOLDER/c.txt",
        "FILE",
        "question.txt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TEXT)
    lines = "\n".join(json.dumps({"text": TEXT, "content": TEXT}) for _ in range(40))
    for name in ("a.jsonl", "FILE.jsonl"):
        (folder / name).write_text(lines)
    (folder / "texts").mkdir()
    (folder / "texts/a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    chats = [{"messages": messages} for messages, _ in QWEN.chats.values()]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats * 40)))
    np.save(folder / "tokens.npy", np.arange(20_000, dtype=np.uint16) % 300)
    np.save(folder / "tokens.offsets.npy", np.arange(0, 20_001, 200))
    (folder / "mix.yaml").write_text(
        "code: {name: text, path: TEXTS, weight: 0.3}\nlines: {name: jsonl, path: FILE.jsonl, weight: 0.7}\n"
    )
    save_tokenizer(folder / "tokenizer.json", (*QWEN.special, "</s>"))
    sizes = {"vocab": 300, "embed": 64, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "expert_mlp": 16}
    model = moezoo.build_model(moezoo.models.MixtralConfig(**sizes, max_length=4096), key=jax.random.key(0))
    moezoo.save_pretrained(model, folder / "FOLDER")
    write_dense(folder / "DENSE", "mistral", vocab_size=300)
    for name in ("FOLDER", "DENSE"):
        shutil.copy(folder / "tokenizer.json", folder / name)
        (folder / name / "tokenizer_config.json").write_text(json.dumps(QWEN.variables))
        (folder / name / "chat_template.jinja").write_text(QWEN.template)
    config = to_yaml(as_mapping(moezoo.compose(*RUN)))
    for name in ("NAME", "A", "B", "small", "mine"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text(config)


def write_files(page: Page, folder: Path) -> None:
    """Write the code of a page that begins with the name of a file, `# path/NAME.py`, as NAME.py."""
    for block in page.blocks:
        if named := re.match(r"# (?:\S+/)?(\w+\.(?:py|yaml))\n", block.text):
            (folder / named[1]).write_text(block.text)
