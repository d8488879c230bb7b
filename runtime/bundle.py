"""A bundle: the folder that ``edgevlm export`` writes and everything else reads.

``bundle.json`` describes the model and lists every file with its size and SHA-256; its own ``checksum`` is the SHA-256
of its own bytes with the 64 digits of the checksum replaced by zeros, so that no byte of a bundle can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import BundleError, UserError
from edgevlm.runtime.calibration import CALIBRATION, CHOICES, EVIDENCE, Calibration, Choices, EvidenceHeads
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, PROFILES, EngineShapes
from edgevlm.runtime.kv import DTYPES, KV_TYPES, SCALES, KVScales, KVType
from edgevlm.runtime.paths import look

FORMAT = 4  # written; 2 adds position axes, frame groups and frame text, 3 the profile, 4 names graphs "full", "per-layer0", ..
READS = (1, 2, 3, 4)
FADING = ("20/19.5", "1.0/0.9")  # of LLaVA, in HERMES's App. D
_QWEN_FADING = ["20/12", "0.75/0.6"]  # of bundles written before their manifest said so
MANIFEST = "bundle.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{64})"')
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLANK = b"0" * 64
_BLOCK = 1 << 22

Verify = Literal["full", "size", "manifest"]
Progress = Callable[[str], object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a listed file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The language model's shapes. Keys are stored rotated (rotate-half pairs ``d`` and ``d + head_dim / 2``)."""

    backbone: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    rope_theta: float
    inv_freq: tuple[float, ...]  # (head_dim / 2,) float32 values; angle = float32(position) * float32(inv_freq)
    model_limit: int  # positions the checkpoint's configuration allows
    trained_length: int  # positions it was trained to; the session's limit is the smaller of the two
    graphs: Mapping[str, str]  # variant -> file; "full" is always there
    embedding: str  # .npy file, float32 or float16 [vocab, hidden]; with scales, codes uint8 [vocab, B, size]
    rope_sections: tuple[int, ...] | None = None  # rotary pairs that turn by frame, row, column (M-RoPE); null for 1-D
    rope_interleaved: bool = False  # the three take turns (Qwen3-VL) instead of standing one after the other
    kv: KVType = "fp32"  # what the graphs keep keys and values as
    deepstack: int = 0  # first layers after which a vision row's further features are added to it
    precision: str = "fp32"  # of the weights; see docs/internals/models.md
    scaling: str | None = None  # "awq" where matrices were scaled for the activations they meet before they were rounded
    fading: tuple[str, str] = FADING  # HERMES's k and omega: value at the first middle layer / fall until the first deep one
    embedding_scales: str | None = None  # .npy file, float32 [vocab, B]: an embedding is (code - 128) * its block's scale

    @property
    def axes(self) -> int:
        """Numbers of a position."""
        return 1 if self.rope_sections is None else len(self.rope_sections)

    @property
    def row_width(self) -> int:
        """Width of a decoder's input row: the embedding, then the features for each of the ``deepstack`` layers."""
        return self.hidden * (1 + self.deepstack)


