"""Record the inputs of a decoder's matrices while the decoder reads passages from ``pydoc``'s help topics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.model import Model
from edgevlm.runtime.positions import rope_tables


def passages(tokens: int, length: int, encode: Callable[[str], Sequence[int]], *, held_out: bool) -> list[list[int]]:
    """Return the token ids of passages, ``tokens`` in total. A passage is the first ``length`` tokens of a help topic.

    ``held_out``: choose from the half of the topics that calibration does not use.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    found: list[list[int]] = []
    for name in sorted(topics)[held_out::2]:
        missing = tokens - sum(map(len, found))
        ids = list(encode(topics[name][: 16 * length]))[: min(length, missing)]
        if missing and len(ids) == min(length, missing):
            found.append(ids)
    return found


Float16 = NDArray[np.float16]

SITES = {"qkv": "input_norm", "output": "attention", "gate_up": "mlp_norm", "down": "gated"}  # a matrix -> its input's name
TOKENS, LENGTH = 2048, 256
LARGEST = np.float32(65504)  # float16's largest number, to which a passage's huge first activations are clipped


def sample_activations(bundle: Bundle) -> dict[str, Float16]:
    """Return the inputs of the matrices ``layer{l}.qkv``, ``.output``, ``.gate_up`` and ``.down`` of an fp32 bundle.

    Each input is ``[n, in]``.
    """
    model = Model.load(bundle.path)
    texts = passages(TOKENS, min(LENGTH, bundle.limit), model.encode, held_out=False)
    session = _with_inputs_of_matrices(bundle)
    found: dict[str, list[Float16]] = {}
    for ids in texts:
        embeds = model.engine.embed(np.asarray(ids, np.int64))
        for name, rows in _run(session, bundle, embeds).items():
            found.setdefault(name, []).append(np.clip(rows, -LARGEST, LARGEST).astype(np.float16))
    model.close()
    return {name: np.concatenate(rows) for name, rows in found.items()}


def _with_inputs_of_matrices(bundle: Bundle) -> Any:
    """Open the bundle's decoder in ONNX Runtime with the inputs of all matrices as extra outputs."""
    onnx, ort = import_module("onnx"), import_module("onnxruntime")
    graph = onnx.load(bundle.file(bundle.decoder.graphs["full"]), load_external_data=False)
    for layer in range(bundle.decoder.layers):
        for site in SITES.values():
            graph.graph.output.add(name=f"layer{layer}.{site}")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    return ort.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])


def _run(session: Any, bundle: Bundle, embeds: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Run the decoder and return the inputs of every layer's matrices, ``[S, in]``. ``embeds``: ``[S, hidden]``."""
    spec, count = bundle.decoder, len(embeds)
    rows = np.zeros((count, spec.row_width), np.float32)
    rows[:, : spec.hidden] = embeds
    cos, sin = rope_tables(np.arange(count, dtype=np.int32), bundle.inv_freq)
    memory = np.zeros((1, spec.kv_heads, count, spec.head_dim), np.float32)
    feeds: dict[str, Any] = {f"{part}{layer}": memory for part in ("key", "value") for layer in range(spec.layers)}
    feeds |= {"inputs_embeds": rows[None], "cos": cos[None], "sin": sin[None], "logit_rows": np.arange(count)}
    feeds["total_len"] = np.full(spec.layers, count, np.int32)
    names = {f"layer{layer}.{matrix}": f"layer{layer}.{site}" for layer in range(spec.layers) for matrix, site in SITES.items()}
    return {name: rows[0] for name, rows in zip(names, session.run(list(names.values()), feeds), strict=True)}
