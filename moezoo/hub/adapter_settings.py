"""What adapter_config.json, as PEFT writes it, says of low-rank pairs. What would compute something else is refused."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.errors import UserError
from moezoo.json_files import read_json
from moezoo.typed import convert, show

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT = (0, 19)  # the first version with this layout of packed experts
# Patterns of names are regular expressions from anybody: few repetitions, and no repeated group.
_REPEATS, _REPEATED, _MOST_REPEATS = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]"), 4
# Keys of adapter_config.json that change what is computed, and the values that have no effect; others are refused.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "loftq_config": (None, {}),
    # The others change the base.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# What was chosen by, and how it was trained: the tensors show the result.
_UNREAD = frozenset(
    {
        *("alora_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "modules_to_save", "monteclora_config", "peft_type", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters", "task_type"),
    }
)
_READ = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))


class AdapterSettings(NamedTuple):
    """What adapter_config.json says of the factor of each pair."""

    where: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool
    version: str | None
    parameters: tuple[str, ...]
    targets: tuple[str, ...]
    excluded: Any
    layers: tuple[int, ...] | None

    @classmethod
    def read(cls, path: Path) -> "AdapterSettings":
        """Read the file. Raises `UserError` for what is no LoRA, and for what would be computed in another way."""
        mapping = read_json(path)
        if mapping.get("peft_type") != "LORA":
            raise UserError(f"{path}: peft_type={show(mapping.get('peft_type'))[:40]}, expected LORA; only it is read")
        for key, value in mapping.items():
            if key in _WITHOUT_EFFECT:
                if value not in _WITHOUT_EFFECT[key]:
                    usual = show(_WITHOUT_EFFECT[key][0])
                    raise UserError(
                        f"{path}: {key}={show(value)[:80]} computes something else than a low-rank pair beside each "
                        f"weight; expected {usual}: merge the adapter with PEFT, and load the merged folder"
                    )
            elif key not in _UNREAD | _READ and value not in (None, False, [], {}, "", 0):
                raise UserError(
                    f"{path}: unknown key {show(key)[:80]}={show(value)[:80]}; what it means is not known here: merge "
                    "the adapter with PEFT, and load the merged folder"
                )
        number = lambda key, kind, of: convert(kind, of, f"{path}: {key}")  # noqa: E731
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in number(key, Mapping[str, float], mapping.get(key) or {}):
                if len(_REPEATS.findall(pattern)) > _MOST_REPEATS or _REPEATED.search(pattern):
                    raise UserError(
                        f"{path}: {key} has {show(pattern)[:80]}, whose search may never end; write the names of the "
                        "modules, or the ends of their names"
                    )
        return cls(
            path,
            number("r", int, mapping.get("r", 8)),
            number("lora_alpha", float, mapping.get("lora_alpha", 8)),
            number("rank_pattern", Mapping[str, int], mapping.get("rank_pattern") or {}),
            number("alpha_pattern", Mapping[str, float], mapping.get("alpha_pattern") or {}),
            number("use_rslora", bool, mapping.get("use_rslora", False)),
            number("peft_version", str | None, mapping.get("peft_version")),
            tuple(str(name).rpartition(".")[2] for name in mapping.get("target_parameters") or ()),
            # A pattern in place of names, which may search for ever, and "all-linear" are not looked at.
            tuple(map(str, targets)) if isinstance(targets := mapping.get("target_modules"), list) else (),
            mapping.get("exclude_modules"),
            number("layers_to_transform", tuple[int, ...], [layers] if isinstance(layers, int) else layers)
            if (layers := mapping.get("layers_to_transform")) is not None
            else None,
        )

    def names(self, module: str) -> bool:
        """Return whether `target_modules` name a module, and nothing excludes it, as far as both are lists of names."""
        ends = lambda names: any(f".{module}".endswith(f".{name}") for name in names)  # noqa: E731
        if self.excluded and (not isinstance(self.excluded, list) or ends(self.excluded)):
            return False
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        return ends(self.targets) and (self.layers is None or (layer is not None and int(layer[1]) in self.layers))

    def check_packed(self) -> None:
        """Raise `UserError` where matrices of all experts have another layout, or an unknown one."""
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        if found is None or (int(found[1]), int(found[2])) < PEFT:
            raise UserError(
                f"{self.where}: the adapter has one pair for all experts of a layer, and peft_version="
                f"{show(self.version)}; before 0.19.0 PEFT had these transposed: load it with that version, merge it, "
                "and load the merged folder"
            )

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's pair, whose matrices have so many ranks."""
        stated, alpha = (_of(module, *pair) for pair in ((self.ranks, self.rank), (self.alphas, self.alpha)))
        if stated != rank:
            raise UserError(
                f"{self.where}: the pair of {module} has rank {rank} in {WEIGHTS}, but {stated} by r or rank_pattern; "
                "the two files belong to different adapters"
            )
        if not alpha or not math.isfinite(alpha):
            raise UserError(
                f"{self.where}: lora_alpha or alpha_pattern has {alpha:g} for {module}, expected a finite number other "
                "than 0; take the right one"
            )
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _of(module: str, pattern: Mapping[str, Any], usual: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as PEFT does."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error:
            continue
    return usual
