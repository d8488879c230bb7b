"""Towers of patches in a square, SigLIP's and CLIP's, with LLaVA's projector, as one module to trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.attention import use_in
from edgevlm.export.checkpoint import Checkpoint, nearest
from edgevlm.export.defaults import with_defaults
from edgevlm.export.vision import VisionFeatures

Pool = Callable[[torch.Tensor], torch.Tensor]
TOWERS = ("clip_vision_model", "siglip_vision_model")


class TowerFeatures(VisionFeatures):
    """Pixels ``[F, 3, H, W]`` to language-space rows ``[F, tokens, hidden]``: tower, chosen layers, projector.

    The chosen hidden states are taken as transformers numbers them (0 is the embedding, -1 the last layer before the final
    norm); layers after them are left out. ``before`` pools the rows ahead of the projector, ``after`` behind it.
    """

    def __init__(self, checkpoint: Checkpoint, *, before: Pool | None = None, after: Pool | None = None) -> None:
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
        self.before, self.after = before, after
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
