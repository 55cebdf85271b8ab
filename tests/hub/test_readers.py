"""Folders as two generations of transformers read them: every model type, with rotary settings that are no default.

Marked `peers4`: transformers 4.57, in a folder of its own before the other libraries
(`pip install --target .ci/peers4 transformers==4.57.1`).
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from tiny_models import CONFIGS, YARN, deepseek_v2, deepseek_v3, gpt_oss, mistral4, mixtral, olmoe, qwen3
from tokenizers_of_kinds import TEXT, sentence_piece

from moezoo.data.tokenizer import folder_tokenizer
from moezoo.hub.card import Facts, Prompt, write_card
from moezoo.hub.folders import tokenizer_config
from moezoo.models import family_of
from moezoo.nn.rotary import Llama3, Yarn

SECONDS = 600
OLDER = Path(__file__).parents[2] / ".ci/peers4"
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 16))
# transformers 4.57 has only the released limit of gpt-oss.
GPT_OSS: Any = gpt_oss(swiglu_limit=7.0, yarn=Yarn(mscale=0.0, mscale_all=0.0, truncate=False))
PLAIN: dict[str, Any] = {
    "mixtral": mixtral(),
    "olmoe": olmoe(),
    "gpt_oss": GPT_OSS,
    "qwen3_moe": qwen3(attention_bias="all"),
    "qwen2_moe": replace(CONFIGS["qwen2"], head_dim=4),  # the only size that transformers 4.57 has
    "glm4_moe": CONFIGS["glm plain"],
    "dots1": CONFIGS["dots"],
    "ernie4_5_moe": CONFIGS["ernie"],
    "deepseek_v2": deepseek_v2(rope_base=100.0),
    "deepseek_v3": deepseek_v3(rope_base=100.0),
    "minimax_m2": CONFIGS["minimax"],
    "hy_v3": CONFIGS["hy"],
    "mistral4": mistral4(rope_base=100.0, yarn=Yarn()),
    "deepseek_v32": deepseek_v3(rope_base=100.0, index_topk=19),
    "glm_moe_dsa": deepseek_v3(rope_base=100.0, index_topk=19, index_pairs="interleaved"),
}
IN_4 = [*PLAIN][:10]
# Without `mscale` the factor on queries and keys follows from that of YaRN alone. In DeepSeek-V2, transformers 4.57 has
# no other.
WITHOUT = replace(YARN, mscale=0.0, mscale_all=0.0)
WITH = ("deepseek_v3", "mistral4", "deepseek_v32", "glm_moe_dsa")
SCALED = {
    "mixtral llama3": replace(PLAIN["mixtral"], llama3=Llama3(factor=4.0, length=64, low=1.0, high=3.0)),
    "gpt_oss yarn": replace(GPT_OSS, yarn=replace(WITHOUT, truncate=False)),
    "mistral4 yarn": mistral4(rope_base=100.0),
} | {
    f"{name} yarn": replace(config, yarn=YARN if name in WITH else WITHOUT)
    for name, config in PLAIN.items()
    if name not in ("mixtral", "olmoe", "gpt_oss", "mistral4")
}
CASES = PLAIN | SCALED
NOT_FULL = ("qwen3_moe yarn", "deepseek_v3 yarn")


@pytest.fixture(scope="module")
def written(save):
    """Return a function from the name of a case to its folder, with a tokenizer as `moezoo convert` writes it, and our
    logits."""

    @functools.cache
    def write(name: str) -> tuple[Path, np.ndarray]:
        model, folder = save(CASES[name])
        sentence_piece().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_bytes(tokenizer_config(None))
        return folder, np.asarray(jax.jit(lambda model: model(TOKENS).logits)(model))

    return write


def cases(names: Any, mark: Any = ()) -> list[Any]:
    return [pytest.param(name, marks=mark if name in NOT_FULL else pytest.mark.full) for name in names]


def run(path: str, *program: Any) -> list[str]:
    """Return the lines that a program prints with the transformers that is first on `path`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@functools.cache