@dataclass(frozen=True, slots=True)
class ChangedTowerSpec:
    """The graph that encodes the changed patches of a frame alone, and what it keeps of the others between calls.

    ``grid``: (rows, columns) of patches; they need not be those of tokens. For each layer it keeps keys, then values, ``[heads,
    positions, head_dim]`` of ``kv``, and behind the last layer float32 ``[patches, width]`` for each width in ``outputs``.
    """

    graph: str
    grid: tuple[int, int]
    layers: int
    heads: int
    head_dim: int
    positions: int  # patches, and CLIP's class token
    outputs: tuple[int, ...] = ()
    kv: KVType = "fp32"

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def cache_bytes(self) -> int:
        """Bytes of one stream's tower cache."""
        row = 2 * self.layers * self.heads * self.head_dim * DTYPES[self.kv].itemsize
        return self.positions * row + self.patches * 4 * sum(self.outputs)


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Sizes that a tower takes: edges of multiples of ``factor`` pixels, ``fewest`` to ``most`` pixels in ``frames`` frames."""

    factor: int
    fewest: int
    most: int
    frames: int = 1

    def __post_init__(self) -> None:
        numbers = [getattr(self, each.name) for each in fields(self)]
        if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers) or self.fewest > self.most:
            raise ValueError(f"a budget of {self.fewest} to {self.most} pixels")

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) nearest to a frame's: its aspect is kept but for what whole multiples take.

        Raises UserError for sides of less than a pixel, or of which one is more than 200 times the other.
        """
        if min(height, width) < 1 or max(height, width) > 200 * min(height, width):
            raise UserError(
                f"frames of {width} x {height} pixels cannot be used; give a size whose sides differ 200-fold at most"
            )
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
    """How a frame becomes pixels, and pixels become rows.

    Pixels: the RGB frame fitted to ``size``, times ``rescale``, minus ``mean``, over ``std``: float32
    [3, height, width]. ``fit`` is ``"stretch"`` (resize to ``size``), ``"crop"`` (resize the shorter edge to
    ``shortest_edge``, then cut ``size`` out of the middle) or ``"longest"`` (resize the longer edge to ``longest_edge``, then
    stretch).

    ``group`` frames make one grid of tokens (Qwen merges two; an odd last one is repeated). ``positions`` says how these take
    theirs: ``"rows"``, the next index each; ``"video"``, one block of frame, row and column for the whole stream, in which the
    frame advances by 1, or by ``tokens_per_second`` of the time that passes; ``"frame"``, such a block for each grid;
    ``"transformers"``, as ``"video"`` with the text behind it where transformers from 5.3 on puts it.
    ``before`` and ``after`` are text that stands around each grid; ``{seconds}``, ``{minutes}`` and ``{second}`` are its time.
    """

    graph: str
    size: tuple[int, int]  # (height, width)
    fit: str
    shortest_edge: int | None
    resample: str  # nearest | lanczos | bilinear | bicubic | box | hamming, as PIL defines them
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    tokens_per_frame: int  # of a frame, or of the group of frames that make one grid
    grid: tuple[int, int]  # its (rows, columns), row-major
    closing: str | None  # .npy file, float32 [n, hidden]: rows that close a video; null for none
    group: int = 1
    positions: str = "rows"  # "rows" | "video" | "frame" | "transformers"
    tokens_per_second: float | None = None
    before: str = ""
    after: str = ""
    longest_edge: int | None = None
    precision: str = "fp32"  # of the tower's linears: fp32 or int8
    changed: ChangedTowerSpec | None = None  # None in bundles of before 0.2
    pixels: PixelBudget | None = None  # sizes that the tower takes beside ``size``; None: that one alone

    def for_frames(self, height: int, width: int) -> VisionSpec:
        """The same for frames of another size, the nearest that the tower takes; itself where it takes one alone.

        The graph of changed patches is for the bundle's own size. Raises UserError for a size that is none.
        """
        if self.pixels is None or (size := self.pixels.fitted(height, width)) == self.size:
            return self
        grid = size[0] // self.pixels.factor, size[1] // self.pixels.factor
        return replace(self, size=size, grid=grid, tokens_per_frame=grid[0] * grid[1], changed=None)


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """How text is built: the checkpoint's own template, and where the video goes in it.

    The template is rendered with one content item ``{"type": content_type}`` for the whole stream; ``placeholder`` then
    stands once in the text, and all rows of all frames (and the closing rows) stand in its place.
    """

    tokenizer: str
    template: str
    content_type: str  # "video" | "image"
    placeholder: str
    placeholder_id: int
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ... as the template expects them
    stop_ids: tuple[int, ...]
    opening: str = ""  # text before the first frame
    ending: str = ""  # text after the last one


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle, checked. Paths come from :meth:`file` only.

    profile: what its graphs are written for, one of :data:`edgevlm.runtime.graph_profiles.PROFILES`; shapes: the largest
    calls that engines are made for, None with profile onnxruntime, whose graphs take any.
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
    def load(cls, path: str | Path, *, verify: Verify = "full", progress: Progress | None = None) -> Bundle:
        """Read and verify the bundle in folder ``path``.

        ``verify="full"`` hashes every file, ``"size"`` only compares sizes, ``"manifest"`` looks at no file but
        ``bundle.json``, which is always checked in full.
        Raises :class:`edgevlm.errors.BundleError`, one line that names the file and the way out.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        try:
            files = _records(folder, manifest)
            if verify != "manifest":
                _check_files(folder, files, verify, progress)
            bundle = cls(
                path=folder,
                edgevlm=str(manifest["edgevlm"]),
                family=str(manifest["family"]),
                source=str(manifest["source"]),
                decoder=_spec(DecoderSpec, _qwen_fading(manifest) | manifest["decoder"]),
                vision=_vision_spec(manifest["vision"]),
                chat=_spec(ChatSpec, manifest["chat"]),
                files=files,
                profile=str(manifest.get("profile", ONNXRUNTIME)),
                shapes=None if manifest.get("shapes") is None else _spec(EngineShapes, manifest["shapes"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _bad(folder / MANIFEST, f"does not describe a model ({error!r})") from None
        for name in (
            *bundle.decoder.graphs.values(),
            bundle.decoder.embedding,
            *filter(None, [bundle.decoder.embedding_scales]),
            bundle.vision.graph,
            *([bundle.vision.changed.graph] if bundle.vision.changed else []),
            bundle.chat.tokenizer,
        ):
            bundle.file(name)
        if bundle.decoder.kv not in KV_TYPES:
            known = ", ".join(KV_TYPES)
            raise BundleError(f"{folder}: keeps {bundle.decoder.kv} keys and this edgevlm knows {known}; upgrade edgevlm")
        if bundle.profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise BundleError(f"{folder}: is of profile {bundle.profile!r} and this edgevlm knows {known}; upgrade edgevlm")
        if verify != "manifest":
            bundle.kv_scales()
        return bundle

    def file(self, name: str) -> Path:
        """The path of a listed file; raises BundleError for a name that is not listed."""
        if name not in self.files:
            raise _bad(self.path / name, "is not listed in bundle.json")
        return self.path / name

    @property
    def inv_freq(self) -> NDArray[np.float32]:
        """Rotary frequencies, float32 ``[head_dim / 2]``, bit for bit those of the checkpoint's own implementation."""
        return np.asarray(self.decoder.inv_freq, np.float32)

    @property
    def limit(self) -> int:
        """Positions a stream may use: ``min(model_limit, trained_length)``."""
        return min(self.decoder.model_limit, self.decoder.trained_length)

    def closing_rows(self) -> NDArray[np.float32]:
        """The rows that close a video before the text after it, float32 ``[n, hidden]``; n is 0 for most families."""
        if self.vision.closing is None:
            return np.zeros((0, self.decoder.hidden), np.float32)
        return np.load(self.file(self.vision.closing), allow_pickle=False)

    def kv_scales(self) -> KVScales | None:
        """What int8 keys and values count; None for other KV precisions. Raises BundleError if they cannot be used."""
        spec = self.decoder
        if spec.kv != "int8":
            return None
        path = self.file(SCALES)
        try:
            return KVScales.load(path, (spec.layers, spec.kv_heads, spec.head_dim))
        except (OSError, ValueError) as error:
            raise _bad(path, str(error)) from None

    def calibration(self) -> Calibration | None:
        """What ``edgevlm calibrate`` measured of this model, None before that. Raises BundleError if it cannot be used."""
        if CALIBRATION not in self.files:
            return None
        path = self.file(CALIBRATION)
        try:
            measured = Calibration.from_json(path.read_bytes())
            if len(measured.cv) != self.decoder.layers:
                raise ValueError(f"is of {len(measured.cv)} layers and the model has {self.decoder.layers}")
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: {error}; measure it again (edgevlm calibrate {self.path})") from None
        return measured

    def choices(self) -> Choices | None:
        """What ``edgevlm calibrate`` found of the policies on this model, None before that. Raises BundleError likewise."""
        if CHOICES not in self.files:
            return None
        path = self.file(CHOICES)
        try:
            return Choices.from_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: {error}; compare again (edgevlm calibrate {self.path})") from None

    def evidence_heads(self) -> EvidenceHeads:
        """Where evidence of an answer is found: as calibrated, else a usual place. Raises BundleError likewise."""
        spec = self.decoder
        if EVIDENCE not in self.files:
            return EvidenceHeads.uncalibrated(spec.layers, spec.heads)
        path = self.file(EVIDENCE)
        try:
            return EvidenceHeads.from_json(path.read_bytes(), spec.layers, spec.heads)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: {error}; measure it again (edgevlm calibrate {self.path})") from None


