"""Pydantic models of the lines that commands print with ``--json``; JSON Schema and reference are generated from them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from edgevlm.runtime import calibration

SCHEMA = 1  # version of the JSON lines: increased when a field is removed or changes its meaning, not when one is added
ESCAPE = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|(ud[89a-f]..)|.)")
"""Matches a JSON escape; the group matches an unpaired surrogate."""


def json_line(event: str, fields: Mapping[str, object]) -> str:
    """Return a line of ASCII JSON: ``event``, the schema's version and ``fields``.

    An unpaired surrogate becomes six characters of text, such as ``\\udce9``.
    """
    line = json.dumps({"event": event, "schema": SCHEMA, **fields})
    return ESCAPE.sub(lambda found: f"\\{found[0]}" if found[1] else found[0], line)


def field(text: str, **given: Any) -> Any:
    """Declare a field that is always present."""
    return Field(description=text, **given)


def maybe(text: str, **given: Any) -> Any:
    """Declare a field that may be missing."""
    return Field(default_factory=lambda: None, description=text, **given)


class Record(BaseModel):
    model_config = ConfigDict(defer_build=True)


class Timed(Record):
    time: str = field("Wall-clock time of the line: RFC 3339, UTC.")


class Moment(Record):
    """A span of frames on which an answer is based."""

    time: str | None = field("Wall-clock time of the first frame; null in recordings.")
    frame: int = field("Number of the first frame.")
    last_frame: int = field("Number of the last frame.")
    time_s: float | None = field("Stream time of the first frame, in seconds.")
    until_s: float | None = field("Stream time of the last frame, in seconds.")
    weight: float | None = field("The moment's fraction of the attention, from 0 to 1.")
    box: list[float] = field("Left, top, right and bottom of the region, as fractions of the picture.")
    jpeg_url: str | None = maybe("The path of the picture on the server; null without a picture.")


class Answer(Timed):
    time_s: float = field("Stream time of the newest frame the answer takes into account, in seconds.")
    question: str = field("The question as asked.")
    text: str = field("The answer.")
    token_ids: list[int] = field("Token ids of the answer.")
    ttft_ms: float = field("Time to first token, in milliseconds.")
    tpot_ms: float = field("Mean time per token after the first, in milliseconds.")
    evidence: list[Moment] = field("The frames on which the answer is based, best first; empty if evidence_held is false.")
    evidence_held: bool | None = field("False if the answer's frames are no longer in memory; null if unknown.")
    model_fits_source: bool = field("False if the demo model watches anything but the demo world; its answers are guesses.")
    truth: str = maybe("The correct answer; only for the demo's own questions.")


class Stats(Timed):
    frames: int = field("Frames watched.")
    dropped: int = field("Frames that were due but were dropped.")
    drops: dict[str, Any] = field("Dropped frames by cause: replaced, corrupt, keyframe, repeated, late.")
    fps: float = field("Frames watched per second since the last line; in a summary, over the whole run.")
    policy: str = field("The policy in use; with auto, the policy that it chose.")
    cache_tokens: int = field("Vision tokens held in the fullest layer.")
    cache_bytes: int = field("Size of the KV cache, in bytes; allocated once.")
    appended: float = field("Fraction of the frames' tokens that were appended to the cache; 1 with --append all.")
    encoded: float = field("Fraction of the frames' patches that were encoded; 1 with --encode all.")
    compressions: int = field("Number of times that the policy has compressed the cache.")
    compress_ms: float = field("Total time spent on compression, in milliseconds.")
    rss_bytes: int = field("Resident memory of the process, in bytes.")
    source_state: str = field("initialising, running, stalled, reconnecting, ended or failed.")
    source_problem: str | None = field("Why the source is not running, without credentials.")
    reconnects: int = field("Number of times that the source delivered frames again after a lost connection.")
    store: dict[str, Any] = maybe("A retrieval policy's bytes off the device, and its counters; missing for other policies.")


class Summary(Stats):
    """The statistics of a whole run."""


class Serving(Timed):
    url: str = field("The server's address. This is the first line, printed once the server answers.")


class Config(Timed):
    path: str = field("The checked file; errors go to stderr instead.")
    cameras: list[str] = field("Names of the configured cameras.")


class Completion(Timed):
    question: str = field("The question as asked.")
    text: str = field("The answer.")
    stream: str | None = field("The stream that was asked about.")
    time_s: float | None = field("Stream time of the newest frame the answer takes into account, in seconds.")
    ttft_ms: float | None = field("Time to first token, in milliseconds, in the server.")
    evidence: list[Moment] = field("The frames on which the answer is based, as in the answer lines of run.")
    evidence_held: bool | None = field("False if the answer's frames are no longer in memory; null if unknown.")
    model_fits_source: bool | None = field("False if the demo model watches anything but the demo world.")


class Line(Record):
    time: str = field("The time that the line describes: RFC 3339, UTC.")
    camera: str = field("The stream's name.")
    text: str = field("The model's description.")
    evidence: list[Moment] = field("The frames that show the evidence, as in an answer.")


class Forgotten(Record):
    stream: str = field("The camera; empty for events of all cameras.")
    rows: int = maybe("Rows deleted from memory, in the layer with the most deletions.")
    thumbnails: int = maybe("Thumbnails deleted.")
    snapshots: int = maybe("Snapshots deleted; only with --all and a folder.")
    events: int = maybe("Events of watches deleted.")
    journal: int = maybe("Lines of the journal deleted.")


class Opening(Record):
    camera: str = field("The stream's name.")
    watch: str = field("The watch's name.")
    question: str = field("The question that the watch asks.")
    opened: str = field("When the watch opened: RFC 3339, UTC.")
    closed: str | None = field("When the watch closed; null if it was still open.")
    seconds: float | None = field("How long the watch was open, in seconds.")
    probability: float = field("Probability of the answer when the watch opened.")
    evidence: list[Moment] = field("The frames that show the evidence, as in an answer.")


class Plan(Record):
    weights_mb: float = field("Weights, in 10^6 bytes.")
    kv_mb: float = field("The KV cache, in 10^6 bytes.")
    policy_mb: float = field("The policy's state outside the cache, in 10^6 bytes.")
    activations_mb: float = field("The decoder's working memory, in 10^6 bytes.")
    vision_mb: float = field("The tower's working memory, in 10^6 bytes.")
    runtime_mb: float = field("Libraries, graphs and sessions, in 10^6 bytes.")
    snapshots_mb: float = field("Copies in memory from which a server writes snapshots, in 10^6 bytes; 0 without --cameras.")
    total_mb: float = field("The sum of the plan's sizes, in 10^6 bytes.")
    usable_mb: float = field("The device's memory minus what the system uses, in 10^6 bytes.")
    export_peak_mb: float = field("Peak memory of edgevlm export, in 10^6 bytes.")
    build_peak_mb: float = field("Peak memory of edgevlm build, in 10^6 bytes; 0 if nothing is built.")
    fits: bool = field("Whether total_mb fits in usable_mb.")
    prefill_fps: float = field("Maximum frames per second, with a full cache.")
    ttft_ms: float = field("Time to first token, in milliseconds.")
    tokens_per_s: float = field("Tokens generated per second in an answer.")
    j_per_frame: float | None = field("Upper bound of the energy per frame, in joules; null if the power is unknown.")
    bound_by: str = field("The bottleneck: vision, compute, memory bandwidth or memory size.")
    model: str = field("The model's name.")
    family: str = field("Model family.")
    device: str = field("The device that the plan is for; this machine unless --device names another.")
    precision: str = field("Precision of the decoder's weights.")
    vision_precision: str = field("Precision of the vision tower on a CPU.")
    kv: str = field("Precision of keys and values.")
    budget: int = field("Vision tokens kept per layer.")
    fps: float = field("Requested frames per second.")
    keeps_up: bool = field("Whether camera_fps reaches fps.")
    largest_budget: int = field("Largest budget that fits and keeps up; 0 if none does.")
    largest_fps: float = field("prefill_fps if the plan fits, otherwise 0.")
    tokens_per_frame: float = field("Cache rows used by a frame and the text around the frame.")
    vision_ms: float = field("Time of the vision tower per frame, in milliseconds.")
    prefill_ms: float = field("Time of the decoder per frame, in milliseconds.")
    compression_ms: float = field("Time of compression per frame, in milliseconds.")
    cameras: int = field("Cameras on the model; with more than one, sizes and prefill_fps are those of all cameras together.")
    camera_mb: float = field("Memory that each further camera of edgevlm serve uses, in 10^6 bytes.")
    question_mb: float = field("Peak memory that a long question uses while it is answered, in 10^6 bytes.")
    camera_fps: float = field("prefill_fps for each camera.")
    largest_cameras: int = field("Maximum number of cameras of edgevlm serve that fit and keep up; at most 256.")


class Model(Record):
    model: str = field("The model's name on the Hugging Face Hub.")
    family: str = field("Model family.")
    licence: str = field("Licence of the model's weights.")
    checked: list[str] = field("The facts that were looked up: licence, geometry. The other facts are unverified.")
    parameters: int = field("Number of weights that a stream uses.")
    measured: bool = field(
        "Whether the model was run with its real weights. If not, the fields after this one are predictions of edgevlm plan."
    )
    device: str = field("The device that the engine was planned for.")
    precision: str = field("Precision chosen for the decoder's weights.")
    kv: str = field("Precision of keys and values.")
    budget: int = field("Vision tokens kept per layer.")
    total_mb: float = field("Memory that one stream needs, in 10^6 bytes.")
    fits: bool = field("Whether the model fits in the memory not used by the system.")
    fps: float = field("Maximum frames per second.")
    keeps_up: bool = field("Whether the model fits and keeps up with --fps.")


class Finding(Record):
    check: str = field("What was checked.")
    status: str = field("ok, warn or fail.")
    found: str = field("What was found.")
    fix: str = field("How to fix the problem; empty if nothing is wrong.")


class Camera(Record):
    camera: str = field("The value for run --camera.")
    kind: str = field("demo, usb, csi or another bus.")
    name: str = field("The camera's own name.")
    usable: bool = field("Whether the camera delivered a picture.")
    reason: str | None = field("Why the camera delivered no picture; null if it did.")
    mode: str = field("Size, frame rate and pixel format in which the camera was opened.")
    links: list[str] = field("Other paths of the same camera.")


class Power(Record):
    time_s: float = field("Seconds since the command started.")
    watts: float | None = field("Mean power since the last line, over the rails that are summed; null if not measured.")
    rails: dict[str, Any] = field("Watts of each rail; null for a rail that was not measured.")
    mode: str | None = field("A Jetson's power mode.")
    clocks_mhz: dict[str, Any] = field("Clocks of GPU, memory and first CPU core, in MHz.")
    cpu_percent: float = field("CPU use since the last line, over all cores.")
    memory_mb: int = field("System memory in use.")


class Energy(Record):
    meter: str = field("The power meter that was used.")
    joules: float | None = field("Total energy in joules; null unless measured the whole time.")
    watts: float | None = field("Mean power in watts.")
    summed: list[str] = field("The rails whose sum is the total.")
    rails: dict[str, Any] = field("Energy of each rail in joules, and gap_s: seconds without a reading.")


class Policy(Record):
    policy: str = field("The policy's name.")
    paper: str = field("Where the policy was published.")
    idea: str = field("What the policy keeps.")
    settings: list[dict[str, Any]] = field("Name, default, choices and meaning of each setting.")
    ours: str = field("How the policy differs from the paper; may be empty.")


class Bundle(Record):
    bundle: str = field("The bundle's name in the bundle cache.")
    family: str = field("Model family.")
    precision: str = field("Precision of the decoder's weights.")
    rounding: str = field("How the weights were rounded: nearest or gptq.")
    kv: str = field("Precision of keys and values.")
    vision_precision: str = field("Precision of the vision tower.")
    profile: str = field("The runtime that the bundle's graphs are for.")
    bytes: int = field("Size of the bundle's files, in bytes.")
    path: str = field("The bundle's directory.")


class Engine(Record):
    graph: str = field("The graph that was built.")
    path: str = field("The engine's file.")
    bytes: int = field("The file's size, in bytes.")
    kept: bool = field("Whether the engine already existed and was kept.")
    capacity: int = field("Number of rows in each layer's cache that the engine supports.")


class Snapshot(Record):
    snapshot: str = field("The file's name.")
    usable: bool = field("Whether a run can resume from the snapshot. If false, reason is the only other field.")
    reason: str = maybe("Why the snapshot cannot be used.")
    bytes: int = maybe("The file's size, in bytes.")
    edgevlm: str = maybe("The version of edgevlm that wrote the snapshot.")
    written: float = maybe("Time of writing, in seconds since 1970.")
    source: str | None = maybe("The source, without credentials.")
    model: str = maybe("SHA-256 of the model's bundle.")
    name: str = maybe("The model's name.")
    policy: str = maybe("Policy with its settings.")
    budget: int = maybe("Vision tokens kept per layer.")
    dtype: str = maybe("Precision of keys and values.")
    chunk: int = maybe("Frames encoded at once.")
    reindexing: str = maybe("lazy or eager.")
    append: str = maybe("The append setting: all, or changed with its settings.")
    encode: str = maybe("The encode setting: all, or changed with its settings.")
    text_budget: list[int] = maybe("Tokens reserved for conversation, question and answer.", alias="text budget")
    system_prompt: str = maybe("Hash of the system prompt.", alias="system prompt")
    frames: int = maybe("Frames watched.")
    time_s: float = maybe("Stream time of the newest frame, in seconds.")
    waiting: int = maybe("Number of frames in the unfinished chunk.")
    rows: int = maybe("Tokens in the fullest layer.")
    compressions: int = maybe("Number of times that the policy has compressed the cache.")
    turns: dict[str, Any] = maybe("Turns of each conversation.")


def record(name: str, kind: Any, /, *, optional: bool = False, without: str = "", **more: Any) -> type[Record]:
    """Make a JSON line's model from a dataclass whose fields are ``Annotated`` with descriptions. ``more``: further fields."""
    types, fields = get_type_hints(kind), dict[str, Any](more)
    for each in dataclasses.fields(kind):
        if each.name != without:
            text = get_type_hints(kind, include_extras=True)[each.name].__metadata__[-1]
            may_be_missing = optional or (each.default is None and name == "Candidate")
            fields[each.name] = (types[each.name], (maybe if may_be_missing else field)(text))
    return create_model(name, __base__=Record, **fields)


