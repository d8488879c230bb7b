"""Make models with real shapes and seeded random weights, to measure speed without downloading a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, Protocol, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgevlm.export.backbones import TEXT_BACKBONES, DecoderShape, text_backbone
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.decoder import WEIGHTS, write_decoder
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.options import ExportOptions
from edgevlm.progress import show
from edgevlm.runtime.bundle import Bundle, ChatSpec, DecoderSpec, FileRecord, VisionSpec
from edgevlm.runtime.kv import KVType

VISION = "vision.onnx"
CHAT = "You are watching a video and answer questions about it. <video> {{ messages[-1]['content'][-1]['text'] }}"


def _shape(backbone: str, *sizes: int, norm_eps: float = 1e-6, rope_theta: float = 1e6) -> tuple[str, DecoderShape]:
    layers, heads, kv_heads, head_dim, hidden, intermediate, vocab, model_limit = sizes
    return backbone, DecoderShape(
        layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, intermediate=intermediate, vocab=vocab,
        norm_eps=norm_eps, rope_theta=rope_theta, model_limit=model_limit, tied=True,
    )  # fmt: skip


# name -> (text backbone, shape of the decoder): layers, heads, kv_heads, head_dim, hidden, intermediate, vocab, model_limit
SHAPES = {
    # SmolLM2-135M and -360M, which are also SmolVLM-256M's and -500M's decoders
    "seeded-135m": _shape("llama", 30, 9, 3, 64, 576, 1536, 49152, 8192, norm_eps=1e-5, rope_theta=1e5),
    "seeded-360m": _shape("llama", 32, 15, 5, 64, 960, 2560, 49152, 8192, norm_eps=1e-5, rope_theta=1e5),
    # LLaVA-OneVision-0.5B with a smaller vocabulary, because no logits are computed for frames
    "seeded-0.5b": _shape("qwen2", 24, 14, 2, 64, 896, 4864, 1024, 32768),
    "seeded-3b": _shape("qwen2", 36, 16, 2, 128, 2048, 11008, 151936, 32768),  # Qwen2.5-VL-3B
    "demo": _shape("qwen2", 4, 4, 2, 64, 128, 384, 66, 4096),
}


class Tensors(Protocol):
    """Gives a decoder's tensors by name, such as ``text.layers.0.mlp.down_proj.weight``."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]: ...


class SeededTensors:
    """Random tensors, determined by a seed and the tensors' names."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.config = seed, dict[str, Any]()

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return float32 random numbers, divided by the square root of the last dimension. The weights of a norm are all 1."""
        if len(shape) == 1 and name.endswith(".weight"):
            return np.ones(shape, np.float32)
        rng = np.random.default_rng([self.seed, crc32(name.encode())])
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
        yield self.tensor(name, shape)


@dataclass(frozen=True, slots=True)
class TextModel:
    """The language model of a vision language model. ``backbone``: llama, qwen2 or qwen3."""

    name: str
    backbone: str
    shape: DecoderShape
    tensors: Tensors

    @property
    def head(self) -> str:
        """The name of the output head's weights."""
        return "text.embed_tokens.weight" if self.shape.tied else "text.lm_head.weight"


def open_text_model(name: str, layers: int | None = None) -> TextModel:
    """Return one of SHAPES with random weights, or the text part of the checkpoint in the directory ``name``.

    ``layers``: keep only the first ``layers`` layers. Raises UserError if the checkpoint does not exist.
    """
    if name in SHAPES:
        (backbone, shape), tensors = SHAPES[name], cast(Tensors, SeededTensors())
    else:
        tensors = checkpoint = Checkpoint(name)
        text: dict[str, Any] = dict(checkpoint.section("text_config"))
        if str(text.get("model_type")) not in TEXT_BACKBONES:  # the whole config of a text-only checkpoint is its text section
            text["model_type"] = str(text.get("model_type")).removesuffix("_text")
        text = with_defaults(text)
        shape = text_backbone(text["model_type"]).shape(text, checkpoint.is_tied(text))
        backbone = text["model_type"].partition("_")[0]
    return TextModel(Path(name).name, backbone, replace(shape, layers=min(layers or shape.layers, shape.layers)), tensors)


