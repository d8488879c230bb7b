"""A model of any shape with random weights, the same for the same seed: for measuring speed without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any, Protocol, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from edgevlm.bench.noise import NoiseEngine
from edgevlm.export.backbones import DecoderShape, text_backbone
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.decoder import WEIGHTS, write_decoder
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.runtime.bundle import Bundle, ChatSpec, DecoderSpec, FileRecord, VisionSpec
from edgevlm.runtime.engine import KVType, load_engine
from edgevlm.runtime.model import Model

VISION = "vision.onnx"
CHAT = "You are watching a video and answer questions about it. <video> {{ messages[-1]['content'][-1]['text'] }}"


class Tensors(Protocol):
    """What a decoder is made of, under a checkpoint's canonical names (``text.layers.0.mlp.down_proj.weight``)."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]: ...


class SeededTensors:
    """What the decoder builder asks of a checkpoint: each tensor from its own name and the seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.config = seed, dict[str, Any]()

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Float32 normal numbers over the square root of the last size; ones for norms."""
        if len(shape) == 1 and name.endswith(".weight"):
            return np.ones(shape, np.float32)
        rng = np.random.default_rng([self.seed, crc32(name.encode())])
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
        """The same tensor, at once."""
        yield self.tensor(name, shape)


def seeded_bundle(
    folder: Path,
    shape: DecoderShape,
    tokens_per_frame: int,
    *,
    seed: int = 0,
    st_spattn_from: int | None = None,
    precision: str = "fp32",
) -> Bundle:
    """Write the decoder of ``shape`` into ``folder`` and return a bundle of it, ready for an engine.

    Its vision tower is a stand-in (features ``[F, tokens_per_frame, hidden]`` repeat one pixel); a frame's grid is as square as
    it can be. Its chat is a few words.
    """
    tensors = SeededTensors(seed)
    return decoder_bundle(folder, tensors, shape, "qwen2", tokens_per_frame, st_spattn_from=st_spattn_from, precision=precision)


def decoder_bundle(
    folder: Path,
    tensors: Tensors,
    shape: DecoderShape,
    backbone: str,
    tokens_per_frame: int = 1,
    *,
    st_spattn_from: int | None = None,
    precision: str = "fp32",
    kv: KVType = "fp32",
) -> Bundle:
    """As :func:`seeded_bundle`, with ``tensors`` of the text backbone named."""
    checkpoint = cast(Checkpoint, tensors)
    backbone_of = text_backbone(backbone)
    made = write_decoder(checkpoint, backbone_of, shape, folder, lambda _: None, st_spattn_from, precision=precision, kv=kv)
    _write_vision(folder, tokens_per_frame, shape.hidden)
    sizes = ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab")
    spec: dict[str, Any] = {name: getattr(shape, name) for name in sizes}
    decoder = DecoderSpec(
        **spec,
        backbone=backbone,
        rope_theta=shape.rope_theta,
        inv_freq=tuple((shape.rope_theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)).astype(np.float32).tolist()),
        model_limit=shape.model_limit,
        trained_length=shape.model_limit,
        graphs=made.graphs,
        embedding=made.embedding[0],
        embedding_scales=made.embedding[1] if made.embedding[1:] else None,
        precision=precision,
        kv=kv,
    )
    third = (0.5, 0.5, 0.5)
    rows = max(size for size in range(1, isqrt(tokens_per_frame) + 1) if tokens_per_frame % size == 0)
    grid = (rows, tokens_per_frame // rows)
    vision = VisionSpec(VISION, (1, 1), "stretch", None, "bilinear", 1 / 255, third, third, tokens_per_frame, grid, None)
    chat = ChatSpec("", CHAT, "video", "<video>", 0, {}, ())
    files = {
        name: FileRecord((folder / name).stat().st_size, "")
        for name in (*made.graphs.values(), WEIGHTS, *made.embedding, VISION)
    }
    return Bundle(folder, "", "seeded", "seeded", decoder, vision, chat, files)


def word_tokenizer() -> Tokenizer:
    """A tokenizer to which every word is token 0."""
    tokenizer = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def seeded_model(folder: Path, shape: DecoderShape, tokens_per_frame: int, threads: int) -> Model:
    """A decoder of ``shape``, loaded, whose memory can be filled with noise; its features are noise, whatever the frame."""
    bundle = seeded_bundle(folder, shape, tokens_per_frame)
    engine = NoiseEngine(load_engine("onnxruntime-cpu", bundle, threads=threads), bundle)
    return Model(bundle, engine, word_tokenizer(), bundle.closing_rows())


def llava_onevision_05b() -> DecoderShape:
    """The decoder of LLaVA-OneVision-0.5B but for its vocabulary: frames have no logits."""
    return DecoderShape(
        layers=24, heads=14, kv_heads=2, head_dim=64, hidden=896, intermediate=4864, vocab=1024, norm_eps=1e-6, rope_theta=1e6,
        model_limit=32768, tied=True,
    )  # fmt: skip


def _write_vision(folder: Path, tokens_per_frame: int, hidden: int) -> None:
    with (folder / "vision.weights").open("wb") as stream:
        g = GraphBuilder("vision", WeightsFile(stream, "vision.weights"))
        pixels = g.input("pixel_values", TensorProto.FLOAT, ["F", 3, 1, 1])
        mean = g.node("ReduceMean", [pixels, g.constant("axes", np.array([1, 2, 3]))], ["mean"], keepdims=0)
        rows = g.node("Unsqueeze", [mean, g.constant("last", np.array([1, 2]))], ["rows"])
        ones = g.constant("ones", np.ones((1, tokens_per_frame, hidden), np.float32))
        g.output(g.node("Mul", [rows, ones], ["features"]), TensorProto.FLOAT, ["F", tokens_per_frame, hidden])
        g.save(folder / VISION)
