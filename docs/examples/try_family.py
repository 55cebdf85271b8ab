from small import TOKENS, difference, small

import moezoo

_, model, execution, logits = small("mesh=fsdp2_ep4", model="alternate.Alternate")
print(difference(model, execution, logits))  # rounding
moezoo.save_pretrained(model, "alternate")
assert (moezoo.from_pretrained("alternate")(TOKENS).logits == logits).all()
print(moezoo.generate(model, TOKENS[:2, :8], max_new_tokens=4))
