"""City simulator: production placement, admission, queues and quality ladder in simulated time on a fixed pool."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
