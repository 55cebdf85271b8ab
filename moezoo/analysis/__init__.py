"""What is known before a run: what each device stores, computes and receives, from traced programs; and of a model, how
it routes a text."""

from moezoo.analysis.text_routing import compare_routing as compare_routing
from moezoo.analysis.text_routing import routing as routing
