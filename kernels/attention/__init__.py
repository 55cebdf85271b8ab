"""Attention over packed documents: the kernel of every attention layer."""

from moezoo.kernels.attention.api import Implementation as Implementation
from moezoo.kernels.attention.api import attend as attend
from moezoo.kernels.attention.api import chosen_backend as chosen_backend
from moezoo.kernels.attention.base import Attended as Attended
from moezoo.kernels.attention.partial import join as join
