"""Run several processes as one: how they find each other (one file per way), agree and end."""

from moezoo.parallel.distributed.alone import Alone as Alone
from moezoo.parallel.distributed.auto import Auto as Auto
from moezoo.parallel.distributed.base import Distributed as Distributed
from moezoo.parallel.distributed.manual import Manual as Manual
from moezoo.parallel.distributed.processes import check_same as check_same
from moezoo.parallel.distributed.processes import count as count
from moezoo.parallel.distributed.processes import first as first
from moezoo.parallel.distributed.processes import gather_texts as gather_texts
from moezoo.parallel.distributed.processes import is_first as is_first
from moezoo.parallel.distributed.processes import largest as largest
from moezoo.parallel.distributed.processes import leave as leave
from moezoo.parallel.distributed.processes import name as name
from moezoo.parallel.distributed.processes import outlast_lost_process as outlast_lost_process
from moezoo.parallel.distributed.processes import several as several
from moezoo.parallel.distributed.processes import start as start
from moezoo.parallel.distributed.processes import together as together
from moezoo.parallel.distributed.processes import within as within

DISTRIBUTED: dict[str, type[Distributed]] = {kind.name: kind for kind in (Alone, Auto, Manual)}
