"""moezoo: Mixture-of-Experts language models in JAX and Equinox.

    cfg = moezoo.compose("model=mixtral", "mesh=ep8")    # the same configuration as on the command line
    run = moezoo.train(cfg)                              # run.model, run.history, run.folder
    out = run.model(tokens)                              # out.logits, out.routing

The public names are in `moezoo.public`. They are imported when the first one is used, so that the command line can
answer a mistyped word without importing JAX.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32" or sys.version_info < (3, 11):
    _refusal = "moezoo does not run on Windows itself; install WSL2 (learn.microsoft.com/windows/wsl), and moezoo there"
    if sys.platform != "win32":  # a clone is run with any Python
        _refusal = f"moezoo needs Python 3.11 or newer, and {sys.executable} is {sys.version.partition(' ')[0]}; "
        _refusal += "make a virtual environment with a newer one, and install moezoo there"
    # A command ends with the line alone: an installed one, `-m` as Python looks for the module, or one of a clone.
    from pathlib import Path

    _command, _clone = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    if _command.stem in ("moezoo", "-m") or _command.parent == _clone / "scripts":
        sys.exit(f"error: {_refusal}")
    raise ImportError(_refusal)

from moezoo.host.machine import add_xla_flags, leave_out_plugins

add_xla_flags()
leave_out_plugins()

if TYPE_CHECKING:
    from moezoo.public import *  # noqa: F403
    from moezoo.public import __all__ as __all__


def __getattr__(name: str) -> Any:
    """Import the public names and return one of them, or a package that this import has loaded."""
    if name == "__all__" or not (name == "public" or name.startswith("__")):
        from moezoo import public

        globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'moezoo' has no attribute '{name}'")


def __dir__() -> list[str]:
    """List the public names, for help and completion."""
    from moezoo import public

    return sorted({*globals(), *public.__all__})
