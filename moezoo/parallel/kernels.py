"""The choice of a kernel's backend: the first of an ordered list that runs on what a program is compiled for."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.errors import UserError, check_type, nearest
from moezoo.parallel.mesh import MeshShape, abstract_mesh, has_started

# The platforms of JAX's lowering. A device of "cuda" or "rocm" reports its platform as "gpu".
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Target(NamedTuple):
    """What a program is compiled for.

    Attributes:
        platform: One of `PLATFORMS`.
        capability: The compute capability of a GPU, such as "9.0" or "gfx942"; None if unknown, and on other platforms.
    """

    platform: str
    capability: str | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.platform in ("cuda", "rocm")


# What a kernel keeps for its backward pass: products, or only its inputs, from which it computes products again.
Keep = Literal["products", "inputs"]


KernelName = Literal["grouped_matmul", "attention", "delta_rule"]


class Kernels(NamedTuple):
    """For each kernel, the names of backends in the order in which they are tried; empty for the kernel's own order."""

    grouped_matmul: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    delta_rule: tuple[str, ...] = ()


ANY_BACKEND = Kernels()


class KernelOrder(NamedTuple):
    """The argument `implementation` of a kernel.

    Attributes:
        names: Backends in the order in which they are tried; empty for the kernel's own order.
        target: What the program is compiled for; None if unknown, and then the choice is made when it is lowered.
    """

    names: tuple[str, ...] = ()
    target: Target | None = None


# Return whether a backend can be traced and run for a target.
RunsOn = Callable[[Target], bool]


class Chosen(NamedTuple):
    """A chosen backend.

    Attributes:
        name: Its name.
        gpu: The GPU that it will run on, from which it may take sizes of blocks; None on other platforms, and if no
            GPU is known.
    """

    name: str
    gpu: Target | None = None


# Pairs (platform, backend). If the target is known, one pair whose platform is "".
ChosenBackends = tuple[tuple[str, Chosen], ...]


def add_backend(kernel: str, backends: dict[str, Any], name: str, backend: Any, kind: type) -> None:
    """Add `backend`, a `kind`, to the `backends` of a kernel. Programs are remembered by names, so names stay."""
    check_type("backend", backend, kind, f"make it with Backend of moezoo.kernels.{kernel}")
    if not (isinstance(name, str) and name.isidentifier()):
        raise UserError(f"{kernel}: the name of a backend is {name!r}, expected a word such as mine")
    if backends.setdefault(name, backend) != backend:
        raise UserError(f"{kernel}: there is another backend '{name}'; choose a name that is not {', '.join(backends)}")


def anywhere(target: Target) -> bool:
    """Return True: `runs_on` of portable backends."""
    del target
    return True


def runs_on_hopper(target: Target) -> bool:
    """Return whether the target is an NVIDIA GPU of compute capability 9.0.

    Kernels for its tensor cores must not be traced for others: for some of these the compiler aborts the process.
    """
    return target == Target("cuda", "9.0")


def runs_on_tpu(target: Target) -> bool:
    """Return whether the target is a TPU."""
    return target.platform == "tpu"


def lacks(backend: Any, target: Target, dtype: DTypeLike) -> str | None:
    """Return why a backend does not run on the target with operands of this dtype; None if it does."""
    name = jnp.dtype(dtype).name
    if not backend.runs_on(target):
        return "does not run here"
    if backend.dtypes is None or name in backend.dtypes:
        return None
    return f"takes {' and '.join(backend.dtypes)}, not {name}"


def passed_over(
    chosen: str,
    names: Sequence[str],
    own: Sequence[str],
    backends: Mapping[str, Any],
    target: Target,
    dtype: DTypeLike,
    otherwise: Callable[[str], str] = lambda name: "",
) -> list[str]:
    """Return why backends before the chosen one are not taken, such as "hopper takes bfloat16, not float32".

    They are those of `names`, or if there are none, those of the kernel's `own` order that are made for the target;
    `otherwise` returns the reason of one that runs there with this dtype.
    """
    own = [name for name in own if backends[name].runs_on is not anywhere and backends[name].runs_on(target)]
    before = itertools.takewhile(lambda name: name != chosen, names or own)
    return [f"{name} {lacks(backends[name], target, dtype) or otherwise(name)}" for name in before]


