"""What tests that compile for absent devices share."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def _uncached():
    """Turn the compilation cache off: programs for absent devices cannot be read back from it."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
