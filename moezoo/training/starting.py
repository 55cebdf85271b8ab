"""A run that starts from weights, before it reads them: do its tokens fit, and what does the summary say of it?"""

from moezoo.config.compose import as_mapping, read_origin
from moezoo.config.origin import Origin
from moezoo.config.settings import TrainConfig
from moezoo.data import PythonStdlib, Synthetic
from moezoo.data.base import naming
from moezoo.data.file_settings import FileSettings
from moezoo.data.tokenizer import is_same_tokenizer, text_tokenizer
from moezoo.errors import UserError
from moezoo.typed import flatten, show

_BYTES = 256


def check_tokens(cfg: TrainConfig) -> None:
    """Raise `UserError` where the tokens of the data cannot be those of the weights that `cfg` starts from."""
    origin, vocab = read_origin(cfg.init_from, cfg.upcycle), cfg.model.vocab
    weights = f"the weights of init_from={cfg.init_from}"
    for name, part in cfg.data.parts.items():
        with naming(name):
            if isinstance(part, FileSettings):  # its tokenizer is set, or that of the weights
                found = text_tokenizer(part.tokenizer, key="data.tokenizer").vocab
                if found > vocab:
                    raise UserError(
                        f"data.tokenizer={show(part.tokenizer)} makes {found} tokens but {weights} have "
                        f"model.vocab={vocab}; set data.tokenizer to the one that they were trained with"
                    )
            elif isinstance(part, PythonStdlib):
                if origin.tokenizer:
                    why = f"have the tokens of {origin.tokenizer}"
                elif not origin.has_tokenizer and vocab != _BYTES:
                    why = f"have {vocab} tokens and no tokenizer.json"
                else:
                    continue
                raise UserError(
                    f"data=python_stdlib is bytes, but {weights} {why}; write data=text data.path=FILE_OR_FOLDER"
                )


def describe_start(cfg: TrainConfig) -> list[tuple[str, str]]:
    """Return the lines of the summary: what the weights are, what they become, and what differs from where they are."""
    origin, how = read_origin(cfg.init_from, cfg.upcycle), cfg.execution.param_dtype
    into = "frozen parameters as they are there, trained ones in float32" if how == "stored" else f"parameters in {how}"
    lines = [f"{cfg.init_from}, stored in {origin.stored}; here {into}"]
    theirs, ours = flatten(origin.model), flatten(as_mapping(cfg)["model"])
    if (up := cfg.upcycle).experts:
        same = f"noise of {up.noise} deviations: not the logits of the dense model" if up.noise else "the same logits"
        lines.append(f"a dense model; each MLP becomes {up.experts} experts, {up.per_token} per token; {same}")
    others = [
        f"model.{key}={show(ours[key])} ({show(theirs[key])} there)" for key in theirs if ours[key] != theirs[key]
    ]
    rate = cfg.optimizer.learning_rate
    usual = ", the default with init_from" * (rate == type(cfg.optimizer).tuning_rate * cfg.adapter.rate_factor)
    lines.append("; ".join([*others, f"optimizer.learning_rate={show(rate)}{usual}"]))
    if origin.run is not None and not cfg.checkpoint_frozen:
        lines.append("checkpoint_frozen=false: this run is read with that checkpoint, so keep it")
    if note := _describe_tokenizer(cfg, origin):
        lines.append(note)
    return [("init_from", line) for line in lines]


def _describe_tokenizer(cfg: TrainConfig, origin: Origin) -> str:
    """Return how the tokens of the data are not those of the weights, as far as both are known."""
    ours, theirs = cfg.data.tokenizer_file(), origin.tokenizer
    if not origin.has_tokenizer:
        return "no tokenizer there: the tokens of the data are taken to be those of the weights"
    there = [path for path in (ours, theirs) if path and path.is_file()]
    if isinstance(cfg.data, Synthetic) or ours == theirs or (len(there) == 2 and is_same_tokenizer(*there)):
        return ""
    return f"the tokens of the data are those of {ours or 'no tokenizer'}, and of the weights {theirs or 'bytes'}"
