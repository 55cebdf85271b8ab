"""What is known of a configuration before it runs, and how a model routes a text, from Python.

The commands of `moezoo.tools` print what these functions return.
"""

from moezoo.tools.cost import communication as communication
from moezoo.tools.memory_model import footprint as footprint
from moezoo.tools.plan.estimate import estimate as estimate
from moezoo.tools.plan.hardware import parse_slice as parse_slice
from moezoo.tools.plan.work import model_flops as model_flops
from moezoo.tools.routing.counted import compare_routing as compare_routing
from moezoo.tools.routing.counted import routing as routing
from moezoo.tools.sharding.describe import describe as describe
