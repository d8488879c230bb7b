"""Commands for models and policies: ``plan``, ``models``, ``export``, ``build``, ``bundles``, ``policies``, ``calibrate``."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edgevlm.apps.commands.cli_options import KV, Device, Json, Threads, flag, lines, option, values_of
from edgevlm.apps.commands.lazy import plain_app
from edgevlm.errors import UserError
from edgevlm.progress import progress, to_stderr, to_stdout

PLAN = """
\b
Examples:
  edgevlm models --device orin-nano-8             what runs on an 8 GB Jetson
  edgevlm plan Qwen/Qwen3-VL-2B-Instruct          one of them, in detail
  edgevlm run --camera 0 --model HuggingFaceTB/SmolVLM2-256M-Video-Instruct
"""
EPILOG = {
    "plan": PLAN,
    "models": PLAN,
    "calibrate": """
\b
Examples:
  edgevlm calibrate demo --out DIR
  edgevlm calibrate BUNDLE --video shop.mp4 --video street.mp4

Each option has a variable: EDGEVLM_CALIBRATE_VIDEO is --video, and so on. EDGEVLM_CALIBRATE_ASK takes one question a line.
""",
}
LEGEND = (
    "|M|: the budget, in vision tokens per layer. f: the budget in frames. |C|: the tokens that a compression leaves. "
    "Set a policy's settings with --policy NAME:SETTING=VALUE,SETTING=VALUE"
)


def plan(
    model: Annotated[str, typer.Argument(metavar="demo|BUNDLE|CHECKPOINT|ORG/NAME", help="Plan for this model.")] = "demo",
    device: Device = None,
    budget: Annotated[
        str | None, option("N|6k", "Keep this many vision tokens per layer.", "as for run, or less to fit")
    ] = None,
    precision: Annotated[
        str | None, option("NAME", "Store weights in this precision.", "the most accurate that keeps up")
    ] = None,
    vision_precision: Annotated[
        str | None, option("fp32|int8", "Store a CPU's vision tower in this precision.", "set by --precision")
    ] = None,
    kv: KV = None,
    fps: Annotated[float, option("N", "Keep up with this many frames a second.")] = 2.0,
    chunk: Annotated[int, option("N", "Encode this many frames at once.", min=1)] = 8,
    frame_size: Annotated[str, option("WxH", "Expect frames of this size, as for export.")] = "640x480",
    cameras: Annotated[
        int | None, option("N", "Plan a server with this many cameras.", "a run with one", min=1, max=256)
    ] = None,
    json: Json = False,
) -> None:
    """Estimate memory and speed before building anything.

    Reads or downloads only a checkpoint's config.json, no weights.
    """
    with progress("planning") as step:
        from edgevlm.apps.bundles.fetch import HubError, resolve_config
        from edgevlm.apps.planning import plan as command
        from edgevlm.apps.planning.model import published_facts
        from edgevlm.apps.settings import parse_size
        from edgevlm.runtime.settings import parse_budget

        wanted = None if budget is None else parse_budget(budget)
        width, height = parse_size(frame_size, "--frame-size ")
        try:
            folder = resolve_config(model, step, to_stderr)
        except HubError as error:
            if model not in (each["id"] for each in published_facts()):
                raise
            to_stderr(f"{error.what}; planning from edgevlm's copy of its config.json")
            folder = model
        asked = (device, wanted, precision, kv, fps, chunk, (height, width), vision_precision, cameras)
        lines = list(command.show(command.PlanRequest(folder, *asked), json))
    to_stdout("\n".join(lines))


def models(
    device: Device = None,
    fps: Annotated[float, option("N", "Keep up with this many frames a second.")] = 2.0,
    json: Json = False,
) -> None:
    """List models with their memory and speed on this machine.

    The numbers are predictions of edgevlm plan, with the weights that edgevlm plan would choose. Nothing is downloaded.
    """
    with progress("planning"):
        from edgevlm.apps.planning.plan import show_models

        lines = list(show_models(device, fps, json))
    to_stdout("\n".join(lines))


def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Export this folder, or ORG/NAME on the hub.")],
    out: Annotated[Path | None, option("DIR", "Write the bundle there.", "the bundle cache")] = None,
    force: Annotated[bool, flag("--force", "Replace an existing bundle.")] = False,
    device: Annotated[
        str | None, option("NAME", "Export for this device: orin-nano-8, cpu, cuda, ..", autocompletion=values_of("device"))
    ] = None,
    jetpack: Annotated[str | None, option("VERSION", "Target this JetPack, with --device.", "the newest")] = None,
    precision: Annotated[
        str | None, option("NAME", "Store decoder weights as fp32, fp16, int8, int4, ..", "fp32, or as in the checkpoint")
    ] = None,
    rounding: Annotated[Literal["nearest", "gptq"], option("nearest|gptq", "How to round weights.")] = "nearest",
    vision_precision: Annotated[
        str | None, option("NAME", "Store vision weights as fp32, fp16 or int8.", "fp32; for TensorRT fp16")
    ] = None,
    kv: KV = None,
    frame_size: Annotated[str, option("WxH", "Expect frames of this size (Qwen families).")] = "640x480",
    positions: Annotated[
        Literal["trained", "transformers"],
        option("trained|transformers", "Place Qwen's prompts as trained, or as transformers does."),
    ] = "trained",
    st_spattn: Annotated[int | None, option("LAYER", "Prefill sparsely from this layer (PureKV).", "3", min=0)] = None,
    family: Annotated[
        str | None, option("NAME|./FILE.py:CLASS", "Read the checkpoint as this family.", "by model_type")
    ] = None,
) -> None:
    """Turn a checkpoint into a bundle that edgevlm runs.

    Prints the path of the bundle, a folder of ONNX graphs, weights, tokenizer and manifest. Without --out, the bundle is
    cached, and edgevlm run --model CHECKPOINT finds it. After an interrupt, run the same command to continue.
    """
    if device is None and jetpack is not None:
        raise UserError("--jetpack requires --device; add --device")
    with progress("starting") as step:
        from edgevlm.apps.bundles.build import ExportTarget, target_for
        from edgevlm.apps.bundles.cache import cached_bundle, export_apart
        from edgevlm.apps.bundles.fetch import checkpoint_config, complete_checkpoint
        from edgevlm.apps.settings import parse_size
        from edgevlm.runtime.graph_profiles import ONNXRUNTIME

        width, height = parse_size(frame_size, "--frame-size ")
        step("reading the checkpoint")
        folder = checkpoint_config(checkpoint, step, to_stderr)
        target = ExportTarget(ONNXRUNTIME, precision, kv or "fp16", "")
        if device is not None:
            target = target_for(folder, device, jetpack, precision, kv, (height, width))
            to_stderr(target.line)
        options: dict[str, Any] = {
            "st_spattn_from": st_spattn, "camera": (height, width), "precision": target.precision, "kv": target.kv,
            "vision_precision": vision_precision, "profile": target.profile, "positions": positions,
            "gptq": rounding == "gptq", "force": force, **({"family": family} if family else {}),
        }  # fmt: skip
        complete_checkpoint(checkpoint, folder, step, to_stderr)
        if out is None:
            out = cached_bundle(folder, step, to_stderr, **options)
        else:
            export_apart(folder, out, progress=step, notify=to_stderr, **options)
    to_stdout(str(out))


def build(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="Build this bundle, exported with --device.")],
    budget: Annotated[str | None, option("N|6k", "Allow budgets up to this.", "as for run")] = None,
    workspace: Annotated[int, option("MB", "Allow each layer this much workspace.", min=1)] = 1024,
    probes: Annotated[bool, flag("--probes/--no-probes", "Support policies that use attention scores.")] = True,
    force: Annotated[bool, flag("--force", "Rebuild existing engines.")] = False,
    json: Json = False,
) -> None:
    """Build a bundle's TensorRT engines on this device.

    Takes minutes and prints a path per engine. Keeps matching engines; after an interrupt, run the same command to continue.
    """
    with progress("starting") as step:
        from edgevlm.apps.bundles import build as command
        from edgevlm.apps.bundles.resolve import resolve_model
        from edgevlm.apps.schemas import json_line

        path = resolve_model(bundle, step, to_stderr, "tensorrt")
        for line, fields in command.build(path, budget, workspace, probes, force, step):
            print(json_line("engine", fields) if json else line, flush=True)  # click.echo would garble the progress line


def list_bundles(json: Json = False) -> None:
    """List the cached bundles: name, family, precisions, size and directory."""
    from edgevlm.apps.bundles import cache

    lines = list(cache.list_bundles(json))
    for line in lines:
        to_stdout(line)
    if not lines:
        to_stderr(f"no bundles in {cache.cache_folder()}; make one with edgevlm export or run --model")


def verify(
    bundles: Annotated[
        list[str] | None, typer.Argument(metavar="BUNDLE", help="Check these bundles.", show_default="all cached")
    ] = None,
) -> None:
    """Check every byte of bundles against their manifests.

    Commands that run a bundle check only the sizes of its files. Exits with status 1 if a bundle is damaged.
    """
    intact = True
    with progress("starting") as step:
        from edgevlm.apps.bundles import cache

        for line, well in cache.verify(bundles or [], step):
            intact &= well
            to_stdout(line)
    raise typer.Exit(0 if intact else 1)


def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME[@REV]", help="Download this bundle.")],
    out: Annotated[Path | None, option("DIR", "Write the bundle there.", "the bundle cache")] = None,
    force: Annotated[bool, flag("--force", "Replace an existing bundle.")] = False,
) -> None:
    """Download a bundle from the hub, and print its directory.

    Checks every byte against the bundle's manifest. After an interrupt, run the same command to continue.
    """
    with progress("asking the hub") as step:
        from edgevlm.apps.bundles import fetch
        from edgevlm.apps.bundles.hub import Repository, parse_id

        path = fetch.pull(Repository(parse_id(name), to_stderr), step, to_stderr, out, force=force)
    to_stdout(str(path))


def push(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="Upload this bundle.")],
    name: Annotated[str, typer.Argument(metavar="ORG/NAME[@BRANCH]", help="Upload to this repository.")],
    public: Annotated[bool, flag("--public", "Make a new repository public.")] = False,
) -> None:
    """Upload a bundle to the hub, and print its address.

    Needs a token with write access in HF_TOKEN. A new repository is private unless --public is given.
    """
    with progress("starting") as step:
        from edgevlm.apps.bundles import fetch

        address = fetch.push(bundle, name, step, public=public)
    to_stdout(address)


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME|all", help="Remove this bundle; all also removes unfinished exports.")],
) -> None:
    """Remove cached bundles."""
    from edgevlm.apps.bundles.cache import remove_bundles

    for path in remove_bundles(name):
        to_stderr(f"removed {path}")


bundles = plain_app(
    {"list": list_bundles, "verify": verify, "pull": pull, "push": push, "remove": remove}, name="bundles",
    help="List, share, verify and remove bundles.", epilog="Set EDGEVLM_CACHE to cache bundles in another directory.",
)  # fmt: skip


def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.py:CLASS", help="Show this policy.", show_default="all")
    ] = None,
    json: Json = False,
) -> None:
    """List the policies and their settings, with their paper, defaults and differences from the paper."""
    to_stdout(list_policies(json, name))


def list_policies(as_json: bool, name: str | None = None) -> str:
    """Return the text that ``edgevlm policies`` prints about the policy ``name``, or about all policies and ``auto``."""
    from edgevlm.apps.schemas import json_line
    from edgevlm.runtime.opening import AUTO, FALLBACK
    from edgevlm.runtime.plugins import names
    from edgevlm.runtime.policies import POLICIES, find_policy
    from edgevlm.runtime.policies.description import Description, describe

    chosen = (
        f"The policy that edgevlm calibrate found best for the model, or else {FALLBACK}; run --verbose shows the measurements."
    )
    described = {AUTO: Description(AUTO, "not a policy itself", chosen, [], "")}
    shown = [*dict.fromkeys([*POLICIES, *names("policies")]), AUTO] if name is None else [name]
    pages = [described[each] if each in described else describe(find_policy(each)) for each in shown]
    if as_json:
        return "\n".join(json_line("policy", asdict(page)) for page in pages)
    width = min(shutil.get_terminal_size().columns, 128)

    def indented(text: str, first: int, rest: int) -> str:
        return textwrap.fill(text, width, initial_indent=" " * first, subsequent_indent=" " * rest, break_on_hyphens=False)

    lines = []
    for page in pages:
        lines += [f"{page.policy}   {page.paper}".rstrip(), indented(page.idea, 2, 2)]
        for each in page.settings:
            default = {True: "on", False: "off"}[each.default] if isinstance(each.default, bool) else each.default
            choices = f" ({'|'.join(each.choices)})" if each.choices else ""
            lines.append(indented(f"{each.name}={default}{choices}  {each.meaning}", 4, 8))
        lines += [indented(f"Ours: {page.ours}", 2, 2), ""] if page.ours else [""]
    return "\n".join([*lines, textwrap.fill(LEGEND, width)])


def calibrate(
    bundle: Annotated[str, typer.Argument(metavar="demo|BUNDLE|CHECKPOINT|ORG/NAME", help="Measure this model.")],
    video: Annotated[list[Path] | None, option("FILE", "Measure on this clip; repeatable.", "demo: its own world")] = None,
    frames: Annotated[int | None, option("N", "Use this many frames of each clip.", "as many as fit", min=1)] = None,
    out: Annotated[Path | None, option("DIR", "Write a calibrated copy here; leave the bundle unchanged.")] = None,
    policies: Annotated[str, option("all|none|NAME,..", "Choose among these policies.")] = "all",
    budget: Annotated[str | None, option("N|6k|P%,..", "Compare at these budgets.", "run's, and 12.5%")] = None,
    ask: Annotated[
        list[str] | None, option("TEXT", "Measure agreement on this question; repeatable.", "three", allow_from_autoenv=False)
    ] = None,
    layers: Annotated[bool, flag("--layers/--no-layers", "Measure the layers before comparing policies.")] = True,
    threads: Threads = None,
    engine: Annotated[str, option("NAME|./FILE.py:CLASS", "Run the model with this engine.")] = "onnxruntime-cpu",
    json: Json = False,
) -> None:
    """Choose the best policy for a model.

    Measures each layer, compares the policies at equal bytes, and finds how much of each frame can be skipped. --policy auto,
    --append auto and --encode auto use the result from the bundle. After an interrupt, run the same command to continue.
    """
    with progress("starting") as step:
        from edgevlm.apps import calibrate as command
        from edgevlm.apps.bundles.resolve import resolve_model

        comparison = command.parse_comparison(policies, budget, tuple(ask or lines("EDGEVLM_CALIBRATE_ASK")))
        model = resolve_model(bundle, step, to_stderr)
        request = command.CalibrateRequest(model, video or [], frames, out, threads, comparison, layers, engine)
        result = command.start(request, step, to_stderr)
    to_stdout((command.as_json if json else command.describe)(*result))
