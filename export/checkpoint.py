"""A checkpoint folder as ``save_pretrained`` writes it: JSON and safetensors, slices of one tensor at a time.

Nothing is unpickled, no code from the folder runs, nothing is fetched from a network, no path in it leads out of it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from edgevlm.errors import UserError
from edgevlm.export.safetensors import AGAIN, SafeTensor, read_safetensors
from edgevlm.export.settings import check_settings
from edgevlm.runtime.files import look, open_file, refuse_address

# Tensor names differ between transformers versions; these are the names that the exporter asks for.
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
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
FILES = (  # what is read beside the weights
    "config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", _INDEX,
)  # fmt: skip
LARGEST = 1 << 26  # bytes of each
SLICE = 4 << 20  # numbers that are converted at once
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")
_DEFAULTS = Path(__file__).with_name("config_defaults.json")  # tests/export/test_config_defaults.py writes it
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.ckpt.index", "tf_model.h5")


class Unread(Protocol):
    """A tensor in a file, not read yet. ``name``: the file's own word."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``[start, stop)`` as float32. Raises UserError for numbers that are no floating point of 16 bits or more."""
        ...


def checkpoint_folder(path: str | Path) -> Path:
    """``path`` as a folder that is there. Raises UserError, one line."""
    refuse_address(path)
    found = look(path)
    if found != "folder":
        what = "does not exist" if found == "nothing" else "is a file"
        raise UserError(f"{path}: {what}; give the folder that save_pretrained wrote")
    return Path(path)


def snapshot_of(folder: Path) -> tuple[str, str] | None:
    """Repository and commit of a snapshot in the cache of the Hugging Face Hub; None for any other folder."""
    folder = folder.resolve()
    kind, *names = folder.parent.parent.name.split("--")
    return ("/".join(names), folder.name) if folder.parent.name == "snapshots" and kind == "models" and names else None


class Checkpoint:
    """Configuration files and tensors of one folder. Every failure is a UserError naming the file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = checkpoint_folder(folder)
        config = self.json("config.json")
        if config is None:
            raise UserError(f"{self.folder / 'config.json'}: is missing; give the folder that save_pretrained wrote")
        self.config: dict[str, Any] = _with_text_config(config)
        check_settings(self.folder / "config.json", self.config)
        self.tensors: dict[str, Unread] = self._read_headers()  # by canonical name
        self._reads = True

    @property
    def name(self) -> str:
        """The folder's own name, or the repository's: what a bundle remembers of where it came from."""
        snapshot = snapshot_of(self.folder)
        return self.folder.resolve().name if snapshot is None else snapshot[0]

    @property
    def source(self) -> str:
        """Its name, and the commit where it is the hub's."""
        return "@".join(snapshot_of(self.folder) or (self.name,))

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the folder, or None if there is no such file."""
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
        """A text file of the folder, or None if there is no such file."""
        path = self.folder / name
        check_link(self.folder, path)
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
        """A sub-configuration of ``config.json`` (``text_config``, ``vision_config``)."""
        section = self.config.get(name)
        if not isinstance(section, dict):
            raise UserError(f"{self.folder / 'config.json'}: has no {name}; {AGAIN}")
        return section

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The tensor of canonical ``name`` as float32, checked to have ``shape`` and to be finite."""
        self.check(name, shape)
        full, filled = np.zeros(shape, np.float32), 0
        if self._reads:
            for rows in self.rows(name, shape):
                full[filled : filled + len(rows)] = rows
                filled += len(rows)
        return full

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
        """The same tensor as slices of whole rows of about SLICE numbers, for what must not be held at once."""
        stored = self.check(name, shape)
        step = max(1, SLICE // max(1, int(np.prod(shape[1:]))))
        for start in range(0, shape[0], step):
            try:
                rows = stored.rows(start, min(start + step, shape[0]))
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"{stored.path}: tensor {stored.name!r} cannot be read ({error}); {AGAIN}") from None
            if not np.isfinite(rows).all():
                what = "holds NaN or infinity, so the model cannot answer"
                raise UserError(f"{stored.path}: tensor {stored.name!r} {what}; {AGAIN}")
            yield rows

    def integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """The tensor of canonical ``name``, which is int32, checked to have ``shape``."""
        stored = self.check(name, shape)
        if not isinstance(stored, SafeTensor):
            raise UserError(f"{stored.path}: tensor {stored.name!r} is not int32; {AGAIN}")
        return stored.integers()

    def check(self, name: str, shape: tuple[int, ...]) -> Unread:
        """The tensor of canonical ``name``, unread. Raises UserError if it is missing or not of ``shape``."""
        if name not in self.tensors:
            raise UserError(f"{self.folder}: the checkpoint has no tensor {name!r}; {AGAIN}")
        tensor = self.tensors[name]
        if tensor.shape != shape:
            means = f"has shape {tensor.shape} where config.json means {shape}"
            raise UserError(f"{tensor.path}: tensor {tensor.name!r} {means}; {AGAIN}")
        return tensor

    def take_text(self, tensors: dict[str, Unread]) -> None:
        """From now on the text half's tensors are these, by canonical name, and no others."""
        self.tensors = {name: each for name, each in self.tensors.items() if not name.startswith("text.")} | tensors

    def without_reading(self) -> Checkpoint:
        """The same checkpoint with all tensors zero, for steps of an export whose weights are written already."""
        other = copy.copy(self)
        other._reads = False
        return other

    def weight_files(self) -> list[str]:
        """The names of the safetensors files, there or not. Raises UserError for a damaged index."""
        index = self.json(_INDEX)
        if index is None:
            return [_SINGLE]
        stored = index.get("weight_map")
        if not isinstance(stored, dict) or not all(isinstance(file, str) for file in stored.values()):
            raise UserError(f"{self.folder / _INDEX}: has no weight_map of file names; {AGAIN}")
        return sorted(set(stored.values()))

    def _read_headers(self) -> dict[str, Unread]:
        """Canonical name -> tensor; reads the header of each file, so that a damaged one is found at the start."""
        files, index = self.weight_files(), self.json(_INDEX)
        if index is None and look(self.folder / _SINGLE) != "file":
            raise self._no_weights()
        held = {file: read_safetensors(inside(self.folder, file, _SINGLE if index is None else _INDEX)) for file in files}
        stored = dict.fromkeys(held[_SINGLE], _SINGLE) if index is None else index["weight_map"]
        for name, file in stored.items():
            if name not in held[file]:
                raise UserError(f"{self.folder / file}: has no tensor {name!r}, which {_INDEX} says it holds; {AGAIN}")
        return {_canonical(name): held[file][name] for name, file in stored.items()}

    def _no_weights(self) -> UserError:
        pickled = next((name for name in _PICKLES if (self.folder / name).exists()), None)
        if pickled is None:
            return UserError(f"{self.folder / _SINGLE}: is missing; only safetensors are read (save_pretrained writes them)")
        return UserError(
            f"{self.folder / pickled}: pickled weights can run code and are not read; convert them where they can be trusted "
            "(transformers: from_pretrained, then save_pretrained) and export that folder"
        )


