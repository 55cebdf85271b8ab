"""Model cards: the README.md of a folder, by the facts that are known. What is not known is left out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from moezoo.data.chat_template import CONFIG, TEMPLATE
from moezoo.errors import UserError
from moezoo.host.files import open_file
from moezoo.hub.public_names import Named
from moezoo.typed import counted, show

README = "README.md"
_LICENSE = re.compile(r"^(license|license_name|license_link): *(\S.*)$", re.MULTILINE)
_LONGEST = 2**20  # bytes of a card that are read
# Around what an adapter's card says of its training, which is taken over where the adapter is merged.
_BEGIN, _END = "<!-- training, by moezoo -->", "<!-- end of training -->"
# In the cards of adapters, which a run that goes on replaces.
_OURS = "<!-- moezoo replaces this file when the run goes on; without this line it stays -->"
# What a reader gives to the model: a chat, a text, bytes as tokens, or tokens of which nothing is known.
Prompt = Literal["chat", "text", "bytes", "ids"]


class Size(NamedTuple):
    """How much text one side of the data has."""

    documents: int
    tokens: int


class Data(NamedTuple):
    """Data, or one source of a mixture.

    Attributes:
        what: The kind, and names without folders.
        unit: What a token is, "byte" or "token".
        training: The documents that were trained on; None where that is not known.
        validation: Those of the validation losses.
        held_out: How these were chosen; empty where that is not known.
    """

    what: str
    unit: str = "token"
    training: Size | None = None
    validation: Size | None = None
    held_out: str = ""


class Loss(NamedTuple):
    """A loss in nats per token, and the step after which the model had it."""

    title: str
    step: int
    value: float


class Training(NamedTuple):
    """A run up to the step that the weights are of.

    Attributes:
        step: That step.
        trained: Which parameters were trained.
        data: The data, or the sources of a mixture.
        settings: Titles and values.
        losses: What is known of losses up to that step.
        versions: Those of the libraries, by name.
    """

    step: int
    trained: str
    data: Sequence[Data]
    settings: Mapping[str, str]
    losses: Sequence[Loss]
    versions: Mapping[str, str]


class Facts(NamedTuple):
    """What the card of a folder says.

    Attributes:
        name: The title.
        what: A sentence about the model, or about the adapter.
        base: The model that it was made of; None for random numbers or where that is not known.
        relation: What it is to the base, in the Hub's words; None for the same model.
        license: The lines of the base's card about its license.
        training: A run, or what the card of a merged adapter says of one.
        prompt: What its readers give to it.
        note: What a reader has to know besides.
    """

    name: str
    what: str
    base: Named | None = None
    relation: Literal["adapter", "finetune", "quantized"] | None = None
    license: Sequence[str] = ()
    training: Training | str | None = None
    prompt: Prompt = "ids"
    note: str = ""


def write_card(facts: Facts) -> str:
    """Return the card as Markdown, with the header that the Hub reads."""
    is_adapter, training = facts.relation == "adapter", facts.training
    parts = ["\n".join(_header(facts)), f"# {_plain(facts.name) or 'A model'}"]
    parts += [*([_OURS] if is_adapter else []), facts.what]
    if facts.base is not None and facts.base.name:
        parts.append(f"Base: {_name(facts.base)}.")
    if facts.note:
        parts.append(facts.note)
    if training:
        parts += [_BEGIN, training if isinstance(training, str) else "\n\n".join(_training(training)), _END]
    parts += ["## How to load it", *(_adapter_loading if is_adapter else _loading)(facts.prompt)]
    parts += ["## What is missing", _missing(facts)]
    return "\n\n".join(parts) + "\n"


def read_card(folder: Path) -> str:
    """Return the README.md of a folder; empty where there is none that can be read."""
    try:
        with open_file(folder / README) as file:
            return file.read(_LONGEST).decode(errors="replace")
    except UserError:
        return ""


def license_of(card: str) -> list[str]:
    """Return the lines of a card's header about the license, without links that lead to files beside the card."""
    header = re.match(r"---\n(.*?)\n---\s*\n", card.replace("\r\n", "\n"), re.DOTALL)
    lines = _LICENSE.findall(header[1]) if header else []
    return [
        f"{key}: {show(text.strip())}"
        for key, text in lines
        if key != "license_link" or text.startswith(("https://", "http://"))
    ]


