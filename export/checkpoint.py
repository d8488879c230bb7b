"""Read a checkpoint folder written by ``save_pretrained``: its JSON files, and its safetensors in slices.

Nothing is unpickled, no code from the folder runs, nothing is downloaded, and no file outside the folder is read.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from edgevlm.errors import UserError
from edgevlm.export.foreign import ADAPTER, INDEX, MERGE, MODELOPT, refuse_config, refuse_files, refuse_quantised
from edgevlm.export.settings import check_settings
from edgevlm.runtime.files import check_utf8, look, open_file, refuse_address, refuse_unmapped

# Tensor names differ between transformers versions: each pattern is replaced by the canonical prefix that the exporter uses.
_CANONICAL = (
    (re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?"), "vision."),
    (re.compile(r"^(model\.)?(visual|vision_model)\."), "vision."),
    (re.compile(r"^(model\.)?multi_modal_projector\."), "projector."),
    (re.compile(r"^(model\.)?connector\."), "connector."),
    (re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?"), "text."),
    (re.compile(r"^model\.(embed_tokens|layers|norm)\."), r"text.\1."),
    (re.compile(r"^lm_head\."), "text.lm_head."),
    (re.compile(r"^model\.image_newline$"), "image_newline"),
)
_ADAPTED = re.compile(r"^base_model\.|\.(base_layer|lora_[AB])\.")  # tensors that peft writes for an unmerged adapter
SINGLE = "model.safetensors"
FILES = (  # files that are read in addition to the weights
    "config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", ADAPTER, INDEX, MODELOPT,
)  # fmt: skip
AGAIN = "download or save the checkpoint again"
MATCH = "check that config.json and the weights belong to the same model"
FLOATS = ("F16", "BF16", "F32", "F64")
LARGEST = 1 << 26  # the maximum size of each of FILES, in bytes
SLICE = 4 << 20
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")
_DEFAULTS = Path(__file__).with_name("config_defaults.json")  # written by tests/export/test_config_defaults.py


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor whose rows are read from a file only when they are needed. ``dtype``: the name that safetensors uses for the
    type.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[slice], NDArray[Any]]

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read the rows from ``start`` to ``stop - 1``, in the stored type. Raises UserError if the file cannot be read."""
        try:
            return self.read(slice(start, stop))
        except Exception as error:  # safetensors and gguf raise exceptions of several types
            raise UserError(f"{self.path}: tensor {self.name!r} cannot be read ({error}); {AGAIN}") from None


def read_safetensors(path: Path) -> dict[str, Unread]:
    """Return a file's tensors by name, without reading them. Raises UserError if the file is damaged."""
    import ml_dtypes  # noqa: F401  adds bfloat16 to numpy
    from safetensors import safe_open

    try:
        with path.open("rb"):  # unlike safetensors, ``open`` names the cause of an error
            file = safe_open(path, "np")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is not a dict
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        found = {name: Unread(path, name, part.get_dtype(), shapes[name], part.__getitem__) for name, part in slices.items()}
        by = (file.metadata() or {}).get("format")
    except Exception as error:
        refuse_unmapped(path, error)
        raise UserError(f"{path}: is damaged or truncated ({str(error)[:200]}); {AGAIN}") from None
    if by == "mlx":  # mlx orders the axes of convolutions differently
        raise UserError(f"{path}: MLX weights are not supported; use the original checkpoint")
    return found


def checkpoint_folder(path: str | Path) -> Path:
    """Return ``path`` as a Path. Raises a one-line UserError if ``path`` is not an existing folder."""
    refuse_address(path)
    check_utf8(path)
    found = look(path)
    if found != "folder":
        refuse_files(Path(path))
        what = "does not exist" if found == "nothing" else "is a file"
        raise UserError(f"{path}: {what}; give the folder that save_pretrained wrote")
    return Path(path)


