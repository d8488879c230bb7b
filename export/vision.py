"""What all vision towers have in common, and how one is traced."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import OPSET

GRAPH, WEIGHTS = "vision.onnx", "vision.weights"
PRECISIONS = ("fp32", "int8")


class VisionFeatures(nn.Module):
    """Pixels ``[G, group * 3, H, W]`` to language-space rows ``[G, tokens, width]``, one frame group after another.

    size: (height, width) of a frame in pixels. group: frames that a tower merges into one. ``forward`` is a family's own.
    """

    size: tuple[int, int]
    group: int = 1


def load_weights(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    """Fill ``module`` from the checkpoint's tensors under ``prefix``, every one of them."""
    state = {
        name: torch.from_numpy(checkpoint.tensor(prefix + name, tuple(tensor.shape)))
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)


def write_vision(module: VisionFeatures, folder: Path, precision: str = "fp32") -> tuple[int, int]:
    """Trace ``module`` for any number of frame groups into ``vision.onnx`` and ``vision.weights``.

    precision: of its linears, one of PRECISIONS. Returns ``(tokens per group, width)``. Source paths and stack traces that the
    tracer records are left out.
    """
    import onnx_ir

    from edgevlm.export.vision_int8 import round_linears

    example = torch.zeros(2, 3 * module.group, *module.size)
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
    if precision == "int8":
        round_linears(model)
    model.producer_name, model.producer_version = "edgevlm", None
    onnx_ir.save(model, folder / GRAPH, external_data=WEIGHTS, alignment=64, align_threshold=0)
    shape = model.graph.outputs[0].shape
    assert shape is not None
    return int(shape[1]), int(shape[2])


def check_precision(name: str) -> None:
    """Raises UserError for a precision that vision towers do not have."""
    if name not in PRECISIONS:
        raise UserError(f"--vision-precision {name!r} is not known; there is {' and '.join(PRECISIONS)}")


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
