"""Vision towers at their real size with random weights: traced by the exporter, and transformers' own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from edgevlm.bench.seeded import SeededTensors, decoder_bundle
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import load_family
from edgevlm.export.vision import GRAPH, VisionFeatures, write_vision
from edgevlm.export.writer import family_parts
from edgevlm.runtime.engine import Engine, load_engine

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tower:
    """``depth``: what ``vision`` calls its number of layers. side: of a frame, pixels. reference: transformers' class."""

    family: str
    vision: dict[str, Any]
    depth: str
    side: int
    reference: str

    def shortened(self, layers: int | None) -> Tower:
        """The tower with its first ``layers`` layers."""
        if layers is None:
            return self
        full = [index for index in self.vision.get("fullatt_block_indexes", ()) if index < layers]
        return replace(self, vision=self.vision | {self.depth: layers} | ({"fullatt_block_indexes": full} if full else {}))


TOWERS = {
    "siglip-so400m-384": Tower(
        family="llava_onevision",
        vision={
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
        },
        depth="num_hidden_layers",
        side=384,
        reference="SiglipVisionModel",
    ),
    "qwen2.5-vl-448": Tower(
        family="qwen2_5_vl",
        vision={
            "model_type": "qwen2_5_vl_vision", "hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16,
            "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        },
        depth="depth",
        side=448,
        reference="Qwen2_5_VisionTransformerPretrainedModel",
    ),
}  # fmt: skip


class SeededCheckpoint(Checkpoint):
    """A folder with a configuration and no weights; tensors are random, the same for the same name."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Float32:
        return SeededTensors(0).tensor(name, shape)

    def check(self, name: str, shape: tuple[int, ...]) -> Any:
        """Every tensor is there, of any shape."""

    def _index(self) -> dict[str, tuple[Path, str]]:
        return {}


def traceable(tower: Tower, folder: Path) -> VisionFeatures:
    """The exporter's module of ``tower``; its configuration is written into ``folder``."""
    text = {"model_type": "qwen2", "hidden_size": 896}
    config = {"model_type": tower.family, "vision_config": tower.vision, "text_config": text, "vision_feature_layer": -1}
    config |= {"vision_feature_select_strategy": "full", "projector_hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1, "max_pixels": tower.side**2}))
    checkpoint = SeededCheckpoint(folder)
    module = family_parts(checkpoint, load_family(tower.family, folder), (tower.side, tower.side)).vision
    filled = module.state_dict()
    for name, source in module.sources.items():
        filled[name] = torch.from_numpy(checkpoint.tensor(source, tuple(filled[name].shape)))
    module.load_state_dict(filled, assign=True)
    module.sources = {}
    return module


def engine_of(module: VisionFeatures, folder: Path, precision: str, threads: int) -> Engine:
    """An engine whose bundle has ``module`` for a tower, and a decoder of no size worth naming."""
    shape = DecoderShape(1, 1, 1, 8, 8, 8, 8, norm_eps=1e-6, rope_theta=1e4, model_limit=64, tied=True)
    bundle = decoder_bundle(folder, SeededTensors(0), shape, "qwen2")
    tokens, _ = write_vision(module, folder, precision)
    spec = replace(
        bundle.vision, graph=GRAPH, size=module.size, tokens_per_frame=tokens, group=module.group, precision=precision
    )
    return load_engine("onnxruntime-cpu", replace(bundle, vision=spec), threads=threads)


def reference(tower: Tower, module: VisionFeatures) -> Callable[[Float32], object]:
    """transformers' own tower with the weights of ``module``: takes ``[F, 3, side, side]``, the last filling its group."""
    settings = {key: value for key, value in tower.vision.items() if key != "model_type"}
    kind = getattr(transformers, tower.reference, None) or _qwen(tower.reference)
    with torch.device("meta"):
        model = kind(kind.config_class(**settings)).eval()
    if module.group == 1:
        inner = getattr(model, "vision_model", model)
        inner.embeddings, inner.encoder.layers = module.embeddings, module.encoder.layers
        inner.post_layernorm.to_empty(device="cpu")
        return lambda frames: model(torch.from_numpy(frames))
    model.load_state_dict(module.state_dict(), assign=True)
    rotary, width = type(model.rotary_pos_emb), tower.vision["hidden_size"] // tower.vision["num_heads"] // 2
    model.rotary_pos_emb = rotary(model.config if "config" in inspect.signature(rotary).parameters else width)
    edge = tower.side // tower.vision["patch_size"]

    def run(frames: Float32) -> object:
        whole = np.concatenate([frames, np.repeat(frames[-1:], -len(frames) % module.group, 0)])
        groups = torch.from_numpy(whole.reshape(-1, 3 * module.group, *module.size))
        rows = module.grid.cut(groups)
        return model(rows.flatten(0, 1), torch.tensor([[len(rows), edge, edge]]))

    return run


def _qwen(name: str) -> Any:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    return getattr(modeling_qwen2_5_vl, name)