def training_of(card: str) -> str:
    """Return what a card that moezoo wrote says of training; empty for other cards."""
    return card.partition(_BEGIN)[2].partition(_END)[0].strip()


def prompt_of(files: Mapping[str, Path | bytes], otherwise: Prompt) -> Prompt:
    """Return what is given to the model of a folder with these files: `otherwise` without a tokenizer."""
    if "tokenizer.json" not in files:
        return otherwise
    config = files.get(CONFIG, b"")
    if isinstance(config, Path):
        with open_file(config) as file:
            config = file.read(_LONGEST)
    found = re.search(rb'"chat_template"\s*:\s*(\S)', config)
    return "chat" if TEMPLATE in files or (found and found[1] in b'"[') else "text"


def is_replaced(card: str) -> bool:
    """Whether a card of an adapter may be replaced: there is none, or moezoo wrote it."""
    return not card or _OURS in card


def _header(facts: Facts) -> Iterator[str]:
    yield "---"
    yield f"library_name: {'peft' if facts.relation == 'adapter' else 'transformers'}"
    yield "pipeline_tag: text-generation"
    if facts.base is not None and facts.base.is_hub:
        yield f"base_model: {facts.base.name}"
        if facts.relation:
            yield f"base_model_relation: {facts.relation}"
    yield from facts.license
    yield "tags:"
    yield from (f"- {tag}" for tag in ("moezoo", "mixture-of-experts", *["lora"] * (facts.relation == "adapter")))
    yield "---"


def _name(named: Named) -> str:
    name = _plain(named.name)
    return f"[{name}](https://huggingface.co/{name})" if named.is_hub else f"`{name}`"


def _plain(name: str) -> str:
    """Return a name that ends no line and no code."""
    return show(name).replace("`", "'")


