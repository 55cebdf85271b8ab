"""Refuse sizes that no memory here could hold, with the bytes, before anything is made.

Every number of bytes is a lower bound: what is refused cannot run here, and what is accepted may still be too large.
"""

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from moezoo.config.settings import TrainConfig
from moezoo.models import ModelConfig
from moezoo.models.working_set import stream
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.memory import check_devices
from moezoo.parallel.mesh_execution import MeshExecution


def check_sizes(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuse sizes of which a few arrays do not fit at one byte per parameter, in no time: by a closed form."""
    least = model.least_parameters
    what = f"{_describe(model)} ({least:,} parameters or more)"
    check_devices(what, least // mesh.size, mesh, "choose smaller sizes")


def check_batch(cfg: TrainConfig, execution: MeshExecution) -> None:
    """Refuse a batch of which token ids, and the activations of one micro-step between two layers, do not fit.

    A stage has the activations of its micro-batches twice, of those that wait and of those that are done.
    """
    tokens = cfg.batch_size * cfg.seq_len // execution.ways(execution.token_axes)
    activations = stream(tokens // cfg.execution.microbatches, cfg.model.embed, execution)
    activations *= 2 if execution.stages > 1 else 1
    what = f"batch_size={cfg.batch_size} x seq_len={cfg.seq_len} in execution.microbatches={cfg.execution.microbatches}"
    advice = "choose a smaller batch_size or seq_len, or more execution.microbatches"
    # Tokens, labels, segments and positions are int32.
    check_devices(what, 4 * 4 * tokens + activations, execution.mesh, advice)


def check_arrays(cfg: TrainConfig, model: PyTree, needed: int, execution: MeshExecution | None, *more: str) -> None:
    """Refuse a model, arrays or shapes, that does not fit into the devices of `execution`, or into JAX's first one.

    `needed` are the bytes per device, and `more` is what they hold beside the parameters.
    """
    dtype = cfg.execution.param_dtype
    total, _ = count_parameters(model, cfg.model.experts_per_token)
    smaller = ", or execution.param_dtype=bfloat16" * (dtype == "float32")
    check_devices(
        f"{_describe(cfg.model)} ({', '.join((f'{total:,} parameters in {dtype}', *more))})",
        needed,
        None if execution is None else execution.mesh,
        f"choose a smaller model, a machine with more memory{smaller}",
    )


def _describe(model: ModelConfig) -> str:
    names = ("vocab", "embed", "layers", "experts", "expert_mlp")
    return " ".join(f"model.{name}={getattr(model, name)}" for name in names)
