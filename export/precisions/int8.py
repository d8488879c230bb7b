"""8 bits in blocks of 32: finer than one scale for an output channel."""

from edgevlm.export.precisions import Precision
from edgevlm.export.precisions.blocks import Blocks

PRECISION = Precision(matrices=Blocks(8), table=Blocks(8))
