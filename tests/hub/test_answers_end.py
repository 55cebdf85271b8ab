"""A tuned model ends its answers by itself: in `generate chat=`, and in transformers by the keys of the folder."""

import json

import numpy as np
import pytest
from chat_styles import save_tokenizer

from moezoo.cli.convert import main as convert
from moezoo.cli.generate import continuations
from moezoo.cli.train import main as train

transformers = pytest.importorskip("transformers")

TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
# Where the end of a turn stands: behind each; nowhere but in the next role's token; before the next turn.
TEMPLATES = {
    "another token than the base model's": TURN + "<|im_end|>{% endfor %}",
    "the next role's token": TURN + "{% endfor %}",
    "a token before the next turn": TURN.replace("<|{{", "{{ '<|im_end|>' if not loop.first }}<|{{") + "{% endfor %}",
}
PROMPT = "{% if add_generation_prompt %}BEFORE<|assistant|>{% endif %}"
WORDS = ("rain", "snow", "wind", "sun")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_answers_end(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tokenizer.json", ("<|end|>", "<|im_end|>", "<|user|>", "<|assistant|>"), words=WORDS)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    before = "<|im_end|>" if "before" in kind else ""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[kind] + PROMPT.replace("BEFORE", before))
    chats = [{"prompt": word, "completion": f"{word}!"} for word in WORDS] * 10
    for name in ("chats", "validation"):  # of so few different chats, one would be held out
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = [
        "data=chat",
        "data.path=chats.jsonl",
        "data.validation=validation.jsonl",
        "data.tokenizer=tokenizer.json",
        "model.vocab=300",
    ]
    small = ["model.layers=1", "model.embed=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16"]
    small += ["model.experts=2", "model.experts_per_token=1", "model.expert_mlp=32", "schedule.warmup_steps=2"]
    train([*data, *small, "mesh=single", "seq_len=32", "batch_size=8", "steps=80", "run_dir=run", "eval_every=0"])
    assert continuations(["run_dir=run", "chat=snow", "max_new_tokens=20"]) == ["snow!"]
    convert(["source=run", "target=folder"])
    assert continuations(["folder=folder", "chat=wind", "max_new_tokens=20"]) == ["wind!"]
    tokenizer = transformers.AutoTokenizer.from_pretrained("folder")
    peer = transformers.AutoModelForCausalLM.from_pretrained("folder")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sun"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = peer.generate(**asked, max_new_tokens=20, do_sample=False)[0].numpy()
    assert tokenizer.decode(found[asked["input_ids"].shape[1] :], skip_special_tokens=True) == "sun!"
    # vLLM and SGLang end an answer at these too.
    ends = json.loads((tmp_path / "folder" / "generation_config.json").read_text())["eos_token_id"]
    assert found[-1] in np.atleast_1d(ends)
    assert len(found) - asked["input_ids"].shape[1] < 20
