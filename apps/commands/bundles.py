"""``edgevlm export``, ``build`` and ``bundles``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edgevlm.apps.commands.cli_options import KV, Json, flag, option
from edgevlm.apps.commands.lazy import lazy_app
from edgevlm.errors import UserError
from edgevlm.progress import progress, to_stderr


def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Export this folder, or ORG/NAME of the hub.")],
    out: Annotated[Path | None, option("DIR", "Write the bundle there.", "the bundle cache")] = None,
    force: Annotated[bool, flag("--force", "Replace an existing bundle.")] = False,
    device: Annotated[str | None, option("NAME", "Export for this device: orin-nano-8, cpu, cuda, ..")] = None,
    jetpack: Annotated[str | None, option("VERSION", "Target this JetPack, with --device.", "the newest")] = None,
    precision: Annotated[
        str | None, option("NAME", "Store decoder weights as fp32, fp16, int8, int4, ..", "fp32, or as the checkpoint")
    ] = None,
    rounding: Annotated[Literal["nearest", "gptq"], option("nearest|gptq", "How to round weights.")] = "nearest",
    vision_precision: Annotated[
        str | None, option("NAME", "Store vision weights as fp32, fp16 or int8.", "fp32, TensorRT fp16")
    ] = None,
    kv: KV = None,
    frame_size: Annotated[str, option("WxH", "Expect frames of this size (Qwen families).")] = "640x480",
    positions: Annotated[
        Literal["trained", "transformers"],
        option("trained|transformers", "Place Qwen's prompts as trained, or as transformers does."),
    ] = "trained",
    st_spattn: Annotated[int | None, option("LAYER", "Prefill sparsely from this layer (PureKV).", "3", min=0)] = None,
) -> None:
    """Turn a checkpoint into a bundle that edgevlm runs.

    Prints the bundle's directory: ONNX graphs, weights, tokenizer and manifest. Interrupted, the same command resumes. Without
    --out the bundle is cached, and `edgevlm run --model CHECKPOINT` finds it.
    """
    if device is None and jetpack is not None:
        raise UserError("--jetpack goes with --device; give both")
    with progress("starting") as step:
        from edgevlm.apps.bundles.build import ExportTarget, target_for
        from edgevlm.apps.bundles.cache import cached_bundle, export_apart
        from edgevlm.apps.bundles.fetch import checkpoint_config, complete_checkpoint
        from edgevlm.apps.settings import parse_size
        from edgevlm.runtime.graph_profiles import ONNXRUNTIME

        width, height = parse_size(frame_size, "--frame-size ")
        step("reading the checkpoint")
        folder = checkpoint_config(checkpoint, step, to_stderr)
        target = ExportTarget(ONNXRUNTIME, precision, kv or "fp32", "")
        if device is not None:
            target = target_for(folder, device, jetpack, precision, kv, (height, width))
            to_stderr(target.line)
        options: dict[str, Any] = {
            "st_spattn_from": st_spattn, "camera": (height, width), "precision": target.precision, "kv": target.kv,
            "vision_precision": vision_precision, "profile": target.profile, "positions": positions,
            "gptq": rounding == "gptq", "force": force,
        }  # fmt: skip
        complete_checkpoint(checkpoint, folder, step, to_stderr)
        if out is None:
            out = cached_bundle(folder, step, to_stderr, **options)
        else:
            export_apart(folder, out, progress=step, notify=to_stderr, **options)
    typer.echo(str(out))


def build(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="Build this bundle, of edgevlm export --device.")],
    budget: Annotated[str | None, option("N|6k", "Allow budgets up to this.", "as run")] = None,
    workspace: Annotated[int, option("MB", "Allow each layer this much workspace.", min=1)] = 1024,
    probes: Annotated[bool, flag("--probes/--no-probes", "Support policies that look at attention.")] = True,
    force: Annotated[bool, flag("--force", "Rebuild existing engines.")] = False,
    json: Json = False,
) -> None:
    """Build a bundle's TensorRT engines on this device.

    Takes minutes an engine and prints each one's path. Engines that exist and match are kept; interrupted, the same command
    resumes.
    """
    with progress("starting") as step:
        from edgevlm.apps.bundles import build as command
        from edgevlm.apps.bundles.resolve import resolve_model
        from edgevlm.apps.schemas import json_line

        path = resolve_model(bundle, step, to_stderr, "tensorrt")
        for line, fields in command.build(path, budget, workspace, probes, force, step):
            print(json_line("engine", fields) if json else line, flush=True)  # click would write past the progress line


bundles = lazy_app(
    {
        "list": (f"{__name__}:list_bundles", "List the cached bundles."),
        "verify": (f"{__name__}:verify", "Check every byte of bundles."),
        "pull": (f"{__name__}:pull", "Download a bundle from the hub."),
        "push": (f"{__name__}:push", "Upload a bundle to the hub."),
        "remove": (f"{__name__}:remove", "Remove cached bundles."),
    },
    name="bundles",
    help="List, share, verify and remove bundles.",
    epilog="EDGEVLM_CACHE names another directory for cached bundles.",
)


def list_bundles(json: Json = False) -> None:
    """List the cached bundles: name, family, precisions, size and directory."""
    from edgevlm.apps.bundles import cache

    for line in cache.list_bundles(json):
        typer.echo(line)


def verify(
    bundles: Annotated[
        list[str] | None, typer.Argument(metavar="BUNDLE", help="Check these.", show_default="all cached")
    ] = None,
) -> None:
    """Check every byte of bundles against their manifests.

    A run compares sizes only. Exits with status 1 where a bundle is damaged.
    """
    intact = True
    with progress("starting") as step:
        from edgevlm.apps.bundles import cache

        for line, well in cache.verify(bundles or [], step):
            intact &= well
            print(line, flush=True)
    raise typer.Exit(0 if intact else 1)


def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME[@REV]", help="Download this bundle.")],
    out: Annotated[Path | None, option("DIR", "Write the bundle there.", "the bundle cache")] = None,
    force: Annotated[bool, flag("--force", "Replace an existing bundle.")] = False,
) -> None:
    """Download a bundle from the hub, and print its directory.

    Every byte is checked against the bundle's manifest. Interrupted, the same command resumes.
    """
    with progress("asking the hub") as step:
        from edgevlm.apps.bundles import fetch
        from edgevlm.apps.bundles.hub import Repository, parse_id

        path = fetch.pull(Repository(parse_id(name), to_stderr), step, to_stderr, out, force=force)
    typer.echo(str(path))


def push(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="Upload this bundle.")],
    name: Annotated[str, typer.Argument(metavar="ORG/NAME[@BRANCH]", help="Upload to this repository.")],
    public: Annotated[bool, flag("--public", "Let everybody read a new repository.")] = False,
) -> None:
    """Upload a bundle to the hub, and print its address.

    Needs a token that may write (HF_TOKEN). The repository is created private unless it exists.
    """
    with progress("starting") as step:
        from edgevlm.apps.bundles import fetch

        address = fetch.push(bundle, name, step, public=public)
    typer.echo(address)


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME|all", help="Remove this, or all and unfinished exports.")],
) -> None:
    """Remove cached bundles."""
    from edgevlm.apps.bundles.cache import remove_bundles

    for path in remove_bundles(name):
        to_stderr(f"removed {path}")
