"""Refuse folders and configurations that look like a checkpoint but cannot be exported, and say what to do instead."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from edgevlm.errors import UserError
from edgevlm.runtime.files import look, open_file

ADAPTER, INDEX, MODELOPT = "adapter_config.json", "model.safetensors.index.json", "hf_quant_config.json"
MERGE = "merge it into the base model (peft: merge_and_unload, then save_pretrained) and use the resulting folder"
_BEFORE = "use the original checkpoint"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES = re.compile(r"pytorch_model.*\.(bin|index\.json)|consolidated.*\.pth|model\.ckpt\.index|tf_model\.h5")
METHODS = ("awq", "gptq", "gguf")  # transformers leaves "gguf" in the config of a dequantised checkpoint


def refuse_files(path: Path, names: Collection[str] | None = None, where: object = None) -> None:
    """Raise UserError for a GGUF file, or for a folder whose file names show that it is not a readable checkpoint.

    ``names`` and ``where``: the file names and the name of a repository. With ``names``, these files are checked instead of
    the folder ``path``.
    """
    where = path if where is None else where
    if names is None:
        found = look(path)
        is_gguf = found == "file" and path.suffix == ".gguf"
        where, names = (path.parent, [path.name]) if is_gguf else (path, os.listdir(path) if found == "folder" else [])
    pickle, shard = (min(filter(kind.fullmatch, names), default="") for kind in (_PICKLES, _SHARD))
    gguf = min((name for name in names if name.endswith(".gguf")), default="")
    if shard and INDEX not in names:
        raise UserError(f"{where}/{INDEX}: is missing, but {shard} exists; download it too")
    if ADAPTER in names:
        try:
            with open_file(path / ADAPTER) as stream:
                base = dict(from_json(stream.read(1 << 20)))["base_model_name_or_path"]
        except (OSError, ValueError, TypeError, KeyError):
            base = None
        base = str(base or "another model")[:200]
        raise UserError(f"{where}/{ADAPTER}: is an adapter for {base} without the base weights; {MERGE}")
    if gguf:
        raise UserError(f"{where}/{gguf}: GGUF is not supported; {_BEFORE} in safetensors")
    if pickle:
        raise UserError(
            f"{where}/{pickle}: pickled weights can run code and are not supported; if you trust them, convert them "
            "(transformers: from_pretrained, then save_pretrained) and export the resulting folder"
        )


def refuse_quantised(where: object, settings: Mapping[str, Any]) -> None:
    """Raise UserError if the settings that ModelOpt saves with a checkpoint name a quantisation."""
    found = settings.get("quantization")
    if isinstance(found, dict) and (method := found.get("quant_algo")) is not None:
        raise UserError(f"{where}: quantization.quant_algo {str(method)[:40]!r} is not supported; {_BEFORE}")


def refuse_config(where: object, config: Mapping[str, Any]) -> None:
    """Raise UserError for a ``config.json`` that is not in transformers' layout, or names an unsupported quantisation."""
    if "mm_vision_tower" in config or "mm_projector_type" in config:
        what = "mm_vision_tower marks the original LLaVA format, which is not supported"
        raise UserError(f"{where}: {what}; use a checkpoint converted for transformers (for example from llava-hf)")
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = section.get(key)
            method = found.get("quant_method") if isinstance(found, dict) else None
            if method is not None and method not in METHODS:
                what = f"{key}.quant_method {str(method)[:40]!r} is not supported, only 4-bit AWQ and GPTQ"
                raise UserError(f"{where}: {what}; {_BEFORE}")
    if "quantization" in config:
        raise UserError(f"{where}: MLX quantization is not supported; {_BEFORE}")