MEASURE = (str, field("kl (divergence from full KV, in nats) or streamqa (questions answered correctly)."))
BUDGET = (int, field("Vision tokens per layer."))
Calibration = record("Calibration", calibration.Calibration, optional=True, bundle=(str, field("The bundle that was written.")))
Candidate = record("Candidate", calibration.Candidate, budget=BUDGET, measure=MEASURE)
AppendTrial = record("AppendTrial", calibration.AppendTrial, measure=MEASURE)
AppendChoice = record("AppendChoice", calibration.AppendChoice, without="trials", measure=MEASURE)
EncodeTrial = record("EncodeTrial", calibration.EncodeTrial, measure=MEASURE)
EncodeChoice = record("EncodeChoice", calibration.EncodeChoice, without="trials", measure=MEASURE)


class Skipped(Record):
    budget: int = field("Vision tokens per layer.")
    policy: str = field("A policy that was not measured at this budget.")
    reason: str = field("Why the policy was not measured.")


class Choice(Record):
    budget: int = field("Vision tokens per layer.")
    measure: str = field("kl or streamqa, as in candidate lines.")
    policy: str = field("The policy that auto uses at this budget.")
    clearly_better: bool = field("Whether the policy beat the fallback; if false, policy is the fallback.")


LINES: dict[str, tuple[type[Record], ...]] = {
    "run": (Answer, Stats, Summary),
    "serve": (Serving,),
    "config check": (Config,),
    "ask": (Completion,),
    "journal": (Line,),
    "forget": (Forgotten,),
    "digest": (Opening, Line),
    "plan": (Plan,),
    "models": (Model,),
    "doctor": (Finding,),
    "cameras": (Camera,),
    "power": (Power, Energy),
    "policies": (Policy,),
    "bundles list": (Bundle,),
    "build": (Engine,),
    "state show": (Snapshot,),
    "calibrate": (Calibration, Candidate, Skipped, Choice, AppendTrial, AppendChoice, EncodeTrial, EncodeChoice),
}


def kind_of(model: type[Record]) -> str:
    """Return the value of ``event`` in the JSON lines that ``model`` describes."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", model.__name__).lower()


@cache
def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema (2020-12) of each kind of line."""
    return {kind_of(model): schema_of(model, {"const": kind_of(model)}) for models in LINES.values() for model in models}


def schema_of(model: type[BaseModel], kind: dict[str, Any], name: str = "event") -> dict[str, Any]:
    """Return the JSON Schema of a line. ``kind`` is the schema of the field ``name``, which identifies the line."""
    schema = model.model_json_schema()
    version = {"const": SCHEMA, "description": "Version of this schema. Later ones may add fields."}
    schema["properties"] = {name: kind, "schema": version, **schema["properties"]}
    schema["required"] = [name, "schema", *schema.get("required", ())]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "additionalProperties": False}
