"""The arrays of a checkpoint against those that a model has."""

import jax
import jax.numpy as jnp
import numpy as np
from refusals import refused

from moezoo.training.checkpoint import Checkpoints, read_about, restore

SAVED = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}


def test_arrays_of_another_model_are_refused_by_name(tmp_path):
    """Orbax would cast, or fail without the name of the array."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, {"model": SAVED}, {"versions": {"moezoo": "0"}, "config": {}, "loader": {}})
    checkpoints.close()
    about = read_about(checkpoints.folder, 1)

    def load(**arrays):
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in arrays.items()}
        return restore(checkpoints.folder, 1, about, model=target)["model"]

    jax.tree.map(np.testing.assert_array_equal, load(**SAVED), SAVED)
    half, turned = SAVED["b"].astype(jnp.bfloat16), SAVED["a"].T
    for arrays, parts in (
        ({"a": SAVED["a"], "b": half}, ("checkpoint at step 1: b is float32[4]", "bfloat16[4]", "settings")),
        ({"a": turned, "b": SAVED["b"]}, ("checkpoint at step 1: a is float32[2, 3]", "float32[3, 2]")),
        ({"a": SAVED["a"]}, ("checkpoint at step 1: array b exists only in the checkpoint",)),
        ({**SAVED, "c": half}, ("checkpoint at step 1: array c exists only in this model",)),
    ):
        with refused(*parts):
            load(**arrays)
