"""Towers of patches in a square, SigLIP's and CLIP's: with LLaVA's projector, or SmolVLM's shuffle."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgevlm.errors import UserError, nearest
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.vision import VisionTower
from edgevlm.export.vision.layers import Float32, VisionGraph

TOWERS = ("clip_vision_model", "siglip_vision_model")


class Encoder:
    """Blocks of pre-norm attention and MLP over the patches of a square, as ``vision_config`` describes them."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.width, self.inner, self.layers, self.heads = (
            int(section[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        )
        self.activation, self.epsilon = str(section["hidden_act"]), float(section["layer_norm_eps"])
        image, self.patch = section["image_size"], section["patch_size"]
        if not isinstance(image, int) or not isinstance(self.patch, int):
            raise UserError("config.json: vision image_size and patch_size must be integers (square frames)")
        if self.width % self.heads:
            raise UserError(f"config.json: a tower {self.width} wide cannot have {self.heads} attention heads")
        self.side, self.size = image // self.patch, (image, image)

    def states(self, g: VisionGraph, rows: str, positions: int, layers: int) -> list[str]:
        """``[F, positions, width]`` ahead of the first block and behind each of the first ``layers``."""
        states, delta = [], ""
        for layer in range(layers):
            name = f"vision.encoder.layers.{layer}"
            normed, rows = g.layer_norm(f"{name}.layer_norm1", rows, self.width, self.epsilon, delta)
            states.append(rows)
            query, key, value = (
                g.linear(f"{name}.self_attn.{part}_proj", normed, self.width, self.width) for part in ("q", "k", "v")
            )
            attended = g.attention(
                f"{name}.self_attn", query, key, value,
                rows=positions, heads=self.heads, scale=(self.width // self.heads) ** -0.5,
            )  # fmt: skip
            delta = g.linear(f"{name}.self_attn.out_proj", attended, self.width, self.width)
            normed, rows = g.layer_norm(f"{name}.layer_norm2", rows, self.width, self.epsilon, delta)
            inner = g.linear(f"{name}.mlp.fc1", normed, self.width, self.inner, activation=self.activation)
            delta = g.linear(f"{name}.mlp.fc2", inner, self.inner, self.width)
        return [*states, g.add("vision.encoder", rows, delta) if delta else rows]


class SquareTower(VisionTower):
    """Tower, chosen layers, projector of two linears: rows ``[F, tokens, width]`` of the language model.

    The chosen hidden states are taken as transformers numbers them (0 is the embedding, -1 the last layer before the final
    norm); layers after them are left out. ``before`` is the matrix that pools rows along both edges ahead of the projector,
    ``after`` behind it; who sets one sets ``tokens`` and ``reach``.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        section, settings = with_defaults(checkpoint.section("vision_config")), with_defaults(checkpoint.config)
        if (kind := str(section.get("model_type"))) not in TOWERS:
            raise UserError(f"config.json: vision tower {kind!r} cannot be exported; {nearest(kind, TOWERS)}")
        self.is_clip, self.encoder = kind == "clip_vision_model", Encoder(section)
        strategy, wanted = settings["vision_feature_select_strategy"], "default" if self.is_clip else "full"
        if strategy != wanted:  # CLIP's class token has no place in a grid, and SigLIP has none to drop
            raise UserError(f"config.json: vision_feature_select_strategy {strategy!r} cannot be exported; set {wanted!r}")
        chosen, layers = settings["vision_feature_layer"], self.encoder.layers
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if not all(-layers - 1 <= index <= layers for index in chosen):
            raise UserError(f"config.json: vision_feature_layer {chosen} does not exist in a tower of {layers} layers")
        self.chosen = [index % (layers + 1) for index in chosen]
        self.size, self.side = self.encoder.size, self.encoder.side
        self.tokens, self.width = self.side**2, int(checkpoint.section("text_config")["hidden_size"])
        self.activation = str(settings.get("projector_hidden_act", "gelu"))
        self.bias = bool(settings.get("multimodal_projector_bias", True))
        self.before: Float32 | None = None
        self.after: Float32 | None = None
        self.patch_grid, self.class_tokens = (self.side, self.side), int(self.is_clip)
        self.head_dim = self.encoder.width // self.encoder.heads

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        g, width, positions = graph, self.encoder.width, self.side**2 + self.is_clip
        rows = g.patches("vision.embeddings.patch_embedding", pixels, width, self.encoder.patch, bias=not self.is_clip)
        places = g.tensor("vision.embeddings.position_embedding.weight", (positions, width))
        if self.is_clip:
            places[0] += g.tensor("vision.embeddings.class_embedding", (width,))
            rows = g.node("Pad", [rows, g.integers(0, 1, 0, 0, 0, 0)], "vision.embeddings.class_token")
        rows = g.add("vision.embeddings", rows, g.per_position(g.constant("vision.embeddings.position_embedding", places)))
        if self.is_clip:
            rows, _ = g.layer_norm("vision.pre_layrnorm", rows, width, self.encoder.epsilon)  # spelt as in checkpoints
        states = self.encoder.states(g, rows, positions, max(self.chosen))
        features = [states[index] for index in self.chosen]
        joined = g.node("Concat", features, "features.chosen", axis=-1) if len(features) > 1 else features[0]
        if self.is_clip:
            ends = [g.integers(number) for number in (1, positions, 1)]
            joined = g.node("Slice", [joined, *ends], "features.patches")
        rows = self._pooled(g, self.before, joined, width * len(features))
        rows = g.linear(
            "projector.linear_1", rows, width * len(features), self.width, bias=self.bias, activation=self.activation
        )
        rows = g.linear("projector.linear_2", rows, self.width, self.width, bias=self.bias)
        return self._pooled(g, self.after, rows, self.width)

    def _pooled(self, g: VisionGraph, matrix: Float32 | None, rows: str, width: int) -> str:
        if matrix is None:
            return rows
        return g.chosen("pooled.chosen", g.resample("pooled", g.kept("pooled.kept", rows, width), width, matrix))


class SmolVLMTower(VisionTower):
    """SigLIP to the end, and squares of ``scale`` x ``scale`` patches joined and projected.

    Frames fill the tower's square, so patches have the table's positions in order. (transformers finds them by fractions in
    float32, which comes to the same for 27 and 32 patches a side, as published, and for some others, 25 say, is off by one.)
    """

    def __init__(self, checkpoint: Checkpoint, vision_type: str) -> None:
        self.encoder = Encoder(with_defaults(checkpoint.section("vision_config"), vision_type))
        self.scale, self.side, self.size = (
            int(with_defaults(checkpoint.config)["scale_factor"]),
            self.encoder.side,
            self.encoder.size,
        )
        if self.side % self.scale:
            raise UserError(f"config.json: {self.side} patches a side cannot be shuffled by scale_factor {self.scale}")
        few = self.side // self.scale
        self.tokens, self.width = few**2, int(checkpoint.section("text_config")["hidden_size"])
        self.patch_grid, self.head_dim = (self.side, self.side), self.encoder.width // self.encoder.heads
        self.reach = (np.repeat(np.eye(few, dtype=np.float32), self.scale, 1),) * 2

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        g, width, positions = graph, self.encoder.width, self.side**2
        rows = g.patches("vision.embeddings.patch_embedding", pixels, width, self.encoder.patch)
        table = g.tensor("vision.embeddings.position_embedding.weight", (positions, width))
        rows = g.add("vision.embeddings", rows, g.per_position(g.constant("vision.embeddings.position_embedding", table)))
        rows = self.encoder.states(g, rows, positions, self.encoder.layers)[-1]
        rows, _ = g.layer_norm("vision.post_layernorm", rows, width, self.encoder.epsilon)
        every = g.shuffle("connector.shuffled", g.kept("connector.kept", rows, width), width, self.side, self.scale)
        squares = g.chosen("connector.chosen", every)
        name, columns = "connector.modality_projection.proj", width * self.scale**2
        return g.linear(name, squares, columns, self.width, bias=False)
