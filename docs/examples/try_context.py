import dataclasses

from pass_around import PassAround
from small import difference, small

from moezoo.parallel.traces import collective_traffic
from moezoo.training.build import build_step

cfg, model, execution, logits = small("mesh.fsdp=2", "mesh.context=4", "dispatch=gather")
execution = dataclasses.replace(execution, context_parallel=PassAround())
print(difference(model, execution, logits))  # rounding
traced = collective_traffic(build_step(cfg, execution).traced.jaxpr)
print(traced.by("scope", "collective")["layers/attention", "ppermute"])
