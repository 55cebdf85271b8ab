"""moezoo: Mixture-of-Experts language models in JAX and Equinox.

cfg = moezoo.compose("model=mixtral", "mesh=ep8")    # the same composition as the command line
run = moezoo.train(cfg)                              # run.model, run.history, run.folder
out = run.model(tokens)                              # out.logits, out.routing
"""

from moezoo import data, kernels, models, moe
from moezoo.compose import compose
from moezoo.errors import UserError
from moezoo.execution import Execution, place
from moezoo.generation import generate
from moezoo.mesh import MeshShape, cpu_devices, make_mesh
from moezoo.models import build
from moezoo.pretrained import from_pretrained, save_pretrained
from moezoo.rules import Rules
from moezoo.train.evaluate import Evaluation, evaluate
from moezoo.train.run import Run, train
from moezoo.train.saved import load_run, saved_config
from moezoo.train.setup import execution
from moezoo.train.signals import Stopped

__all__ = [
    "Evaluation",
    "Execution",
    "MeshShape",
    "Rules",
    "Run",
    "Stopped",
    "UserError",
    "build",
    "compose",
    "cpu_devices",
    "data",
    "evaluate",
    "execution",
    "from_pretrained",
    "generate",
    "kernels",
    "load_run",
    "make_mesh",
    "models",
    "moe",
    "place",
    "save_pretrained",
    "saved_config",
    "train",
]
