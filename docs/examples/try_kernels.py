import per_row  # noqa: F401 (both register themselves)
import plain  # noqa: F401
from small import difference, small

_, model, execution, _ = small("execution.attention=plain", "execution.grouped_matmul=per_row")
print(difference(model, execution, small()[3]))  # rounding
