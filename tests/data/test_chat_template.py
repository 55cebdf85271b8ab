"""Chat templates and their variables, as folders hold them."""

import json

import pytest
from refusals import by_table, refused
from special_tokens import CASES as TWO_FILES

from moezoo.data.chat_template import file_template, folder_template, missing_tokens

CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": None,
    "add_bos_token": True,
    "additional_special_tokens": ["<a>", {"content": "<b>"}],
    "extra_special_tokens": {"image_token": "<image>", "end_of_image": "</image>"},
}
VARIABLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "image_token": "<image>",
    "end_of_image": "</image>",
}


def write_config(folder, **more):
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **more}))


def test_a_folder_with_one_template(tmp_path):
    write_config(tmp_path, chat_template="hello")
    found = folder_template(tmp_path, key="folder")
    assert found == (f"{tmp_path}/tokenizer_config.json", {"default": "hello"}, VARIABLES)


def test_a_folder_with_named_templates(tmp_path):
    write_config(tmp_path, chat_template=[{"name": n, "template": t} for n, t in (("default", "d"), ("tool_use", "t"))])
    assert folder_template(tmp_path, key="folder").texts == {"default": "d", "tool_use": "t"}
    # Files of their own come first.
    (tmp_path / "chat_template.jinja").write_text("file\n")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    found = folder_template(tmp_path, key="folder")
    assert found == (f"{tmp_path}/chat_template.jinja", {"default": "file\n", "tool_use": "tools"}, VARIABLES)


def test_a_file(tmp_path):
    """Special tokens are those beside the tokenizer, or without one beside the template."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "t.jinja").write_text("own")
    write_config(tmp_path, chat_template="of the folder")
    path = str(tmp_path / "own" / "t.jinja")
    assert file_template(path, key="data.template", tokenizer=None) == (f"data.template={path}", {"default": "own"}, {})
    found = file_template(path, key="data.template", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (found.texts, found.variables) == ({"default": "own"}, VARIABLES)
    path = str(tmp_path / "tokenizer_config.json")
    found = file_template(path, key="data.template", tokenizer=None)
    assert (found.texts, found.variables) == ({"default": "of the folder"}, VARIABLES)


@pytest.mark.parametrize(("config", "older", "variables"), TWO_FILES)
def test_special_tokens_of_two_files(tmp_path, config, older, variables):
    for name, value in (("tokenizer_config", config), ("special_tokens_map", older)):
        if value is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "chat_template.jinja").write_text("")
    assert folder_template(tmp_path, key="folder").variables == variables


def test_special_tokens_that_print_nothing(tmp_path):
    write_config(tmp_path, chat_template="hello", bos_token=None)
    template = folder_template(tmp_path, key="folder")
    assert missing_tokens(template, ["eos_token", "image_token", "messages", "ns"]) is None
    files = "no tokenizer_config.json or special_tokens_map.json beside the tokenizer has"
    assert missing_tokens(template, ["messages", "bos_token", "eos_token"]) == (
        f"{tmp_path}/tokenizer_config.json prints nothing for bos_token: {files} it; if the model needs it, write it "
        "into tokenizer_config.json"
    )
    several = missing_tokens(template, ["sep_token", "bos_token"])
    assert several is not None
    assert f"prints nothing for bos_token and sep_token: {files} them; if the model needs them, write them" in several


@by_table(
    r"""
    name => content => message
    none => => {} does not exist; give a .jinja file, or a tokenizer_config.json that has chat_template
    t.jinja => \xff => {} is not UTF-8 text (byte 0); give a .jinja file
    t.json => { => {} is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1));
    t.json => [] => {} is not a JSON object; copy or download it again
    t.json => {} => {} has no chat_template; give a .jinja file
    t.json => {"chat_template": 7} => {}: chat_template is neither a text nor a list with one named default; give
    t.json => {"chat_template": [{"name": "tool_use", "template": ""}]} => {}: chat_template is neither a text nor
    """
)
def test_refusals(tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_bytes(content.replace(r"\xff", "\xff").encode("latin-1"))
    with refused(message.replace("{}", f"data.template={tmp_path / name}")):
        file_template(str(tmp_path / name), key="data.template", tokenizer=None)


def test_a_folder_without_a_template(tmp_path):
    for _ in range(2):
        with refused(f"data.tokenizer: {tmp_path} has no chat template (chat_template.jinja, or chat_template in"):
            folder_template(tmp_path, key="data.tokenizer")
        write_config(tmp_path)
