"""The SigLIP vision tower with its projector, as one module to trace, and the tracing itself."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import OPSET

GRAPH, WEIGHTS = "vision.onnx", "vision.weights"
Pool = Callable[[torch.Tensor], torch.Tensor]


class SiglipFeatures(nn.Module):
    """Pixels ``[F, 3, H, W]`` to language-space rows ``[F, tokens, hidden]``: tower, chosen layer, projector, pooling.

    The chosen hidden state is taken as transformers numbers them (0 is the embedding, -1 the last layer before the
    final norm); layers after it are left out.
    """

    def __init__(self, checkpoint: Checkpoint, pool: Pool | None = None) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig, SiglipVisionModel

        section = checkpoint.section("vision_config")
        if section.get("model_type") != "siglip_vision_model":
            found = section.get("model_type")
            raise UserError(f"config.json: vision tower {found!r} cannot be exported; 'siglip_vision_model' can")
        strategy = checkpoint.config.get("vision_feature_select_strategy")
        if strategy != "full":
            raise UserError(
                f"config.json: vision_feature_select_strategy {strategy!r} drops a patch of a SigLIP tower; set 'full'"
            )
        config = SiglipVisionConfig(**{k: v for k, v in section.items() if k != "model_type"})
        if not isinstance(config.image_size, int) or not isinstance(config.patch_size, int):
            raise UserError("config.json: vision image_size and patch_size must be whole numbers (square frames)")
        with torch.device("meta"):  # shapes only: the checkpoint brings the numbers
            model = SiglipVisionModel(config)
        tower: Any = getattr(model, "vision_model", model)  # transformers before 5.6 keeps the tower one level down
        chosen = checkpoint.config.get("vision_feature_layer", -1)
        self.chosen = [
            _hidden_state(index, config.num_hidden_layers) for index in (chosen if isinstance(chosen, list) else [chosen])
        ]
        self.embeddings = tower.embeddings
        self.encoder = nn.Module()
        self.encoder.layers = tower.encoder.layers[: max(self.chosen)]
        self.side = config.image_size // config.patch_size
        self.size = config.image_size
        self.embeddings.position_ids = torch.arange(self.side**2)[None]  # a buffer that no checkpoint stores
        self.projector = _projector(checkpoint, config.hidden_size * len(self.chosen))
        self.pool = pool
        _load(self.embeddings, checkpoint, "vision.embeddings.")
        _load(self.encoder, checkpoint, "vision.encoder.")
        _load(self.projector, checkpoint, "projector.")
        self.eval()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        states = [self.embeddings(pixel_values)]
        for layer in self.encoder.layers:
            output = layer(states[-1], None)
            states.append(output[0] if isinstance(output, tuple) else output)
        features = torch.cat([states[index] for index in self.chosen], dim=-1)
        rows: torch.Tensor = self.projector(features)
        return rows if self.pool is None else self.pool(rows)


def _hidden_state(index: int, layers: int) -> int:
    if not -layers - 1 <= index <= layers:
        raise UserError(f"config.json: vision_feature_layer {index} does not exist in a tower of {layers} layers")
    return index % (layers + 1)


def _projector(checkpoint: Checkpoint, width: int) -> nn.Module:
    from transformers.activations import ACT2FN

    hidden = int(checkpoint.section("text_config")["hidden_size"])
    bias = bool(checkpoint.config.get("multimodal_projector_bias", True))
    projector = nn.Sequential()
    projector.add_module("linear_1", nn.Linear(width, hidden, bias=bias))
    projector.add_module("act", ACT2FN[checkpoint.config.get("projector_hidden_act", "gelu")])
    projector.add_module("linear_2", nn.Linear(hidden, hidden, bias=bias))
    return projector


def _load(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    """Fill ``module`` from the checkpoint's tensors under ``prefix``, every one of them."""
    state = {
        name: torch.from_numpy(checkpoint.tensor(prefix + name, tuple(tensor.shape)))
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)


def write_vision(module: SiglipFeatures, folder: Path) -> tuple[int, int]:
    """Trace ``module`` for any number of frames into ``vision.onnx`` and ``vision.weights``.

    Returns ``(tokens per frame, hidden)``. Source paths and stack traces that the tracer records are left out.
    """
    import onnx_ir

    example = torch.zeros(2, 3, module.size, module.size)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _quiet("torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            input_names=["pixel_values"],
            output_names=["features"],
            dynamic_shapes={"pixel_values": {0: torch.export.Dim("F", min=1)}},
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model
    for holder in (model, model.graph, *model.graph.all_nodes(), *model.graph.initializers.values()):
        holder.metadata_props.clear()
        holder.doc_string = None
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.metadata_props.clear()
    model.producer_name, model.producer_version = "edgevlm", None
    onnx_ir.save(model, folder / GRAPH, external_data=WEIGHTS, alignment=64, align_threshold=0)
    shape = model.graph.outputs[0].shape
    assert shape is not None
    return int(shape[1]), int(shape[2])


@contextlib.contextmanager
def _quiet(*names: str) -> Any:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
