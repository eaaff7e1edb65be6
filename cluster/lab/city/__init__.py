"""A simulated city on a fixed pool: production's placement, admission, queues and ladder on made time."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
