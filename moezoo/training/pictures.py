"""The run's pictures; matplotlib, wrapped here alone, without a screen."""

import os
from pathlib import Path

import numpy as np

from moezoo.training.metrics import MetricsRow


def _save(figure, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)


def loss_picture(history: list[MetricsRow], path: Path, *, unit: str, baseline: float | None) -> None:
    """Training and validation loss by step, in nats a `unit`; `baseline` is a trigram model's validation loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    losses = [np.nan if r["loss"] is None else r["loss"] for r in history]
    axes.plot([r["step"] for r in history], losses, color="tab:blue", lw=1, label="training")
    evaluated = [(r["step"], r["val_loss"]) for r in history if r.get("val_loss") is not None]
    if evaluated:
        steps, values = zip(*evaluated, strict=True)
        axes.plot(steps, values, "o-", color="tab:orange", label=f"validation ({values[-1]:.3f} at the end)")
    if baseline is not None:
        axes.axhline(baseline, color="gray", ls="--", lw=1, label=f"trigram ({baseline:.3f})")
    axes.set_xlabel("step")
    axes.set_ylabel(f"cross-entropy, nats a {unit}")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def load_picture(load: np.ndarray, path: Path, *, steps: str) -> None:
    """How much of each layer's assignments every expert had: `load` [layer, experts], 1 = the balanced share."""
    from matplotlib.figure import Figure

    relative = load * load.shape[1] / np.maximum(load.sum(1, keepdims=True), 1)
    layers, num_experts = load.shape
    figure = Figure(
        figsize=(max(4.5, 1.8 + 0.55 * min(num_experts, 24)), max(2.8, 1.6 + 0.4 * layers)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    if num_experts <= 16 and layers <= 32:
        for layer, expert in np.ndindex(layers, num_experts):
            dark = abs(relative[layer, expert] - 1) > 0.7
            color = "white" if dark else "black"
            axes.text(
                expert, layer, f"{relative[layer, expert]:.2f}", ha="center", va="center", fontsize=7, color=color
            )
        axes.set_xticks(range(num_experts))
        axes.set_yticks(range(layers))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer with experts")
    axes.set_title(f"load over the balanced share, {steps}", fontsize=10)
    figure.colorbar(image, ax=axes, extend="max")
    _save(figure, path)
