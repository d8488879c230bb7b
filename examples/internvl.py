"""Your own model family, InternVL 3: `edgevlm export OpenGVLab/InternVL3-1B-hf --family ./examples/internvl.py:InternVL`.

In a package, an entry point named after the checkpoint's model_type makes `--family` unnecessary:

[project.entry-points."edgevlm.families"]
internvl = "my_package.internvl:InternVL"
"""

import numpy as np

from edgevlm.extend import Checkpoint, Family, FamilyParts, Tower, VisionGraph


class InternVLTower(Tower):
    """An InternViT tower, then joined squares of 2 x 2 patches, a norm and two linears."""

    class_tokens = 1

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = config = checkpoint.section("vision_config")
        self.columns, self.heads = config["hidden_size"], config["num_attention_heads"]
        (image, _), (self.patch, _) = config["image_size"], config["patch_size"]
        self.side, self.size, self.head_dim = image // self.patch, (image, image), self.columns // self.heads
        self.patch_grid, self.tokens = (self.side, self.side), (self.side // 2) ** 2
        self.width = checkpoint.section("text_config")["hidden_size"]
        self.reach = (np.repeat(np.eye(self.side // 2, dtype=np.float32), 2, 1),) * 2  # the patches of each token

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        g, columns, name = graph, self.columns, "vision.embeddings"
        rows = g.patches(f"{name}.patch_embeddings.projection", pixels, columns, self.patch, writes=False)
        places = g.tensor(f"{name}.position_embeddings", (1, self.side**2 + 1, columns))[0]
        places[0] += g.tensor(f"{name}.cls_token", (1, 1, columns))[0, 0]
        rows = g.node("Pad", [rows, g.integers(0, 1, 0, 0, 0, 0)], f"{name}.class_token")
        rows = g.add(name, rows, g.per_position(g.constant(f"{name}.places", places)))
        for layer in range(self.config["num_hidden_layers"]):
            rows = self.block(g, f"vision.encoder.layer.{layer}", rows)
        patches = g.node("Slice", [rows, *map(g.integers, (1, self.side**2 + 1, 1))], "patches")
        squares = g.shuffle("squares", g.kept("kept", patches, columns), columns, self.side, 2)
        rows, _ = g.layer_norm("projector.layer_norm", g.chosen("chosen", squares), 4 * columns, 1e-5)
        rows = g.linear("projector.linear_1", rows, 4 * columns, self.width, activation="gelu")
        return g.linear("projector.linear_2", rows, self.width, self.width)

    def block(self, g: VisionGraph, name: str, rows: str) -> str:
        columns, inner, epsilon = self.columns, self.config["intermediate_size"], self.config["layer_norm_eps"]
        normed, _ = g.layer_norm(f"{name}.layernorm_before", rows, columns, epsilon)
        bias = self.config["attention_bias"]
        parts = [g.linear(f"{name}.attention.{part}_proj", normed, columns, columns, bias=bias) for part in "qkv"]
        attended = g.attention(f"{name}.attended", *parts, rows=self.side**2 + 1, heads=self.heads, scale=self.head_dim**-0.5)
        out = g.linear(f"{name}.attention.projection_layer", attended, columns, columns)
        rows = g.add(f"{name}.seen", rows, g.mul(f"{name}.scaled", out, g.weight(f"{name}.lambda_1", (columns,))))
        normed, _ = g.layer_norm(f"{name}.layernorm_after", rows, columns, epsilon)
        wide = g.linear(f"{name}.mlp.fc1", normed, columns, inner, activation="gelu")
        out = g.linear(f"{name}.mlp.fc2", wide, inner, columns)
        return g.add(f"{name}.out", rows, g.mul(f"{name}.scaled_2", out, g.weight(f"{name}.lambda_2", (columns,))))


class InternVL(Family):
    """InternVL 3 with a Qwen2.5 decoder. As in InternVL's processor, each frame's number precedes the frame."""

    content_type, token_keys = "video", ("image_token_id",)
    placeholder = "<video>"  # what the chat template writes for a video
    before, after = "Frame{frame}: <img>", "</img>\n"
    text_tokens = 12

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        tower = InternVLTower(checkpoint)
        return FamilyParts(tower, (tower.side // 2, tower.side // 2))
