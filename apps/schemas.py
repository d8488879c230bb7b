"""The objects that commands print with ``--json``, one a line: their schemas, and :func:`json_line`, which writes them.

``docs/reference.py`` makes docs/reference/json.md from SCHEMAS. A field's name ends in ``?`` where it may be missing; its type
is one of JSON Schema's, or several joined by ``|``. The lines of ``edgevlm bench`` are in :mod:`edgevlm.bench.schemas`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SCHEMA = 1  # raised when a field changes its meaning or goes; readers ignore fields that they do not know

Fields = Mapping[str, tuple[str, str]]  # name: type and meaning


def json_line(event: str, fields: Mapping[str, object]) -> str:
    """One line in ASCII: ``event`` and the schema's version before ``fields``."""
    return json.dumps({"event": event, "schema": SCHEMA, **fields})


def schema_of(kind: str, fields: Fields, name: str = "event") -> dict[str, Any]:
    """JSON Schema 2020-12 of one kind of line; ``name``: the field that says the kind."""
    common = {
        name: {"const": kind},
        "schema": {"const": SCHEMA, "description": "Version of this schema. Later ones may add fields."},
    }
    schema = object_schema(fields)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {**common, **schema["properties"]},
        "required": [*common, *schema["required"]],
        "additionalProperties": False,
    }


def object_schema(fields: Fields) -> dict[str, Any]:
    """JSON Schema of an object that has these fields, and may have more."""
    described = {
        field.rstrip("?"): {"type": types if len(types := kinds.split("|")) > 1 else kinds, "description": text}
        for field, (kinds, text) in fields.items()
    }
    return {"type": "object", "properties": described, "required": [field for field in fields if not field.endswith("?")]}


_TIME: Fields = {"time": ("string", "Wall-clock time of the line: RFC 3339, UTC.")}
_STATS: Fields = {
    **_TIME,
    "frames": ("integer", "Frames watched."),
    "dropped": ("integer", "Frames that were due and were lost."),
    "drops": ("object", "Dropped frames by cause: replaced, corrupt, keyframe, late."),
    "gated": ("integer", "Still frames that the gate held back; not in frames."),
    "fps": ("number", "Frames watched per second since the last line; in a summary, over the whole run."),
    "policy": ("string", "The policy in use; under auto, the one it chose."),
    "cache_tokens": ("integer", "Vision tokens held in the fullest layer."),
    "cache_bytes": ("integer", "Size of the KV cache, which is allocated once."),
    "appended": ("number", "Fraction of the frames' tokens that entered the memory; 1 with --append all."),
    "encoded": ("number", "Fraction of the frames' patches that were encoded; 1 with --encode all."),
    "compressions": ("integer", "How often the policy has compressed the cache."),
    "compress_ms": ("number", "Milliseconds spent on compression in all."),
    "rss_bytes": ("integer", "Resident memory of the process."),
    "source_state": ("string", "initialising, running, stalled, reconnecting, ended or failed."),
    "source_problem": ("string|null", "Why the source is not running, without credentials."),
    "reconnects": ("integer", "How often the source delivered frames again after a lost connection."),
    "store?": ("object", "Bytes a retrieval policy keeps off the device, and its counters; only with such a policy."),
}
_EVIDENCE = ("array", "What it was read from, as in an answer; jpeg_url is the server's.")
_LINE: Fields = {
    "time": ("string", "When it was seen: RFC 3339, UTC."),
    "camera": ("string", "The stream's name."),
    "text": ("string", "What the model said it saw."),
    "evidence": _EVIDENCE,
}

