"""A checkpoint folder as ``save_pretrained`` writes it: JSON and safetensors, read directly, one tensor at a time.

Nothing is unpickled, no code from the folder runs, nothing is fetched from a network.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.paths import look

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
_AGAIN = "download or save the checkpoint again"


def nearest(word: str, known: Iterable[str]) -> str:
    """``the nearest known is 'x'`` or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.4)
    return f"the nearest known is {close[0]!r}" if close else f"known are {', '.join(map(repr, names))}"


def checkpoint_folder(path: str | Path) -> Path:
    """``path`` as a folder that is there. Raises UserError, one line."""
    found = look(path)
    if found != "folder":
        what = "does not exist" if found == "nothing" else "is a file"
        raise UserError(f"{path}: {what}; give the folder that save_pretrained wrote")
    return Path(path)


class Checkpoint:
    """Configuration files and tensors of one folder. Every failure is a UserError naming the file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = checkpoint_folder(folder)
        config = self.json("config.json")
        if config is None:
            raise UserError(f"{self.folder / 'config.json'}: is missing; give the folder that save_pretrained wrote")
        self.config: dict[str, Any] = _with_text_config(config)
        self.names = self._index()  # canonical name -> (file, name in the file)
        self._open: tuple[Path, Any] | None = None

    @property
    def name(self) -> str:
        """The folder's own name: what a bundle remembers of where it came from."""
        return self.folder.resolve().name

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the folder, or None if there is no such file."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(f"{self.folder / name}: is not valid JSON ({error}); {_AGAIN}") from None
        if not isinstance(value, dict):
            raise UserError(f"{self.folder / name}: is not a JSON object; {_AGAIN}")
        return value

    def text(self, name: str) -> str | None:
        """A text file of the folder, or None if there is no such file."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.folder / name}: cannot be read ({error}); {_AGAIN}") from None

    def section(self, name: str) -> dict[str, Any]:
        """A sub-configuration of ``config.json`` (``text_config``, ``vision_config``)."""
        section = self.config.get(name)
        if not isinstance(section, dict):
            raise UserError(f"{self.folder / 'config.json'}: has no {name}; {_AGAIN}")
        return section

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The tensor of canonical ``name`` as float32, checked to have ``shape``."""
        path, stored, tensor = self._read(name, shape)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{path}: tensor {stored!r} is {kind}; give the checkpoint before quantisation, in float32 or 16 bits"
            )
        array: NDArray[np.float32] = tensor.float().numpy()
        if not np.isfinite(array).all():
            raise UserError(f"{path}: tensor {stored!r} holds NaN or infinity, so the model cannot answer; {_AGAIN}")
        return array

    def integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """The tensor of canonical ``name``, which is int32, checked to have ``shape``."""
        path, stored, tensor = self._read(name, shape)
        array: NDArray[np.int32] = tensor.numpy()
        if array.dtype != np.int32:
            raise UserError(f"{path}: tensor {stored!r} is {array.dtype}, not int32; {_AGAIN}")
        return array

    def _read(self, name: str, shape: tuple[int, ...]) -> tuple[Path, str, Any]:
        """The tensor of canonical ``name`` as it is stored, checked to have ``shape``, with its file and its name there."""
        if name not in self.names:
            raise UserError(f"{self.folder}: the checkpoint has no tensor {name!r}; {_AGAIN}")
        path, stored = self.names[name]
        try:
            tensor = self._reader(path).get_tensor(stored)
        except Exception as error:
            raise UserError(f"{path}: tensor {stored!r} cannot be read ({error}); {_AGAIN}") from None
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise UserError(f"{path}: tensor {stored!r} has shape {found} where config.json means {shape}; {_AGAIN}")
        return path, stored, tensor

    def _index(self) -> dict[str, tuple[Path, str]]:
        index = self.json(_INDEX)
        if index is not None:
            stored = index.get("weight_map")
            if not isinstance(stored, dict):
                raise UserError(f"{self.folder / _INDEX}: has no weight_map; {_AGAIN}")
        elif (self.folder / _SINGLE).exists():
            stored = dict.fromkeys(self._reader(self.folder / _SINGLE, keep=False).keys(), _SINGLE)
        else:
            raise UserError(f"{self.folder / _SINGLE}: is missing; only safetensors are read (save_pretrained writes them)")
        files = {}
        for file in set(stored.values()):
            path = self.folder / str(file)
            if path.parent != self.folder or look(path) != "file":
                raise UserError(f"{path}: is named in {_INDEX} but is missing; {_AGAIN}")
            self._reader(path, keep=False)
            files[file] = path
        return {_canonical(name): (files[file], name) for name, file in stored.items()}

    def _reader(self, path: Path, keep: bool = True) -> Any:
        """An open safetensors file; the last one stays open, since shards are read in order."""
        from safetensors import SafetensorError, safe_open

        if keep and self._open is not None and self._open[0] == path:
            return self._open[1]
        try:
            reader = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: is damaged or truncated ({error}); {_AGAIN}") from None
        if keep:
            self._open = (path, reader)
        return reader


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
