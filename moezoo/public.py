"""The public names of moezoo, which `moezoo.NAME` gives; importing this module imports JAX."""

import moezoo.analysis as analysis
import moezoo.data as data
import moezoo.kernels as kernels
import moezoo.models as models
import moezoo.moe as moe
from moezoo.config.build import build_execution as execution
from moezoo.config.compose import compose
from moezoo.data.tokenizer import folder_tokenizer as tokenizer
from moezoo.errors import UserError
from moezoo.generation.generate import generate, stream
from moezoo.hub.adapters import load_adapter, save_adapter
from moezoo.hub.loading import from_pretrained
from moezoo.hub.saving import save_pretrained
from moezoo.hub.upcycling import Upcycle
from moezoo.models import build_model
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import MeshShape, cpu_devices, make_mesh
from moezoo.parallel.mesh_execution import place
from moezoo.parallel.rules import Rules
from moezoo.training.evaluate import Evaluation, evaluate
from moezoo.training.harness import LmEval
from moezoo.training.saved import load_run, saved_config
from moezoo.training.signals import Stopped
from moezoo.training.train import Run, train

__all__ = [
    "Evaluation",
    "Execution",
    "Kernels",
    "LmEval",
    "MeshShape",
    "Rules",
    "Run",
    "Stopped",
    "Upcycle",
    "UserError",
    "analysis",
    "build_model",
    "compose",
    "cpu_devices",
    "data",
    "evaluate",
    "execution",
    "from_pretrained",
    "generate",
    "kernels",
    "load_adapter",
    "load_run",
    "make_mesh",
    "models",
    "moe",
    "place",
    "save_adapter",
    "save_pretrained",
    "saved_config",
    "stream",
    "tokenizer",
    "train",
]
