"""Checkpoints to bundles."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import checkpoint_folder
from edgevlm.packages import needs
from edgevlm.progress import Notify
from edgevlm.runtime.graph_profiles import ONNXRUNTIME

if TYPE_CHECKING:
    from edgevlm.export.samples import ActivationSampler, Samples
    from edgevlm.runtime.kv import KVType

__all__ = ["export_checkpoint"]


def export_checkpoint(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    *,
    progress: Notify | None = None,
    notify: Notify | None = None,
    force: bool = False,
    st_spattn_from: int | None = None,
    camera: tuple[int, int] = (480, 640),
    text_gguf: str | Path | None = None,
    precision: str | None = None,
    samples: Samples | ActivationSampler | None = None,
    vision_precision: str | None = None,
    kv: KVType = "fp32",
    profile: str = ONNXRUNTIME,
    positions: str = "trained",
) -> Path:
    """Write the bundle of a Hugging Face checkpoint folder to ``out_dir`` and return its path.

    ``progress(what)`` hears of each step, ``notify(line)`` that an export which was stopped or killed continues. With
    ``force`` an existing bundle is replaced, once the new one is whole. ``text_gguf``: a GGUF file that the text half's
    weights are taken from.
    ``st_spattn_from`` is the first layer that prefills frames sparsely when a policy asks for PureKV's ST-SpAttn; 3, the layer
    above PureKV's CLIE layer, or a smaller model's last layer by default.
    ``camera``: (height, width) of the frames to be watched; families that keep a frame's aspect are made for a grid of that
    shape, to which other frames are stretched.
    ``precision``: of the decoder's weights, a name of :mod:`edgevlm.export.precisions`; fp32 unless
    given, int4-zp for AWQ and GPTQ checkpoints, which are stored as they are rounded already. With ``samples``, which
    :func:`edgevlm.calib.activations.sample_activations` takes from the fp32 bundle, they are rounded by GPTQ for those; a
    function makes them in a folder, which is kept with the rest where an export is stopped.
    ``vision_precision``: of the vision tower's linears, fp32 or int8; for TensorRT fp32 or fp16, and fp16 there unless
    ``precision`` is fp32.
    ``kv``: what the bundle keeps keys and values as; int8's scales are measured with onnxruntime once the graphs are written.
    ``profile``: what the graphs are for, one of :data:`edgevlm.runtime.graph_profiles.PROFILES`.
    ``positions``: where prompts behind a video of Qwen2-VL or Qwen2.5-VL go on, ``trained`` or as ``transformers`` does now.
    Raises UserError, one line, for a checkpoint that is damaged or of an unknown kind and for a disk that is full.
    """
    folder, told, noted = checkpoint_folder(checkpoint_dir), progress or _unheard, notify or _unheard
    gguf = None if text_gguf is None else Path(text_gguf)
    try:
        # torch and transformers take seconds to import, and parts of them come later than the writer
        with needs("exporting"):
            writer: Any = import_module("edgevlm.export.writer")
            options = writer.Options(st_spattn_from, camera, gguf, precision, samples, vision_precision, kv, profile, positions)
            path: Path = writer.write_bundle(folder, Path(out_dir), options, told, noted, force=force)
    except MemoryError:
        raise UserError(f"{folder}: does not fit in the free memory while it is exported; end other programs") from None
    return path


def _unheard(_: str) -> None:
    pass
