"""Masks of tokens: in token files, in the cache of ids, and in what processes and a resume compare."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from moezoo.data import Jsonl, Tokens, load, train_batches
from moezoo.data.corpus import Ids
from moezoo.data.token_files import write_token_files

DOCUMENTS = [np.arange(n, 2 * n + 1, dtype=np.uint16) for n in range(40)]


def write(path: Path, divisor: int | None) -> Path:
    """Write documents in which the multiples of `divisor` are predicted; None writes no mask."""
    masked = (Ids(ids, None if divisor is None else ids % divisor == 0) for ids in DOCUMENTS)
    write_token_files(path, masked, np.dtype(np.uint16), lambda: {"vocab": 100, "unit": "token"})
    return path


def load_tokens(path: Path):
    return load(Tokens(path=str(path)), seq_len=8, seed=0, vocab=100)


def test_token_files_hold_masks(tmp_path):
    source = load_tokens(write(tmp_path / "a.npy", 3))
    assert isinstance(source.train.mask, np.memmap)
    batches = train_batches(source, seq_len=8, batch_size=5, seed=0)
    labels = np.concatenate([next(batches).labels.ravel() for _ in range(9)])
    assert (labels[labels >= 0] % 3 == 0).all()
    assert (labels >= 0).sum() > 50
    described = json.loads((tmp_path / "a.json").read_text())
    assert described["predicted"] == sum(int((ids % 3 == 0).sum()) for ids in DOCUMENTS)
    # With all tokens predicted, and without a mask, batches are the same; the data are not.
    sources = [load_tokens(write(tmp_path / f"{divisor}.npy", divisor)) for divisor in (1, None)]
    same = [np.stack(next(train_batches(each, seq_len=8, batch_size=5, seed=0))) for each in sources]
    assert same[0].tolist() == same[1].tolist()
    facts = [each.facts(8) for each in (source, *sources)]
    assert len({each["the sha256 of all token ids"] for each in facts}) == 3
    assert len({each["the hash of the training tokens"] for each in facts}) == 3
    assert sorted(file.name for file in tmp_path.glob("None*")) == ["None.json", "None.npy", "None.offsets.npy"]


def save(array):
    return lambda path: np.save(path, array)


def write_again(path):
    """Write the ids without their mask, and put another one beside them."""
    write(path.with_name("a.npy"), None)
    np.save(path, np.ones(820, bool))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "{0} needs a.mask.npy next to it: a.json says that not all tokens are predicted"),
        (save(np.ones(820, np.uint8)), "{0}: a.mask.npy has dtype uint8 and shape [820], expected bool [820]"),
        (save(np.ones(7, bool)), "{0}: a.mask.npy has dtype bool and shape [7], expected bool [820]"),
        (lambda path: path.write_text("text"), "data.path={1} cannot be read as a .npy array"),
        (write_again, "{0}: a.mask.npy is not of the data in a.json; remove one of the two files"),
        (save(np.zeros(820, bool)), "data=tokens has no token to predict for training; give data that have some"),
    ],
)
def test_masks_that_do_not_belong_to_the_ids(tmp_path, damage, message):
    path = write(tmp_path / "a.npy", 3)
    damage(tmp_path / "a.mask.npy")
    with refused(message.format(f"data.path={path}", tmp_path / "a.mask.npy")):
        load_tokens(path)


@dataclasses.dataclass(frozen=True)
class Shouted(Jsonl):
    """Bytes of which only capital letters from `first` on are predicted."""

    first: str = "A"

    @property
    def reader(self) -> str:
        return f"{super().reader} from {self.first}"

    def _how(self, vocab: int):
        def make(document) -> Ids:
            ids = np.frombuffer(document.text, np.uint8)
            return Ids(ids, (ids >= ord(self.first)) & (ids <= ord("Z")))

        return super()._how(vocab)._replace(make=make)


def test_the_cache_keeps_masks(tmp_path):
    kinds = ["lower UPPER lower", "", "ABC", "q", "what A mess OF Words"]
    texts = [f"{text}{i}" for i in range(30) for text in kinds]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def read(first):
        return load(Shouted(path=str(tmp_path / "a.jsonl"), first=first), seq_len=8, seed=0, vocab=256)

    cold, warm, other = read("A"), read("A"), read("B")
    plain = load(Jsonl(path=str(tmp_path / "a.jsonl")), seq_len=8, seed=0, vocab=256)
    assert cold.facts(8) == warm.facts(8)
    assert len({source.summary["sha256"] for source in (cold, other, plain)}) == 3
    for source in (cold, warm):
        batch = next(train_batches(source, seq_len=8, batch_size=20, seed=0))
        labels = bytes(batch.labels[batch.labels >= 0].tolist()).decode()
        assert labels.isupper()
        assert len(labels) > 10


def test_a_damaged_mask_in_the_cache(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i} what A mess OF Words"}}\n' for i in range(30)))
    settings = Shouted(path=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "ids"))
    load(settings, seq_len=8, seed=0, vocab=256)
    (entry,) = (tmp_path / "ids").iterdir()
    mask = (entry / "tokens.mask.npy").read_bytes()
    (entry / "tokens.mask.npy").write_bytes(mask[:-1] + bytes([mask[-1] ^ 1]))
    with refused(f"{entry} is damaged; remove this folder, and start again (its ids or its mask are not those that"):
        load(settings, seq_len=8, seed=0, vocab=256)
