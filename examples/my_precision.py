"""A weight precision of your own: `edgevlm export CHECKPOINT --precision int8-wide`, by the entry point's name.

[project.entry-points."edgevlm.precisions"]
int8-wide = "my_package.my_precision:WIDE"
"""

from edgevlm.extend import Blocks, Layouts, Precision

# 8 bits with a scale for each 64 weights; embedding and head as int8 has them. A Layout of your own stores and multiplies.
WIDE = Precision(onnxruntime=Layouts(Blocks(8, size=64), Blocks(8)), tensorrt=None)
