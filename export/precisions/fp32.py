"""float32: what the checkpoint says."""

from edgevlm.export.precisions import Precision
from edgevlm.export.precisions.dense import Dense, DenseRows

PRECISION = Precision(matrices=Dense(), table=DenseRows())