def snapshot_of(folder: Path) -> tuple[str, str] | None:
    """Return the repository and the commit of a snapshot in the Hugging Face Hub's cache, or None for any other folder."""
    folder = folder.resolve()
    kind, *names = folder.parent.parent.name.split("--")
    return ("/".join(names), folder.name) if folder.parent.name == "snapshots" and kind == "models" and names else None


class Checkpoint:
    """The configuration files and tensors of a checkpoint folder. Every failure raises a UserError that names the file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = checkpoint_folder(folder)
        self.notes: list[str] = []  # lines for the user about files and settings that are not used
        where, config = self.folder / "config.json", self.json("config.json")
        if config is None:
            refuse_files(self.folder)
            raise UserError(f"{where}: is missing; give the folder that save_pretrained wrote")
        refuse_config(where, config)
        refuse_quantised(self.folder / MODELOPT, self.json(MODELOPT) or {})
        self.config: dict[str, Any] = with_sections(config)
        check_settings(where, self.config)
        self.tensors: dict[str, Unread] = self._read_headers()  # by canonical name
        self._reads = True

    @property
    def name(self) -> str:
        """Return the Hugging Face repository's name if the folder is a snapshot, otherwise the folder's name."""
        snapshot = snapshot_of(self.folder)
        return self.folder.resolve().name if snapshot is None else snapshot[0]

    @property
    def source(self) -> str:
        """Return :attr:`name`, followed by ``@`` and the commit if the folder is a snapshot from the Hugging Face Hub."""
        return "@".join(snapshot_of(self.folder) or (self.name,))

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file of the folder, or None if the file does not exist."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = from_json(text)
        except ValueError as error:
            raise UserError(f"{self.folder / name}: is not valid JSON ({error}); {AGAIN}") from None
        if not isinstance(value, dict):
            raise UserError(f"{self.folder / name}: is not a JSON object; {AGAIN}")
        return value

    def text(self, name: str) -> str | None:
        """Return the content of a text file in the folder, or None if the file does not exist."""
        path = inside(self.folder, name)
        try:
            with open_file(path) as stream:
                raw = stream.read(LARGEST + 1)
            if len(raw) > LARGEST:
                raise ValueError(f"it is larger than {LARGEST >> 20} MB")
            return raw.decode()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {AGAIN}") from None

    def section(self, name: str) -> dict[str, Any]:
        """Return a sub-configuration of ``config.json`` (``text_config``, ``vision_config``)."""
        section = self.config.get(name)
        if not isinstance(section, dict):
            raise UserError(f"{self.folder / 'config.json'}: {name} is missing; use the config.json published with the model")
        return section

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return a tensor as float32. Raises UserError unless the tensor has this shape and all its numbers are finite."""
        self.check(name, shape)
        full, filled = np.zeros(shape, np.float32), 0
        if self._reads:
            for rows in self.rows(name, shape):
                full[filled : filled + len(rows)] = rows
                filled += len(rows)
        return full

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor as float32, in slices of whole rows with about SLICE numbers."""
        stored = self.check(name, shape)
        step = max(1, SLICE // max(1, int(np.prod(shape[1:]))))
        for start in range(0, shape[0], step):
            rows = np.asarray(stored.rows(start, min(start + step, shape[0])), np.float32)
            if not np.isfinite(rows).all():
                what = "contains NaN or infinity, so the model cannot answer"
                raise UserError(f"{stored.path}: tensor {stored.name!r} {what}; {AGAIN}")
            yield rows

    def integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Return an int32 tensor. Raises UserError if the tensor has a different type or shape."""
        return self.check(name, shape, ("I32",)).rows(0, shape[0])

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Unread:
        """Return the tensor without reading it. Raises UserError if the tensor is missing or has the wrong shape or type."""
        if name not in self.tensors:
            if (packed := self.tensors.get(f"{name.removesuffix('weight')}qweight")) is not None:
                what = "is quantised; only decoder layers with quantization_config in config.json are supported"
                raise UserError(f"{packed.path}: tensor {packed.name!r} {what}; use the unquantised checkpoint")
            what = f"tensor {self._own_name(name)!r} is missing, but config.json requires it"
            part = next((tensor.name for tensor in self.tensors.values() if _ADAPTED.search(tensor.name)), "")
            raise UserError(f"{self.folder}: {what}; {f'{part!r} is part of an adapter: {MERGE}' if part else MATCH}")
        tensor = self.tensors[name]
        if tensor.dtype not in dtypes:
            what = f"is {tensor.dtype}, not {' or '.join(dtypes)}"
            raise UserError(f"{tensor.path}: tensor {tensor.name!r} {what}; use the unquantised checkpoint")
        if tensor.shape != shape:
            means = f"has shape {tensor.shape}, but config.json specifies {shape}"
            raise UserError(f"{tensor.path}: tensor {tensor.name!r} {means}; {MATCH}")
        return tensor

    def without_reading(self) -> Checkpoint:
        """Return a copy of the checkpoint whose tensors are all zeros, for exports that have already written the weights."""
        other = copy.copy(self)
        other._reads = False
        return other

    def is_tied(self, text: Mapping[str, Any]) -> bool:
        """Return whether the head and the embedding use the same matrix.

        The configuration decides, unless the files contain two different matrices. If the files hold only the head's matrix,
        the embedding uses that matrix too, as in transformers.
        """
        embedding, head = (self.tensors.get(f"text.{name}.weight") for name in ("embed_tokens", "lm_head"))
        if not (self.config.get("tie_word_embeddings") or text.get("tie_word_embeddings")):
            return False
        if head is not None and embedding is None:
            self.tensors["text.embed_tokens.weight"] = head
        if head is None or embedding is None:
            return True
        names = "text.embed_tokens.weight", "text.lm_head.weight"
        if embedding.shape == head.shape != ():
            pairs = zip(*(self.rows(name, head.shape) for name in names), strict=True)
            if all(np.array_equal(*pair) for pair in pairs):
                return True
        what = f"tie_word_embeddings is true, but {head.name} differs from {embedding.name}"
        self.notes.append(f"{self.folder / 'config.json'}: {what}; both are used, as in transformers")
        return False

    def weight_files(self) -> list[str]:
        """Return the names of the safetensors files. If the file SINGLE exists, the index is ignored."""
        whole = look(inside(self.folder, SINGLE)) == "file"
        return [SINGLE] if whole else sorted(set(self._weight_map().values())) or [SINGLE]

    def _weight_map(self) -> dict[str, str]:
        index = self.json(INDEX)
        stored = {} if index is None else index.get("weight_map")
        if not isinstance(stored, dict) or not all(isinstance(file, str) for file in stored.values()):
            raise UserError(f"{self.folder / INDEX}: weight_map is missing or does not list file names; {AGAIN}")
        return stored

    def _read_headers(self) -> dict[str, Unread]:
        held, files = dict[str, dict[str, Unread]](), self.weight_files()
        for file in files:
            if look(inside(self.folder, file)) != "file":
                if (self.folder / INDEX).exists():
                    raise UserError(f"{self.folder / file}: is missing, but {INDEX} lists it; download it too")
                refuse_files(self.folder)
                raise UserError(
                    f"{self.folder / file}: is missing; only safetensors are supported (save_pretrained writes them)"
                )
            held[file] = read_safetensors(self.folder / file)
        stored = dict.fromkeys(held[SINGLE], SINGLE) if files == [SINGLE] else self._weight_map()
        for name, file in stored.items():
            if name not in held[file]:
                raise UserError(f"{self.folder / file}: tensor {name!r} is missing, but {INDEX} lists it; {AGAIN}")
        if files == [SINGLE] and (self.folder / INDEX).exists():
            self.notes.append(f"{self.folder / INDEX}: is not used; {SINGLE} takes precedence, as in transformers")
        if (self.folder / ADAPTER).exists():
            self.notes.append(
                f"{self.folder / ADAPTER}: is not used: the weights beside it are exported; for its model, {MERGE}"
            )
        found = dict[str, Unread]()
        for name, file in stored.items():
            if (first := found.setdefault(_canonical(name), held[file][name])).name != name:
                what = f"{first.name!r} and {name!r} are the same tensor, saved twice"
                raise UserError(f"{self.folder / file}: {what}; save the checkpoint again into an empty folder")
        return found

    def _own_name(self, name: str) -> str:
        """Return the name that the checkpoint's files use for a tensor."""
        part, _, rest = name.partition(".")
        if rest.startswith("lm_head."):
            return rest
        for canonical, tensor in self.tensors.items():
            place, _, tail = canonical.partition(".")
            if place == part and not tail.startswith("lm_head.") and tensor.name.endswith(tail):
                return tensor.name.removesuffix(tail) + rest
        return rest or name


