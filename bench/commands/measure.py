"""Options of ``edgevlm bench`` ``speed``, ``stream``, ``memory``, ``camera``, ``serve``, ``watch`` and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json, Threads, flag, option
from edgevlm.apps.commands.cli_options import threads as threads_option
from edgevlm.errors import UserError, nearest
from edgevlm.progress import Report, to_stderr

EPILOG = {  # what each command needs beside edgevlm[cpu]
    "speed": "vision, export and --against transformers need torch and transformers; --against llama.cpp also "
    "llama-cpp-python and gguf, openvino also openvino and nncf; precision gguf.",
    "stream": "against, and changed with a seeded model, need torch and transformers.",
    "serve": "Needs edgevlm[serve]; page also chromium (apt install chromium).",
    "cluster": "scaling needs edgevlm[cluster].",
}


# what each command measures -> its module and function; the first is measured unless another is named
SPEED = {
    "decode": "speed.decoder:decode",
    "prefill": "speed.decoder:prefill",
    "vision": "speed.vision:vision",
    "changed": "speed.changed:changed",
    "precision": "speed.precision:weights",
    "kv": "speed.precision:kv_cache",
    "export": "speed.export:export",
    "per-layer": "speed.graphs:per_layer",
    "patches": "speed.patches:patches",
    "st-spattn": "speed.graphs:st_spattn",
}
STREAM = {
    "growth": "stream.growth:growth",
    "breakdown": "stream.breakdown:breakdown",
    "against": "stream.against:against",
    "changed": "stream.changed:changed",
}
MEMORY = {
    "longrun": "memory.longrun:longrun",
    "snapshot": "memory.snapshot:snapshot",
    "store": "memory.store:store",
    "windows": "memory.questions:windows",
    "evidence": "memory.questions:evidence",
    "journal": "memory.questions:journal",
    "retrieval": "memory.retrieval:retrieval",
}

SERVE = {"ttft": "serve:ttft", "cameras": "serve:cameras", "clients": "serve:clients", "page": "page:page"}

WATCH = {"quality": "watches:quality", "month": "watches:month", "cost": "watches:cost"}

CLUSTER = {"failures": "cluster:cluster", "scaling": "scaling:scaling"}

OF_CHECKPOINTS = ("precision", "export", "against")  # export what they measure

Models = Annotated[
    str | None, typer.Option("--model", metavar="NAME,...", help="Measure these: demo, seeded-0.5b, a bundle, ORG/NAME.")
]
Policies = Annotated[list[str] | None, typer.Option("--policy", metavar="NAME[:K=V,...],...", help="Compare these policies.")]
Budget = Annotated[str | None, option("N|6k", "Keep this many vision tokens per layer.")]
Rounds = Annotated[int | None, option("N", "Take medians over this many rounds.", min=1)]
Camera = Annotated[str | None, option("SRC", "Watch a camera, as for run.")]
Video = Annotated[str | None, option("FILE", "Watch a recording, as for run.")]


def speed(
    what: Annotated[str, typer.Argument(metavar="|".join(SPEED), help="Choose the measurement.")] = "decode",
    model: Annotated[
        str | None, option("NAME,...", "Measure these: seeded-135m|360m|0.5b|3b, demo, a checkpoint or bundle.")
    ] = None,
    tower: Annotated[str | None, option("NAME,...", "Measure siglip-so400m-384, qwen2.5-vl-448, ..")] = None,
    against: Annotated[str | None, option("NAME,...", "Compare with llama.cpp, openvino, ..")] = None,
    held: Annotated[str | None, option("N,...", "Fill the KV cache with this many tokens.")] = None,
    frames: Annotated[str | None, option("N,...", "Take this many frames in a call.")] = None,
    tokens_per_frame: Annotated[int | None, option("N", "Set a frame's tokens, for prefill.", min=1)] = None,
    precisions: Annotated[str | None, option("NAME,...", "Measure these weight precisions; int4+gptq by GPTQ.")] = None,
    kv: Annotated[str | None, option("fp32,fp16,int8", "Measure these KV cache precisions.")] = None,
    layers: Annotated[int | None, option("N", "Keep only the model's first layers.", min=1)] = None,
    tokens: Annotated[int | None, option("N", "Compare this many tokens of text.", min=2, max=20000)] = None,
    rotate: Annotated[bool | None, flag("--rotate", "Rotate the hidden states first, for precision.")] = None,
    text: Annotated[Path | None, option("FILE", "Read the text from a file, for kv.")] = None,
    turns: Annotated[int | None, option("N", "Rotate all keys before each 64 tokens, for kv.", min=0)] = None,
    changed: Annotated[str | None, option("N,...", "Encode these percentages of a frame's patches.")] = None,
    clips: Annotated[str | None, option("NAME|FILE,...", "Compare features on these, for changed.")] = None,
    encode: Annotated[str | None, option("changed[:..],...", "Encode clips so, for changed.", "changed")] = None,
    threads: Annotated[int | None, threads_option("physical cores, 1 for decode, prefill and vision")] = None,
    rounds: Rounds = None,
    as_json: Json = False,
) -> None:
    """Time decode, prefill, vision towers, precisions, exports and graphs.

    decode and prefill run beside llama.cpp, OpenVINO and transformers with the same weights, taking turns; vision beside
    transformers, OpenVINO, and with --against fixed the same tower exported for one frame size. changed encodes the
    changed patches of a frame alone, beside the whole tower; with --clips it compares their features.
    precision compares weight precisions of a checkpoint with fp32 (KL, top-1, size, speed); kv a bundle's KV cache with an
    fp32 one. export times one beside torch, which traces the tower. per-layer times per-layer graphs, st-spattn PureKV's
    sparse prefill, each beside the full graph. patches times what tells changed patches.
    """
    _measure("speed", SPEED, locals())


def compression(
    policy: Annotated[
        list[str] | None, option("all|NAME[:K=V,...],...", "Time these policies.", "infinipot-v, sliding-window, last-seen")
    ] = None,
    layers: Annotated[int | None, option("N", "Set the cache's layers.", "36", min=1)] = None,
    kv_heads: Annotated[int | None, option("N", "Set the cache's KV heads.", "2", min=1)] = None,
    head_dim: Annotated[int | None, option("N", "Set the size of a head.", "128", min=2)] = None,
    tokens: Annotated[int | None, option("N", "Hold this many tokens per layer.", "6076", min=1)] = None,
    dtype: Annotated[str | None, option("all|fp32,fp16,int8", "Store keys and values as this.", "fp32")] = None,
    threads: Annotated[int | None, threads_option("1")] = None,
    rounds: Rounds = None,
    device: Annotated[str | None, option("cpu|cuda", "cuda: time its kernels beside a copy.")] = None,
    as_json: Json = False,
) -> None:
    """Time policies' compression beside one plain read."""
    _measure("compression", {"": "compression:compression"}, locals())


