"""The reader of compiled programs: every printed form, programs that run here, and errors that it must find."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiled import ALL, UNMERGED, Budget, Collective, collectives, merged_on_cpu
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import Row, Traffic, TrafficTable

SIZES = {"data": 1, "fsdp": 2, "expert": 4}


def program(*lines: str, other: str = "") -> str:
    """Return the text of a program with these lines after its two parameters, `%p` 128 B and `%q` 64 B per device."""
    entry = ["%p = f32[8,4]{1,0} parameter(0)", "%q = bf16[32]{0:T(128)(2,1)} parameter(1)", *lines]
    body = "\n".join(f"  {line}" for line in entry)
    return (
        f"HloModule jit_f, num_partitions=8\n{other}\nENTRY %main (p: f32[8,4], q: bf16[32]) -> f32[] {{\n{body}\n}}\n"
    )


def gather(devices: str, axes: str = "dimensions={0}") -> str:
    return program(f"ROOT %g = f32[64,4] all-gather(%p), channel_id=1, {devices}, {axes}, use_global_device_ids=true")


@pytest.mark.parametrize(
    ("devices", "axes", "ways"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("expert",), 4),
        ("replica_groups={{7,6,5,4},{2,0,3,1}}", ("expert",), 4),  # groups are sets
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("fsdp",), 2),
        ("replica_groups={{0,4,1,5,2,6,3,7}}", ("fsdp", "expert"), 8),
        ("replica_groups={}", ("fsdp", "expert"), 8),
        ("replica_groups=[2,4]<=[8]", ("expert",), 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("fsdp",), 2),
        ("replica_groups=[1,8]<=[8]", ("fsdp", "expert"), 8),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'expert'=4] {'fsdp'}", ("fsdp",), 2),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'expert'=4] {'expert','fsdp'}", ("fsdp", "expert"), 8),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", ("expert",), 4),
        ("replica_groups=mesh['a'=8], device_ids=([8]) {'a':(2)4}", ("expert",), 4),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("fsdp",), 2),
        # Another mesh of the same devices: only the devices count, not the names.
        ("replica_groups=mesh['expert'=2,'fsdp'=4] {'fsdp'}", ("expert",), 4),
        ("replica_groups={{0,1,2,3}}", ("[(0, 1, 2, 3)]",), 4),  # not all devices take part
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("[(0, 1), (2, 3), (4, 5), (6, 7)]",), 2),  # the groups of no axes
    ],
)
def test_axes_are_read_from_devices(devices, axes, ways):
    assert collectives(gather(devices), SIZES) == [Collective("all-gather", axes, ways, 128, 1)]


@pytest.mark.parametrize("devices", ["replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", "replica_groups=[8,1]<=[8]"])
def test_one_device_exchanges_nothing(devices):
    assert collectives(gather(devices), SIZES) == []


@pytest.mark.parametrize("devices", ["replica_groups=mesh['a'=8], somehow {'a'}", "replica_groups=somehow"])
def test_unknown_devices_are_refused(devices):
    with pytest.raises(ValueError, match=r"no groups of devices in a form that is known: .*replica_groups"):
        collectives(gather(devices), SIZES)


@pytest.mark.parametrize(
    ("line", "op", "axes", "given", "received"),
    [
        ("%r = (f32[1,4], bf16[4]) reduce-scatter(%p, %q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add",
         "reduce-scatter", ("fsdp", "expert"), [128, 64], 112 + 56),
        ("%r = (f32[8,4]{1,0:T(8,128)}, /*index=1*/bf16[32]) all-reduce(%p, /*index=1*/%q), replica_groups={{0,4},"
         "{1,5},{2,6},{3,7}}, to_apply=%add, metadata={op_name=\"a/b(c)\"}",
         "all-reduce", ("fsdp",), [128, 64], 128 + 64),
        ("%r = f32[8,4] all-reduce(f32[8,4]{1,0:T(8,128)} %p), replica_groups={}",
         "all-reduce", ("fsdp", "expert"), [128], 224),
        ("%r = f32[8,4] all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}",
         "all-to-all", ("expert",), [128], 96),
        ("%r = (f32[8,4], f32[8,4], f32[8,4], f32[8,4]) all-to-all(%p, %p, %p, %p), replica_groups=[2,4]<=[8]",
         "all-to-all", ("expert",), [512], 384),
        ("%r = bf16[32] ragged-all-to-all(%p, %q, %o, %o, %o, /*index=5*/%o), replica_groups=[2,4]<=[8]",
         "ragged-all-to-all", ("expert",), [64], 48),
        ("%r = f32[8,4] collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}",
         "collective-permute", ("expert",), [128], 128),
        ("%r = f32[8,4] collective-permute(%p), source_target_pairs={{0,4},{1,5}}",
         "collective-permute", ("fsdp",), [128], 128),
        ("%r = f32[8,4] collective-permute(%p), source_target_pairs={{0,5},{5,0}}",
         "collective-permute", ("fsdp", "expert"), [128], 128),
    ],
)  # fmt: skip
def test_bytes_are_those_of_all_operands(line, op, axes, given, received):
    found = collectives(program("%o = s32[4] constant(0)", line), SIZES)
    assert [(c.op, c.axes, c.given, c.times) for c in found] == [(op, axes, one, 1) for one in given]
    assert sum(c.traffic.bytes for c in found) == received


def test_what_is_asynchronous_counts_once():
    """`-start` and `-done`, and the general form, whose end may name the computation again."""
    inner = """