class ConfigOnly(Checkpoint):
    """A checkpoint whose weights may be missing: only its JSON files are read."""

    def _read_headers(self) -> dict[str, Unread]:
        return {}


class DeclaredOnly(Checkpoint):
    """A checkpoint made from a ``config.json`` alone: every tensor has the requested shape and is all zeros."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.folder, self.notes = dict(config), Path(), []

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
        yield self.tensor(name, shape)

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Any:
        return None


def _canonical(name: str) -> str:
    for pattern, replacement in _CANONICAL:
        renamed, count = pattern.subn(replacement, name)
        if count:
            return renamed
    return name


def with_defaults(section: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """Return a section of ``config.json``, with missing settings filled in from transformers' defaults.

    ``kind`` replaces the section's ``model_type``, because early checkpoints give the type of the whole model there. If the
    section has its own rotary settings, only a missing ``rope_theta`` is added.
    """
    defaults = dict(_defaults().get(kind or str(section.get("model_type")), {}))
    if any(section.get(key) is not None for key in _ROTARY) and "rope_parameters" in defaults:
        defaults["rope_theta"] = defaults.pop("rope_parameters")["rope_theta"]
    return defaults | section


def with_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` with transformers' defaults for missing or null sections and for the sections' ``model_type``."""
    kind = str(config.get("model_type"))
    sections = _defaults().get(f"{kind}/sections", {})
    is_flat = config.get("text_config") is None and "num_hidden_layers" in config  # as in early Qwen2-VL and text-only models
    if is_flat and (kind.startswith("qwen2") or not sections):
        config = config | {"text_config": config | {"model_type": f"{kind}_text"}}
    for name, default in sections.items():
        given = config.get(name)
        if given is None:
            config = config | {name: default}
        elif isinstance(given, dict) and (given.get("model_type") is None or kind.startswith("qwen")):
            config = config | {name: given | {"model_type": default["model_type"]}}
    return config


def processor_defaults(model_type: str) -> dict[str, Any]:
    """Return transformers' default processor settings for a model type or for a class of image processors."""
    return _defaults().get(f"{model_type}/processor", {})


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(_DEFAULTS.read_text())
    return table


def inside(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint's file. Raises UserError if the path, or a link at that path, points outside the folder.

    Links into ``../../blobs`` are allowed: a snapshot in the Hugging Face Hub's cache consists of such links.
    """
    path, home = folder / name, folder.resolve()
    if Path(name).name != name or name in ("", ".", ".."):
        raise UserError(f"{folder}: {name!r} is outside the checkpoint folder; {AGAIN}")
    homes = {home, home.parents[1] / "blobs"} if home.parent.name == "snapshots" else {home}
    if path.is_symlink() and look(path) != "nothing" and homes.isdisjoint(path.resolve().parents):
        raise UserError(f"{path}: links to {path.resolve()}, outside the checkpoint folder; replace the link with the file")
    return path
