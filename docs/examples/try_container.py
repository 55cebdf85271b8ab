from half import Half
from small import TOKENS, difference, small

from moezoo.nn.containers import store

_, model, execution, logits = small("mesh=fsdp2_ep4")
stored = store(model, lambda path: ".experts." in path, Half)
one = stored(TOKENS).logits
print(difference(stored, execution, one))  # rounding
print(abs(one - logits).max())  # what 16 bits change