class ConfigOnly(Checkpoint):
    """A checkpoint's JSON files. Its weights may be anywhere, or nowhere."""

    def _read_headers(self) -> dict[str, Unread]:
        return {}


def _with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Early Qwen2-VL and Qwen2.5-VL checkpoints keep the decoder's settings beside ``vision_config``, not in a section."""
    if "text_config" in config or "num_hidden_layers" not in config:
        return config
    return config | {"text_config": config | {"model_type": f"{config.get('model_type')}_text"}}


def _canonical(name: str) -> str:
    for pattern, replacement in _CANONICAL:
        renamed, count = pattern.subn(replacement, name)
        if count:
            return renamed
    return name


def with_defaults(section: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """A section of ``config.json`` with transformers' defaults for what its ``model_type`` has and it does not name.

    kind: the type to go by, where early checkpoints call a section by the whole model's name. Of rotary settings, which have
    had several names, all or none are the default's.
    """
    defaults = dict(_defaults().get(kind or str(section.get("model_type")), {}))
    if any(section.get(key) is not None for key in _ROTARY) and "rope_parameters" in defaults:
        defaults["rope_theta"] = defaults.pop("rope_parameters")["rope_theta"]
    return defaults | section


def processor_defaults(model_type: str) -> dict[str, Any]:
    """What transformers takes where a model type's processor file leaves out mean, standard deviation or resampling."""
    return _defaults().get(f"{model_type}/processor", {})


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Model type -> what transformers takes where ``config.json`` leaves it out."""
    table: dict[str, dict[str, Any]] = json.loads(_DEFAULTS.read_text())
    return table


def inside(folder: Path, name: str, named_in: str) -> Path:
    """The file ``name`` of a checkpoint folder. Raises UserError if it is missing or lies elsewhere.

    The Hugging Face Hub's cache keeps a snapshot as links into ``blobs`` two folders up, which is followed.
    """
    path = folder / name
    if Path(name).name != name or name in ("", ".", ".."):
        raise UserError(f"{folder / named_in}: names {name!r}, which lies outside the checkpoint's folder; {AGAIN}")
    if look(path) != "file":
        raise UserError(f"{path}: is named in {named_in} but is missing; {AGAIN}")
    check_link(folder, path)
    return path


def check_link(folder: Path, path: Path) -> None:
    """Raise UserError if ``path``, in ``folder``, is a link that leads out of it."""
    if not path.is_symlink() or look(path) == "nothing":
        return
    home, target = folder.resolve(), path.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if home not in target.parents and blobs not in target.parents:
        raise UserError(f"{path}: is a link out of the checkpoint's folder, to {target}; put the file in its place")
