"""What a configuration leaves out: transformers saves differences from its defaults, and reads them back so."""

from __future__ import annotations

from functools import cache
from typing import Any

_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")


def with_defaults(section: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """A section of ``config.json`` with transformers' defaults for what its ``model_type`` has and it does not name.

    kind: the type to go by, where early checkpoints call a section by the whole model's name. Of rotary settings, which have
    had several names, all or none are the default's.
    """
    missing = {key: value for key, value in _defaults(kind or str(section.get("model_type"))).items() if key not in section}
    if any(section.get(key) is not None for key in _ROTARY):
        missing = {key: value for key, value in missing.items() if key not in _ROTARY}
    return missing | section


@cache
def _defaults(model_type: str) -> dict[str, Any]:
    import transformers

    mapping = transformers.CONFIG_MAPPING

    if model_type not in mapping:
        return {}
    values: dict[str, Any] = mapping[model_type]().to_dict()
    return values