%wrapped (x: f32[8,4]) -> f32[1,4] {
  %x = f32[8,4] parameter(0)
  ROOT %s = f32[1,4] reduce-scatter(%x), replica_groups={}, dimensions={0}, to_apply=%add
}
"""
    text = program(
        "%a = ((f32[8,4]), f32[64,4]) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        "%b = f32[32,4] all-gather-done(%a)",
        "%c = (f32[8,4], f32[8,4], u32[]{:S(2)}) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
        "%d = f32[8,4] collective-permute-done(%c)",
        "%e = ((f32[8,4]), f32[1,4], s32[]) async-start(%p), calls=%wrapped",
        "%f = ((f32[8,4]), f32[1,4], s32[]) async-update(%e), calls=%wrapped",
        "ROOT %g = f32[1,4] async-done(%f), calls=%wrapped",
        other=inner,
    )
    found = [(c.op, c.axes, c.given, c.times) for c in collectives(text, SIZES)]
    assert found == [
        ("all-gather", ("expert",), 128, 1),
        ("collective-permute", ("expert",), 128, 1),
        ("reduce-scatter", ("fsdp", "expert"), 128, 1),
    ]


_LOOPS = """
%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], f32[8,4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,4] get-tuple-element(%t), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %sum = f32[8,4] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %r = (s32[], f32[8,4]) tuple(%next, %sum)
}

%less (t.1: (s32[], f32[8,4])) -> pred[] {
  %t.1 = (s32[], f32[8,4]) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %ten = s32[] constant(10)
  ROOT %lt = pred[] compare(%i.1, %ten), direction=LT, backend_config={"a":[]}
}

%outer (u: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %u = (s32[], f32[8,4]) parameter(0)
  ROOT %v = (s32[], f32[8,4]) while(%u), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}