def _training(training: Training) -> Iterator[str]:
    yield f"## Training\n\n{training.trained} The weights are those of step {training.step:,}."
    if training.data:
        yield "### Data"
        yield "\n".join(line for data in training.data for line in _data(data))
    yield "### Settings"
    yield "\n".join(["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in training.settings.items())])
    if training.losses:
        unit = training.data[0].unit if training.data else "token"
        rows = (f"| {title} | {step:,} | {value:.4f} |" for title, step, value in training.losses)
        yield "### Losses"
        yield "\n".join([f"| loss | step | nats per {unit} |", "|---|---|---|", *rows])
    if training.versions:
        yield "Trained with " + ", ".join(f"{name} {version}" for name, version in training.versions.items()) + "."


def _data(data: Data) -> Iterator[str]:
    yield f"- {data.what}"
    for title, size in (("training", data.training), ("validation", data.validation)):
        chosen = f": {data.held_out}" if title == "validation" and data.held_out else ""
        if size is not None:
            yield f"  - {title}: {counted(size.documents, 'document')}, {counted(size.tokens, data.unit)}{chosen}"
        elif chosen:
            yield f"  - {title}{chosen}"


class _Way(NamedTuple):
    """How a model is asked: lines that make `inputs`, what shows `ids`, vLLM's program, and a command's key."""

    inputs: str
    shown: str
    vllm: str
    command: str


_TEXT = '"Once upon a time"'
_CHAT = '[{"role": "user", "content": "Hello"}]'
_TOKENIZER = 'tokenizer = transformers.AutoTokenizer.from_pretrained("FOLDER")\n'
_VLLM = """\
from vllm import LLM, SamplingParams

model = LLM(model="FOLDER")
print(model.HOW(WHAT, SamplingParams(max_tokens=64))[0].outputs[0].text)"""
_VLLM_OF_IDS = """\
from vllm import LLM, SamplingParams

model = LLM(model="FOLDER", skip_tokenizer_init=True)
asked = {"prompt_token_ids": WHAT}
print(model.generate(asked, SamplingParams(max_tokens=64, detokenize=False))[0].outputs[0].token_ids)"""
_BYTES = f"list({_TEXT}.encode())"  # each byte is a token
_WAYS: Mapping[Prompt, _Way] = {
    "chat": _Way(
        f"{_TOKENIZER}chat = {_CHAT}\ninputs = tokenizer.apply_chat_template(\n"
        '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n)',
        "tokenizer.decode(ids)",
        _VLLM.replace("HOW", "chat").replace("WHAT", _CHAT),
        'chat="Hello"',
    ),
    "text": _Way(
        f'{_TOKENIZER}inputs = tokenizer({_TEXT}, return_tensors="pt")',
        "tokenizer.decode(ids)",
        _VLLM.replace("HOW", "generate").replace("WHAT", _TEXT),
        f"prompt={_TEXT}",
    ),
    "bytes": _Way(
        f'inputs = {{"input_ids": torch.tensor([{_BYTES}])}}',
        'bytes(ids.tolist()).decode(errors="replace")',
        _VLLM_OF_IDS.replace("WHAT", _BYTES),
        'prompt="79 110 99 101"  # token ids, which are bytes',
    ),
    "ids": _Way(
        'inputs = {"input_ids": torch.tensor([[1, 2, 3]])}',
        "ids.tolist()",
        _VLLM_OF_IDS.replace("WHAT", "[1, 2, 3]"),
        'prompt="1 2 3"  # token ids',
    ),
}


def _loading(prompt: Prompt) -> Iterator[str]:
    way = _WAYS[prompt]
    yield "`FOLDER` is the path of this folder, or its name on the Hub. In transformers, 4.57 or later:"
    yield _code("python", _in_transformers(way))
    yield "In vLLM, by its documentation; it was not run when this card was written:"
    yield _code("python", way.vllm)
    yield "In moezoo, from a disk:"
    yield _code("python", 'import moezoo\n\nmodel = moezoo.from_pretrained("FOLDER")')
    yield _code("sh", f"moezoo generate folder=FOLDER {way.command}")


def _adapter_loading(prompt: Prompt) -> Iterator[str]:
    way = _WAYS[prompt]
    yield "`FOLDER` is the base, and `ADAPTER` this folder. In transformers, with PEFT:"
    load = 'model = peft.PeftModel.from_pretrained(model, "ADAPTER")\n'
    yield _code("python", f"import peft\n{_in_transformers(way, load)}")
    yield "In moezoo, from a disk:"
    yield _code("python", 'import moezoo\n\nmodel = moezoo.from_pretrained("FOLDER", adapter="ADAPTER")')
    yield _code("sh", f"moezoo generate folder=FOLDER adapter=ADAPTER {way.command}")
    yield 'In vLLM and others, as a folder of merged weights, by `LLM(model="MERGED")`; it was not run:'
    yield _code("sh", "moezoo convert FOLDER MERGED adapter=ADAPTER")


def _in_transformers(way: _Way, load: str = "") -> str:
    """Return a program; `load` are lines between the model and its use."""
    return (
        "import torch\n" * ("torch." in way.inputs)
        + 'import transformers\n\nmodel = transformers.AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")\n'
        + f"{load}{way.inputs}\nids = model.generate(**inputs, max_new_tokens=64)[0]\nprint({way.shown})"
    )


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _missing(facts: Facts) -> str:
    keys = ["datasets"] if facts.license else ["license", "datasets"]
    if facts.base is not None and not facts.base.is_hub:
        keys.append("base_model")
    words = f"The header has no {', no '.join(f'`{key}`' for key in keys)}: write them before you publish the folder."
    return words + " Its `license` is that of the base's card." * bool(facts.license)
