"""A model family of your own: `edgevlm export CHECKPOINT --family ./examples/my_family.py:MyVLM`.

A package offers it with an entry point whose name is the checkpoint's model_type, and then no option is needed:

[project.entry-points."edgevlm.families"]
my_vlm = "my_package.my_family:MyVLM"
"""

from edgevlm.export.vision.square import SquareTower
from edgevlm.extend import Family, FamilyParts


class MyVLM(Family):
    """SigLIP, a projector of two linears, every patch a token; text around frames and the like are attributes of Family."""

    content_type = "video"  # what the chat template calls a frame

    def parts(self, checkpoint, camera):
        """The tower, and the grid of a frame's tokens; one of your own is a Tower, which adds its layers to a graph."""
        vision = SquareTower(checkpoint)
        return FamilyParts(vision, (vision.side, vision.side))
