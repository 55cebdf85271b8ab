"""What the scripts of this folder share: a small model on eight virtual devices."""

import jax

import moezoo

moezoo.cpu_devices(8)
TOKENS = jax.random.randint(jax.random.key(1), (8, 32), 0, 256)


def small(*words, model="mixtral"):
    """A configuration, its model, how to run it, and the logits of one device without it."""
    cfg = moezoo.compose(f"model={model}", "model.layers=2", "seq_len=32", *words)
    built = moezoo.build_model(cfg.model, key=jax.random.key(0))
    return cfg, built, moezoo.execution(cfg), built(TOKENS).logits


def difference(model, execution, logits):
    """The largest difference of logits under `execution` from `logits`."""
    return abs(moezoo.place(model, execution)(TOKENS, execution=execution).logits - logits).max()
