"""Make the JSON Schema of what ``edgevlm bench .. --json`` prints. ``fields.json`` lists the fields."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pydantic import create_model

from edgevlm.apps.schemas import SCHEMA, Record, maybe, schema_of

# the fields printed in brackets after a median
SPREADS = {
    "ms_per_token": ("low", "high"), "ms_per_frame": ("low", "high"), "ratio": ("low", "high"),
    "accuracy": ("ci_low", "ci_high"), "difference": ("difference_low", "difference_high"), "ms": ("low", "high"),
    "pass_over_read": ("pass_low", "pass_high"), "compress_fraction": ("fraction_low", "fraction_high"),
    "frame_ms": ("frame_low", "frame_high"), "hold_ms": ("hold_low", "hold_high"), "write_ms": ("write_low", "write_high"),
    "fps": ("fps_low", "fps_high"), "tpot_ms": ("tpot_low", "tpot_high"), "fps_ratio": ("low", "high"),
    "tokens_ratio": ("tokens_low", "tokens_high"),
    "ttft_ms": ("ttft_low", "ttft_high"), "own_frame_ms": ("own_low", "own_high"), "idle_frame_ms": ("idle_low", "idle_high"),
    "wait_over_unexpected": ("wait_low", "wait_high"), "event_precision": ("precision_low", "precision_high"),
    "event_recall": ("recall_low", "recall_high"),
}  # fmt: skip
_KINDS: dict[str, Any] = {
    "text": str | None, "number": float | None, "array": list[Any], "boolean": bool, "object": dict[str, Any],
    "integer|string": int | str,
}  # fmt: skip
_FIELDS = json.loads(files(__package__).joinpath("fields.json").read_text(encoding="utf-8"))
_MODELLED: dict[str, Any] = {name: (_KINDS[kind], maybe(text)) for name, (kind, text) in _FIELDS.items()}
Bench = create_model("Bench", __base__=Record, **_MODELLED)


def bench_schema() -> dict[str, Any]:
    """Return the JSON Schema of a line of any measurement."""
    return schema_of(Bench, {"type": "string", "description": "The measurement."}, "bench")


def bench_line(line: dict[str, Any]) -> str:
    """Format a measurement's line as JSON, with the schema's version added."""
    return json.dumps({"bench": line["bench"], "schema": SCHEMA, **line}, ensure_ascii=False)
