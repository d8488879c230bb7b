"""A model family of your own: `edgevlm export CHECKPOINT` where config.json's model_type is the entry point's name.

[project.entry-points."edgevlm.families"]
my_vlm = "my_package.my_family:MyVLM"
"""

from edgevlm.export.families import Family, FamilyParts, square_geometry


class MyVLM(Family):
    """SigLIP, a projector of two linears, every patch a token; text around frames and the like are attributes of Family."""

    content_type = "video"  # what the chat template calls a frame

    def parts(self, checkpoint, camera):
        """The tower, and the grid of a frame's tokens; one of your own is a Tower, which adds its layers to a graph."""
        from edgevlm.export.vision.square import SquareTower

        vision = SquareTower(checkpoint)
        return FamilyParts(vision, (vision.side, vision.side))

    def geometry(self, config, sized):
        """The same in numbers, from config.json alone: what `edgevlm plan` counts with."""
        vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
        patches = (vision["image_size"] // vision["patch_size"]) ** 2
        projector = vision["hidden_size"] * hidden + hidden * hidden + 2 * hidden
        return square_geometry(vision, vision["num_hidden_layers"], projector, projected=patches, tokens=patches)
