"""What tests that compile for absent devices share."""

import jax
import pytest
from commands_run import console, families_of_a_file_stay_in_it, refuses, signals_keep_their_effect, small_run  # noqa: F401
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def _uncached():
    """Turn the compilation cache off: programs for absent devices cannot be read back from it."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