def listed_files(folder: Path) -> dict[str, FileRecord]:
    """What the manifest in ``folder`` lists: its checksum and the names are checked, none of the files is looked at.

    Raises BundleError.
    """
    manifest = _read_manifest(folder)
    try:
        return _records(folder, manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _bad(folder / MANIFEST, f"does not list its files ({error!r})") from None


def seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of ``bundle.json`` for ``manifest`` (whose ``checksum``, if any, is replaced)."""
    body = {**{k: v for k, v in manifest.items() if k != "checksum"}, "checksum": _BLANK.decode()}
    raw = (json.dumps(body, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()
    head, tail = raw.rsplit(_BLANK, 1)
    return head + hashlib.sha256(raw).hexdigest().encode() + tail


def hash_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as stream:
        while n := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:n])
            size += n
    return FileRecord(size, digest.hexdigest())


def _bad(path: Path, what: str) -> BundleError:
    return BundleError(f"{path}: {what}; export the checkpoint again (edgevlm export CHECKPOINT_DIR --out DIR)")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path, found = folder / MANIFEST, look(folder)
    if found != "folder":
        what = "no such bundle folder" if found == "nothing" else "is a file, not a bundle folder"
        raise BundleError(
            f"{folder}: {what}; give demo, what edgevlm export wrote, a checkpoint, or ORG/NAME of a model on the hub"
        )
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _bad(path, "is missing, so this is not a bundle") from None
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None
    sums = _CHECKSUM.findall(raw)
    if not sums or hashlib.sha256(_BLANK.join(raw.rsplit(sums[-1], 1))).hexdigest().encode() != sums[-1]:
        raise _bad(path, "is damaged (its checksum does not match)")
    try:
        manifest = json.loads(raw)
        version = manifest["format"]
    except (ValueError, KeyError, TypeError):
        raise _bad(path, "does not describe a bundle") from None
    known = ", ".join(map(str, READS))
    if isinstance(version, int) and version > FORMAT:
        raise BundleError(f"{path}: is of bundle format {version} and this edgevlm reads format {known}; upgrade edgevlm")
    if version not in READS:
        raise _bad(path, f"is of bundle format {version!r} and this edgevlm reads format {known}")
    if version < 4 and isinstance(manifest.get("decoder"), dict) and isinstance(manifest["decoder"].get("graphs"), dict):
        manifest["decoder"]["graphs"] = {_graph_name(name): file for name, file in manifest["decoder"]["graphs"].items()}
    return manifest


def _graph_name(name: str) -> str:
    """A decoder graph's name today; bundles of formats 1 to 3 say ``whole``, ``cut0``, ``cut1``, .."""
    return re.sub(r"cut(?=\d+$)", "per-layer", "full" if name == "whole" else name)


def _records(folder: Path, manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    """The files of a manifest by name; raises BundleError for one that may lie elsewhere, ValueError for no record."""
    files = {name: FileRecord(int(record["bytes"]), str(record["sha256"])) for name, record in manifest["files"].items()}
    for name, record in files.items():
        if not _PLAIN_NAME.fullmatch(name):
            raise _bad(folder / MANIFEST, f"names {name!r}, which may lie outside the bundle folder")
        if record.bytes < 0 or not _DIGEST.fullmatch(record.sha256):
            raise ValueError(name)
    return files


def _check_files(folder: Path, files: Mapping[str, FileRecord], verify: Verify, progress: Progress | None) -> None:
    for name, record in files.items():
        if progress is not None:
            progress(f"verifying {name}")
        path = folder / name
        if path.is_symlink():
            raise _bad(folder / MANIFEST, f"names {name!r}, which may lie outside the bundle folder")
        try:
            size = path.stat().st_size
        except OSError:
            raise _bad(path, "is missing") from None
        if not path.is_file():
            raise _bad(path, "is not a file")
        if size != record.bytes:
            raise _bad(path, f"is {'truncated' if size < record.bytes else 'too long'} ({size} bytes, not {record.bytes})")
        if verify == "full":
            try:
                matches = hash_file(path).sha256 == record.sha256
            except OSError as error:
                raise _bad(path, f"cannot be read ({error.strerror})") from None
            if not matches:
                raise _bad(path, "is damaged (its SHA-256 does not match)")


def _qwen_fading(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {"fading": _QWEN_FADING} if str(manifest["family"]).startswith("qwen") else {}


def _vision_spec(values: Mapping[str, Any]) -> VisionSpec:
    kinds: dict[str, type[Any]] = {"changed": ChangedTowerSpec, "pixels": PixelBudget}
    parts = {name: _spec(kind, values[name]) for name, kind in kinds.items() if values.get(name) is not None}
    return _spec(VisionSpec, {**values, **parts})


def _spec(kind: type[T], values: Mapping[str, Any]) -> T:
    """A spec from its JSON object: what has no default is there, lists are tuples, unknown keys are left for later versions."""
    known = [each for each in fields(kind) if each.default is MISSING or each.name in values]  # type: ignore[arg-type]
    return kind(**{each.name: tuple(v) if isinstance(v := values[each.name], list) else v for each in known})