def read_by(path: str, *folders: Path) -> dict[str, Any]:
    """Return what the transformers that is first on `path` makes of folders, in one process."""
    program = Path(__file__).with_name("read_folders.py")
    return json.loads(run(path, program, json.dumps(TOKENS.tolist()), TEXT, *folders)[-1])


def assert_reads(written: Any, name: str, version: str, path: str) -> None:
    """Assert that a version of transformers, which is first on `path`, computes our logits and makes our ids."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
    together = NOT_FULL if name in NOT_FULL else (name,)
    found = read_by(path, *(written(each)[0] for each in together))
    assert found["version"].startswith(version), "pip install --target .ci/peers4 transformers==4.57.1"
    (folder, wanted), read = written(name), found["folders"][together.index(name)]
    assert read["ids"] == folder_tokenizer(folder).encode(TEXT)
    # About a thousand products, each rounded to 6e-8; a wrong rotation changes logits by more than 0.1.
    np.testing.assert_allclose(wanted, read["logits"], rtol=0, atol=1e-4)


@pytest.mark.peers4
def test_programs_of_cards(save, tmp_path):
    """What a card says of loading in transformers works, for each kind of prompt (5: `test_cards.py`)."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
    shutil.copytree(save(replace(PLAIN["mixtral"], vocab=430)).folder, folder := tmp_path / "folder")
    sentence_piece().save(str(folder / "tokenizer.json"))
    (tmp_path / "template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    (folder / "tokenizer_config.json").write_bytes(tokenizer_config(None, tmp_path / "template.json"))
    cards = [write_card(Facts("", "", prompt=prompt)) for prompt in get_args(Prompt)]
    programs = [card.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(folder)) for card in cards]
    # This model has more tokens than bytes.
    programs = [program.replace("bytes(ids.tolist())", "bytes(i % 256 for i in ids.tolist())") for program in programs]
    assert run(str(OLDER), "-c", "\n".join([*programs, "print(transformers.__version__)"]))[-1].startswith("4.57.")


# Keys that transformers' classes do not have, with which vLLM 0.33.0 and SGLang 0.5.23 compute what we do.
DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
SERVED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), DEEPSEEK),
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 4},
    "hy_v3": {"qk_norm": True, "route_norm": True, "expert_hidden_dim": 12, "first_k_dense_replace": 2},
    "gpt_oss": {"hidden_act_alpha": 1.702},
}


@pytest.mark.parametrize("name", SERVED)
def test_keys_that_programs_that_serve_models_read(name):
    config = replace(PLAIN[name], layers=3, mlp_layers=(0, 1)) if name == "hy_v3" else PLAIN[name]
    keys = family_of(config).hub.write(config)
    assert {key: keys.get(key) for key in SERVED[name]} == SERVED[name]


def test_a_list_of_layers_that_a_number_cannot_say():
    keys = family_of(PLAIN["hy_v3"]).hub.write(PLAIN["hy_v3"])
    assert keys["mlp_layer_types"] == ["sparse", "dense", "sparse"]
    assert "first_k_dense_replace" not in keys


def test_no_factor_of_yarn_is_no_key():
    """vLLM and SGLang compute with 0."""
    config = SCALED["deepseek_v2 yarn"]
    assert not {"mscale", "mscale_all_dim"} & family_of(config).hub.write(config)["rope_parameters"].keys()


@pytest.mark.peers4
@pytest.mark.parametrize("name", cases(name for name in CASES if name.split()[0] in IN_4))
def test_what_transformers_4_reads(written, name):
    assert_reads(written, name, "4.57.", str(OLDER))


@pytest.mark.parametrize("name", cases(CASES, pytest.mark.weekly))
def test_what_transformers_5_reads(written, name):
    assert_reads(written, name, "5.", "")
