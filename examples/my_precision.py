"""Your own weight precision, named by its entry point: `edgevlm export CHECKPOINT --precision int8-wide`.

[project.entry-points."edgevlm.precisions"]
int8-wide = "my_package.my_precision:WIDE"
"""

from edgevlm.extend import Blocks, Layouts, Precision

# 8 bits with a scale per 64 weights; embedding and head are as in int8. Your own Layout can store weights in another way.
WIDE = Precision(onnxruntime=Layouts(Blocks(8, size=64), Blocks(8)), tensorrt=None)