def stream(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="|".join(STREAM), help="Choose the measurement.", show_default="growth; changed with --append or --encode"
        ),
    ] = None,
    model: Models = None,
    policy: Policies = None,
    budget: Budget = None,
    camera: Camera = None,
    video: Video = None,
    fps: Annotated[float | None, option("N", "Take this many frames a second.", "2")] = None,
    frames: Annotated[str | None, option("N,...", "Measure after this many frames.", "16,64,256,512")] = None,
    chunk: Annotated[str | None, option("N,...", "Append this many frames at once.", "8")] = None,
    questions: Annotated[int | None, option("N", "Ask this many questions at each mark.", "5", min=1)] = None,
    answer_tokens: Annotated[int | None, option("N", "Limit an answer's tokens.", "16", min=2)] = None,
    idle: Annotated[float | None, option("S", "Measure power at rest for this many seconds.", "10", min=0)] = None,
    append: Annotated[str | None, option("all,changed[:..]", "Append this way, for changed.", "all,changed")] = None,
    encode: Annotated[str | None, option("all,changed[:..]", "Encode this way, for changed.", "all,changed")] = None,
    clips: Annotated[str | None, option("NAME|FILE,...", "Watch these, for changed.", "street,room,moving")] = None,
    precisions: Annotated[str | None, option("NAME,...", "Measure these, for against and changed.")] = None,
    layers: Annotated[int | None, option("N", "Keep this many layers, for changed.", min=1)] = None,
    attention: Annotated[str | None, option("sdpa|eager", "Set transformers' attention, for against.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Watch a stream grow: frames a second, memory, answers, energy.

    growth compares policies, full KV included, each in a process of its own. breakdown says where a frame's time goes once the
    cache is full, and what fraction compression takes. against runs transformers with infinipot-v in PyTorch beside edgevlm,
    on one llava_onevision checkpoint (by default one with random weights: 8 GB of memory, 4 GB of disk for a while). changed
    watches clips whole and by what changed, in turn, beside the ceiling that the fractions allow (the same model by default).
    """
    _check_fps(fps)
    what = what or ("changed" if append or encode else "growth")
    _measure("stream", STREAM, locals())


def memory(
    what: Annotated[str, typer.Argument(metavar="|".join(MEMORY), help="Choose the measurement.")] = "longrun",
    model: Models = None,
    policy: Policies = None,
    budget: Budget = None,
    frames: Annotated[int | None, option("N", "Watch this many frames.", min=1)] = None,
    seed: Annotated[int | None, option("N", "Draw another stream, for longrun.", min=0)] = None,
    questions: Annotated[int | None, option("N", "Ask this many questions, for retrieval.", "6", min=1)] = None,
    chunk: Annotated[int | None, option("N", "Append this many frames at once, for retrieval.", min=1)] = None,
    host_bytes: Annotated[int | None, option("N", "Limit the store's host memory.", min=1_000_000)] = None,
    file_bytes: Annotated[int | None, option("N", "Limit the store's file, for longrun.", "8000000000", min=0)] = None,
    cold: Annotated[bool | None, flag("--cold", "Empty the page cache before questions, for retrieval.")] = None,
    clusters: Annotated[int | None, option("N", "Put this many into the store.", "20000", min=2)] = None,
    asked: Annotated[int | None, option("N", "Fetch this many clusters at once.", "64", min=1)] = None,
    rounds: Rounds = None,
    directory: Annotated[Path | None, option("DIR", "Write below this directory.", "/tmp")] = None,
    append: Annotated[str | None, option("all,changed[:..]", "Append this way, for longrun.", "all")] = None,
    encode: Annotated[str | None, option("all,changed[:..]", "Encode this way, for longrun.", "all")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure long runs, snapshots, stores and retrieval.

    longrun takes policies through 100,000 frames: bytes on the device, in host memory and on disk, times to the first token,
    and recall of past events. snapshot says how long one holds the stream. store fetches clusters from memory and disk.
    retrieval says what policies fetch, and its cost beside a sliding window. windows times questions about a part of the time,
    evidence answers with theirs, journal frames with a line written after every 64.
    """
    _measure("memory", MEMORY, locals())


def camera(
    camera: Camera = None,
    video: Video = None,
    model: Annotated[str | None, option("demo|BUNDLE", "Run this model.")] = None,
    frames: Annotated[int | None, option("N", "Measure this many frames.", "20", min=1)] = None,
    fps: Annotated[float | None, option("N", "Take this many frames a second.", "2")] = None,
    realtime: Annotated[bool, flag("--realtime/--no-realtime", "Play recordings at their own speed.")] = True,
    inline: Annotated[bool, flag("--inline", "Prepare frames in the watching thread, to compare.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time a frame from camera to answer, stage by stage."""
    _measure("camera", {"": "camera:camera"}, locals())


def serve(
    what: Annotated[str, typer.Argument(metavar="|".join(SERVE), help="Choose the measurement.")] = "ttft",
    model: Annotated[str | None, option("demo|BUNDLE", "Run this model; ttft: also seeded-0.5b.")] = None,
    cameras: Annotated[str | None, option("N,...", "Watch this many cameras.", "1,4,16")] = None,
    rounds: Rounds = None,
    seconds: Annotated[float | None, option("S", "Count frames for this long each time.", min=0.1)] = None,
    hours: Annotated[float | None, option("H", "Simulate this many hours, for page.", min=0.02)] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time serve's answers, several cameras, and many clients.

    ttft is the time to the first token through HTTP beside that in process, the same session asked in turn. cameras watches
    demo cameras as fast as they go, in one process and in one each: frames a second in all, and memory. clients finds the rate
    of requests at which frames a second fall by 10 %. page keeps the page open in Chromium for simulated hours and tells what
    grows.
    """
    _measure("serve", SERVE, locals())


def watch(
    what: Annotated[str, typer.Argument(metavar="|".join(WATCH), help="Choose the measurement.")] = "quality",
    events: Annotated[int | None, option("N", "Watch until this many events.", "500", min=1)] = None,
    seed: Annotated[str | None, option("N|test", "Draw the streams from this seed.", "0")] = None,
    policy: Policies = None,
    append: Annotated[str | None, option("all,changed[:..]", "Append this way.", "auto,all")] = None,
    model: Annotated[str | None, option("demo|BUNDLE", "Run this model, for cost.")] = None,
    watches: Annotated[int | None, option("N", "Ask this many watches.", "12", min=0, max=64)] = None,
    hours: Annotated[float | None, option("H", "Watch for this many hours, for month.", "720", min=1)] = None,
    kinds: Annotated[int | None, option("N", "Let this many kinds come in turn, for month.", "64", min=1, max=64)] = None,
    rounds: Rounds = None,
    out: Annotated[Path | None, option("FILE", "Keep finished streams here, and go on there.")] = None,
    workers: Annotated[int | None, option("N", "Work in this many processes.", min=1, max=256)] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure how well watches open and close, and their cost.

    quality counts openings and closings on the demo world beside the truth: precision, recall, delay in frames, and changes
    again while nothing changed, by rule, of what is there now and of what left a while ago; beside a sliding window, and each
    frame asked about alone. month is a camera of a frame a minute to which an object comes once an hour. cost is frames a
    second with a dozen watches over those without, and what asking them together saves.
    """
    _measure("watch", WATCH, locals())


def cluster(
    what: Annotated[str, typer.Argument(metavar="|".join(CLUSTER), help="Choose the measurement.")] = "failures",
    nodes: Annotated[int | None, option("N", "Simulate this many nodes.", "1000", min=1, max=10_000)] = None,
    cameras: Annotated[int | None, option("N", "Simulate this many cameras.", "10000", min=1, max=1_000_000)] = None,
    days: Annotated[float | None, option("N", "Simulate this many days.", "30", min=0.01, max=3650)] = None,
    seed: Annotated[int | None, option("N", "Draw the faults from this seed.", "0", min=0)] = None,
    workers: Annotated[str | None, option("1,N,..", "Time scaling on this many workers.", "1,2")] = None,
    cluster: Annotated[str | None, option("HOST:PORT|local", "Time scaling on this Ray cluster.", "local")] = None,
    streams: Annotated[int | None, option("N", "Show this many streams, for scaling.", "10", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Simulate nodes that fail, or time work on a cluster.

    failures runs the code with which serve --cluster places and moves cameras, over simulated nodes and clocks, without video.
    A node is killed once in 30 days on average, frozen once in 30, cut off once in 15 and replaced once in 1,000. scaling times
    bench accuracy --cluster, and predicts it for more workers.
    """
    _measure("cluster", CLUSTER, locals())


def vrex(
    prefill_ratio: Annotated[
        float | None, option(None, "Set the fraction of rows ReSV fetches for a frame.", min=0, max=1)
    ] = None,
    generation_ratio: Annotated[
        float | None, option(None, "Set the fraction of rows it fetches for a token.", min=0, max=1)
    ] = None,
    ratios: Annotated[Path | None, option("FILE", "Read ratios measured by bench memory retrieval.")] = None,
    as_json: Json = False,
) -> None:
    """Model V-Rex's accelerator beside its paper's figures."""
    _measure("vrex", {"": "vrex:vrex"}, locals())


def _check_fps(fps: float | None) -> None:
    from edgevlm.apps.sources.base import SLOWEST_FPS

    if fps is not None and not SLOWEST_FPS <= fps <= 1000:
        raise UserError(f"--fps {fps:g}: give frames a second, from {SLOWEST_FPS:g} to 1000")


def _measure(command: str, known: dict[str, str], typed: dict[str, Any]) -> None:
    """Run one of the ``known`` measurements with the options that were typed (not None) and print its lines.

    typed: the command's arguments; ``what`` names the measurement. Raises UserError for another, for an option that it does not
    take, and where a package that it needs is not installed.
    """
    from edgevlm.bench.output import measure_and_print
    from edgevlm.packages import needed
    from edgevlm.progress import progress

    what, as_json = typed.pop("what", ""), typed.pop("as_json")
    if what not in known:
        raise UserError(f"bench {command} {what}: {nearest(what, known)}")
    command, (module, _, name) = f"bench {command} {what}".rstrip(), known[what].partition(":")
    with progress("loading") as step:
        function: Callable[..., Iterable[dict[str, Any]]] = getattr(needed(f"edgevlm.bench.{module}", command), name)
        takes = inspect.signature(function).parameters
        given = {key: value for key, value in typed.items() if value is not None}
        if unknown := [key for key in given if key not in takes]:
            options = ", ".join(map(_option, (key for key in typed if key in takes)))
            raise UserError(f"{_option(unknown[0])}: is not for {command}, which takes {options}")
        if lacking := [key for key, one in takes.items() if one.default is inspect.Parameter.empty and key not in given]:
            raise UserError(f"{command}: give {_option(lacking[0])}")
        given = {key: _read(key, value, takes[key].annotation) for key, value in given.items()}
        if "model" in given:
            given["model"] = _resolved(given["model"], step, is_checkpoint=what in OF_CHECKPOINTS)
        measure_and_print(function, given, as_json)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(name: str, typed: Any, wanted: str) -> Any:
    """What was typed, as a measurement's annotation wants it: commas part a list. Raises UserError."""
    if name == "budget":
        from edgevlm.runtime.settings import parse_budget

        return parse_budget(typed)
    if wanted == "Sequence[str]":
        from edgevlm.calib.accuracy.variants import split

        return list(dict.fromkeys(part for text in ([typed] if isinstance(typed, str) else typed) for part in split(text)))
    if wanted != "Sequence[int]" or isinstance(typed, int):
        return [typed] if wanted == "Sequence[int]" else typed
    parts = [part.strip() for part in typed.split(",") if part.strip()]
    if not parts or any(not part.isdecimal() or not int(part) for part in parts):
        raise UserError(f"{_option(name)} {typed!r}: give integers of 1 or more, separated by commas")
    return [int(part) for part in parts]


def _resolved(names: str | list[str], progress: Report, *, is_checkpoint: bool) -> Any:
    """Folders in place of checkpoints and of names on the hub. Raises UserError."""
    from edgevlm.apps.bundles.fetch import resolve_checkpoint
    from edgevlm.apps.bundles.resolve import resolve_model

    if not isinstance(names, str):
        return [_resolved(name, progress, is_checkpoint=is_checkpoint) for name in names]
    if is_checkpoint:
        return names if names.startswith("seeded-") else str(resolve_checkpoint(names, progress, to_stderr))
    return resolve_model(names, progress, to_stderr)
