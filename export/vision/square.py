"""Towers of patches in a square, SigLIP's and CLIP's: with LLaVA's projector, or SmolVLM's shuffle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from edgevlm.errors import UserError, nearest
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.vision import VisionFeatures
from edgevlm.export.vision.attention import use_in

Pool = Callable[[torch.Tensor], torch.Tensor]
TOWERS = ("clip_vision_model", "siglip_vision_model")


class SquareTower(VisionFeatures):
    """Pixels ``[F, 3, H, W]`` to language-space rows ``[F, tokens, hidden]``: tower, chosen layers, projector.

    The chosen hidden states are taken as transformers numbers them (0 is the embedding, -1 the last layer before the final
    norm); layers after them are left out. ``before`` pools the rows ahead of the projector, ``after`` behind it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        section = checkpoint.section("vision_config")
        model, config = _tower(section)
        settings = with_defaults(checkpoint.config)
        strategy = settings["vision_feature_select_strategy"]
        self.skipped = int(strategy == "default")  # the class token, ahead of the patches
        _check(section, config, strategy)
        chosen = settings["vision_feature_layer"]
        self.chosen = [
            _hidden_state(index, config.num_hidden_layers) for index in (chosen if isinstance(chosen, list) else [chosen])
        ]
        self.embeddings = model.embeddings
        self.encoder = nn.Module()
        self.encoder.layers = model.encoder.layers[: max(self.chosen)]
        self.pre_layrnorm = getattr(model, "pre_layrnorm", None)  # CLIP's, spelt as its checkpoints do
        self.side = config.image_size // config.patch_size
        self.size = (config.image_size, config.image_size)
        positions = self.side**2 + (self.pre_layrnorm is not None)
        self.embeddings.position_ids = torch.arange(positions)[None]  # a buffer that no checkpoint stores
        self.projector = _projector(checkpoint, config.hidden_size * len(self.chosen))
        self.before: Pool | None = None
        self.after: Pool | None = None
        parts = {"embeddings": "vision.embeddings.", "encoder": "vision.encoder.", "projector": "projector."}
        self.take(checkpoint, parts if self.pre_layrnorm is None else parts | {"pre_layrnorm": "vision.pre_layrnorm."})
        self.eval()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embedded = self.embeddings(pixel_values)
        states = [embedded if self.pre_layrnorm is None else self.pre_layrnorm(embedded)]
        for layer in self.encoder.layers:
            output = layer(states[-1], None)
            states.append(output[0] if isinstance(output, tuple) else output)
        features = torch.cat([states[index][:, self.skipped :] for index in self.chosen], dim=-1)
        rows: torch.Tensor = self.projector(features if self.before is None else self.before(features))
        return rows if self.after is None else self.after(rows)


def _tower(section: dict[str, Any]) -> tuple[Any, Any]:
    """The tower that ``vision_config`` means, without weights, and its configuration."""
    import transformers

    kind = str(section.get("model_type"))
    if kind not in TOWERS:
        raise UserError(f"config.json: vision tower {kind!r} cannot be exported; {nearest(kind, TOWERS)}")
    name = {"clip_vision_model": "CLIPVision", "siglip_vision_model": "SiglipVision"}[kind]
    config = getattr(transformers, f"{name}Config")(**{k: v for k, v in section.items() if k != "model_type"})
    with torch.device("meta"):  # shapes only: the checkpoint brings the numbers
        model = getattr(transformers, f"{name}Model")(config)
    use_in(model)
    return getattr(model, "vision_model", model), config  # transformers before 5.6 keeps the tower one level down


def _check(section: dict[str, Any], config: Any, strategy: object) -> None:
    is_clip = section["model_type"] == "clip_vision_model"
    if strategy not in ("default", "full"):
        raise UserError(f"config.json: vision_feature_select_strategy {strategy!r} is unknown; there are 'default' and 'full'")
    if is_clip and strategy == "full":
        raise UserError(
            "config.json: vision_feature_select_strategy 'full' keeps CLIP's class token beside its grid; set 'default'"
        )
    if not is_clip and strategy == "default":
        raise UserError("config.json: vision_feature_select_strategy 'default' drops a patch of a SigLIP tower; set 'full'")
    if not isinstance(config.image_size, int) or not isinstance(config.patch_size, int):
        raise UserError("config.json: vision image_size and patch_size must be whole numbers (square frames)")


def _hidden_state(index: int, layers: int) -> int:
    if not -layers - 1 <= index <= layers:
        raise UserError(f"config.json: vision_feature_layer {index} does not exist in a tower of {layers} layers")
    return index % (layers + 1)


def _projector(checkpoint: Checkpoint, width: int) -> nn.Module:
    from transformers.activations import ACT2FN

    hidden = int(checkpoint.section("text_config")["hidden_size"])
    bias = bool(checkpoint.config.get("multimodal_projector_bias", True))
    projector = nn.Sequential()
    with torch.device("meta"):
        projector.add_module("linear_1", nn.Linear(width, hidden, bias=bias))
        projector.add_module("act", ACT2FN[checkpoint.config.get("projector_hidden_act", "gelu")])
        projector.add_module("linear_2", nn.Linear(hidden, hidden, bias=bias))
    return projector


class SmolVLMTower(VisionFeatures):
    """Pixels ``[F, 3, H, W]`` to rows ``[F, (side / scale) ** 2, hidden]``."""

    def __init__(self, checkpoint: Checkpoint, vision_type: str) -> None:
        super().__init__()
        from transformers import SmolVLMVisionConfig
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

        section = with_defaults(checkpoint.section("vision_config"), vision_type)
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
