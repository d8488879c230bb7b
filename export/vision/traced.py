"""Towers that are still traced."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import OPSET, WeightsFile
from edgevlm.export.vision import GRAPH, WEIGHTS
from edgevlm.export.vision.attention import traced_as

UNROUNDED = "vision-fp32.weights"  # there while the weights are rounded


class VisionFeatures(nn.Module):
    """Pixels ``[G, group * 3, H, W]`` to language-space rows ``[G, tokens, width]``, one frame group after another.

    size: (height, width) of a frame in pixels. group: frames that a tower merges into one. sources: the checkpoint's tensor of
    each parameter. ``forward`` is a family's own.
    """

    size: tuple[int, int]
    group: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, str] = {}

    def take(self, checkpoint: Checkpoint, parts: Mapping[str, str]) -> None:
        """Say where parameters come from: those of the submodule ``part`` are the tensors under its prefix, every one of them.

        They are not read, and take no memory: a trace needs shapes alone. Raises UserError for a tensor that is missing or of
        another shape.
        """
        for part, prefix in parts.items():
            module, shapes = self.get_submodule(part), {}
            for name, parameter in module.state_dict().items():
                checkpoint.check(prefix + name, tuple(parameter.shape))
                self.sources[f"{part}.{name}" if part else name] = prefix + name
                shapes[name] = torch.empty(parameter.shape)
            module.load_state_dict(shapes, assign=True)


def write_traced(
    module: VisionFeatures,
    folder: Path,
    precision: str = "fp32",
    checkpoint: Checkpoint | None = None,
    standard: bool = False,
) -> tuple[int, int]:
    """Trace ``module`` for any number of frame groups into ``vision.onnx`` and ``vision.weights``.

    precision: of its linears, fp32, fp16 (which needs ``standard``) or int8. standard: without nodes of ONNX Runtime's own;
    then attention is in the precision too. Returns ``(tokens per group, width)``. Weights that the module takes from the
    checkpoint go to the file one tensor at a time; fp16 and int8 make a float32 file first. Source paths and stack traces that
    the tracer records are left out.
    """
    import onnx_ir

    from edgevlm.export.vision.rounding import halve_linears, round_linears

    with traced_as(("half" if precision == "fp16" else "standard") if standard else "fused"):
        model = _trace(module)
    for holder in (model, model.graph, *model.graph.all_nodes(), *model.graph.initializers.values()):
        holder.metadata_props.clear()
        holder.doc_string = None
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.metadata_props.clear()
    model.producer_name, model.producer_version = "edgevlm", None
    if precision != "fp32":
        _write_weights(model, module, checkpoint, folder / UNROUNDED)
        (round_linears if precision == "int8" else halve_linears)(model)
        onnx_ir.save(model, folder / GRAPH, external_data=WEIGHTS, alignment=64, align_threshold=0)
        (folder / UNROUNDED).unlink()
    else:
        _write_weights(model, module, checkpoint, folder / WEIGHTS)
        onnx_ir.save(model, folder / GRAPH)
    shape = model.graph.outputs[0].shape
    assert shape is not None
    return int(shape[1]), int(shape[2])


def _trace(module: VisionFeatures) -> Any:
    """The graph, an ``onnx_ir.Model``, optimised without the values of the parameters, which are not there yet."""
    example = torch.zeros(2, 3 * module.group, *module.size)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
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
            optimize=False,
        )
        assert program is not None
        for name, value in program.model.graph.initializers.items():
            if name in module.sources:
                value.const_value = None
        program.optimize()
    return program.model


def _write_weights(model: Any, module: VisionFeatures, checkpoint: Checkpoint | None, path: Path) -> None:
    """Every float32 initializer into a file; a parameter that is only used transposed is written so."""
    import onnx_ir

    parameters = dict(module.named_parameters())
    with path.open("wb") as stream:
        weights = WeightsFile(stream, path.name)
        for name, value in list(model.graph.initializers.items()):
            if checkpoint is not None and name in module.sources:
                shape = tuple(parameters[name].shape)
                if turned := _transposed(model, value):
                    tensor = weights.add(name, checkpoint.tensor(module.sources[name], shape).T)
                    value.shape = onnx_ir.Shape(shape[::-1])
                    onnx_ir.convenience.replace_all_uses_with(turned.outputs[0], value)
                    model.graph.remove(turned, safe=True)
                else:
                    tensor = weights.add_slices(name, shape, np.float32, checkpoint.rows(module.sources[name], shape))
            elif value.const_value.dtype == onnx_ir.DataType.FLOAT and value.const_value.size > 1:
                tensor = weights.add(name, value.const_value.numpy())
            else:
                continue
            place = {entry.key: entry.value for entry in tensor.external_data}
            value.const_value = onnx_ir.ExternalTensor(
                path.name, int(place["offset"]), int(place["length"]), onnx_ir.DataType.FLOAT,
                shape=onnx_ir.Shape(tensor.dims), name=name, base_dir=path.parent,
            )  # fmt: skip


def _transposed(model: Any, value: Any) -> Any:
    """The node that transposes a matrix, if nothing else uses it, else None."""
    users = [user for user, _ in value.uses()]
    if len(users) == 1 and users[0].op_type == "Transpose" and len(value.shape) == 2:
        return users[0]
    return None


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