def decoder_bundle(
    folder: Path, shape: DecoderShape, tokens_per_frame: int = 1, *, tensors: Tensors | None = None, backbone: str = "qwen2",
    st_spattn_from: int | None = None, precision: str = "fp32", kv: KVType = "fp32",
) -> Bundle:  # fmt: skip
    """Write a decoder into ``folder`` and return its bundle, ready for an engine. Without ``tensors``, the weights are random.

    The bundle has no real vision tower. A frame's features ``[F, tokens_per_frame, hidden]`` are random numbers multiplied by
    the frame's mean.
    """
    checkpoint = cast(Checkpoint, tensors or SeededTensors())
    options = ExportOptions(st_spattn_from, precision=precision, kv=kv)
    made = write_decoder(checkpoint, text_backbone(backbone), shape, folder, options)
    _write_vision(folder, tokens_per_frame, shape.hidden)
    sizes: dict[str, Any] = {
        name: getattr(shape, name) for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab")
    }
    decoder = DecoderSpec(
        **sizes, backbone=backbone, rope_theta=shape.rope_theta, inv_freq=tuple(shape.inv_freq()),
        model_limit=shape.model_limit, trained_length=shape.model_limit, graphs=made.graphs, embedding=made.embedding[0],
        embedding_scales=made.embedding[1] if made.embedding[1:] else None, precision=precision, kv=kv,
    )  # fmt: skip
    half = (0.5, 0.5, 0.5)
    rows = max(size for size in range(1, isqrt(tokens_per_frame) + 1) if tokens_per_frame % size == 0)
    grid = (rows, tokens_per_frame // rows)
    vision = VisionSpec(VISION, (1, 1), "stretch", None, "bilinear", 1 / 255, half, half, tokens_per_frame, grid, None)
    names = (*made.graphs.values(), WEIGHTS, *made.embedding, VISION)
    files = {name: FileRecord((folder / name).stat().st_size, "") for name in names}
    return Bundle(folder, "", "seeded", "seeded", decoder, vision, ChatSpec("", CHAT, "video", "<video>", 1, {}, ()), files)


def _write_vision(folder: Path, tokens_per_frame: int, hidden: int) -> None:
    with (folder / "vision.weights").open("wb") as stream:
        g = GraphBuilder("vision", WeightsFile(stream, "vision.weights"))
        pixels = g.input("pixel_values", TensorProto.FLOAT, ["F", 3, 1, 1])
        mean = g.node("ReduceMean", [pixels, g.constant("axes", np.array([1, 2, 3]))], ["mean"], keepdims=0)
        rows = g.node("Unsqueeze", [mean, g.constant("last", np.array([1, 2]))], ["rows"])
        noise = np.random.default_rng(0).standard_normal((1, tokens_per_frame, hidden), np.float32)
        g.output(
            g.node("Mul", [rows, g.constant("noise", noise)], ["features"]), TensorProto.FLOAT, ["F", tokens_per_frame, hidden]
        )
        g.save(folder / VISION)


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer that maps every word to token 0."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


# a whole checkpoint, as transformers' ``save_pretrained`` writes it, for exports and comparisons with transformers
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)


def llava_onevision_config(layers: int | None = None) -> Any:
    """Return the configuration of LLaVA-OneVision-0.5B.

    The model consists of SigLIP-so400m's vision tower for pictures of 384 x 384 pixels, 196 tokens per frame, and Qwen2-0.5B.
    ``layers``: the number of layers in the tower and in the decoder, by default the model's.
    """
    import transformers

    vision = transformers.SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=layers or 26, num_attention_heads=16, image_size=384,
        patch_size=14, vision_use_head=False,
    )  # fmt: skip
    shape = SHAPES["seeded-0.5b"][1]
    text = transformers.Qwen2Config(
        vocab_size=152_000, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
        num_hidden_layers=layers or shape.layers, num_key_value_heads=shape.kv_heads, rms_norm_eps=shape.norm_eps,
        max_position_embeddings=shape.model_limit, tie_word_embeddings=shape.tied,
        rope_parameters={"rope_theta": shape.rope_theta, "rope_type": "default"},
    )  # fmt: skip
    given: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "tie_word_embeddings": True}
    return transformers.LlavaOnevisionConfig(vision_config=vision, text_config=text, **given)


def write_checkpoint(folder: Path, config: Any | None = None) -> Path:
    """Save a LLaVA-OneVision checkpoint in bfloat16 and return its directory.

    ``config``: by default, the 0.5B model, which takes 1.8 GB. The random weights depend only on torch's version. The tokenizer
    has a token for each byte and ChatML's special tokens.
    """
    import torch
    import transformers

    config = config or llava_onevision_config()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*MARKS])
    frames: dict[str, Any] = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "resample": 3, "rescale_factor": 1 / 255, "size": dict.fromkeys(("height", "width"), config.vision_config.image_size),
    }  # fmt: skip
    config.image_token_id, config.video_token_id = map(tokenizer.token_to_id, ("<image>", "<video>"))
    config.text_config.eos_token_id = tokenizer.token_to_id("<|im_end|>")
    show("writing a checkpoint of random weights")
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **chat}))
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": frames, "video_token": "<video>"}))
    return folder