# command: kind of line: fields
LINES: dict[str, dict[str, Fields]] = {
    "run": {
        "chosen": {
            **_TIME,
            "device": ("string", "What --model CHECKPOINT was chosen for. Such a run prints this line first."),
            "precision": ("string", "Precision of the decoder's weights."),
            "vision_precision": ("string", "Precision of the vision tower."),
            "kv": ("string", "Precision of keys and values."),
            "frame_size": ("array", "Width and height of the frames the model sees."),
            "budget": ("integer", "Vision tokens kept per layer."),
            "fps": ("number", "Frames per second asked for."),
            "predicted_fps": ("number", "Most frames per second, as edgevlm plan predicts."),
            "total_mb": ("number", "Memory a run takes, as edgevlm plan predicts, in 10^6 bytes."),
            "usable_mb": ("number", "What the device has beside the system."),
            "fits": ("boolean", "Whether total_mb fits in usable_mb."),
            "keeps_up": ("boolean", "Whether it fits and predicted_fps reaches fps."),
            "remedy": ("string|null", "What would help where it does not; else null."),
        },
        "answer": {
            **_TIME,
            "time_s": ("number", "Stream time of the newest frame the answer takes into account, in seconds."),
            "question": ("string", "The question as asked."),
            "text": ("string", "The answer."),
            "token_ids": ("array", "Token ids of the answer."),
            "ttft_ms": ("number", "Time to first token, in milliseconds."),
            "tpot_ms": ("number", "Mean time of each further token, in milliseconds."),
            "evidence": (
                "array",
                "Frames the answer was read from, best first, none where evidence_held is false: time (wall clock, null in "
                "recordings), frame, last_frame, "
                "time_s, until_s, weight (0 to 1), box (left, top, right, bottom, as fractions of the picture).",
            ),
            "evidence_held": ("boolean|null", "False where what would answer is no longer in memory; null where nobody knows."),
            "truth?": ("string", "The right answer; only for a question about the demo world that has one."),
        },
        "stats": _STATS,
        "summary": _STATS,
    },
    "serve": {
        "serving": {
            **_TIME,
            "url": ("string", "Where the server answers. It prints this line first, once it does."),
        },
    },
    "config check": {
        "config": {
            **_TIME,
            "path": ("string", "The file, in which nothing is wrong; of others stderr has the line."),
            "cameras": ("array", "Names of its cameras."),
        },
    },
    "ask": {
        "completion": {
            **_TIME,
            "question": ("string", "The question as asked."),
            "text": ("string", "The answer."),
            "stream": ("string|null", "The stream that was asked about."),
            "time_s": ("number|null", "Stream time of the newest frame the answer takes into account, in seconds."),
            "ttft_ms": ("number|null", "Time to first token, in milliseconds, in the server."),
            "evidence": ("array", "Frames the answer was read from, as in run, with jpeg_url, the path of its thumbnail."),
            "evidence_held": ("boolean|null", "False where what would answer is no longer in memory; null where nobody knows."),
        },
    },
    "journal": {
        "line": _LINE,
    },
    "forget": {
        "forgotten": {
            "stream": ("string", "The camera; empty for events of all."),
            "rows?": ("integer", "Rows of the memory deleted, of the layer that lost most."),
            "thumbnails?": ("integer", "Thumbnails deleted."),
            "snapshots?": ("integer", "Snapshots deleted, with --all in a folder."),
            "events?": ("integer", "Events of watches deleted."),
            "journal?": ("integer", "Lines of the journal deleted."),
        },
    },
    "digest": {
        "opening": {
            "camera": ("string", "The stream's name."),
            "watch": ("string", "The watch's name."),
            "question": ("string", "What it asks."),
            "opened": ("string", "When it opened: RFC 3339, UTC."),
            "closed": ("string|null", "When it closed; null where it was still open."),
            "seconds": ("number|null", "How long it was open."),
            "probability": ("number", "Of the answer, when it opened."),
            "evidence": _EVIDENCE,
        },
        "line": _LINE,
    },
    "plan": {
        "plan": {
            **{
                f"{part}_mb": ("number", f"{text}, in 10^6 bytes.")
                for part, text in (
                    ("weights", "Weights"),
                    ("kv", "The KV cache"),
                    ("policy", "What a policy keeps beside it"),
                    ("activations", "The decoder's working memory"),
                    ("vision", "The tower's working memory"),
                    ("runtime", "Libraries, graphs and sessions"),
                    ("snapshots", "Copies that a server's snapshots are written from; 0 without --cameras"),
                    ("total", "All of these"),
                    ("usable", "What the device has beside the system"),
                    ("export_peak", "What edgevlm export takes"),
                    ("build_peak", "What edgevlm build takes; 0 where there is no such step"),
                    ("present", "With --append changed, the newest frame and the references of a camera, beside total_mb"),
                    ("tower_cache", "With --encode changed, what the tower keeps of a camera, beside total_mb"),
                )
            },
            "fits": ("boolean", "Whether total_mb fits in usable_mb."),
            "prefill_fps": ("number", "Most frames per second, with the cache full."),
            "ttft_ms": ("number", "Time to first token, in milliseconds."),
            "tokens_per_s": ("number", "Tokens of an answer per second."),
            "j_per_frame": ("number|null", "Upper bound of the energy of a frame, in joules; null if the power is not known."),
            "bound_by": ("string", "What limits it: vision, compute, memory bandwidth or memory size."),
            "model": ("string", "The model's name."),
            "family": ("string", "Model family."),
            "device": ("string", "What it was planned for; this machine unless --device names another."),
            "precision": ("string", "Precision of the decoder's weights."),
            "vision_precision": ("string", "Precision of the vision tower on a CPU."),
            "kv": ("string", "Precision of keys and values."),
            "budget": ("integer", "Vision tokens kept per layer."),
            "fps": ("number", "Frames per second asked for."),
            "keeps_up": ("boolean", "Whether camera_fps reaches fps."),
            "largest_budget": ("integer", "Largest budget that fits and keeps up; 0 if none does."),
            "largest_fps": ("number", "prefill_fps where it fits, else 0."),
            "tokens_per_frame": ("number", "Rows of the cache a frame takes, text around it included."),
            "vision_ms": ("number", "Tower's time per frame, in milliseconds."),
            "prefill_ms": ("number", "Decoder's time per frame, in milliseconds."),
            "compression_ms": ("number", "Compression's time per frame, in milliseconds."),
            "changed": ("number", "Fraction of a frame taken to change."),
            "changed_fps": ("number", "prefill_fps where only that is encoded and appended."),
            "cameras": ("integer", "Cameras on the model; above 1 the sizes and prefill_fps are of all of them."),
            "camera_mb": ("number", "What one more camera takes of edgevlm serve, in 10^6 bytes."),
            "camera_fps": ("number", "prefill_fps for each camera."),
            "largest_cameras": ("integer", "Most cameras of edgevlm serve that fit and keep up, 256 at most."),
        },
        "measured": {
            "planned_mb": ("number", "total_mb of the plan; with --measure only."),
            "measured_mb": ("number", "How much a process's memory grew, in 10^6 bytes."),
            "error": ("number", "planned / measured - 1."),
        },
        "published": {
            "device": ("string", "What was measured on; with --published only."),
            "model": ("string", "The model."),
            "figure": ("string", "What was measured, and its unit."),
            "published": ("number", "The published figure."),
            "planned": ("number", "The plan's."),
            "error": ("number", "planned / published - 1."),
        },
    },
    "models": {
        "model": {
            "model": ("string", "Its name on the Hugging Face Hub."),
            "family": ("string", "Model family."),
            "licence": ("string", "Licence of its weights."),
            "checked": ("array", "What was looked up: licence, geometry. The rest is from memory."),
            "parameters": ("integer", "Weights that a stream uses."),
            "measured": ("boolean", "Whether we have run its real weights. If not, what follows is predicted, as by plan."),
            "device": ("string", "What it was planned for."),
            "precision": ("string", "Precision chosen for the decoder's weights."),
            "kv": ("string", "Precision of keys and values."),
            "budget": ("integer", "Vision tokens kept per layer."),
            "total_mb": ("number", "Memory of a stream, in 10^6 bytes."),
            "fits": ("boolean", "Whether it fits beside the system."),
            "fps": ("number", "Most frames per second."),
            "keeps_up": ("boolean", "Whether it fits and keeps up with --fps."),
        }
    },
    "doctor": {
        "finding": {
            "check": ("string", "What was checked."),
            "status": ("string", "ok, warn or fail."),
            "found": ("string", "What was found."),
            "fix": ("string", "How to fix it; empty where nothing is wrong."),
        }
    },
    "cameras": {
        "camera": {
            "camera": ("string", "What to give run --camera."),
            "kind": ("string", "demo, usb, csi or another bus."),
            "name": ("string", "The camera's own name."),
            "usable": ("boolean", "Whether it delivered a picture."),
            "reason": ("string|null", "Why not."),
            "modes": ("array", "Pixel formats, sizes and frame rates it offers."),
            "links": ("array", "Other paths of the same camera."),
        },
        "ability": {
            "name": ("string", "A way of reading or decoding video."),
            "usable": ("boolean", "Whether this machine has it."),
            "reason": ("string|null", "Why not."),
        },
    },
    "power": {
        "power": {
            "time_s": ("number", "Seconds since the command started."),
            "watts": ("number|null", "Mean power since the last line: the sum of the summed rails; null if not measured."),
            "rails": ("object", "Watts of each rail; null where it was not measured."),
            "mode": ("string|null", "A Jetson's power mode."),
            "clocks_mhz": ("object", "Clocks of GPU, memory and first CPU core, in MHz."),
            "cpu_percent": ("number", "CPU use since the last line, over all cores."),
            "memory_mb": ("integer", "System memory in use."),
        },
        "energy": {
            "meter": ("string", "What measured."),
            "joules": ("number|null", "Energy in all; null if not measured throughout."),
            "watts": ("number|null", "Mean power."),
            "idle_watts": ("number|null", "Power of the idle machine, where it was measured first."),
            "net_joules": ("number|null", "Energy above idle."),
            "summed": ("array", "The rails that make up the total."),
            "rails": ("object", "Of each rail: joules, and gap_s, seconds without a reading."),
        },
    },
    "policies": {
        "policy": {
            "policy": ("string", "Its name."),
            "paper": ("string", "Where it was published."),
            "idea": ("string", "What it keeps."),
            "settings": ("array", "Of each setting: name, default, choices and meaning."),
            "ours": ("string", "What differs from the paper; may be empty."),
        }
    },
    "bundles list": {
        "bundle": {
            "bundle": ("string", "Its name in the bundle cache."),
            "family": ("string", "Model family."),
            "precision": ("string", "Precision of the decoder's weights."),
            "rounding": ("string", "How the weights were rounded: nearest or gptq."),
            "kv": ("string", "Precision of keys and values."),
            "vision_precision": ("string", "Precision of the vision tower."),
            "profile": ("string", "The runtime its graphs are for."),
            "bytes": ("integer", "Size of its files."),
            "path": ("string", "Its directory."),
        }
    },
    "build": {
        "engine": {
            "graph": ("string", "The graph that was built."),
            "path": ("string", "The engine's file."),
            "bytes": ("integer", "Its size."),
            "kept": ("boolean", "Whether it existed and was kept."),
            "capacity": ("integer", "Rows of each layer's cache it supports."),
        }
    },
    "state show": {
        "snapshot": {
            "snapshot": ("string", "The file's name."),
            "usable": ("boolean", "Whether it can be resumed from. If false, reason is the only other field."),
            "reason?": ("string", "Why it cannot be used."),
            "bytes?": ("integer", "Its size."),
            "edgevlm?": ("string", "Version that wrote it."),
            "written?": ("number", "When, in seconds since 1970."),
            "source?": ("string|null", "What was watched, without credentials."),
            "model?": ("string", "SHA-256 of the model's bundle."),
            "name?": ("string", "The model's name."),
            "policy?": ("string", "Policy with its settings."),
            "budget?": ("integer", "Vision tokens kept per layer."),
            "dtype?": ("string", "Precision of keys and values."),
            "chunk?": ("integer", "Frames encoded at once."),
            "reindexing?": ("string", "lazy or eager."),
            "append?": ("string", "all, or changed with its settings."),
            "encode?": ("string", "The same of what is encoded."),
            "text budget?": ("array", "Tokens reserved for conversation, question and answer."),
            "system prompt?": ("string", "Hash of the system prompt."),
            "frames?": ("integer", "Frames watched."),
            "time_s?": ("number", "Stream time of the newest frame, in seconds."),
            "waiting?": ("integer", "Frames of an unfinished chunk."),
            "rows?": ("integer", "Tokens in the fullest layer."),
            "compressions?": ("integer", "How often the policy has compressed the cache."),
            "turns?": ("object", "Turns of each conversation."),
        }
    },
    "calibrate": {
        "calibration": {
            "bundle": ("string", "The bundle that was written."),
            "edgevlm?": ("string", "Version that measured. This and what follows is missing with --no-layers."),
            "date?": ("string", "When: ISO 8601, UTC."),
            "clips?": ("array", "What was watched."),
            "frames?": ("array", "Frames of each clip."),
            "questions?": ("array", "Questions asked."),
            "cv?": ("array", "Per layer: coefficient of variation of the value norms."),
            "thresholds?": ("array", "InfiniPot-V's three thresholds on cv."),
            "ages?": ("array", "Per layer: fraction of attention by age of frame, newest first."),
            "recency?": ("array", "Per layer: fraction of attention on the newest tenth of the frames."),
            "flat?": ("number", "What recency would be if attention were even."),
            "periodicity?": ("array", "Per layer: autocorrelation of log attention at a lag of one frame."),
            "classes?": ("array", "Per layer: shallow, middle or deep (HERMES)."),
            "middle_from?": ("integer", "First middle layer."),
            "deep_from?": ("integer", "First deep layer."),
            "agreement?": ("array", "Per candidate layer: Spearman's rank correlation with every layer above it (PureKV)."),
            "clie?": ("integer", "The candidate that ranks best."),
        },
        "candidate": {
            "budget": ("integer", "Vision tokens per layer."),
            "measure": ("string", "kl (agreement with full KV, in nats) or accuracy (questions answered right)."),
            "policy": ("string", "The policy measured."),
            "tokens": ("integer", "The budget at which it takes no more bytes than a sliding window; of that, what it uses."),
            "value": ("number", "The measure."),
            "ci_low": ("number", "Lower end of the 95 % interval."),
            "ci_high": ("number", "Upper end."),
            "compress_ms": ("number", "Mean time of compression per stream, in milliseconds."),
            "bytes": ("integer", "Most bytes that cache and policy took together."),
            "top1?": ("number", "Fraction of next tokens equal to full KV's; with kl only."),
        },
        "skipped": {
            "budget": ("integer", "Vision tokens per layer."),
            "policy": ("string", "A policy that was not measured at it."),
            "reason": ("string", "Why."),
        },
        "choice": {
            "budget": ("integer", "Vision tokens per layer."),
            "measure": ("string", "As in candidate."),
            "policy": ("string", "What auto uses at this budget."),
            "clearly_better": ("boolean", "Whether it beat the fallback; if false, it is the fallback."),
        },
        "append_trial": {
            "measure": ("string", "As in candidate."),
            "tau": ("number", "Of --append changed, under full KV."),
            "appended": ("number", "Fraction of the frames' tokens that entered the memory."),
            "loss": ("number", "Fraction of right answers, or with kl of next tokens, lost to whole frames."),
            "ci_low": ("number", "Lower end of the 95 % interval."),
            "ci_high": ("number", "Upper end."),
        },
        "append_choice": {
            "measure": ("string", "As in candidate."),
            "tau": ("number|null", "What --append auto uses; null is all."),
            "bound": ("number", "The loss that it surely stays within."),
            "refresh": ("integer", "Frames of the refresh that refreshed is for."),
            "refreshed": ("number|null", "Fraction appended at tau with that refresh."),
        },
        "evidence": {
            "layer": ("integer", "Whose attention says which frames an answer was read from; with --evidence only."),
            "heads": ("array", "Its heads."),
            "weights": ("array", "Of the rule that tells whether evidence is held; empty without one."),
            "bias": ("number", "The rule's constant."),
        },
        "encode_trial": {
            "measure": ("string", "As in candidate."),
            "setting": ("string", "Of --encode, under full KV."),
            "encoded": ("number", "Fraction of the frames' patches that were encoded."),
            "loss": ("number", "As in append_trial."),
            "ci_low": ("number", "Lower end of the 95 % interval."),
            "ci_high": ("number", "Upper end."),
            "low_cosine": ("number|null", "Cosine to the whole tower's that 99 % of the features reach; with kl alone."),
        },
        "encode_choice": {
            "measure": ("string", "As in candidate."),
            "setting": ("string|null", "What --encode auto uses; null is all."),
            "bound": ("number", "The loss that it surely stays within."),
        },
    },
}

SCHEMAS = {kind: schema_of(kind, fields) for kinds in LINES.values() for kind, fields in kinds.items()}
