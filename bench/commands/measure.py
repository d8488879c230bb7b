"""Options of ``edgevlm bench`` ``speed``, ``stream``, ``memory``, ``camera``, ``serve``, ``watch`` and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json, Threads, note
from edgevlm.apps.commands.cli_options import threads as threads_option
from edgevlm.errors import UserError, nearest
from edgevlm.progress import Report

EPILOG = (
    "Needs: --against transformers, vision and export need torch and transformers; "
    "--against llama.cpp needs llama-cpp-python and gguf; charts need edgevlm[report]."
)


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
    "windows": "memory.windows:windows",
    "retrieval": "memory.retrieval:retrieval",
}

SERVE = {"ttft": "serve:ttft", "cameras": "serve:cameras", "clients": "serve:clients", "page": "page:page"}

WATCH = {"quality": "watches:quality", "cost": "watches:cost"}

OF_CHECKPOINTS = ("precision", "export", "against")  # export what they measure

Models = Annotated[
    str | None, typer.Option("--model", metavar="NAME,...", help="Measure these: demo, seeded-0.5b, a bundle, ORG/NAME.")
]
Policies = Annotated[list[str] | None, typer.Option("--policy", metavar="NAME[:K=V,...],...", help="Compare these policies.")]
Budget = Annotated[str | None, typer.Option(metavar="N|6k", help="Keep this many vision tokens per layer.")]
Rounds = Annotated[int | None, typer.Option(metavar="N", help="Take medians over this many rounds.", min=1)]
Camera = Annotated[str | None, typer.Option(metavar="SRC", help="Watch a camera, as for run.")]
Video = Annotated[str | None, typer.Option(metavar="FILE", help="Watch a recording, as for run.")]


def speed(
    what: Annotated[str, typer.Argument(metavar="|".join(SPEED), help="Choose the measurement.")] = "decode",
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Measure these: seeded-135m|0.5b|3b, demo, a checkpoint or bundle."),
    ] = None,
    tower: Annotated[str | None, typer.Option(metavar="NAME,...", help="Measure siglip-so400m-384, qwen2.5-vl-448, ..")] = None,
    against: Annotated[str | None, typer.Option(metavar="NAME,...", help="Compare with llama.cpp, transformers, ..")] = None,
    held: Annotated[str | None, typer.Option(metavar="N,...", help="Fill the KV cache with these many tokens.")] = None,
    frames: Annotated[str | None, typer.Option(metavar="N,...", help="Take these many frames in a call.")] = None,
    tokens_per_frame: Annotated[int | None, typer.Option(metavar="N", help="Set a frame's tokens, for prefill.", min=1)] = None,
    precisions: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Measure these weight precisions; int4+awq with AWQ.")
    ] = None,
    kv: Annotated[str | None, typer.Option(metavar="fp32,fp16", help="Measure these KV cache precisions.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Keep only the model's first layers.", min=1)] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Compare this many tokens of text.", min=2, max=20000)] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the text from a file, for kv.")] = None,
    turns: Annotated[
        int | None, typer.Option(metavar="N", help="Rotate all keys before each 64 tokens, for kv.", min=0)
    ] = None,
    changed: Annotated[str | None, typer.Option(metavar="N,...", help="Encode these percentages of a frame's patches.")] = None,
    clips: Annotated[str | None, typer.Option(metavar="NAME|FILE,...", help="Compare features on these, for changed.")] = None,
    encode: Annotated[
        str | None, typer.Option(metavar="changed[:..],...", help="Encode clips so, for changed.", show_default="changed")
    ] = None,
    threads: Annotated[int | None, threads_option("physical cores, 1 for decode, prefill and vision")] = None,
    rounds: Rounds = None,
    as_json: Json = False,
) -> None:
    """Time decode, prefill, vision towers, precisions, exports and graphs.

    decode and prefill run beside llama.cpp and transformers with the same weights, taking turns; vision beside
    transformers, and with --against fixed beside the same tower exported for one frame size. changed encodes the
    changed patches of a frame alone, beside the whole tower; with --clips it compares their features.
    precision compares weight precisions of a checkpoint with fp32 (KL, top-1, size, speed); kv a bundle's KV cache with an
    fp32 one. export times one beside torch, which traces the tower. per-layer times per-layer graphs, st-spattn PureKV's
    sparse prefill, each beside the full graph. patches times what tells changed patches.
    """
    _measure(
        SPEED, what, "speed", as_json, model=_names(model), tower=_names(tower), against=_names(against),
        held=_numbers("--held", held), frames=_numbers("--frames", frames), tokens_per_frame=tokens_per_frame,
        precisions=_names(precisions), kv=_names(kv), layers=layers, tokens=tokens, text=text, turns=turns, threads=threads,
        changed=_numbers("--changed", changed), clips=_names(clips), encode=_settings(encode), rounds=rounds,
    )  # fmt: skip


def compression(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="all|NAME[:K=V,...],...", help="Time these policies.", show_default="infinipot-v, sliding-window, last-seen"
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Set the cache's layers.", show_default="36", min=1)] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="N", help="Set the cache's KV heads.", show_default="2", min=1)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(metavar="N", help="Set the size of a head.", show_default="128", min=2)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Hold this many tokens per layer.", show_default="6076", min=1)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="all|fp32,fp16,int8", help="Store keys and values so.", show_default="fp32")
    ] = None,
    threads: Annotated[int | None, threads_option("1")] = None,
    rounds: Rounds = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="cuda: time its kernels beside a copy.")] = None,
    as_json: Json = False,
) -> None:
    """Time policies' compression beside one plain read."""
    from edgevlm.runtime.kv import KV_TYPES

    dtypes = [*KV_TYPES] if dtype == "all" else _names(dtype)
    if device not in (None, "cpu", "cuda"):
        raise UserError(f"--device {device}: there is cpu, cuda")
    if unknown := [name for name in dtypes or () if name not in KV_TYPES]:
        raise UserError(f"--dtype {unknown[0]}: there is {', '.join(KV_TYPES)}")
    _measure(
        {"": "compression:compression"}, "", "compression", as_json, policy=_policies(policy), layers=layers,
        kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, dtype=dtypes, threads=threads, rounds=rounds, device=device,
    )  # fmt: skip


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
    fps: Annotated[float | None, typer.Option(metavar="N", help="Take this many frames a second.", show_default="2")] = None,
    frames: Annotated[
        str | None, typer.Option(metavar="N,...", help="Measure at these many frames.", show_default="16,64,256,512")
    ] = None,
    chunk: Annotated[
        str | None, typer.Option(metavar="N,...", help="Append these many frames at once.", show_default="8")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(metavar="N", help="Ask this many questions at each mark.", show_default="5", min=1)
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Limit an answer's tokens.", show_default="16", min=2)
    ] = None,
    idle: Annotated[
        float | None, typer.Option(metavar="S", help="Measure power at rest for so many seconds.", show_default="10", min=0)
    ] = None,
    append: Annotated[
        str | None, typer.Option(metavar="all,changed[:..]", help="Append so, for changed.", show_default="all,changed")
    ] = None,
    encode: Annotated[
        str | None, typer.Option(metavar="all,changed[:..]", help="Encode so, for changed.", show_default="all,changed")
    ] = None,
    clips: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE,...", help="Watch these, for changed.", show_default="street,room,moving"),
    ] = None,
    precisions: Annotated[str | None, typer.Option(metavar="NAME,...", help="Measure these, for against and changed.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Keep so many layers, for changed.", min=1)] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="sdpa|eager", help="Set transformers' attention, for against.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Watch a stream grow: frames a second, memory, answers, energy.

    growth compares policies, full KV included, each in a process of its own. breakdown says where a frame's time goes once the
    cache is full, and compression's share. against runs transformers with infinipot-v in PyTorch beside edgevlm, on one
    llava_onevision checkpoint (by default one with random weights: 8 GB of memory, 4 GB of disk for a while). changed watches
    clips whole and by what changed, in turn, beside the ceiling that the fractions allow (the same model by default).
    """
    if fps is not None and not 0 < fps <= 1000:
        raise UserError(f"--fps {fps:g}: give a rate above 0, up to 1000")
    if attention not in (None, "sdpa", "eager"):
        raise UserError(f"--attention {attention}: there is sdpa, eager")
    what = what or ("changed" if append or encode else "growth")
    _measure(
        STREAM, what, "stream", as_json, model=_names(model), policy=_policies(policy), budget=_budget(budget),
        camera=camera, video=video, fps=fps, frames=_numbers("--frames", frames), chunk=_numbers("--chunk", chunk),
        questions=questions, answer_tokens=answer_tokens, idle=idle, append=_settings(append), encode=_settings(encode),
        clips=_names(clips), precisions=_names(precisions), layers=layers, attention=attention, threads=threads,
    )  # fmt: skip


def memory(
    what: Annotated[str, typer.Argument(metavar="|".join(MEMORY), help="Choose the measurement.")] = "longrun",
    model: Models = None,
    policy: Policies = None,
    budget: Budget = None,
    frames: Annotated[int | None, typer.Option(metavar="N", help="Watch this many frames.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Draw another stream, for longrun.", min=0)] = None,
    questions: Annotated[
        int | None, typer.Option(metavar="N", help="Ask this many questions, for retrieval.", show_default="6", min=1)
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", help="Append this many frames at once, for retrieval.", min=1)
    ] = None,
    host_bytes: Annotated[int | None, typer.Option(metavar="N", help="Limit the store's host memory.", min=1_000_000)] = None,
    file_bytes: Annotated[
        int | None, typer.Option(metavar="N", help="Limit the store's file, for longrun.", show_default="8000000000", min=0)
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the page cache before questions, for retrieval.")] = False,
    clusters: Annotated[
        int | None, typer.Option(metavar="N", help="Put this many into the store.", show_default="20000", min=2)
    ] = None,
    asked: Annotated[
        int | None, typer.Option(metavar="N", help="Fetch this many clusters at once.", show_default="64", min=1)
    ] = None,
    rounds: Rounds = None,
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write below this directory.", show_default="/tmp")
    ] = None,
    append: Annotated[
        str | None, typer.Option(metavar="all,changed[:..]", help="Append so, for longrun.", show_default="all")
    ] = None,
    encode: Annotated[
        str | None, typer.Option(metavar="all,changed[:..]", help="Encode so, for longrun.", show_default="all")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure long runs, snapshots, stores and retrieval.

    longrun takes policies through 100,000 frames: bytes on the device, in host memory and on disk, times to the first token,
    and recall of past events. snapshot says how long one holds the stream. store fetches clusters from memory and disk.
    retrieval says what policies fetch, and its cost beside a plain window. windows times questions about a part of the time.
    """
    _measure(
        MEMORY, what, "memory", as_json, model=_names(model), policy=_policies(policy), budget=_budget(budget), seed=seed,
        questions=questions, frames=None if frames is None else [frames], chunk=None if chunk is None else [chunk],
        host_bytes=host_bytes, file_bytes=file_bytes, cold=cold or None, clusters=clusters, asked=asked, rounds=rounds,
        directory=directory, append=_settings(append), encode=_settings(encode), threads=threads,
    )  # fmt: skip


