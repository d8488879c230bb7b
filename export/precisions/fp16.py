"""float16 in the file and float32 in memory: ONNX Runtime's CPU kernels have no float16 product."""

import numpy as np

from edgevlm.export.precisions import Precision
from edgevlm.export.precisions.dense import Dense, DenseRows

PRECISION = Precision(matrices=Dense(np.float16), table=DenseRows(np.float16))
