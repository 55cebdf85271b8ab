"""One process of `bench.py train_step peer=transformers`: `python -P one_trainer.py moezoo|transformers FOLDER`.

It loads the folder's model, prints what computes attention, and then answers each line of its input with a line. Both
are JSON. A number is answered by making as many steps, null by the length of all arrays of each kind.
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError
from moezoo.host.machine import processors


class Trainer(NamedTuple):
    """A model in training.

    Attributes:
        attention: What computes attention.
        step: Makes a step with batch number n, and returns its loss when the step is done.
        arrays: Returns the trained arrays and AdamW's moments, by kind.
        empty_bytes: The memory of this process when it had imported its libraries and loaded nothing.
    """

    attention: str
    step: Callable[[int], float]
    arrays: Callable[[], dict[str, Iterable[np.ndarray]]]
    empty_bytes: int

    def lengths(self) -> dict[str, float]:
        """Return the length of all arrays of each kind, as one vector; added up in float64 without a copy of them."""
        return {kind: sum(map(_square, arrays)) ** 0.5 for kind, arrays in self.arrays().items()}


def _square(x: np.ndarray) -> float:
    return float(np.einsum("i,i->", x.ravel(), x.ravel(), dtype=np.float64))


def train_here(folder: Path, settings: dict[str, Any], tokens: np.ndarray) -> Trainer:
    """Return moezoo's compiled step, from the weights in `folder`."""
    import jax
    from optax import tree

    from benchmarks.steps import Running, batch_of
    from moezoo.config.compose import compose
    from moezoo.parallel.mesh import start

    start()
    empty = _memory("VmRSS")
    running = Running(compose(f"init_from={folder}", *settings["words"]))
    batches = [jax.block_until_ready(batch_of(running, each)) for each in tokens]

    def step(number: int) -> float:
        return float(running.run(batches[number]).loss)

    def arrays() -> dict[str, Iterable[np.ndarray]]:
        model, optimizer = running.state.model, running.state.optimizer
        kinds = {"parameters": model, "first moments": tree.get(optimizer, "mu")}
        kinds["second moments"] = tree.get(optimizer, "nu")
        # NumPy's other views keep the buffers, which the next step could then not write to.
        return {
            kind: [np.from_dlpack(leaf.addressable_data(0)) for leaf in jax.tree.leaves(some)]
            for kind, some in kinds.items()
        }

    return Trainer("moezoo", step, arrays, empty)


def train_in_pytorch(folder: Path, settings: dict[str, Any], tokens: np.ndarray) -> Trainer:
    """Return a step of transformers' model with PyTorch's AdamW, from the weights in `folder`."""
    import torch

    from moezoo.tools.parity.peer import class_of, load_peer

    torch.set_num_threads(processors())
    # Of a model with sinks transformers has no other attention that runs on processors.
    attention = "sdpa" if class_of(folder)._supports_sdpa else "eager"
    empty = _memory("VmRSS")
    model = load_peer(folder, attention=attention, experts="grouped_mm").train()
    decaying, others = [], []
    for name, parameter in model.named_parameters():
        is_weight = parameter.ndim > 1 and "embed_tokens" not in name and not name.endswith("bias")
        (decaying if is_weight else others).append(parameter)
    groups = [{"params": decaying, "weight_decay": settings["decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **settings["adamw"])
    batches = torch.from_numpy(tokens.astype(np.int64))

    def step(number: int) -> float:
        ids = batches[number]
        optimizer.zero_grad()
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if settings["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(decaying + others, settings["clip"])
        optimizer.step()
        return loss.item()

    def arrays() -> dict[str, Iterable[np.ndarray]]:
        states = list(optimizer.state.values())
        kinds = {"parameters": decaying + others, "first moments": [state["exp_avg"] for state in states]}
        kinds["second moments"] = [state["exp_avg_sq"] for state in states]
        return {kind: [tensor.detach().numpy() for tensor in some] for kind, some in kinds.items()}

    return Trainer(attention, step, arrays, empty)


def main(who: str, folder: Path) -> None:
    """Answer lines until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    settings, tokens = json.loads((folder / "settings.json").read_text()), np.load(folder / "tokens.npy")
    trainer = {"moezoo": train_here, "transformers": train_in_pytorch}[who](folder, settings, tokens)
    done = 0
    answer(trainer.attention)
    for line in sys.stdin:
        if (count := json.loads(line)) is None:
            answer(trainer.lengths())
            continue
        cpu, began = _cpu_seconds(), time.perf_counter()
        losses = [trainer.step(number % len(tokens)) for number in range(done, done + count)]
        seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - cpu
        done += count
        peak = _memory("VmHWM") - trainer.empty_bytes
        answer({"seconds": seconds / count, "cpu_seconds": cpu_seconds / count, "losses": losses, "peak_bytes": peak})


def _cpu_seconds() -> float:
    """Return the seconds that all threads of this process have worked, in the program and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory(name: str) -> int:
    """Return the bytes of memory that this process has (VmRSS), or has had at most (VmHWM)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    # As in scripts/bench.py: `benchmarks` is not installed, and libraries look for packages `kernels` and `models`.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import benchmarks  # noqa: F401

    del sys.path[0]
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except UserError as error:
        sys.exit(f"error: {error}")
