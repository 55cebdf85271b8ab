"""The page of model types has the packages of transformers."""

from pathlib import Path

from model_types_page import MISSING, TRANSFORMERS, packages
from peer_results import transformers


def test_every_package_with_experts_has_a_row():
    assert transformers.__version__.startswith(f"{TRANSFORMERS}.")
    assert list(packages(Path(transformers.__file__).parent / "models")) == list(MISSING)
