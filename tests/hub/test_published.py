"""The script that tries published files, on a folder with a file of each kind."""

import gzip
import json

import pytest
from chat_styles import save_tokenizer

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")

import published

TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ECHO = "{{ messages[0].content if m.role == 'assistant' }}<|end|>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CONFIG = {"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
CONFIG |= {"num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
CONFIG |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 16}
# Embedding and unembedding; four projections; router; experts; three norms.
TOTAL, ROUTER, EXPERT = 2 * 16 * 8 + 4 * 8 * 8 + 2 * 8 + 2 * 3 * 8 * 8 + 3 * 8, 2 * 8, 3 * 8 * 8
OUTSIDE = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
LAYER = ["input_layernorm", "post_attention_layernorm", "block_sparse_moe.gate"]
LAYER += [f"self_attn.{name}_proj" for name in "qkvo"]
LAYER += [f"block_sparse_moe.experts.{expert}.w{number}" for expert in range(2) for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with what is well and what is not."""
    (folder := tmp_path / "files").mkdir()
    for name, text in (
        ("good", TURN + PROMPT),
        ("bad", "{{ raise_exception('no') }}"),
        ("leak", TURN.replace("<|end|>", ECHO) + PROMPT),
    ):
        (folder / f"{name}.jinja").write_text(text)
    names = {name: "a" for name in [*OUTSIDE, *(f"model.layers.0.{name}.weight" for name in LAYER)]}
    other = {name: "a" for name in names if name != "lm_head.weight"} | {"model.layers.0.extra": "a"}
    for name, mapping in (
        ("configs/sparse", CONFIG),
        (
            "configs/dense",
            {key: value for key, value in CONFIG.items() if "expert" not in key} | {"model_type": "llama"},
        ),
        ("configs/unknown", {"model_type": "no_such"}),
        ("indexes/sparse", {"weight_map": names, "metadata": {"total_size": 1}}),
        ("indexes/alone", {"weight_map": names}),
        ("whole/config", CONFIG),
        ("whole/model.safetensors.index", {"weight_map": other}),
    ):
        (path := folder / f"{name}.json").parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(mapping))
    (folder / "damaged.json").write_text("{")
    (folder / "other.txt").write_text("no")
    (tokenizer := folder / "tokenizer").mkdir()
    text = save_tokenizer(tmp_path / "tokenizer.json", ("<|end|>", "<|user|>", "<|assistant|>")).read_bytes()
    (tokenizer / "tokenizer.json.gz").write_bytes(gzip.compress(text))
    return folder


def rows_of(lines):
    """Return the cells of each row by the file and by the column."""
    rows, columns = {}, []
    for line in lines:
        name, *cells = map(str.strip, line.split(" | "))
        if name == "file":
            columns = cells
        elif cells:
            rows[name] = dict(zip(columns, cells, strict=False))
    return rows


def test_every_file_has_a_row(folder, tmp_path, capsys):
    assert published.main([str(folder), "--write", str(tmp_path / "hashes.json")]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out.splitlines())
    assert all(rows["good.jinja"][name] == "=" for name in ("one", "two", "system", "thoughts", "prompt"))
    assert all(rows["good.jinja"][name] == "ok" for name in ("assistant: one", "assistant: two", "last: two"))
    assert rows["good.jinja"]["assistant: tools"] == "lost"
    assert (rows["good.jinja"]["before"], rows["good.jinja"]["after"]) == ("''", "'<|end|>'")
    assert (rows["bad.jinja"]["one"], rows["bad.jinja"]["last: one"]) == ("r", "R")
    assert "bad.jinja: one: moezoo template refuses this chat: no; transformers TemplateError: no" in out
    assert rows["leak.jinja"]["last: one"] == "leak"
    sparse, dense = rows["configs/sparse.json"], rows["configs/dense.json"]
    assert (sparse["read"], sparse["parameters"], sparse["same"]) == ("yes", f"{TOTAL:,}", "=")
    assert sparse["active"] == f"{TOTAL - EXPERT:,}"
    assert (dense["read"], dense["parameters"], dense["same"]) == ("upcycled", f"{TOTAL - ROUTER - EXPERT:,}", "=")
    assert rows["configs/unknown.json"]["read"] == "refused"
    assert "configs/unknown.json: config.json: unknown model_type 'no_such'" in out
    assert rows["indexes/sparse.json"]["names"] == "="
    assert rows["indexes/alone.json"]["names"] == "no config"
    assert rows["whole/model.safetensors.index.json"]["names"] == "1 missing, 1 unknown"
    assert "missing: lm_head.weight" in out
    tokenizer = rows["tokenizer/tokenizer.json.gz"]
    assert len({tokenizer[name] for name in ("texts", "AutoTokenizer", "chats")}) == 1
    assert tokenizer["texts"].startswith("15/")
    assert (tokenizer["added"], tokenizer["lookalikes stay text"]) == ("4/4", "3/3")
    assert rows["damaged.json"] == {"fault": "fault"}
    assert "\nother.txt" in out


def test_what_another_version_renders_is_named(folder, tmp_path, capsys):
    for path in folder.rglob("*.json*"):
        path.unlink()
    hashes = tmp_path / "hashes.json"
    assert published.main([str(folder), "--write", str(hashes)]) == 0
    (folder / "good.jinja").write_text(TURN.replace("<|end|>", "{{ ' ' if loop.last }}<|end|>") + PROMPT)
    (folder / "bad.jinja").write_text(TURN + PROMPT)
    assert published.main([str(folder), "--compare", str(hashes)]) == 1
    out = capsys.readouterr().out
    assert "good.jinja: one text: other text" in out
    assert "bad.jinja: one last: is read, before refused" in out
    assert "leak.jinja" not in out.partition("# Compared")[2]
