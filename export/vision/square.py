"""The towers SigLIP and CLIP for square frames, with LLaVA's projector or SmolVLM's shuffle."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.vision import Tower
from edgevlm.export.vision.layers import Float32, VisionGraph

TOWERS = ("clip_vision_model", "siglip_vision_model")


class EncoderTower(Tower):
    """A tower that ``vision_config`` describes: pre-norm attention and MLP blocks over a square grid of patches."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.columns, self.inner, self.layers, self.heads = (
            int(section[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        )
        self.block_activation, self.epsilon = str(section["hidden_act"]), float(section["layer_norm_eps"])
        image, self.patch = section["image_size"], section["patch_size"]
        if not isinstance(image, int) or not isinstance(self.patch, int):
            raise UserError("config.json: vision image_size and patch_size must be integers, for square frames")
        if self.columns % self.heads:
            raise UserError(f"config.json: vision width {self.columns} is not a multiple of {self.heads} attention heads")
        self.side, self.size, self.head_dim = image // self.patch, (image, image), self.columns // self.heads
        self.patch_grid, self.residual = (self.side, self.side), self.columns

    def embedded(self, g: VisionGraph, pixels: str, *, has_class: bool = False) -> str:
        """Return patch embeddings with their position embeddings. The shape is ``[F, positions, columns]``.

        With ``has_class``, CLIP's class token comes first, and the caller must norm the rows before the first block.
        """
        name, positions = "vision.embeddings", self.side**2 + has_class
        rows = g.patches(f"{name}.patch_embedding", pixels, self.columns, self.patch, bias=not has_class, writes=not has_class)
        places = g.tensor(f"{name}.position_embedding.weight", (positions, self.columns))
        if has_class:
            places[0] += g.tensor(f"{name}.class_embedding", (self.columns,))
            rows = g.node("Pad", [rows, g.integers(0, 1, 0, 0, 0, 0)], f"{name}.class_token")
        places = places if has_class else g.residual(places)
        return g.add(name, rows, g.per_position(g.constant(f"{name}.position_embedding", places)))

    def states(self, g: VisionGraph, rows: str, layers: int) -> list[str]:
        """Return the first block's input and the outputs of the first ``layers`` blocks, each ``[F, positions, columns]``."""
        states, delta, columns, positions = [], "", self.columns, self.side**2 + self.class_tokens
        for layer in range(layers):
            name = f"vision.encoder.layers.{layer}"
            norms = [f"{name}.layer_norm{index}" for index in (1, 2)]
            normed, rows = g.layer_norm(norms[0], rows, columns, self.epsilon, delta)
            states.append(rows)
            query, key, value = (
                g.linear(f"{name}.self_attn.{part}_proj", normed, columns, columns, reads=norms[0]) for part in "qkv"
            )
            attended = g.attention(
                f"{name}.self_attn", query, key, value, rows=positions, heads=self.heads, scale=self.head_dim**-0.5
            )
            delta = g.linear(f"{name}.self_attn.out_proj", attended, columns, columns, writes=True)
            normed, rows = g.layer_norm(norms[1], rows, columns, self.epsilon, delta)
            inner = g.linear(f"{name}.mlp.fc1", normed, columns, self.inner, activation=self.block_activation, reads=norms[1])
            delta = g.linear(f"{name}.mlp.fc2", inner, self.inner, columns, writes=True)
        return [*states, g.add("vision.encoder", rows, delta) if delta else rows]


class SquareTower(EncoderTower):
    """A tower that joins the hidden states of chosen layers, and projects them to rows for the decoder.

    Hidden states are numbered as in transformers: 0 is the embedding, and -1 is the last layer's output before the final norm.
    The rows are ``[F, tokens, width]``. ``before`` and ``after``: matrices that pool the projector's input and output along
    both edges. If you set ``before`` or ``after``, set ``tokens`` and ``reach`` too.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        section, settings = with_defaults(checkpoint.section("vision_config")), with_defaults(checkpoint.config)
        if (kind := str(section.get("model_type"))) not in TOWERS:
            raise UserError(f"config.json: vision tower {kind!r} is not supported, only {', '.join(TOWERS)}")
        super().__init__(section)
        self.is_clip = kind == "clip_vision_model"
        self.class_tokens = int(self.is_clip)
        strategy, wanted = settings["vision_feature_select_strategy"], "default" if self.is_clip else "full"
        if strategy != wanted:  # CLIP's class token must be dropped; SigLIP has no class token
            what = f"vision_feature_select_strategy {strategy!r} of a {kind} is not supported, only {wanted!r}"
            raise UserError(f"config.json: {what}; use a model trained that way")
        chosen, layers = settings["vision_feature_layer"], self.layers
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if not all(-layers - 1 <= index <= layers for index in chosen):
            raise UserError(f"config.json: vision_feature_layer {chosen} does not exist in a tower of {layers} layers")
        self.chosen = [index % (layers + 1) for index in chosen]
        self.tokens, self.width = self.side**2, int(with_defaults(checkpoint.section("text_config"))["hidden_size"])
        self.activation = str(settings.get("projector_hidden_act", "gelu"))
        self.bias = bool(settings.get("multimodal_projector_bias", True))
        self.before: Float32 | None = None
        self.after: Float32 | None = None

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        g, width = graph, self.columns
        rows = self.embedded(g, pixels, has_class=self.is_clip)
        if self.is_clip:
            # "layrnorm" is the checkpoints' spelling
            rows, _ = g.layer_norm("vision.pre_layrnorm", rows, width, self.epsilon, writes=True)
        states = self.states(g, rows, max(self.chosen))
        features = [states[index] for index in self.chosen]
        joined = g.node("Concat", features, "features.chosen", axis=-1) if len(features) > 1 else features[0]
        if self.is_clip:
            ends = [g.integers(number) for number in (1, self.side**2 + 1, 1)]
            joined = g.node("Slice", [joined, *ends], "features.patches")
        rows = self._pooled(g, self.before, joined, width * len(features))
        rows = g.linear(
            "projector.linear_1", rows, width * len(features), self.width,
            bias=self.bias, activation=self.activation, reads="residual",
        )  # fmt: skip
        rows = g.linear("projector.linear_2", rows, self.width, self.width, bias=self.bias)
        return self._pooled(g, self.after, rows, self.width)

    def _pooled(self, g: VisionGraph, matrix: Float32 | None, rows: str, width: int) -> str:
        if matrix is None:
            return rows
        return g.chosen("pooled.chosen", g.resample("pooled", g.kept("pooled.kept", rows, width), width, matrix))


class SmolVLMTower(EncoderTower):
    """SmolVLM's tower. A linear layer turns each square of ``scale`` x ``scale`` patches from SigLIP into one token.

    Frames are resized to the vision tower's square input size, so patch i has position i. transformers computes the same
    positions for the published 27 or 32 patches per side, but not for 25.
    """

    def __init__(self, checkpoint: Checkpoint, vision_type: str) -> None:
        super().__init__(with_defaults(checkpoint.section("vision_config"), vision_type))
        self.scale = int(with_defaults(checkpoint.config)["scale_factor"])
        if self.side % self.scale:
            raise UserError(f"config.json: {self.side} patches per side is not a multiple of scale_factor {self.scale}")
        few = self.side // self.scale
        self.tokens, self.width = few**2, int(with_defaults(checkpoint.section("text_config"))["hidden_size"])
        self.reach = (np.repeat(np.eye(few, dtype=np.float32), self.scale, 1),) * 2

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        g, width = graph, self.columns
        rows = self.states(g, self.embedded(g, pixels), self.layers)[-1]
        rows, _ = g.layer_norm("vision.post_layernorm", rows, width, self.epsilon)
        every = g.shuffle("connector.shuffled", g.kept("connector.kept", rows, width), width, self.side, self.scale)
        squares = g.chosen("connector.chosen", every)
        name, columns = "connector.modality_projection.proj", width * self.scale**2
        return g.linear(name, squares, columns, self.width, bias=False, reads="vision.post_layernorm")
