"""Make the measuring commands (``speed``, ``stream``, ``memory`` and others) and declare their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from edgevlm.apps.commands.cli_options import Json, Threads, flag, option
from edgevlm.errors import UserError, nearest
from edgevlm.progress import to_stderr

EPILOG = {  # the packages each command needs besides edgevlm[cpu]
    "speed": "vision and --against transformers need torch and transformers; --against llama.cpp also llama-cpp-python and "
    "gguf, openvino also openvino and nncf.",
    "stream": "against, and changed with a seeded model, need torch and transformers.",
    "serve": "Needs edgevlm[serve].",
}
OF_CHECKPOINTS = ("precision", "against")  # measurements of a checkpoint, not of a bundle


@dataclass
class MeasureOptions:
    """Options shared by all measurements. A measurement accepts an option if its function has a parameter of that name."""

    model: Annotated[list[str] | None, option("NAME,...", "Measure demo, seeded-0.5b, a bundle, ORG/NAME.")] = None
    policy: Annotated[list[str] | None, option("NAME[:K=V,...],...", "Compare these policies.")] = None
    budget: Annotated[str | None, option("N|6k", "Keep this many vision tokens per layer.")] = None
    camera: Annotated[str | None, option("SRC", "Watch a camera, as for run.")] = None
    video: Annotated[str | None, option("FILE", "Watch a recording, as for run.")] = None
    fps: Annotated[float | None, option("N", "Take this many frames per second.", min=1e-5, max=1000)] = None
    frames: Annotated[str | None, option("N,...", "Watch this many frames; for speed, frames per call.")] = None
    chunk: Annotated[str | None, option("N,...", "Append this many frames at once.")] = None
    append: Annotated[list[str] | None, option("all,auto,changed[:..]", "Append all of each frame, or only changes.")] = None
    encode: Annotated[list[str] | None, option("all,auto,changed[:..]", "Encode all of each frame, or only changes.")] = None
    clips: Annotated[list[str] | None, option("NAME|FILE,...", "Watch street, room, moving, or recordings.")] = None
    questions: Annotated[int | None, option("N", "Ask this many questions at each mark.", min=1)] = None
    against: Annotated[list[str] | None, option("NAME,...", "Compare with llama.cpp, openvino, transformers.")] = None
    theirs: Annotated[str | None, option("fp32|bf16", "Run transformers in this precision.")] = None
    held: Annotated[str | None, option("N,...", "Fill the KV cache with this many tokens.")] = None
    tokens_per_frame: Annotated[int | None, option("N", "Use this many tokens per frame.", min=1)] = None
    precisions: Annotated[list[str] | None, option("NAME,...", "Measure these weight precisions.")] = None
    kv: Annotated[list[str] | None, option("fp32,fp16,int8", "Measure these KV cache precisions.")] = None
    layers: Annotated[int | None, option("N", "Keep only this many of the model's first layers.", min=1)] = None
    tokens: Annotated[int | None, option("N", "Hold or compare this many tokens.", min=1)] = None
    dtype: Annotated[list[str] | None, option("all|fp32,fp16,int8", "Store keys and values in these types.")] = None
    device: Annotated[str | None, option("cpu|cuda", "Time the kernels on this device.")] = None
    seed: Annotated[str | None, option("N|test", "Draw streams from this seed.")] = None
    host_bytes: Annotated[int | None, option("N", "Limit the store's host memory.", min=1_000_000)] = None
    file_bytes: Annotated[int | None, option("N", "Limit the store's file.", min=0)] = None
    cameras: Annotated[str | None, option("N,...", "Watch this many cameras.")] = None
    seconds: Annotated[float | None, option("S", "Count frames for this many seconds each time.", min=0.1)] = None
    events: Annotated[int | None, option("N", "Watch until this many events happen.", min=1)] = None
    realtime: Annotated[bool | None, flag("--realtime/--no-realtime", "Play recordings at their own speed.")] = None
    engine: Annotated[str | None, option("NAME|./FILE.py:CLASS", "Run the model with this engine.")] = None
    threads: Threads = None
    rounds: Annotated[int | None, option("N", "Take medians over this many rounds.", min=1)] = None
    as_json: Json = False


def command(name: str, known: dict[str, str], options: str, about: str) -> Callable[..., None]:
    """Make a command that runs one of several measurements, by default the first.

    ``known``: each measurement's function, as ``module:function``. ``options``: the command's options, separated by spaces.
    ``about``: the command's help text.
    """
    parameters, hints = inspect.signature(MeasureOptions).parameters, get_type_hints(MeasureOptions, include_extras=True)
    chosen = [parameters[each].replace(annotation=hints[each]) for each in [*options.split(), "as_json"]]
    if len(known) > 1:
        what = Annotated[str, typer.Argument(metavar="|".join(known), help="Choose the measurement.")]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        chosen.insert(0, inspect.Parameter("what", kind, default=next(iter(known)), annotation=what))

    def run(**typed: Any) -> None:
        _measure(name, known, typed)

    run.__signature__ = inspect.Signature(chosen)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in chosen}
    run.__doc__ = about
    return run


speed = command(
    "speed",
    {
        "decode": "speed.decoder:decode",
        "prefill": "speed.decoder:prefill",
        "attention": "speed.attention:attention",
        "products": "speed.products:products",
        "vision": "speed.vision:vision",
        "precision": "speed.precision:weights",
    },
    "model against held frames tokens_per_frame precisions kv layers tokens threads rounds",
    """Time decode, prefill, attention, products, vision towers and precisions.

    decode and prefill take turns with llama.cpp, OpenVINO and transformers on the same weights. vision is compared with
    transformers, attention with ONNX Runtime's and a plain read, and products of each weight layout with float32's and a plain
    read. Models are seeded-135m|360m|0.5b|3b with random weights, demo, a checkpoint or a bundle. precision compares a
    checkpoint's weight precisions with fp32 (KL, top-1, size, speed; int4+gptq rounds with GPTQ).
    """,
)
compression = command(
    "compression",
    {"": "compression:compression"},
    "policy layers tokens dtype threads rounds device",
    "Compare the time of policies' compression with one plain read; with --device cuda, compare its kernels with a copy.",
)
stream = command(
    "stream",
    {"growth": "stream.growth:growth", "against": "stream.against:against", "changed": "stream.changed:changed"},
    "model policy budget frames chunk questions append encode clips precisions theirs layers engine threads",
    """Measure a growing stream: frames per second, memory, answers and energy.

    growth compares policies and full KV, each in a separate process. against compares edgevlm with transformers and infinipot-v
    in PyTorch on one llava_onevision checkpoint (default: random weights; 8 GB of memory and, temporarily, 4 GB of disk).
    changed watches clips with whole frames and with changes only, in turn, and prints the highest possible ratio.
    """,
)
memory = command(
    "memory",
    {"longrun": "memory.longrun:longrun", "snapshot": "memory.snapshot:snapshot", "store": "memory.store:store"},
    "model policy budget frames seed append encode host_bytes file_bytes rounds engine threads",
    """Measure long runs, snapshots and the store.

    longrun shows policies 100,000 frames and measures bytes on the device, in host memory and on disk, times to the first
    token, and recall. snapshot measures how long one holds up the stream. store times fetches from memory and disk.
    """,
)
camera = command(
    "camera",
    {"": "camera:camera"},
    "camera video model frames fps realtime engine threads",
    "Time a frame from camera to answer, stage by stage.",
)
serve = command(
    "serve",
    {"cameras": "serve:cameras", "questions": "questions:questions"},
    "model cameras budget fps rounds seconds engine threads",
    """Time several cameras of edgevlm serve, and long questions to them.

    cameras watches demo cameras at full speed, in one process and in one each, and measures total frames per second and memory.
    questions asks one of two cameras 256, 1,000 and 4,000 tokens and measures times to the first token and waits of frames.
    """,
)
watch = command(
    "watch",
    {"quality": "watches:quality", "cost": "watches:cost"},
    "events seed policy append model rounds engine threads",
    """Measure how well watches open and close, and their cost.

    quality compares openings and closings on the demo world with the truth, for each rule: precision, recall, delay in frames,
    and changes while nothing changed. A sliding window and asking about each frame by itself are compared too. cost is the
    frame rate with a dozen watches divided by that without, and what asking them together saves.
    """,
)
vrex = command("vrex", {"": "vrex:vrex"}, "", "Model V-Rex's accelerator and compare it with its paper's figures.")


def _measure(command: str, known: dict[str, str], typed: dict[str, Any]) -> None:
    """Run a measurement with the options that the user typed, and print its results.

    Raises UserError for an unknown measurement or option, and if a package is missing.
    """
    from edgevlm.apps.bundles.fetch import resolve_checkpoint
    from edgevlm.apps.bundles.resolve import resolve_model
    from edgevlm.bench.output import Table
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
        for key in given:
            if key not in takes:
                raise UserError(f"{_option(key)}: is not supported by {command}; remove it")
            given[key] = _read(key, given[key], takes[key].annotation)
        for key, one in takes.items():
            if one.default is inspect.Parameter.empty and key not in given:
                raise UserError(f"{command}: add {_option(key)}")
        if names := given.get("model"):
            resolve = resolve_checkpoint if what in OF_CHECKPOINTS else resolve_model
            found = [
                name if name.startswith("seeded-") else str(resolve(name, step, to_stderr))
                for name in ([names] if isinstance(names, str) else names)
            ]
            given["model"] = found[0] if isinstance(names, str) else found
        engine = {name: given[name] for name in ["engine"] if name in given}
        Table(as_json).print_all(line | engine for line in function(**given))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(name: str, typed: Any, wanted: str) -> Any:
    """Convert an option's value to the type that the measurement expects. Commas separate list items. Raises UserError."""
    from edgevlm.calib.accuracy.variants import split
    from edgevlm.runtime.settings import parse_budget

    if name == "budget":
        return parse_budget(typed)
    is_number = "int" in wanted
    if not isinstance(typed, list) and not (is_number and isinstance(typed, str)):
        return typed
    parts: list[Any] = list(dict.fromkeys(part for text in typed for part in split(text))) if isinstance(typed, list) else []
    if isinstance(typed, str):
        parts = [part.strip() for part in typed.split(",") if part.strip()]
        if not parts or any(not part.isdecimal() or (part == "0" and name != "seed") for part in parts):
            raise UserError(f"{_option(name)} {typed!r}: give integers of 1 or more, separated by commas")
        parts = [int(part) for part in parts]
    if not wanted.startswith("Sequence") and len(parts) != 1:
        raise UserError(f"{_option(name)} {', '.join(map(str, parts))}: give only one")
    return parts if wanted.startswith("Sequence") else parts[0]
