"""Read and verify bundles, the folders that ``edgevlm export`` writes and all other commands read.

``bundle.json`` describes the model and lists every file with its size and SHA-256. The manifest's ``checksum`` is the SHA-256
of ``bundle.json`` with the checksum's own 64 digits replaced by zeros.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from numpy.typing import DTypeLike, NDArray

from edgevlm.errors import BundleError, UserError, first_problem
from edgevlm.progress import Notify
from edgevlm.runtime.calibration import CALIBRATION, CHOICES, EVIDENCE, Calibration, Choices, EvidenceHeads, JsonFile
from edgevlm.runtime.files import check_utf8, look, open_file, put_back, refuse_unmapped
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, PROFILES, EngineShapes
from edgevlm.runtime.kv import DTYPES, KV_TYPES, SCALES, KVScales, KVType

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# The newest bundle format. Format 2 added position axes, frame groups and frame text; format 3 added the profile; format 4
# added the graph names "full", "per-layer0", ..; since format 5, per-layer graphs compute no attention.
FORMAT = 5
READS = range(1, FORMAT + 1)
FADING = ("20/19.5", "1.0/0.9")  # HERMES's k and omega for LLaVA, from the paper's appendix D
_QWEN_FADING = ["20/12", "0.75/0.6"]
MANIFEST = "bundle.json"
AGAIN = "export the checkpoint again (edgevlm export CHECKPOINT_DIR --out DIR)"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{64})"')
_FADING = re.compile(r"\d+(\.\d*)?/\d+(\.\d*)?")
_BLANK = b"0" * 64
_BLOCK = 1 << 22
_LARGEST = 1 << 25  # the maximum size of a manifest in bytes

Verify = Literal["full", "size", "manifest"]
Measured = TypeVar("Measured", bound=JsonFile)

# allowed ranges of a manifest's numbers; no model exceeds them
Count = Annotated[int, Ge(1), Le(1024)]
Width = Annotated[int, Ge(1), Le(1 << 16)]
Positions = Annotated[int, Ge(1), Le(1 << 31)]
Pixels = Annotated[int, Ge(1), Le(1 << 14)]
Finite = Annotated[float, Ge(-1e9), Le(1e9)]
Positive = Annotated[float, Gt(0), Le(1e12)]
Penalty = Annotated[float, Ge(0.01), Le(100)]
TokenId = Annotated[int, Ge(0), Le(1 << 24)]
Word = Annotated[str, MaxLen(256)]
Text = Annotated[str, MaxLen(1 << 20)]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and SHA-256 of a file that ``bundle.json`` lists."""

    bytes: Annotated[int, Ge(0), Le(1 << 50)]
    sha256: Annotated[str, MinLen(64), MaxLen(64)]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The language model's dimensions and files.

    Keys are stored rotated; a rotary pair is the channels ``d`` and ``d + head_dim / 2``. ``model_limit`` is the number of
    positions that the checkpoint's configuration allows, and ``trained_length`` is the number that training covered. ``graphs``
    maps each variant to its file; the variant ``full`` always exists. ``embedding`` is a .npy file: float32 or float16
    ``[vocab, hidden]``, or uint8 codes ``[vocab, B, size]`` if the float32 ``embedding_scales [vocab, B]`` exist. With
    ``embedding_scales``, an embedding is ``(code - 128) * scale``. With M-RoPE, ``rope_sections`` gives the number of rotary
    pairs for frame, row and column. If ``rope_interleaved`` is set, pairs alternate between the three axes (Qwen3-VL) instead
    of forming three blocks. ``deepstack`` is the number of first layers that add features to vision rows. ``windows`` gives how
    many positions back each layer sees; 0 means all. ``local_inv_freq`` replaces ``inv_freq`` in layers with a window. If
    ``whole_frames`` is set, each row of a frame sees all rows of the frame, including later rows.
    """

    backbone: Word
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    hidden: Width
    vocab: Annotated[int, Ge(1), Le(1 << 24)]
    rope_theta: Positive
    inv_freq: tuple[Finite, ...]
    model_limit: Positions
    trained_length: Positions
    graphs: Mapping[str, str]
    embedding: str
    rope_sections: tuple[Annotated[int, Ge(0), Le(1024)], ...] | None = None
    rope_interleaved: bool = False
    kv: KVType = "fp32"  # the type in which the graphs store keys and values
    deepstack: Annotated[int, Ge(0), Le(1024)] = 0
    precision: str = "fp32"
    rounding: str = "nearest"
    fading: tuple[str, str] = FADING  # HERMES's k and omega: "value in the first middle layer/decrease over the middle layers"
    windows: tuple[Annotated[int, Ge(0), Le(1 << 24)], ...] = ()
    local_inv_freq: tuple[Finite, ...] = ()
    whole_frames: bool = False
    embedding_scales: str | None = None

    @property
    def axes(self) -> int:
        """The number of axes of a position."""
        return 1 if self.rope_sections is None else len(self.rope_sections)

    @property
    def rotary(self) -> int:
        """The number of columns in the cosine and sine tables."""
        return len(self.inv_freq) + len(self.local_inv_freq)

    @property
    def is_causal(self) -> bool:
        """Whether a row sees all rows up to itself, and no later ones, in every layer."""
        return not (any(self.windows) or self.whole_frames)

    @property
    def row_width(self) -> int:
        """The width of the decoder's input rows, including DeepStack features."""
        return self.hidden * (1 + self.deepstack)


