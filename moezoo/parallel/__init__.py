"""Meshes, layouts and communication: where parameters and tokens are stored, and what devices exchange.

Four contracts are defined here and implemented elsewhere:

| contract | defines | implementations |
|---|---|---|
| `dispatch.Dispatch` | how tokens meet experts on other devices | `moezoo.moe.dispatch` |
| `context_parallel.ContextParallel` | how queries meet keys on other devices | `moezoo.nn.context_parallel` |
| `stored.Stored` | a container that stands for a weight | `moezoo.nn.containers` |
| `distributed.Distributed` | how the processes of a run find each other | `moezoo.parallel.distributed` |
"""
