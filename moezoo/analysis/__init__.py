"""What is known before a run, from traced programs; how a model routes a text; a trial of the devices here."""

from moezoo.analysis.text_routing import compare_routing as compare_routing
from moezoo.analysis.text_routing import routing as routing
