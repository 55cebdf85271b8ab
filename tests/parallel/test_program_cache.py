"""The folder of compiled programs: where it is, when there is none, and that a later compilation loads from it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from meshes import auto_mesh

from moezoo.errors import UserError
from moezoo.parallel import cache
from moezoo.parallel.cache import use_cache

DIR = "jax_compilation_cache_dir"
SEVERAL = {"0.10.2": "off: jax 0.10", "0.12.0": "compiled programs in"}


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    """JAX as without the suite's folder; the user's folder of caches is below the test's folder."""
    names = (DIR, "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    settings = {name: getattr(jax.config, name) for name in names}
    jax.config.update(DIR, None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(cache, "_set_here", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield tmp_path / "caches" / "moezoo"
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_users_own_folder_stays(no_folder):
    """A folder in JAX's own setting."""
    jax.config.update(DIR, str(no_folder))
    assert str(no_folder) in use_cache(None, auto_mesh(data=1))
    assert getattr(jax.config, DIR) == str(no_folder)


def test_a_later_compilation_loads(no_folder):
    """With the default, from moezoo's folder in the user's folder of caches; with null, from none."""
    loaded: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: loaded.append(event) if "cache_hits" in event else None)

    def compile_anew() -> int:
        loaded.clear()
        jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(5)).compile()  # a new function each time
        return len(loaded)

    one = auto_mesh(data=1)
    assert str(no_folder) in use_cache("auto", one)
    compile_anew()
    assert any(no_folder.iterdir())
    assert compile_anew() >= 1
    assert "null" in use_cache(None, one)
    assert compile_anew() == 0


@pytest.mark.parametrize("version", SEVERAL)
def test_several_cpu_devices(no_folder, monkeypatch, version):
    """jax 0.10 loses the order of their collectives, whoever has set the folder."""
    use_cache("auto", auto_mesh(data=1))
    monkeypatch.setattr(jax, "__version__", version)
    assert use_cache("auto", auto_mesh(fsdp=8)).startswith(SEVERAL[version])
    assert getattr(jax.config, "jax_enable_compilation_cache") == (version != "0.10.2")  # noqa: B009  not declared
    jax.config.update(DIR, "elsewhere")
    assert use_cache(None, auto_mesh(fsdp=8)).startswith(SEVERAL[version])


def test_a_folder_that_cannot_be_written(no_folder):
    """A named one is refused with its key; the default one is left out, with the reason."""
    file = Path("file")
    file.touch()
    with pytest.raises(
        UserError, match=r"^cache_dir=file/below: cannot be written \(Not a directory\); .*cache_dir=null"
    ):
        use_cache("file/below", auto_mesh(data=1))
    no_folder.parent.touch()
    assert use_cache("auto", auto_mesh(data=1)) == f"off: {no_folder} cannot be written (Not a directory)"
    assert getattr(jax.config, DIR) is None