def camera(
    camera: Camera = None,
    video: Video = None,
    model: Annotated[str | None, typer.Option(metavar="demo|BUNDLE", help="Run this model.")] = None,
    frames: Annotated[int | None, typer.Option(metavar="N", help="Measure this many frames.", show_default="20", min=1)] = None,
    fps: Annotated[float | None, typer.Option(metavar="N", help="Take this many frames a second.", show_default="2")] = None,
    realtime: Annotated[bool, typer.Option("--realtime/--no-realtime", help="Play recordings at their own speed.")] = True,
    inline: Annotated[bool, typer.Option("--inline", help="Prepare frames in the watching thread, to compare.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time a frame from camera to answer, stage by stage."""
    _measure(
        {"": "camera:camera"}, "", "camera", as_json, camera=camera, video=video, model=model, frames=frames, fps=fps,
        realtime=realtime, inline=inline, threads=threads,
    )  # fmt: skip


def serve(
    what: Annotated[str, typer.Argument(metavar="|".join(SERVE), help="Choose the measurement.")] = "ttft",
    model: Annotated[str | None, typer.Option(metavar="demo|BUNDLE", help="Run this model; ttft: also seeded-0.5b.")] = None,
    cameras: Annotated[
        str | None, typer.Option(metavar="N,...", help="Watch these many cameras.", show_default="1,4,16")
    ] = None,
    rounds: Rounds = None,
    seconds: Annotated[float | None, typer.Option(metavar="S", help="Count frames for so long each time.", min=0.1)] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time serve's answers, several cameras, and many clients.

    ttft is the time to the first token through HTTP beside that in process, the same session asked in turn. cameras watches
    demo cameras as fast as they go, in one process and in one each: frames a second in all, and memory. clients finds the rate
    of requests at which frames a second fall by 10 %. page keeps the page open in Chromium, sped up, and tells what grows.
    """
    _measure(
        SERVE, what, "serve", as_json, model=model, cameras=_numbers("--cameras", cameras), rounds=rounds, seconds=seconds,
        threads=threads,
    )  # fmt: skip


def watch(
    what: Annotated[str, typer.Argument(metavar="|".join(WATCH), help="Choose the measurement.")] = "quality",
    events: Annotated[int | None, typer.Option(metavar="N", help="Watch for this many.", show_default="500", min=1)] = None,
    seed: Annotated[str | None, typer.Option(metavar="N|test", help="Draw the streams by this.", show_default="0")] = None,
    policy: Policies = None,
    append: Annotated[str | None, typer.Option(metavar="all,changed[:..]", help="Append so.", show_default="auto,all")] = None,
    model: Annotated[str | None, typer.Option(metavar="demo|BUNDLE", help="Run this model, for cost.")] = None,
    watches: Annotated[
        int | None, typer.Option(metavar="N", help="Ask so many, for cost.", show_default="12", min=1, max=64)
    ] = None,
    rounds: Rounds = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure how well watches open and close, and their cost.

    quality counts openings on the demo world beside the truth: precision, recall, delay in frames, and openings again while
    nothing changed, by rule; beside a plain window, and each frame asked about alone. cost is frames a second with a dozen
    watches over those without, and what asking them together saves.
    """
    _measure(
        WATCH, what, "watch", as_json, events=events, seed=seed, policy=_policies(policy), append=_settings(append),
        model=model, watches=watches, rounds=rounds, threads=threads,
    )  # fmt: skip


def vrex(
    prefill_ratio: Annotated[
        float | None, typer.Option(help="Set the fraction of rows ReSV fetches for a frame.", min=0, max=1)
    ] = None,
    generation_ratio: Annotated[
        float | None, typer.Option(help="Set the fraction of rows it fetches for a token.", min=0, max=1)
    ] = None,
    ratios: Annotated[Path | None, typer.Option(metavar="FILE", help="Read ratios measured by bench memory retrieval.")] = None,
    as_json: Json = False,
) -> None:
    """Model V-Rex's accelerator beside its paper's figures."""
    _measure(
        {"": "vrex:vrex"}, "", "vrex", as_json, prefill_ratio=prefill_ratio, generation_ratio=generation_ratio, ratios=ratios
    )


def _measure(known: dict[str, str], what: str, command: str, as_json: bool, **typed: Any) -> None:
    """Run one of the ``known`` measurements with the options that were typed (not None) and print its lines.

    Raises UserError for another, for an option that it does not take, and where a package that it needs is not installed.
    """
    from edgevlm.bench.output import measure_and_print
    from edgevlm.packages import needed
    from edgevlm.progress import progress

    if what not in known:
        raise UserError(f"bench {command} {what}: {nearest(what, known)}")
    command, (module, _, name) = f"bench {command} {what}".rstrip(), known[what].partition(":")
    with progress("loading") as step:
        function: Callable[..., Iterable[dict[str, Any]]] = getattr(needed(f"edgevlm.bench.{module}", command), name)
        takes = inspect.signature(function).parameters
        given = {key: value for key, value in typed.items() if value is not None}
        if unknown := [key for key in given if key not in takes]:
            options = ", ".join(f"--{key.replace('_', '-')}" for key in typed if key in takes)
            raise UserError(f"--{unknown[0].replace('_', '-')}: is not for {command}, which takes {options}")
        if lacking := [key for key, one in takes.items() if one.default is inspect.Parameter.empty and key not in given]:
            raise UserError(f"{command}: give --{lacking[0].replace('_', '-')}")
        if "model" in given:
            given["model"] = _resolved(given["model"], step, is_checkpoint=what in OF_CHECKPOINTS)
        measure_and_print(function, given, as_json)


def _resolved(names: str | list[str], progress: Report, *, is_checkpoint: bool) -> Any:
    """Folders in place of checkpoints and of names on the hub. Raises UserError."""
    from edgevlm.apps.bundles.fetch import resolve_checkpoint
    from edgevlm.apps.bundles.resolve import resolve_model

    if not isinstance(names, str):
        return [_resolved(name, progress, is_checkpoint=is_checkpoint) for name in names]
    if is_checkpoint:
        return names if names.startswith("seeded-") else str(resolve_checkpoint(names, progress, note))
    return resolve_model(names, progress, note)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = _names(text) or []
    if not parts or any(not part.isdecimal() or not int(part) for part in parts):
        raise UserError(f"{option} {text!r}: give whole numbers of 1 or more, separated by commas")
    return [int(part) for part in parts]


def _policies(texts: list[str] | None) -> list[str] | None:
    return [name for text in texts for name in _settings(text) or ()] if texts else None


def _settings(text: str | None) -> list[str] | None:
    """``name:setting=value,...`` that commas separate."""
    from edgevlm.calib.accuracy.variants import split

    return None if text is None else list(dict.fromkeys(split(text)))


def _budget(text: str | None) -> int | None:
    from edgevlm.runtime.budget import parse_budget

    return None if text is None else parse_budget(text)
