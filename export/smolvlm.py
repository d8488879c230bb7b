"""SmolVLM2: SigLIP patches shuffled into fewer, wider tokens, Llama, and each frame announced by its time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.attention import use_in
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.defaults import with_defaults
from edgevlm.export.family import FamilyParts
from edgevlm.export.frames import processor
from edgevlm.export.vision import VisionFeatures

INTRODUCTION = (
    "You are provided the following series of frames from a video.\n"  # a stream knows neither their number nor its length
)
PROCESSORS = ("video_processor", "image_processor")
MOST_PIXELS = 4096  # of an edge
FENCE = "<fake_token_around_image>"


class Tower(VisionFeatures):
    """Pixels ``[F, 3, H, W]`` to rows ``[F, (side / scale) ** 2, hidden]``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        from transformers import SmolVLMVisionConfig
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

        section = with_defaults(checkpoint.section("vision_config"), "smolvlm_vision")
        config = SmolVLMVisionConfig(**{key: value for key, value in section.items() if key != "model_type"})
        hidden = int(checkpoint.section("text_config")["hidden_size"])
        self.scale = int(with_defaults(checkpoint.config)["scale_factor"])
        self.side = int(config.image_size) // int(config.patch_size)
        if self.side % self.scale:
            raise UserError(f"config.json: {self.side} patches a side cannot be shuffled by scale_factor {self.scale}")
        self.size = (int(config.image_size), int(config.image_size))
        with torch.device("meta"):
            model: Any = SmolVLMVisionTransformer(config)
            self.proj = nn.Linear(config.hidden_size * self.scale**2, hidden, bias=False)
        use_in(model)
        self.patch_embedding, self.position_embedding = model.embeddings.patch_embedding, model.embeddings.position_embedding
        self.layers, self.post_layernorm = model.encoder.layers, model.post_layernorm
        names = {
            "patch_embedding": "vision.embeddings.patch_embedding.",
            "position_embedding": "vision.embeddings.position_embedding.",
            "layers": "vision.encoder.layers.",
            "post_layernorm": "vision.post_layernorm.",
            "proj": "connector.modality_projection.proj.",
        }
        self.take(checkpoint, names)
        places = _buckets(self.side)
        self.places = (places[:, None] * self.side + places).flatten()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2) + self.position_embedding(self.places)
        for layer in self.layers:
            output = layer(rows, None)
            rows = output[0] if isinstance(output, tuple) else output
        return self._shuffled(self.post_layernorm(rows))

    def _shuffled(self, rows: torch.Tensor) -> torch.Tensor:
        """Squares of ``scale`` x ``scale`` patches side by side, projected."""
        scale, few = self.scale, self.side // self.scale
        square = rows.unflatten(1, (few, scale, few, scale)).transpose(2, 3).flatten(3).flatten(1, 2)
        tokens: torch.Tensor = self.proj(square)
        return tokens


def _buckets(side: int) -> torch.Tensor:
    """The place in the position table of each of ``side`` patches of a whole image: fractions of its edge, in float32."""
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    return torch.bucketize(fractions, torch.arange(1 / side, 1.0, 1 / side), right=True)


def _longest_edge(checkpoint: Checkpoint, side: int) -> int:
    """What a frame's longer edge is first resized to; raises UserError if it does not end as the tower's square."""
    file, config = processor(checkpoint, PROCESSORS)
    sampled = (config.get("video_sampling") or {}).get("video_size") or config.get("size") or {}
    final = (config.get("max_image_size") or {}).get("longest_edge")
    edge = sampled.get("longest_edge")
    if final != side or not isinstance(edge, int):
        raise UserError(f"{file}: frames become {edge}, then {final} pixels wide, but the vision tower takes {side}")
    return min(edge, MOST_PIXELS)


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    tower = Tower(checkpoint)
    return FamilyParts(
        vision=tower.eval(),
        grid=(tower.side // tower.scale, tower.side // tower.scale),
        closing=None,
        content_type="video",
        placeholder="<video>",
        template=DEFAULT_CHAT_TEMPLATE,
        token_keys=("image_token_id",),
        processors=PROCESSORS,
        before=f"\nFrame from {{minutes:02d}}:{{second:02d}}:{FENCE}<global-img>",
        after=FENCE,
        longest_edge=_longest_edge(checkpoint, tower.size[0]),
        is_sized=True,
        opening=INTRODUCTION,
        ending="\n\n",
    )