def target_of(mesh: Mesh | AbstractMesh | None) -> Target | None:
    """Return the target of programs for `mesh`; None without a mesh, and for a mesh that names no device."""
    if mesh is None:
        return None
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return None if device is None else device_target(device)


def device_target(device: Any) -> Target:
    """Return the target of programs for a device of JAX, present or absent, or for the abstract device of a mesh."""
    # Only concrete GPU devices have this attribute.
    capability = getattr(device, "compute_capability", None)
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if str(capability).startswith("gfx") or "AMD" in device.device_kind else "cuda"
    return Target(platform, None if capability is None else str(capability))


class _Described(NamedTuple):
    """The device of a mesh without devices: as much of it as `device_target` and JAX's tracing read."""

    platform: str
    compute_capability: str | None
    device_kind: str = "absent"
    num_cores: int | None = None


def mesh_for(shape: MeshShape, target: Target) -> AbstractMesh:
    """Return a mesh of `shape` without devices, to trace programs for `target`. Raises as `abstract_mesh` does."""
    device = _Described("gpu" if target.is_gpu else target.platform, target.capability)
    mesh = abstract_mesh(shape)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)


def _own() -> Target | None:
    """Return the target of programs for this process's devices; None before JAX has started."""
    # Asking for devices would start JAX, after which their number is fixed.
    return device_target(jax.devices()[0]) if has_started() else None


def choose(
    kernel: str,
    backends: Mapping[str, RunsOn],
    implementation: str | KernelOrder | None,
    own_order: Callable[[Target], Sequence[str]],
    operands: str = "",
    refused: Mapping[str, str] = MappingProxyType({}),
) -> ChosenBackends:
    """Choose the first backend that runs on the target; without a target, one for each platform, with the capability
    of this process's own GPU if it has one, and one must run on this process's devices.

    Args:
        kernel: The kernel's name, for messages.
        backends: Name -> whether the backend runs on a target.
        implementation: A backend's name, an order, or None for the kernel's own order.
        own_order: The kernel's own order of names for a target.
        operands: What `backends` were asked for besides the target, for messages, such as " with float32".
        refused: Why names that a user may expect are no backends, and what to take.

    Raises:
        UserError: A name is not a backend, or none of the named backends runs on the target.
    """
    if not isinstance(implementation, str | KernelOrder | None):
        raise UserError(f"{kernel}: implementation is {implementation!r}, expected the name of a backend or None")
    order = KernelOrder((implementation,)) if isinstance(implementation, str) else implementation or KernelOrder()
    for name in order.names:
        if name not in backends:
            raise UserError(f"{kernel}: no backend '{name}'; {refused.get(name) or nearest(name, backends)}")

    def first(target: Target) -> Chosen | None:
        names = order.names or own_order(target)
        name = next((name for name in names if backends[name](target)), None)
        is_known = target.is_gpu and (target.capability or order.target)
        return None if name is None else Chosen(name, target if is_known else None)

    own = _own()
    if order.target is not None:
        chosen, must = {"": first(order.target)}, order.target
    else:
        targets = {platform: Target(platform) for platform in PLATFORMS} | ({own.platform: own} if own else {})
        chosen, must = {platform: first(target) for platform, target in targets.items()}, own
    found = {platform: one for platform, one in chosen.items() if one is not None}
    if not found or (must is not None and first(must) is None):
        where = "any platform" if must is None else " ".join(filter(None, must))
        others = [name for name, runs_on in backends.items() if must is None or runs_on(must)]
        raise UserError(
            f"{kernel}={' '.join(order.names)}: does not run on {where}{operands}; choose {' or '.join(others)}"
        )
    return tuple(found.items())


def run(chosen: ChosenBackends, function_of: Callable[[Chosen], Callable[..., Any]], *operands: PyTree) -> Any:
    """Call `function_of` the chosen backend on `operands`; where platforms differ, the lowering chooses."""
    (_, usual), *_ = chosen
    others = {platform: one for platform, one in chosen if one != usual}
    if not others:
        return function_of(usual)(*operands)
    branches = {platform: function_of(one) for platform, one in others.items()}
    return lax.platform_dependent(*operands, default=function_of(usual), **branches)