%fused (w: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %w = (s32[], f32[8,4]) parameter(0)
  ROOT %v.1 = (s32[], f32[8,4]) call(%w), to_apply=%outer
}
"""


@pytest.mark.parametrize(
    ("line", "times"),
    [
        ("while(%start), condition=%less, body=%body", [4]),  # from 3 to below 10, by twos
        ("while(%start), condition=%less, body=%outer, backend_config={\"known_trip_count\":{\"n\":\"5\"}}", [15]),
        ("fusion(%start), kind=kLoop, calls=%fused", [3]),
        ("conditional(%c, %start, %start), branch_computations={%body, %fused}", [1, 3]),
        ("conditional(%c, %start, %start), true_computation=%body, false_computation=%fused", [1, 3]),
        ("while(%unknown), condition=%less, body=%body", None),
        ("while(%start), condition=%body, body=%body", None),
    ],
)  # fmt: skip
def test_how_often(line, times):
    text = program(
        "%three = s32[] constant(3)",
        "%i.2 = s32[] copy(%three)",
        "%start = (s32[], f32[8,4]) tuple(%i.2, %p)",
        "%unknown = (s32[], f32[8,4]) tuple(%q, %p)",
        f"ROOT %w = (s32[], f32[8,4]) {line}",
        other=_LOOPS,
    )
    if times is None:
        with pytest.raises(ValueError, match="a loop of unknown length"):
            collectives(text, SIZES)
    else:
        assert [(c.op, c.times) for c in collectives(text, SIZES)] == [("all-reduce", n) for n in times]


def traced(*rows: tuple[str, tuple[str, ...], int, int]) -> TrafficTable:
    table = TrafficTable()
    for name, axes, count, received in rows:
        table.add(Row("", "forward", name, axes), Traffic(count, received))
    return table


SCATTER = "reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add"
REDUCE = "all-reduce(%p), replica_groups={}, to_apply=%add"
EVERYWHERE = ("expert", "fsdp")


@pytest.mark.parametrize(
    ("lines", "trace", "message"),
    [
        ([f"%a = f32[1,4] {SCATTER}"], [("reduce_scatter", EVERYWHERE, 1, 112)], None),
        # One of two became an all-reduce, of twice the bytes.
        ([f"%a = f32[1,4] {SCATTER}", f"%b = f32[8,4] {REDUCE}"], [("reduce_scatter", EVERYWHERE, 2, 224)], None),
        # ... and here a third array is summed.
        ([f"%a = f32[8,4] {REDUCE}", f"%b = f32[8,4] {REDUCE}"], [("reduce_scatter", EVERYWHERE, 1, 112)],
         "448 bytes, traced 112; 1 reduce-scatters became all-reduces, which adds 112"),
        # What a reduce-scatter no longer moves is no room for anything else.
        (["%a = f32[32] all-gather(%p), replica_groups={}"],
         [("reduce_scatter", EVERYWHERE, 8, 896), ("all_gather", ("fsdp",), 1, 9)],
         "all-gather over fsdp expert runs 1 times, traced 0 times"),
        (["%a = f32[64,4] all-gather(%p), replica_groups={}", "%b = f32[64,4] all-gather(%p), replica_groups={}"],
         [("reduce_scatter", EVERYWHERE, 8, 896), ("all_gather", EVERYWHERE, 2, 9)],
         "fsdp expert 1,792 bytes, traced 905"),
        ([f"%a = f32[8,4] {REDUCE}"], [("psum", EVERYWHERE, 1, 214)], None),  # less than 5% more
        ([f"%a = f32[8,4] {REDUCE}"], [("psum", EVERYWHERE, 1, 213)], "fsdp expert 224 bytes, traced 213"),
        ([f"%a = f32[8,4] {REDUCE}"], [("psum", ("fsdp",), 1, 224)], "fsdp expert 224 bytes, traced 0"),
    ],
)  # fmt: skip
def test_budget(lines, trace, message):
    budget = Budget(traced(*trace), program(*lines), SIZES)
    if message is None:
        budget.check()
    else:
        with pytest.raises(AssertionError, match=message) as failure:
            budget.check()
        assert str(budget) in str(failure.value)


def test_budget_without_slack():
    """A byte more is found; with `equal` one less too, of the collectives named."""
    lines = [f"%a = f32[8,4] {REDUCE}", f"%b = f32[1,4] {SCATTER}"]  # 224 and 112 bytes
    for received, slack, equal, message in (
        (224, 1, ALL, None),
        (223, 1, (), "336 bytes, traced 335"),
        (225, 1, UNMERGED, None),
        (225, 1, ALL, r"all-reduce over fsdp expert runs \(1, 224\) \(count, bytes\), traced \(1, 225\)"),
    ):
        trace = traced(("psum", EVERYWHERE, 1, received), ("reduce_scatter", EVERYWHERE, 1, 112))
        budget = Budget(trace, program(*lines), SIZES, slack=slack)
        if message is None:
            budget.check(equal)
        else:
            with pytest.raises(AssertionError, match=message):
                budget.check(equal)


def test_what_a_cpu_merges_by_hand():
    """Three micro-steps with a tied table, and rings of two and four devices."""
    sizes = {"fsdp": 2, "expert": 4}
    kept = {
        Row("head/weights", "forward", "all_gather", ("fsdp",)): Traffic(3, 30),
        Row("head/weights", "backward", "reduce_scatter", ("fsdp",)): Traffic(3, 60),
        Row("layers/weights", "forward", "all_gather", ("fsdp",)): Traffic(6, 6),
        Row("layers/attention", "forward", "ppermute", ("fsdp",)): Traffic(6, 6),
        Row("layers/attention", "recomputed", "ppermute", ("expert",)): Traffic(18, 18),
    }
    merged = {
        Row("embedding/weights", "forward", "all_gather", ("fsdp",)): Traffic(3, 30),
        Row("layers/attention", "recomputed", "ppermute", ("fsdp",)): Traffic(6, 6),
    }
    once = {
        row: Traffic(1, 10) if row.scope == "head/weights" and row.phase == "forward" else t for row, t in kept.items()
    }
    assert merged_on_cpu(TrafficTable(kept | merged), 3, True, sizes) == once
    (table, _) = merged
    assert merged_on_cpu(TrafficTable(kept | merged), 3, False, sizes) == once | {table: Traffic(1, 10)}


def scanned(weights: Any, x: Any, again: bool = False, around: bool = False) -> Any:
    """Run three layers on [batch fsdp, seq expert, d]; their weights are split over both axes.

    Args:
        again: Whether to plant an error: each weight is gathered twice.
        around: Whether to plant an error: the sequence is gathered around the exchange between experts.
    """
    split = ("fsdp", "expert")

    def layer(x: Any, weight: Any) -> tuple[Any, None]:
        whole = jax.lax.all_gather(weight, split, axis=0, tiled=True)
        if again:  # transposed, so that XLA does not see that it is the same
            whole = (whole + jax.lax.all_gather(weight.T, split, axis=1, tiled=True).T) / 2
        x = jnp.tanh(x @ whole)
        if around:
            here, length = jax.lax.axis_index("expert"), x.shape[1]
            x = jax.lax.all_gather(x, "expert", axis=1, tiled=True)
            x = jax.lax.dynamic_slice_in_dim(x, here * length, length, axis=1)
        x = jax.lax.all_to_all(x, "expert", split_axis=1, concat_axis=1, tiled=True)
        return jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]), None

    def loss(weights: Any) -> Any:
        return jax.lax.psum((jax.lax.scan(layer, x, weights)[0] ** 2).sum(), split)

    return jax.grad(loss)(weights)


def budget_of_scan(**errors: bool) -> Budget:
    """Return the budget of a program with errors, against the trace of the program without."""
    mesh, spec = auto_mesh(fsdp=2, expert=4), PartitionSpec(None, ("fsdp", "expert"))
    given = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((2, 32, 16), jnp.float32)
    specs = (spec, PartitionSpec("fsdp", "expert"))
    whole = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=spec))  # noqa: E731
    text = whole(functools.partial(scanned, **errors)).lower(*given).compile().as_text() or ""
    return Budget(collective_traffic(whole(scanned).trace(*given).jaxpr, "cpu"), text, mesh.shape)


def test_compiled_program_is_its_trace():
    """On the CPU, in every count and byte; these are the numbers by hand."""
    budget = budget_of_scan()
    weight, tokens = 16 * 16 * 4, 1 * 8 * 16 * 4  # the whole array; a device's part
    assert budget.program == {
        ("all-gather", ("fsdp", "expert")): Traffic(3, 3 * weight * 7 // 8),
        ("reduce-scatter", ("fsdp", "expert")): Traffic(3, 3 * weight * 7 // 8),
        ("all-to-all", ("expert",)): Traffic(6, 6 * tokens * 3 // 4),
        ("collective-permute", ("fsdp",)): Traffic(6, 6 * tokens),
    }
    assert {key: traffic for key, traffic in budget.trace.items() if key[0] != "all-reduce"} == budget.program


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("again", "all-gather over fsdp expert runs 6 times, traced 3 times"),
        ("around", "all-gather over expert runs 3 times, traced 0 times"),
    ],
)
def test_a_gather_too_many_is_found(error, message):
    with pytest.raises(AssertionError, match=message):
        budget_of_scan(**{error: True}).check()
