"""Settings of meshes, stages and processes that are refused before anything is computed: one line with the key."""

from refusals import by_table, refused

import moezoo
from moezoo.config.build import build_execution
from moezoo.parallel.mesh import abstract_mesh


@by_table(
    """
    words => line
    mesh.fsdp=0 => mesh.fsdp=0 must be at least 1 ... -1
    mesh.expert=-2 => mesh.expert=-2 must be at least 1 ... -1
    mesh.data=-1 mesh.expert=-1 => mesh.data and mesh.expert are both -1; only one
    mesh.axis_types=manual => mesh.axis_types=manual: expected one of auto, explicit
    mesh.context=2 seq_len=10 => seq_len=10 is not divisible by 4 ... seq_len=8 or seq_len=12
    distributed.process=2 => distributed.process=2 must be below distributed.processes=2
    distributed.process=-1 => distributed.process=-1 must be at least 0
    distributed.coordinator=node => distributed.coordinator=node must be HOST:PORT, such as localhost:8476
    distributed.coordinator=host:port => distributed.coordinator=host:port must be HOST:PORT
    distributed.coordinator=host:99999 => distributed.coordinator=host:99999 must be HOST:PORT
    distributed.heartbeat_seconds=0 => distributed.heartbeat_seconds=0 must be at least 1
    mesh.stage=4 execution.pipeline.microbatches=6 batch_size=24
        => execution.pipeline.microbatches=6 is not a multiple of mesh.stage=4; choose 4 or 8
    mesh.stage=4 execution.pipeline.microbatches=3
        => execution.pipeline.microbatches=3 is not a multiple of mesh.stage=4; choose 4
    mesh.stage=16 batch_size=16
        => mesh.stage=16 needs 16 layers, and the longest run of one pattern has 8 ... choose mesh.stage=8 or less
    mesh.stage=4 execution.pipeline.chunks=3
        => mesh.stage=4 x execution.pipeline.chunks=3 needs 12 layers ... has 8 ...
        choose execution.pipeline.chunks=2 or less
    mesh.stage=2 rules=serve => mesh.stage=2 but rules serve name no axis 'stage'
    mesh.stage=-1 => mesh.stage=-1 ... give it as a number
    execution.pipeline.chunks=0 => execution.pipeline.chunks=0 ... at least 1
    execution.pipeline.gather=never => execution.pipeline.gather=never ... once, tick
    execution.pipeline=zigzag => execution.pipeline.name=zigzag ... no such execution.pipeline ... circular
    rules.batch=[stage,data] => rules.batch=[stage, data] names stage ... leave it out
    rules.store.layer=[fsdp] => rules.store.layer=[fsdp] ... [stage]
    rules.store.embed=[stage,fsdp] => rules.store.embed=[stage, fsdp] ... stage must be the last
    rules.compute.layer=[stage] => rules.compute.layer=[stage] ... leave stage out
    mesh.stage=2 execution.pipeline.microbatches=6
        => batch_size=8 is not divisible by 6 (execution.pipeline.microbatches=6) ... microbatches=4
    mesh.stage=2 execution.microbatches=4 execution.pipeline.microbatches=4
        => batch_size=8 is not divisible by 16 (execution.microbatches=4 x execution.pipeline.microbatches=4) ...
        or set execution.microbatches=2 or execution.pipeline.microbatches=2
    # Recurrent layers: a period is a layer of each kind; filters read three tokens of the chunk before.
    model=qwen3_5 model.attention_every=2 mesh.stage=8
        => mesh.stage=8 needs 8 periods of 2 layers, and the longest run of one pattern has 4;
        choose mesh.stage=4 or less
    model=qwen3_5 mesh.context=4 seq_len=16
        => seq_len=16 in 8 chunks (mesh.context=4, execution.sequence_order=balanced) has 2 tokens per chunk ...
        reads 3 tokens of the chunk before; make seq_len at least 24
    rules.store.key_heads=[tensor] => rules.store.key_heads: ... rules.store.heads ... leave it out
    rules.store.channels=[tensor] => rules.store.channels: ... rules.store.heads ... leave it out
    rules.compute.value_heads=[tensor] => rules.compute.value_heads: ... rules.compute.heads ... leave it out
    pp=2 => pp: there is no key 'pp' ... 'mesh.stage'
    mesh=pp2_ep4 => mesh=pp2_ep4 ... write mesh.stage=2 mesh.expert=4
    """
)
def test_settings(words, line):
    processes = ("distributed=manual", "distributed.processes=2") if words.startswith("distributed.") else ()
    with refused(line):
        cfg = moezoo.compose("model.layers=8", *processes, *words.split())
        build_execution(cfg, abstract_mesh(cfg.mesh))
