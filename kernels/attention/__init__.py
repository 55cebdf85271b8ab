"""Attention over packed documents: the kernel of every attention layer."""

from moezoo.kernels.attention.api import BACKENDS as BACKENDS
from moezoo.kernels.attention.api import REFUSED as REFUSED
from moezoo.kernels.attention.api import attend as attend
from moezoo.kernels.attention.api import attend_part as attend_part
from moezoo.kernels.attention.api import chosen_backend as chosen_backend
from moezoo.kernels.attention.api import part_gradients as part_gradients
from moezoo.kernels.attention.api import reasons as reasons
from moezoo.kernels.attention.api import register as register
from moezoo.kernels.attention.base import FLOOR as FLOOR
from moezoo.kernels.attention.base import Attended as Attended
from moezoo.kernels.attention.base import Backend as Backend
from moezoo.kernels.attention.base import Operands as Operands
from moezoo.kernels.attention.base import Softmax as Softmax
from moezoo.kernels.attention.partial import join as join
from moezoo.kernels.attention.partial import join_softmax as join_softmax
