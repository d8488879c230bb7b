"""4 bits in blocks of 32 without zero points; embedding and head have 8."""

from edgevlm.export.precisions import Precision
from edgevlm.export.precisions.blocks import Blocks

PRECISION = Precision(matrices=Blocks(4), table=Blocks(8))