@dataclass(frozen=True, slots=True)
class ChangedTowerSpec:
    """The graph that encodes only a frame's changed patches, and the layout of its cache.

    ``grid`` is the (rows, columns) of patches, which may differ from the tokens' grid. The cache contains the keys and then the
    values of each layer, ``[heads, positions, head_dim]`` of type ``kv``, then float32 ``[patches, width]`` for each output.
    """

    graph: str
    grid: tuple[Count, Count]
    layers: Count
    heads: Count
    head_dim: Count
    positions: Annotated[int, Ge(1), Le(1 << 20)]  # the number of patches, plus 1 for CLIP's class token
    outputs: tuple[Width, ...] = ()
    kv: KVType = "fp32"

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def cache_bytes(self) -> int:
        """The size of one stream's tower cache in bytes."""
        row = 2 * self.layers * self.heads * self.head_dim * DTYPES[self.kv].itemsize
        return self.positions * row + self.patches * 4 * sum(self.outputs)


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """The allowed frame sizes. Sides are multiples of ``factor``. ``fewest``, ``most``: the minimum and maximum number of
    pixels in ``frames`` frames together.
    """

    factor: Count
    fewest: int
    most: Annotated[int, Le(1 << 28)]
    frames: Count = 1

    def __post_init__(self) -> None:
        numbers = (self.factor, self.frames, self.fewest, self.most)
        if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers) or self.fewest > self.most:
            raise ValueError(f"invalid pixel budget: {self.fewest} to {self.most}")

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return the allowed (height, width) nearest to the given size. Raises UserError for an aspect ratio over 200."""
        if min(height, width) < 1 or max(height, width) > 200 * min(height, width):
            raise UserError(f"frames of {width} x {height} pixels are not supported; use an aspect ratio of at most 200")
        if self.frames > 1 and min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        tall, wide = (round(side / self.factor) * self.factor for side in (height, width))
        if self.frames * tall * wide > self.most:
            shrink = math.sqrt(self.frames * height * width / self.most)
            return self._multiples(height / shrink, width / shrink, math.floor)
        if self.frames * tall * wide < self.fewest:
            grow = math.sqrt(self.fewest / (self.frames * height * width))
            return self._multiples(height * grow, width * grow, math.ceil)
        return tall, wide

    def _multiples(self, height: float, width: float, rounded: Callable[[float], int]) -> tuple[int, int]:
        tall, wide = (max(self.factor, rounded(side / self.factor) * self.factor) for side in (height, width))
        return tall, wide


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """How frames are resized, encoded and placed in the decoder's input.

    The pixels, float32 ``[3, height, width]``, are ``(frame * rescale - mean) / std`` of the RGB frame fitted to ``size``.
    ``fit`` is ``"stretch"`` (resize to ``size``), ``"crop"`` (resize the shorter edge to ``shortest_edge``, then cut ``size``
    out of the middle) or ``"longest"`` (resize the longer edge to ``longest_edge``, then stretch). The tower merges ``group``
    frames into one grid of ``tokens_per_frame`` tokens (Qwen: two; an odd last frame is repeated). ``closing`` is a .npy file
    with the rows, float32 ``[n, hidden]``, that follow a video's last frame.

    With ``positions="rows"``, each token takes the next position. With ``positions="video"``, the whole stream is one block of
    (frame, row, column) positions. In a block, the frame coordinate grows by 1 per grid or, if ``tokens_per_second`` is set, by
    that number per second. With ``positions="frame"``, each grid is a block of its own. ``positions="transformers"`` is like
    ``"video"`` but places the text after the video as transformers 5.23 and later do. ``before`` and ``after`` are the texts
    before and after each grid. In both texts, ``{seconds}``, ``{minutes}`` and ``{second}`` are replaced by the frame's time.
    """

    graph: str
    size: tuple[Pixels, Pixels]  # (height, width)
    fit: Literal["stretch", "crop", "longest"]
    shortest_edge: Pixels | None
    resample: Word  # a resampling filter of PIL: nearest | lanczos | bilinear | bicubic | box | hamming
    rescale: Positive
    mean: tuple[Finite, Finite, Finite]
    std: tuple[Positive, Positive, Positive]
    tokens_per_frame: Annotated[int, Ge(1), Le(1 << 20)]
    grid: tuple[Count, Count]  # (rows, columns); tokens are in row-major order
    closing: str | None
    group: Annotated[int, Ge(1), Le(64)] = 1
    positions: Word = "rows"
    tokens_per_second: Positive | None = None
    before: Word = ""
    after: Word = ""
    longest_edge: Pixels | None = None
    precision: Word = "fp32"  # the precision of the tower's linear layers: fp32, fp16 or int8
    changed: ChangedTowerSpec | None = None
    pixels: PixelBudget | None = None  # the frame sizes that the tower supports; None: only ``size``

    def for_frames(self, height: int, width: int) -> VisionSpec:
        """Return the spec for frames of a new size.

        The graph for changed patches is dropped, because it works only at the bundle's size. Returns this spec itself if the
        tower takes only one size. Raises UserError for an invalid size.
        """
        if self.pixels is None or (size := self.pixels.fitted(height, width)) == self.size:
            return self
        grid = size[0] // self.pixels.factor, size[1] // self.pixels.factor
        return replace(self, size=size, grid=grid, tokens_per_frame=grid[0] * grid[1], changed=None)


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """The checkpoint's chat template, and where the video is placed in it.

    The template is rendered with one content item ``{"type": content_type}`` for the whole stream. In the rendered text, the
    rows of all frames and the closing rows replace ``placeholder``, which occurs once. ``opening`` and ``ending`` are the texts
    before the first frame and after the last frame.
    """

    tokenizer: str
    template: Text
    content_type: Literal["video", "image"]
    placeholder: Annotated[str, MinLen(1), MaxLen(256)]
    placeholder_id: Annotated[int, Ge(-1), Le(1 << 24)]
    special_tokens: Mapping[str, Word]  # maps the name of each special token in the template to its text
    stop_ids: tuple[TokenId, ...]
    opening: Word = ""
    ending: Word = ""
    adds_special: bool = False  # whether the tokenizer adds special tokens to a prompt that does not begin with bos_token
    repetition_penalty: Penalty = 1.0
    no_repeat_ngram_size: Annotated[int, Ge(0), Le(1024)] = 0  # no run of this many tokens may repeat; 0 means no limit


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle. :meth:`file` returns the path of one of its files.

    ``profile``: the kind of the bundle's graphs, one of :data:`edgevlm.runtime.graph_profiles.PROFILES`. ``shapes``: the
    largest calls that engines are built for; None for the profile ``onnxruntime``, whose graphs take calls of any size.
    """

    path: Path
    edgevlm: str
    family: str
    source: str
    decoder: DecoderSpec
    vision: VisionSpec
    chat: ChatSpec
    files: Mapping[str, FileRecord]
    profile: str = field(default=ONNXRUNTIME, kw_only=True)
    shapes: EngineShapes | None = field(default=None, kw_only=True)

    @classmethod
    def load(cls, path: str | Path, *, verify: Verify = "full", progress: Notify | None = None) -> Bundle:
        """Read and verify the bundle in folder ``path``.

        ``verify="full"`` hashes every file, ``"size"`` only compares file sizes, and ``"manifest"`` reads only ``bundle.json``,
        which every mode checks in full. Raises a one-line :class:`edgevlm.errors.BundleError` that names the file and the fix.
        """
        check_utf8(folder := Path(path))
        bundle = _checked(folder, _read_manifest(folder))
        if verify != "manifest":
            _check_files(folder, bundle.files, verify, progress)
            bundle.kv_scales()
        return bundle

    def file(self, name: str) -> Path:
        """Return the path of a file that ``bundle.json`` lists. Raises BundleError for an unlisted name."""
        if name not in self.files:
            raise _bad(self.path / name, "is not listed in bundle.json")
        return self.path / name

    def in_fp32(self) -> Bundle:
        """Return a copy of this bundle whose sessions use an fp32 cache."""
        return replace(self, decoder=replace(self.decoder, kv="fp32"))

    @property
    def inv_freq(self) -> NDArray[np.float32]:
        """The rotary frequencies, float32 ``[decoder.rotary]``, bit-identical to those of the original implementation."""
        return np.asarray(self.decoder.inv_freq + self.decoder.local_inv_freq, np.float32)

    @property
    def limit(self) -> int:
        """The number of positions that a stream may use: ``min(model_limit, trained_length)``."""
        return min(self.decoder.model_limit, self.decoder.trained_length)

    def closing_rows(self) -> NDArray[np.float32]:
        """Return the rows that follow a video's last frame, float32 ``[n, hidden]``; n is 0 for most families."""
        if self.vision.closing is None:
            return np.zeros((0, self.decoder.hidden), np.float32)
        rows = self.array(self.vision.closing, (None, self.decoder.hidden), np.float32)
        if not np.isfinite(rows).all():
            raise _bad(self.file(self.vision.closing), "holds NaN or infinity")
        return np.array(rows)

    def array(self, name: str, shape: tuple[int | None, ...], *dtypes: DTypeLike) -> NDArray[Any]:
        """Map a .npy file of the bundle. None in ``shape`` matches any size. Raises BundleError for a wrong dtype or shape."""
        path = self.file(name)
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy raises errors of many types for an invalid file
            refuse_unmapped(path, error)
            raise _bad(path, f"cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})") from None
        sizes = found.shape if isinstance(found, np.ndarray) else ()
        fits = len(sizes) == len(shape) and all(size in (None, own) for size, own in zip(shape, sizes, strict=True))
        if not fits or found.dtype not in [np.dtype(each) for each in dtypes]:
            wanted = [each or "any" for each in shape]
            raise _bad(path, f"holds {getattr(found, 'dtype', 'no')} {list(sizes)}, not {np.dtype(dtypes[0])} {wanted}")
        return found

    def kv_scales(self) -> KVScales | None:
        """Return the scales of int8 keys and values, or None for fp32 and fp16. Raises BundleError for an invalid file."""
        spec = self.decoder
        if spec.kv != "int8":
            return None
        path = self.file(SCALES)
        try:
            return KVScales.load(path, (spec.layers, spec.kv_heads, spec.head_dim))
        except (OSError, ValueError) as error:
            raise _bad(path, str(error)) from None

    def calibration(self) -> Calibration | None:
        """Return the results of ``edgevlm calibrate``, or None if there are none. Raises BundleError for invalid results."""
        return self._measured(CALIBRATION, Calibration)

    def choices(self) -> Choices | None:
        """Return the settings that ``edgevlm calibrate`` chose, or None. Raises BundleError for an invalid file."""
        return self._measured(CHOICES, Choices)

    def evidence_heads(self) -> EvidenceHeads:
        """Return the attention heads that show which frames an answer came from. Raises BundleError for an invalid file."""
        uncalibrated = EvidenceHeads.uncalibrated(self.decoder.layers, self.decoder.heads, self.decoder.windows)
        return self._measured(EVIDENCE, EvidenceHeads) or uncalibrated

    def _measured(self, name: str, kind: type[Measured]) -> Measured | None:
        if name not in self.files:
            return None
        path = self.file(name)
        try:
            found = kind.from_json(path.read_bytes())
            found.check(self.decoder.layers, self.decoder.heads)
            return found
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: {error}; calibrate again (edgevlm calibrate {self.path})") from None


def seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of ``bundle.json`` with a new checksum."""
    body = {**{k: v for k, v in manifest.items() if k != "checksum"}, "checksum": _BLANK.decode()}
    raw = (json.dumps(body, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()
    head, tail = raw.rsplit(_BLANK, 1)
    return head + hashlib.sha256(raw).hexdigest().encode() + tail


def hash_file(path: Path) -> FileRecord:
    """Return the size and SHA-256 of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_BLOCK)
    with open_file(path) as stream:
        while n := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:n])
            size += n
    return FileRecord(size, digest.hexdigest())


def check_target(out_dir: str | Path, force: bool) -> None:
    """Raise UserError if a bundle must not be written to this folder. The check is cheap; call it before long work."""
    target = Path(os.path.abspath(out_dir))
    found = look(target)
    if found == "nothing" and not target.is_symlink():
        return
    if found != "folder":
        raise UserError(f"{target}: is a file; choose another --out")
    if (target / MANIFEST).exists():
        if not force:
            raise UserError(f"{target}: bundle already exists; add --force to replace it")
    elif any(target.iterdir()):
        raise UserError(f"{target}: is not empty and contains no bundle; choose another --out")


def _bad(path: Path, what: str) -> BundleError:
    return BundleError(f"{path}: {what}; {AGAIN}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    put_back(Path(os.path.abspath(folder)))
    path, found = folder / MANIFEST, look(folder)
    if found != "folder":
        what = "no such bundle folder" if found == "nothing" else "is a file, not a bundle folder"
        raise BundleError(
            f"{folder}: {what}; give demo, a folder written by edgevlm export, a checkpoint folder, or ORG/NAME on the hub"
        )
    try:
        with open_file(path) as stream:
            raw = stream.read(_LARGEST + 1)
    except FileNotFoundError:
        raise BundleError(f"{folder} is neither a bundle nor a checkpoint folder") from None
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None
    if len(raw) > _LARGEST:
        raise _bad(path, f"is larger than {_LARGEST >> 20} MB")
    sums = _CHECKSUM.findall(raw)
    if not sums or hashlib.sha256(_BLANK.join(raw.rsplit(sums[-1], 1))).hexdigest().encode() != sums[-1]:
        raise _bad(path, "is damaged (its checksum does not match)")
    from pydantic_core import from_json

    try:
        manifest = dict(from_json(raw, allow_inf_nan=False))
        version, decoder = manifest["format"], manifest["decoder"]
        if type(version) is not int or version not in READS:
            newer = "upgrade edgevlm" if type(version) is int and version > FORMAT else AGAIN
            known = ", ".join(map(str, READS))
            raise BundleError(f"{path}: has bundle format {str(version)[:40]}, but this edgevlm supports {known}; {newer}")
        if version < 4:
            decoder["graphs"] = {_graph_name(name): file for name, file in decoder["graphs"].items()}
        if str(manifest.get("family")).startswith("qwen"):
            decoder.setdefault("fading", _QWEN_FADING)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _bad(path, "is not a valid bundle manifest") from None
    return manifest


def _graph_name(name: str) -> str:
    """Translate a decoder graph's name from formats 1 to 3 (``whole``, ``cut0``, ``cut1``, ..) to the current one."""
    return re.sub(r"cut(?=\d+$)", "per-layer", "full" if name == "whole" else name)


@cache
def _schema() -> TypeAdapter[Bundle]:
    from pydantic import TypeAdapter  # imported here because importing pydantic takes 0.2 s

    return TypeAdapter(Bundle)


def _checked(folder: Path, manifest: Mapping[str, Any]) -> Bundle:
    from pydantic import ValidationError
    from pydantic_core import to_json

    where = folder / MANIFEST
    try:
        bundle = _schema().validate_json(to_json({**manifest, "path": str(folder)}), strict=True)
    except ValidationError as error:
        raise _bad(where, f"is invalid ({first_problem(error)})") from None
    for name in bundle.files:
        if not _PLAIN_NAME.fullmatch(name):
            raise _bad(where, f"lists {name[:80]!r}, which may be outside the bundle folder")
    changed, decoder, vision = bundle.vision.changed, bundle.decoder, bundle.vision
    named = [*decoder.graphs.values(), decoder.embedding, decoder.embedding_scales, vision.graph, bundle.chat.tokenizer]
    for name in filter(None, [*named, vision.closing, changed.graph if changed else None]):
        bundle.file(name)
    for what, word, known in (("uses {} keys", decoder.kv, KV_TYPES), ("has profile {!r}", bundle.profile, PROFILES)):
        if word not in known:
            raise BundleError(
                f"{folder}: {what.format(word[:40])}, but this edgevlm supports {', '.join(known)}; upgrade edgevlm"
            )
    if problem := _contradiction(bundle):
        raise _bad(where, f"is invalid ({problem})")
    return bundle


def _contradiction(bundle: Bundle) -> str:
    """Return the first contradiction in a manifest, or an empty string if there is none."""
    decoder, vision, chat = bundle.decoder, bundle.vision, bundle.chat
    half, changed = decoder.head_dim // 2, vision.changed
    rules = {
        "decoder.kv_heads does not divide decoder.heads": decoder.heads % decoder.kv_heads,
        "decoder.head_dim is odd": decoder.head_dim % 2,
        "decoder.inv_freq must be head_dim / 2 numbers": len(decoder.inv_freq) != half,
        "decoder.windows must be one number per layer": len(decoder.windows) not in (0, decoder.layers),
        "decoder.local_inv_freq must be head_dim / 2 numbers, with windows and 1-D positions": bool(decoder.local_inv_freq)
        and (len(decoder.local_inv_freq) != half or decoder.axes > 1 or not decoder.windows),
        "decoder.rope_sections must be three numbers that add up to head_dim / 2": decoder.rope_sections is not None
        and (len(decoder.rope_sections) != 3 or sum(decoder.rope_sections) != half or min(decoder.rope_sections) < 0),
        "vision.positions and decoder.rope_sections disagree": (decoder.rope_sections is None) != (vision.positions == "rows"),
        "vision.positions is unknown": vision.positions not in ("rows", "video", "frame", "transformers"),
        "decoder.deepstack exceeds decoder.layers": decoder.deepstack > decoder.layers,
        "decoder.graphs has no full graph": "full" not in decoder.graphs,
        "decoder.fading must be two pairs of numbers": not all(map(_FADING.fullmatch, decoder.fading)),
        "vision.grid does not match vision.tokens_per_frame": math.prod(vision.grid) != vision.tokens_per_frame,
        "vision.changed is inconsistent": changed is not None
        and (changed.positions < changed.patches or changed.kv not in DTYPES or len(changed.outputs) > changed.layers + 1),
        "chat.placeholder_id is outside decoder.vocab": chat.placeholder_id >= decoder.vocab,
        "chat.stop_ids are outside decoder.vocab": any(token >= decoder.vocab for token in chat.stop_ids),
        "chat.special_tokens are not named .._token": not all(name.endswith("_token") for name in chat.special_tokens),
    }
    return next((words for words, broken in rules.items() if broken), "")


def _check_files(folder: Path, files: Mapping[str, FileRecord], verify: Verify, progress: Notify | None) -> None:
    for name, record in files.items():
        if progress is not None:
            progress(f"verifying {name}")
        path = folder / name
        if path.is_symlink():
            raise _bad(folder / MANIFEST, f"lists {name!r}, which may be outside the bundle folder")
        if (found := look(path)) != "file":
            raise _bad(path, "is missing" if found == "nothing" else "is not a file")
        if (size := path.stat().st_size) != record.bytes:
            raise _bad(path, f"is {'truncated' if size < record.bytes else 'too long'} ({size} bytes, not {record.bytes})")
        try:
            if verify == "full" and hash_file(path) != record:
                raise _bad(path, "is damaged (its SHA-256 does not match)")
        except OSError as error:
            raise _bad(path, f"cannot be read ({error.strerror})") from None
