"""Read from a checkpoint's processor files how frames are resized and normalised."""

from __future__ import annotations

from typing import Any

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, processor_defaults
from edgevlm.export.settings import check_settings
from edgevlm.runtime.bundle import PixelBudget
from edgevlm.runtime.preprocess import SUPPORT

_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # indexed by PIL's numbers for filters
_JOINT = "processor_config.json"
MOST_TOKENS = 768  # the most tokens per frame, as in the Qwen authors' code
_FILES = {"video_processor": "video_preprocessor_config.json", "image_processor": "preprocessor_config.json"}


def frame_preparation(
    checkpoint: Checkpoint, processors: tuple[str, ...], size: tuple[int, int], *, is_sized: bool = False
) -> dict[str, Any]:
    """Return how to prepare frames, as the bundle's ``vision`` fields.

    Raises UserError if no processor exists, or if a bundle cannot express its settings. ``processors``: processor names, of
    which the first that exists is used. ``size``: the tower's (height, width) in pixels. ``is_sized``: whether the processor's
    pixel budget determines the size, to which frames are stretched.
    """
    file, config = processor(checkpoint, processors)
    wanted = {"do_resize": True, "do_rescale": True, "do_normalize": True, "use_square_size": False}
    if processors == ("image_processor",):
        wanted["do_pad"] = False  # padding to a square is not supported
    for key, expected in wanted.items():
        if bool(config.get(key, expected)) is not expected:
            what = f"{key} = {config[key]} is not supported, only {str(expected).lower()}"
            raise UserError(f"{file}: {what}; use a model trained that way")
    if not (config.get("image_mean") and config.get("image_std") and config.get("rescale_factor", 1)):
        raise UserError(f"{file}: image_mean, image_std or rescale_factor is missing; save the processor again")
    number = config.get("resample", 3)
    resample = "none" if number is None else _RESAMPLE[number]
    if resample not in SUPPORT:
        usable = ", ".join(f"{_RESAMPLE.index(name)} ({name})" for name in SUPPORT)
        raise UserError(f"{file}: resample {number} ({resample}) is not supported; set it to one of {usable}")
    return {
        "size": list(size),
        **({"fit": "stretch", "shortest_edge": None} if is_sized else _fit(file, config, size)),
        "resample": resample,
        "rescale": float(config.get("rescale_factor", 1 / 255)),
        "mean": _channels(config["image_mean"]),
        "std": _channels(config["image_std"]),
    }


def processor(checkpoint: Checkpoint, processors: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Return the file and the settings of the first processor that exists. Missing settings get transformers' defaults.

    A processor is looked up in ``processor_config.json`` first, then in the processor's own file.
    """
    joint = checkpoint.json(_JOINT)
    for name in processors:
        file, own = f"{checkpoint.folder / _JOINT} ({name})", (joint or {}).get(name)
        if not isinstance(own, dict):
            file, own = str(checkpoint.folder / _FILES[name]), checkpoint.json(_FILES[name])
        if own is not None:
            check_settings(file, own)
            return file, _defaults_of(checkpoint, processors, file, own) | own
    missing = "is missing" if joint is None else f"has no {processors[0]}, and {_FILES[processors[-1]]} is missing"
    raise UserError(f"{checkpoint.folder / _JOINT}: {missing}; save the processor with the model (processor.save_pretrained)")


def _defaults_of(checkpoint: Checkpoint, processors: tuple[str, ...], file: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of the image processor that the file names, or else of the checkpoint's model type."""
    named = own.get("image_processor_type") or own.get("feature_extractor_type")
    if processors != ("image_processor",) or named is None:
        return processor_defaults(str(checkpoint.config.get("model_type")))
    kind = str(named).replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if not (found := processor_defaults(kind)):
        raise UserError(f"{file}: image_processor_type {named!r} is not supported, only CLIP's, SigLIP's and LLaVA's")
    return found


def _channels(numbers: list[float] | float) -> list[float]:
    return [float(number) for number in (numbers if isinstance(numbers, list) else [numbers] * 3)]


def sides(config: dict[str, Any], key: str = "size") -> dict[str, int | None]:
    """Return a size setting as a dict.

    A single number sets both sides if ``key`` is ``crop_size``, otherwise the shortest edge.
    """
    size = config.get(key) or {}
    if isinstance(size, list):
        return {"height": size[0], "width": size[1]}
    if isinstance(size, dict):
        return dict(size)
    return {"height": size, "width": size} if key == "crop_size" else {"shortest_edge": size}


def _fit(file: str, config: dict[str, Any], wanted: tuple[int, int]) -> dict[str, Any]:
    size, crop = sides(config), sides(config, "crop_size") if config.get("do_center_crop") else {}
    final, edge = crop or size, size.get("shortest_edge")
    if (final.get("height"), final.get("width")) != wanted:
        raise UserError(f"{file}: frames are resized to {final}, but the vision tower expects {wanted[0]} x {wanted[1]} pixels")
    if crop and edge is not None:
        if edge < max(wanted):
            raise UserError(f"{file}: shortest_edge {edge} is smaller than the crop of {wanted[0]} x {wanted[1]} pixels")
        return {"fit": "crop", "shortest_edge": edge}
    if crop and (size.get("height"), size.get("width")) != wanted:
        raise UserError(f"{file}: resizing to {size} before a crop of {final} is not supported; set shortest_edge")
    return {"fit": "stretch", "shortest_edge": None}


def pixel_budget(
    checkpoint: Checkpoint,
    processors: tuple[str, ...],
    factor: int,
    budget: tuple[int, int],
    clip: int,
    needs_file: bool = True,
) -> PixelBudget:
    """Return the frame sizes that a Qwen-like processor allows: multiples of ``factor`` pixels within a pixel budget.

    A stream has no fixed length, so its frames get the pixel budget of the shortest clip, limited to MOST_TOKENS tokens per
    frame. As in transformers, min_pixels and max_pixels take precedence over ``size`` if ``clip`` is 1, and are ignored
    otherwise. Raises UserError if the budget is invalid, or if ``needs_file`` and the processor file is missing. ``budget``:
    the default (minimum, maximum) number of pixels. ``clip``: how many frames share one budget.
    """
    if not needs_file and not any((checkpoint.folder / name).exists() for name in (_JOINT, *_FILES.values())):
        return PixelBudget(factor, budget[0], budget[1] * clip, clip)
    file, config = processor(checkpoint, processors)
    size = sides(config)
    older = config if clip == 1 else {}
    fewest, most = older.get("min_pixels") or size.get("shortest_edge"), older.get("max_pixels") or size.get("longest_edge")
    if size and None in (fewest, most):
        raise UserError(f"{file}: size {size} is not a pixel budget; set shortest_edge and longest_edge")
    fewest, most = int(fewest or budget[0]), int(most or budget[1])
    if clip > 1:
        most = max(min(MOST_TOKENS * factor**2, most // clip), int(fewest * 1.05)) * clip
    if not 0 < fewest <= most:
        raise UserError(f"{file}: pixel budget {fewest} to {most} is empty; increase the maximum")
    return PixelBudget(factor, fewest, most, clip)
