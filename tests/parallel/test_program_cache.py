"""The folder of compiled programs: where it is, when there is none, and that a later compilation loads from it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from meshes import auto_mesh
from refusals import refused

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.errors import UserError
from moezoo.generation.generate import generate
from moezoo.parallel import cache
from moezoo.parallel.cache import function_cache, use_cache

DIR, SHORTEST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
SEVERAL = {"0.10.2": "off: jax 0.10", "0.12.0": "compiled programs in"}


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    """JAX as without the suite's folder; the user's folder of caches is below the test's folder."""
    names = (DIR, SHORTEST, "jax_enable_compilation_cache")
    settings = {name: getattr(jax.config, name) for name in names}
    jax.config.update(DIR, None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(cache, "_set_here", None)
    monkeypatch.setattr(cache, "_is_chosen", False)
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


@pytest.fixture
def compile_anew():
    """A function that compiles a program, a new function of Python each time, and returns how many were loaded."""
    loaded: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: loaded.append(event) if "cache_hits" in event else None)

    def compile_anew() -> int:
        loaded.clear()
        jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(5)).compile()
        return len(loaded)

    return compile_anew


def test_a_later_compilation_loads(no_folder, compile_anew):
    """With the default, from moezoo's folder in the user's folder of caches; with null, from none."""
    one = auto_mesh(data=1)
    assert str(no_folder) in use_cache("auto", one)
    compile_anew()
    assert any(no_folder.iterdir())
    assert compile_anew() >= 1
    assert "null" in use_cache(None, one)
    assert compile_anew() == 0


@pytest.fixture
def one_device(monkeypatch):
    """A process with one CPU device."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def test_the_default_of_a_function(no_folder, one_device, compile_anew):
    """Only what the function compiles is kept, and loaded in a later call; JAX's settings return."""
    shortest = getattr(jax.config, SHORTEST)
    kept = function_cache()(compile_anew)
    kept()
    assert any(no_folder.iterdir())
    assert compile_anew() == 0
    assert kept() >= 1
    assert (getattr(jax.config, DIR), getattr(jax.config, SHORTEST)) == (None, shortest)


@pytest.mark.parametrize("case", ["null", "folder", "off", "devices", "unwritable", "homeless"])
def test_no_default(no_folder, one_device, compile_anew, monkeypatch, case):
    """What the user or a configuration has chosen stays, and a function works where nothing can be kept."""
    if case == "null":
        use_cache(None, auto_mesh(data=1))
    elif case == "folder":
        jax.config.update(DIR, "own")
    elif case == "off":
        jax.config.update("jax_enable_compilation_cache", False)
    elif case == "devices":
        monkeypatch.setattr(jax, "device_count", lambda: 2)
    elif case == "unwritable":
        no_folder.parent.touch()
    else:
        monkeypatch.setattr(cache, "user_cache", homeless)
    before = getattr(jax.config, DIR)
    with function_cache():
        assert case == "off" or getattr(jax.config, DIR) == before
        compile_anew()
    assert not no_folder.is_dir() or not any(no_folder.iterdir())


def test_generate_takes_the_default(no_folder, one_device):
    """Whatever it compiles, for its arguments included."""
    with refused("max_new_tokens=0"):
        generate(blueprint_of(moezoo.compose()).shapes, [[1]], max_new_tokens=0)
    assert no_folder.is_dir()


def test_a_named_folder_of_a_function(no_folder, one_device):
    """As for `use_cache`."""
    Path("file").touch()
    with refused("cache_dir=file/below: cannot be written"), function_cache("file/below"):
        pass
    with function_cache("own"):
        assert getattr(jax.config, DIR) == str(Path("own").absolute())
    with function_cache(None):
        assert getattr(jax.config, DIR) is None


def homeless() -> Path:
    raise UserError("no home folder")


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
    with refused("cache_dir=file/below: cannot be written (Not a directory); ... cache_dir=null"):
        use_cache("file/below", auto_mesh(data=1))
    no_folder.parent.touch()
    assert use_cache("auto", auto_mesh(data=1)) == f"off: {no_folder} cannot be written (Not a directory)"
    assert getattr(jax.config, DIR) is None
