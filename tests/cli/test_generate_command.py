"""Texts in, texts out: with a run's model, a Hugging Face folder's, and scripts/generate.py."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import moezoo
from moezoo.cli.generate import continuations
from moezoo.models import MixtralConfig, build_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model without a tokenizer: prompts are numbers."""
    config = MixtralConfig(vocab=40, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, expert_mlp=8, max_length=64)
    path = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(build_model(config, key=jax.random.key(0)), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of few steps on numbers."""
    small = ("model.layers=1", "model.embed=16", "model.heads=2", "model.kv_heads=1", "model.head_dim=8")
    small += ("model.expert_mlp=8", "model.vocab=32", "data=synthetic", "data.vocab=32", "seq_len=16", "steps=1")
    return moezoo.train(moezoo.compose(*small, f"run_dir={tmp_path_factory.mktemp('run') / 'one'}"))


def test_prompts_of_different_lengths(folder):
    texts = continuations([f"folder={folder}", "prompt=3 1 4", "prompt=5", "max_new_tokens=4", "mesh=ep8"])
    model = moezoo.from_pretrained(folder)
    alone = [moezoo.generate(model, ids, max_new_tokens=4)[0].tolist() for ids in ([[3, 1, 4]], [[5]])]
    assert [[int(i) for i in text.split()] for text in texts] == alone


def test_a_text_ends_where_the_folder_says(folder, tmp_path):
    whole = continuations([f"folder={folder}", "prompt=3 1 4", "max_new_tokens=8"])[0].split()
    new = whole[3:]
    # A token other than the first, at its first place.
    at = next(i for i, token in enumerate(new) if i and token not in new[:i])
    (tmp_path / "model").symlink_to(folder)
    asked = [f"folder={folder}", "prompt=3 1 4", "max_new_tokens=8"]
    assert continuations([*asked, f"eos_token_id={new[at]}"])[0].split() == whole[: 3 + at]
    said = folder / "generation_config.json"
    said.write_text(json.dumps({"eos_token_id": [int(new[at])]}))
    try:
        assert continuations(asked)[0].split() == whole[: 3 + at]
        assert continuations([*asked, "stop=length"])[0].split() == whole
    finally:
        said.unlink()


def test_a_run_speaks_its_data(run):
    text = continuations([f"run_dir={run.folder}", "prompt=1 2 3", "max_new_tokens=5"])[0]
    ids = moezoo.generate(run.model, np.array([[1, 2, 3]]), max_new_tokens=5)
    assert text == " ".join(map(str, ids[0]))
    drawn = [f"run_dir={run.folder}", "prompt=1 2 3", "max_new_tokens=12", "temperature=2.0", "top_k=20"]
    assert continuations([*drawn, "seed=1"]) == continuations([*drawn, "seed=1", "mesh=fsdp2_ep4"])
    assert continuations([*drawn, "seed=1"]) != continuations([*drawn, "seed=2"])


def test_a_tokenizer_of_the_folder(folder, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(30)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    library.save(str(tmp_path / "tokenizer.json"))
    text = continuations([f"folder={tmp_path}", "prompt=w3 w1", "max_new_tokens=6"])[0]
    ids = moezoo.generate(moezoo.from_pretrained(folder), [[3, 1]], max_new_tokens=6, vocab=30)
    assert text == " ".join(f"w{i}" for i in ids[0])


def test_the_script(folder):
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            f"folder={folder}",
            "prompt=1 2",
            "prompt=7",
            "max_new_tokens=2",
            "mesh=fsdp2_ep4",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, one, between, second, other = done.stdout.splitlines()
    assert (first, between, second) == ("[1 of 2]", "", "[2 of 2]")
    assert [len(text.split()) for text in (one, other)] == [4, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt=1"], "name one model: run_dir=FOLDER of a run, or folder=FOLDER in Hugging Face's format"),
        (["folder={folder}", "run_dir=b", "prompt=1"], "name one model"),
        (["folder={folder}"], 'prompt is missing; write prompt="some text"'),
        (["folder={folder}", "prompt=1", "prompt="], "prompt[1]=: expected text, found nothing"),
        (["folder={folder}", "prompt= "], "a prompt is empty; write at least one token"),
        (["folder={folder}", "prompt=40"], "'40' is not a token: "),
        (["folder={folder}", "prompt=1", "model.layers=2"], "model.layers=2: the model is the one in folder="),
        (["folder={folder}", "prompt=1", "max_new_tokens=64"], "model.max_length=64; set max_new_tokens"),
        (["folder={folder}", "prompt=1", "temprature=1"], "there is no key 'temprature'; did you mean 'temperature'?"),
        (["folder={folder}", "prompt=1", "mesh.expert=3"], "splits experts 3 ways but model.experts=8"),
        (["folder={folder}/nowhere", "prompt=1"], "no config.json; name a Hugging Face model folder"),
        (["run_dir={folder}", "prompt=1"], "no run there"),
    ],
)
def test_mistakes(folder, arguments, message):
    with pytest.raises(moezoo.UserError) as error:
        continuations([a.format(folder=folder) for a in arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
