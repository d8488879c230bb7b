"""A bundle's engine with plain numpy memory: what a session does, without policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.engines.onnxruntime_cuda import OnnxRuntimeCuda
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Decoder, Float32, FramePattern, KVBuffer, StepResult
from edgevlm.runtime.kv import DTYPES


class WholeGraph(OnnxRuntimeCuda):
    """The CUDA engine on the CPU's provider: ONNX Runtime computes the whole graph, attention included."""

    ort_device, shrunk, kv_types = "cpu", "cpu:0", ("fp32", "fp16", "int8")
    provider, providers = "CPUExecutionProvider", ("CPUExecutionProvider",)


class Runner:
    """Append rows, keep count, read logits. ``keys[l]``, ``values[l]`` are ``[1, kv_heads, capacity, head_dim]``."""

    def __init__(
        self, bundle: Path, capacity: int = 512, probes: Sequence[int] = (), engine: type[OnnxRuntimeCpu] = OnnxRuntimeCpu
    ) -> None:
        self.bundle = Bundle.load(bundle)
        self.engine = engine(self.bundle, threads=1)
        self.tokenizer = Tokenizer.from_file(str(self.bundle.file(self.bundle.chat.tokenizer)))
        spec = self.bundle.decoder
        shape, kind, scales = (1, spec.kv_heads, capacity, spec.head_dim), DTYPES[spec.kv], self.bundle.kv_scales()
        self.keys = [np.zeros(shape, kind) for _ in range(spec.layers)]
        self.values = [np.zeros(shape, kind) for _ in range(spec.layers)]
        self.past_len = np.zeros(spec.layers, np.int32)
        self.position = 0
        pairs = zip(self.keys, self.values, strict=True)
        self.buffers = [
            KVBuffer(
                k.ctypes.data, v.ctypes.data, shape, k.dtype, (k, v),
                *((None, None) if scales is None else (scales.key[layer], scales.value[layer])),
            )
            for layer, (k, v) in enumerate(pairs)
        ]  # fmt: skip
        self.decoder = self.engine.bind(self.buffers, probes)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def embed(self, ids: Sequence[int]) -> Float32:
        return self.engine.embed(np.asarray(ids, np.int64))

    def step(
        self,
        embeds: Float32,
        logit_rows: Sequence[int] = (-1,),
        decoder: Decoder | None = None,
        pattern: FramePattern | None = None,
    ) -> StepResult:
        """Append at the next positions, through another bound decoder when one is given."""
        positions = np.arange(self.position, self.position + len(embeds), dtype=np.int32)
        taken = decoder or self.decoder
        result = taken.step(embeds, *self.tables(positions), self.past_len, logit_rows, pattern)
        self.past_len += len(embeds)
        self.position += len(embeds)
        return result

    def tables(self, positions: NDArray[np.int32]) -> tuple[Float32, Float32]:
        angles = positions.astype(np.float32)[:, None] * self.bundle.inv_freq
        return np.cos(angles), np.sin(angles)

    def greedy(self, logits: Float32, count: int) -> list[int]:
        """``count`` greedy tokens, the first chosen by ``logits [vocab]``."""
        tokens = [int(np.argmax(logits))]
        while len(tokens) < count:
            tokens.append(int(np.argmax(self.step(self.embed(tokens[-1:])).logits[0])))
        return tokens
