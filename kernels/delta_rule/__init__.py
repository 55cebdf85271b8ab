"""The gated delta rule over packed documents: the kernel of recurrent mixers."""

from moezoo.kernels.delta_rule.api import BACKENDS as BACKENDS
from moezoo.kernels.delta_rule.api import chosen_backend as chosen_backend
from moezoo.kernels.delta_rule.api import delta_rule as delta_rule
from moezoo.kernels.delta_rule.api import register as register
from moezoo.kernels.delta_rule.api import span_map as span_map
from moezoo.kernels.delta_rule.api import then as then
from moezoo.kernels.delta_rule.api import times as times
from moezoo.kernels.delta_rule.base import Backend as Backend
from moezoo.kernels.delta_rule.base import Operands as Operands
from moezoo.kernels.delta_rule.base import Recalled as Recalled
from moezoo.kernels.delta_rule.base import SpanMap as SpanMap
from moezoo.kernels.delta_rule.base import Start as Start
