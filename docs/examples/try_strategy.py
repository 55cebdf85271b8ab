import dataclasses

from broadcast import Broadcast
from small import difference, small

from moezoo.analysis import communication

cfg, model, execution, logits = small("mesh=fsdp2_ep4")
print(difference(model, dataclasses.replace(execution, dispatch=Broadcast()), logits))  # rounding
print(communication(cfg, dispatch=Broadcast()).within("layers/feed_forward"))  # what it moves in a training step
