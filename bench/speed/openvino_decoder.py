"""Run transformers' decoder in OpenVINO on the CPU, with weights compressed by nncf and OpenVINO's stateful KV cache.

The conversion follows the stateful export of optimum-intel, which cannot be installed with edgevlm's version of transformers.
The KV cache is an OpenVINO state reordered by ``beam_idx``, which the CPU plugin fuses with attention. Weights follow
optimum-intel's defaults. In int8, each matrix row has its own scale and zero point; in int4, each group of at most 128 weights
has its own. The embedding and the head are stored in 8 bits.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation
from transformers.cache_utils import DynamicCache, DynamicLayer

from edgevlm.bench.seeded import TextModel
from edgevlm.bench.speed.torch_decoder import load

KV = {"fp32": "f32", "fp16": "f16", "int8": "u8"}
LARGEST_GROUP = 128


class OpenVino:
    """OpenVINO as a :class:`~edgevlm.bench.speed.runtimes.Runtime`. The KV cache is filled with noise."""

    def __init__(self, model: TextModel, precision: str, threads: int, capacity: int, kv: str) -> None:
        self._shape, self._held = model.shape, 0
        converted, group = stateful(model), math.gcd(model.shape.hidden, model.shape.intermediate, LARGEST_GROUP)
        nncf.set_log_level(logging.ERROR)
        with redirect_stdout(StringIO()):  # hides nncf's progress
            if precision == "int8":
                nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_ASYM)
            elif precision == "int4":
                nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT4_ASYM, ratio=1.0, group_size=group)
        settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads)}
        settings |= {"INFERENCE_PRECISION_HINT": "f32"} if precision == "fp32" else {}  # prevents bfloat16
        compiled = ov.Core().compile_model(converted, "CPU", {**settings, "KV_CACHE_PRECISION": KV[kv]})
        self._request = compiled.create_infer_request()
        self.hold(0)

    def hold(self, rows: int) -> None:
        s, self._held = self._shape, rows
        random = np.random.default_rng(0)
        self._noise = random.standard_normal((1, s.kv_heads, max(0, rows - 1), s.head_dim), np.float32)
        self.forget()

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        return self._append(ids, self._held)

    def forget(self) -> None:
        """Drop the appended rows: restore all held rows except the last, then decode the last row again."""
        for state in self._request.query_state():
            state.state = ov.Tensor(self._noise)
        if self._held:
            self._append([0], self._held - 1)

    def close(self) -> None:
        del self._request

    def _append(self, ids: Sequence[int], held: int) -> NDArray[np.float32]:
        inputs = {
            "input_ids": np.asarray([ids], np.int64), "attention_mask": np.ones((1, held + len(ids)), np.int64),
            "position_ids": np.arange(held, held + len(ids))[None], "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        logits: NDArray[np.float32] = self._request.infer(inputs)[0][0, -1].copy()
        return logits


class WithCache(torch.nn.Module):
    """transformers' decoder with keys and values as inputs and outputs. Its first output is the last row's logits."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> tuple[Any, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        seen = torch.arange(attention_mask.shape[1]) <= position_ids[0, :, None]
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        out = self.decoder(input_ids, mask, position_ids, cache, use_cache=True, logits_to_keep=1)
        return out.logits, *(part for layer in cache.layers for part in (layer.keys, layer.values))


def stateful(model: TextModel) -> Any:
    """Return the decoder as a float32 OpenVINO model whose states are the keys and values, reordered by ``beam_idx``."""
    s, rows, before = model.shape, 3, 5
    past = [torch.zeros(1, s.kv_heads, before, s.head_dim) for _ in range(2 * s.layers)]
    inputs = torch.zeros(1, rows, dtype=torch.long), torch.ones(1, before + rows, dtype=torch.long), torch.arange(5, 8)[None]
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # tracing warns about values that are constant here
        converted = ov.convert_model(WithCache(load(model)), example_input=(*inputs, *past))
    names = {f"past{index}": f"present{index}" for index in range(2 * s.layers)}
    for (taken, given), node, output in zip(names.items(), converted.inputs[3:], converted.outputs[1:], strict=True):
        node.tensor.set_names({taken})
        output.tensor.set_names({given})
        node.node.set_partial_shape(ov.PartialShape([-1, s.kv_heads, -1, s.head_dim]))
    converted.validate_nodes_and_infer_types()
    index = opset13.parameter(name="beam_idx", dtype=ov.Type.i32, shape=ov.PartialShape([-1]))
    index.output(0).get_tensor().add_names({"beam_idx"})
    converted.add_parameters([index])
    for name in names:  # OpenVINO's CPU plugin expects keys and values to be gathered by beam
        past = converted.input(name)
        readers = past.get_target_inputs()
        gathered = opset13.gather(past, index, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, names)
    batch = opset13.gather(opset13.shape_of(converted.input("input_ids"), "i64"), opset13.constant([0]), opset13.constant(0))
    rest = opset13.constant(np.array([s.kv_heads, 0, s.head_dim], np.int64))
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":  # make states start empty
            shape = opset13.concat([batch, rest], 0)
            node.set_arguments([opset13.broadcast(opset13.constant(np.float32(0)), shape)])
    converted.validate_nodes_and_infer_types()
    return converted
