"""What the pages call FOLDER, runs/NAME and the like: small files and runs of these names."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chat_styles import QWEN, save_tokenizer
from dense_folders import write_dense
from pages import ROOT, read

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
    """Make texts, chats, token ids, a tokenizer, and Hugging Face folders, in a new folder."""
    folder.mkdir(parents=True)
    for example in ROOT.glob("docs/examples/*"):
        shutil.copy(example, folder)
    for name in ("notes/a", "notes/b", "TEXTS/a", "TEXTS/b", "OTHER_FOLDER/c", "FILE"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TEXT)
    lines = "\n".join(json.dumps({"text": TEXT, "content": TEXT}) for _ in range(40))
    for name in ("a.jsonl", "FILE.jsonl"):
        (folder / name).write_text(lines)
    (folder / "texts").mkdir()
    (folder / "texts/a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "question.txt").write_text("What is 3 times 4?")
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(60) for b in range(60)]
    chats = ({"prompt": question, "completion": answer} for question, answer in sums)
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (forms,) = (
        block.text for block in read("docs/data.md").blocks if "sharegpt" in block.text and block.language != "sh"
    )
    subprocess.run([sys.executable, "-c", forms.replace("docs/examples", ".")], cwd=folder, check=True)
    (folder / "chat.jsonl").write_text(json.dumps({"prompt": "What is 1 + 2?", "completion": "3"}))
    np.save(folder / "tokens.npy", np.arange(20_000, dtype=np.uint16) % 299)  # 100 different documents
    np.save(folder / "tokens.offsets.npy", np.arange(0, 20_001, 200))
    (folder / "mix.yaml").write_text(
        "code: {name: text, path: TEXTS, weight: 0.3}\nlines: {name: jsonl, path: FILE.jsonl, weight: 0.7}\n"
    )
    save_tokenizer(folder / "tokenizer.json", (*QWEN.special, "</s>"))
    sizes: dict[str, Any] = {
        "vocab": 300,
        "embed": 64,
        "layers": 2,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 8,
        "expert_mlp": 16,
    }
    model = moezoo.build_model(moezoo.models.MixtralConfig(**sizes, max_length=4096), key=jax.random.key(0))
    moezoo.save_pretrained(model, folder / "FOLDER")
    write_dense(folder / "DENSE", "mistral", vocab_size=300, max_position_embeddings=4096)
    for name in ("FOLDER", "DENSE"):
        shutil.copy(folder / "tokenizer.json", folder / name)
        (folder / name / "tokenizer_config.json").write_text(json.dumps(QWEN.variables))
        (folder / name / "chat_template.jinja").write_text(QWEN.template)


def add_configurations(folder: Path) -> None:
    """Add the configurations of the runs that the pages name, alone, and a folder that a page makes."""
    shutil.copytree(folder / "FOLDER", folder / "TINY")
    config = to_yaml(as_mapping(moezoo.compose(*RUN)))
    for name in ("NAME", "A", "B", "CHAT", "TUNED", "LORA", "small", "mine", "sums"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text(config)


def add_runs(folder: Path) -> None:
    """Train what the pages call runs/NAME, runs/A and runs/B, which stop half-way, and short runs of other kinds."""
    short = ("seq_len=64", "batch_size=16", "eval_every=0", "steps=20")
    chat = ("data=chat", "data.path=chats.jsonl", "data.tokenizer=FOLDER/tokenizer.json", "model.vocab=300")
    start = ("init_from=FOLDER", "data=text", "data.path=notes")
    runs = {"NAME": RUN, "B": (*RUN, "seed=1"), "CHAT": (*RUN, *chat, *short), "TUNED": (*start, *short)}
    for name, words in {**runs, "LORA": (*start, *short, "adapter=lora")}.items():
        command = [sys.executable, "-m", "moezoo", "train", *words, f"run_dir=runs/{name}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        config = folder / "runs" / name / "config.yaml"
        config.write_text(re.sub(r"^steps: 500$", "steps: 1000", config.read_text(), flags=re.MULTILINE))
    shutil.copytree(folder / "runs/NAME", folder / "runs/A")
    for name in ("A", "B"):
        shutil.copytree(folder / "runs" / name, folder / "sweeps/rates" / name)
