"""Which backend of a kernel runs: an ordered choice by the platform and the device that a program is compiled for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from moezoo.errors import UserError, nearest

# As JAX's lowering names them: a device of "cuda" or "rocm" itself says "gpu".
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Target(NamedTuple):
    """What a program is compiled for: one of `PLATFORMS`, and the compute capability of its GPU ("9.0", "gfx942").

    `capability` is None where it is unknown, and on platforms that have none.
    """

    platform: str
    capability: str | None = None


class Kernels(NamedTuple):
    """For each kernel the names of its backends, in the order in which they are tried; none: the kernel's own order."""

    grouped_matmul: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


ANY_BACKEND = Kernels()


class KernelOrder(NamedTuple):
    """What a call of a kernel is given: names of backends to try in order, and the target; None where it is unknown."""

    names: tuple[str, ...] = ()
    target: Target | None = None


# Whether a backend can be traced and run for a target.
RunsOn = Callable[[Target], bool]
# What a kernel runs: for each platform the name of a backend; one pair with platform "" where the target is known.
Choice = tuple[tuple[str, str], ...]


def anywhere(target: Target) -> bool:
    """`runs_on` of portable backends."""
    del target
    return True


def target_of(mesh: Mesh | AbstractMesh | None) -> Target | None:
    """The target of programs for `mesh`; None without a mesh, and for a mesh that names no device."""
    if mesh is None:
        return None
    if isinstance(mesh, AbstractMesh):
        return None if mesh.abstract_device is None else device_target(mesh.abstract_device)
    return device_target(mesh.devices.flat[0])


def device_target(device: Any) -> Target:
    """The target of programs for a device of JAX, present or not, or for the abstract device of a mesh."""
    # An attribute of GPUs alone, and not of abstract devices.
    capability = getattr(device, "compute_capability", None)
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if str(capability).startswith("gfx") or "AMD" in device.device_kind else "cuda"
    return Target(platform, None if capability is None else str(capability))


def choose(
    kernel: str,
    backends: Mapping[str, RunsOn],
    implementation: str | KernelOrder | None,
    own_order: Callable[[Target], Sequence[str]],
) -> Choice:
    """The first backend that runs on the target, in the order of `implementation`, or of `own_order` if it names none.

    Where the target is unknown, one for each platform; `run` leaves the choice to the lowering.

    Raises `UserError` for a name that is no backend, and where none of those named runs on the target.
    """
    order = KernelOrder((implementation,)) if isinstance(implementation, str) else implementation or KernelOrder()
    for name in order.names:
        if name not in backends:
            raise UserError(f"{kernel}: no backend '{name}'; {nearest(name, backends)}")

    def first(target: Target) -> str | None:
        names = order.names or own_order(target)
        return next((name for name in names if backends[name](target)), None)

    if order.target is not None:
        chosen = {"": first(order.target)}
    else:
        chosen = {platform: first(Target(platform)) for platform in PLATFORMS}
    found = {platform: name for platform, name in chosen.items() if name is not None}
    if not found:
        where = "any platform" if order.target is None else " ".join(filter(None, order.target))
        others = [name for name, runs_on in backends.items() if order.target is None or runs_on(order.target)]
        raise UserError(f"{kernel}={' '.join(order.names)}: does not run on {where}; choose {' or '.join(others)}")
    return tuple(found.items())


def run(choice: Choice, function_of: Callable[[str], Callable[..., Any]], *operands: PyTree) -> Any:
    """`function_of(name)` of the chosen backend on `operands`; where platforms differ, the lowering picks one."""
    (_, usual), *_ = choice
    others = {platform: name for platform, name in choice if name != usual}
    if not others:
        return function_of(usual)(*operands)
    branches = {platform: function_of(name) for platform, name in others.items()}
    return lax.platform_dependent(*operands, default=function_of(usual), **branches)
