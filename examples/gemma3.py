"""A family with its own decoder, Gemma 3: `edgevlm export google/gemma-3-4b-it --family ./examples/gemma3.py:Gemma3`.

Five of six layers attend to a window of the newest positions, with their own rotary base. A frame's patches attend to one
another. The CPU engine supports windows and attention within frames.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import numpy as np

from edgevlm.extend import Backbone, Checkpoint, DecoderShape, EncoderTower, Family, FamilyParts, LayerWeights, VisionGraph

TEXT = {  # defaults for what published configs omit
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
VISION = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "model_type": "siglip_vision_model"}


@dataclass(frozen=True, slots=True)
class GemmaShape(DecoderShape):
    """A decoder's shape. factor: divides positions in layers with full attention. query: multiplies queries."""

    factor: float = 1.0
    query: float = 1.0

    def inv_freq(self) -> list[float]:
        return [frequency / self.factor for frequency in DecoderShape.inv_freq(self)]


class GemmaDecoder(Backbone):
    """A decoder whose norms have gain 1 + weight and also follow attention and MLP. Embeddings are scaled."""

    def shape(self, config: dict[str, Any], tied: bool) -> DecoderShape:
        text = TEXT | {name: value for name, value in config.items() if value is not None}
        layers, heads, dim = text["num_hidden_layers"], text["num_attention_heads"], text["head_dim"]
        kinds = text.get("layer_types")
        sees_all = [kind == "full_attention" for kind in kinds] if kinds else [n % 6 == 5 for n in range(layers)]
        rope = text.get("rope_parameters") or {}
        full = {"rope_theta": text["rope_theta"]} | (text.get("rope_scaling") or {}) | rope.get("full_attention", {})
        local = {"rope_theta": text["rope_local_base_freq"]} | rope.get("sliding_attention", {})
        return GemmaShape(
            layers=layers, heads=heads, kv_heads=text["num_key_value_heads"], head_dim=dim, hidden=text["hidden_size"],
            intermediate=text["intermediate_size"], vocab=text["vocab_size"], norm_eps=text["rms_norm_eps"],
            rope_theta=full["rope_theta"], model_limit=text["max_position_embeddings"],
            tied=tied or "tie_word_embeddings" not in config, head_norms=True, gate="gelu_pytorch_tanh",
            windows=tuple(0 if every else text["sliding_window"] for every in sees_all),
            local_theta=local["rope_theta"], whole_frames=True, factor=full.get("factor", 1.0),
            query=(dim / text["query_pre_attn_scalar"]) ** 0.5,
        )  # fmt: skip

    def vectors(self, s: DecoderShape, layer: int) -> dict[str, tuple[str, int]]:
        norms = {"attended": "post_attention", "mlp": "pre_feedforward", "passed": "post_feedforward"}
        own = {part: (f"text.layers.{layer}.{name}_layernorm.weight", s.hidden) for part, name in norms.items()}
        return super().vectors(s, layer) | own

    def layer(self, checkpoint: Checkpoint, s: DecoderShape, layer: int) -> LayerWeights:
        assert isinstance(s, GemmaShape)
        read = super().layer(checkpoint, s, layer)
        norms = {part: 1 + weight for part, weight in read.norms.items()}
        norms["q"] *= np.float32(s.query)
        return replace(read, norms=norms)

    def embedding(self, checkpoint: Checkpoint, s: DecoderShape) -> Iterator[np.ndarray]:
        for rows in super().embedding(checkpoint, s):
            yield rows * np.float32(s.hidden**0.5)

    def final_norm(self, checkpoint: Checkpoint, s: DecoderShape) -> np.ndarray:
        gain = 1 + super().final_norm(checkpoint, s)
        return gain / np.float32(s.hidden**0.5) if s.tied else gain  # a tied head is the scaled embedding


class GemmaTower(EncoderTower):
    """A SigLIP tower, followed by the mean of each square of patches, a norm and a linear layer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(VISION | checkpoint.section("vision_config"))
        self.few = isqrt(checkpoint.config.get("mm_tokens_per_image", 256))
        self.residual = 0  # the projector needs unrotated columns
        self.tokens, self.width = self.few**2, (TEXT | checkpoint.section("text_config"))["hidden_size"]
        self.squares = np.repeat(np.eye(self.few, dtype=np.float32), self.side // self.few, 1)  # the patches of each token
        self.reach = (self.squares, self.squares)

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        g, columns = graph, self.columns
        rows = self.states(g, self.embedded(g, pixels), self.layers)[-1]
        rows, _ = g.layer_norm("vision.post_layernorm", rows, columns, self.epsilon)
        mean = self.squares * np.float32(self.few / self.side)
        rows = g.chosen("chosen", g.resample("pooled", g.kept("kept", rows, columns), columns, mean))
        ones = g.constant("projector.ones", np.ones(columns, np.float32))
        rows = g.node("SimplifiedLayerNormalization", [rows, ones], "projector.norm", axis=-1, epsilon=1e-6, stash_type=1)
        gain = 1 + g.tensor("projector.mm_soft_emb_norm.weight", (columns,))
        matrix = gain[:, None] * g.tensor("projector.mm_input_projection_weight", (columns, self.width))
        return g.node("MatMul", [rows, g.constant("projector.matrix", matrix)], "projected")


class Gemma3(Family):
    """Gemma 3, with two newlines between frames where transformers has four between images."""

    content_type, token_keys = "image", ("image_token_id", "image_token_index")
    placeholder = "<start_of_image>"  # what the chat template writes for an image
    opening, before, after = "\n\n", "<start_of_image>", "<end_of_image>\n\n"
    text_tokens = 3
    backbone = GemmaDecoder(head_norms=True)

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        tower = GemmaTower(checkpoint)
        return FamilyParts(tower, (tower.few, tower.few))
