"""Checkpoints to bundles: one file a model family, one line each in the registry."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import checkpoint_folder

if TYPE_CHECKING:
    from edgevlm.engines.base import KVType
    from edgevlm.runtime.bundle import Progress

# model_type in config.json -> module with ``parts``
FAMILIES: dict[str, str] = {
    "llava": "edgevlm.export.llava",
    "llava_next_video": "edgevlm.export.llava_next_video",
    "llava_onevision": "edgevlm.export.llava_onevision",
    "qwen2_5_vl": "edgevlm.export.qwen2_5_vl",
    "qwen2_vl": "edgevlm.export.qwen2_vl",
    "qwen3_vl": "edgevlm.export.qwen3_vl",
    "smolvlm": "edgevlm.export.smolvlm",
}

__all__ = ["FAMILIES", "export_checkpoint"]


def export_checkpoint(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    st_spattn_from: int | None = None,
    camera: tuple[int, int] = (480, 640),
    kv: KVType = "fp32",
) -> Path:
    """Write the bundle of a Hugging Face checkpoint folder to ``out_dir`` and return its path.

    ``progress(what)`` is told of each step. With ``force`` an existing bundle is replaced, once the new one is whole.
    ``st_spattn_from`` is the first layer that prefills frames sparsely when a policy asks for PureKV's ST-SpAttn; 3, the layer
    above PureKV's CLIE layer, or a smaller model's last layer by default.
    ``camera``: (height, width) of the frames to be watched; families that keep a frame's aspect are made for a grid of that
    shape, to which other frames are stretched.
    ``kv``: what the bundle keeps keys and values as; int8's scales are measured with onnxruntime once the graphs are written.
    Raises UserError, one line, for a checkpoint that is damaged or of an unknown kind and for a disk that is full.
    """
    folder, told = checkpoint_folder(checkpoint_dir), progress or (lambda _: None)
    try:  # torch and transformers take seconds to import, and parts of them come later than the writer
        writer: Any = import_module("edgevlm.export.writer")
        path: Path = writer.write_bundle(folder, Path(out_dir), FAMILIES, told, force, st_spattn_from, camera, kv)
    except MemoryError:
        raise UserError(f"{folder}: does not fit in the free memory while it is exported; end other programs") from None
    except ModuleNotFoundError as error:
        raise UserError(
            f"exporting needs the package {error.name}, which is not installed: pip install 'edgevlm[export]'"
        ) from None
    return path
