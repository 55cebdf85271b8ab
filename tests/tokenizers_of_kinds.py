"""Small Hugging Face tokenizers of the kinds that released models have, trained on a text."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "The cat sat on the mat. Ein Bär aß süße Äpfel für 3 € — naïve façade; 漢字 and 😀 twice 😀.\n\tprint(x)  # two\n"
    * 3
)
SPECIAL = ["<s>", "</s>"]


def byte_level(text: str = TEXT, vocab: int = 330) -> Any:
    """Each byte is a character in which words are written, as in Qwen, DeepSeek and gpt-oss."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    made.add_tokens(["<think>"])  # an added token that is text
    return made


def sentence_piece() -> Any:
    """Pieces with a mark in place of spaces and one added before the text, and bytes of unknown characters: Mixtral."""
    made: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *SPECIAL, *(f"<0x{value:02X}>" for value in range(256))]
    made.train_from_iterator([TEXT.replace("漢字", "")], trainers.BpeTrainer(vocab_size=420, special_tokens=special))
    return _with_plain_bytes(made)


def _with_plain_bytes(made: Any) -> Any:
    """Return the tokenizer with bytes that are tokens of its vocabulary, which special ones are not."""
    import json

    table = json.loads(made.to_str())
    table["added_tokens"] = [token for token in table["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(table))


def metaspace() -> Any:
    """Words that begin with a mark in place of the space before them; one is added to the first word."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL))
    return made


def with_start(made: Any) -> Any:
    """Return the tokenizer with <s> before each text."""
    token = ("<s>", made.token_to_id("<s>"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[token])
    return made


KINDS = {"byte level": byte_level, "SentencePiece": sentence_piece, "Metaspace": metaspace}


def special_in_vocabulary(kind: str) -> Any:
    """Return a tokenizer whose special tokens, END and <unk>, are words of its vocabulary too, as GPT-NeoX has it.

    Two tokens are added after them that are not special and not in it: two spaces, and <late>. `kind` is that of the
    model, and in BPE what it makes of a whole word.
    """
    words = ["<unk>", "END", *"abEND▁", "ab"]
    if kind in ("byte level", "whole words"):
        words += sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(words))
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    made: Any = Tokenizer(
        {
            "byte level": lambda: models.BPE(vocab, [("a", "b")]),
            "whole words": lambda: models.BPE(vocab, [("a", "b")], ignore_merges=True),
            "BPE": lambda: models.BPE(vocab, [("a", "b")], unk_token="<unk>"),
            "WordLevel": lambda: models.WordLevel(vocab, unk_token="<unk>"),
            "WordPiece": lambda: models.WordPiece(vocab, unk_token="<unk>"),
            "Unigram": lambda: models.Unigram([(word, -1.0) for word in vocab], unk_id=0),
        }[kind]()
    )
    at_bytes = kind in ("byte level", "whole words")
    made.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if at_bytes else pre_tokenizers.WhitespaceSplit()
    )
    made.add_special_tokens([AddedToken("<unk>"), AddedToken("END", lstrip=True, rstrip=True)])
    made.add_tokens(["  ", "<late>"])
    return made


IN_VOCABULARY = ("byte level", "whole words", "BPE", "WordLevel", "WordPiece", "Unigram")
