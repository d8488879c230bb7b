"""``edgevlm export``, ``build`` and ``bundles``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import KV, Json, note, pixels

if TYPE_CHECKING:
    from edgevlm.runtime.engine import KVType


class Scaling(str, Enum):
    """Of weights before they are rounded."""

    NONE = "none"
    AWQ = "awq"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face checkpoint directory, as save_pretrained writes it.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The bundle to write.", show_default="a folder of the cache, made once"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
    st_spattn: Annotated[
        int | None,
        typer.Option(
            metavar="LAYER",
            help="The first layer that prefills sparsely when a policy asks for PureKV's ST-SpAttn.",
            show_default="3",
            min=0,
        ),
    ] = None,
    frame_size: Annotated[
        str,
        typer.Option(
            metavar="WxH", help="The camera's frames, for families that keep their aspect (Qwen): other frames are stretched."
        ),
    ] = "640x480",
    text_gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the text half's weights from a GGUF file: llama, qwen2 or qwen3."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|fp16|int8|int4|int4-zp",
            help="Of the decoder's weights; int4-zp: with zero points.",
            show_default="fp32; AWQ and GPTQ checkpoints as they are",
        ),
    ] = None,
    scaling: Annotated[
        Scaling, typer.Option(help="awq: whole numbers are rounded more finely where the model's activations are large.")
    ] = Scaling.NONE,
    vision_precision: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|fp16|int8",
            help="Of the vision tower's linears; fp16 is for TensorRT, int8 for ONNX Runtime.",
            show_default="fp32; for TensorRT fp16",
        ),
    ] = None,
    kv: Annotated[
        KV | None,
        typer.Option(help="What the cache keeps keys and values as.", show_default="fp32; fp16 for a Jetson and for cuda"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write for this device: orin-nano-8, orin-agx-64, cpu, cuda and others."),
    ] = None,
    jetpack: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The device's JetPack: 6.2, 7.2.", show_default="its newest")
    ] = None,
) -> None:
    """Turn a checkpoint into a bundle that edgevlm runs: ONNX graphs, weights, tokenizer, manifest; prints where it is.

    When it is stopped or killed, the same command goes on. Without --out the bundle is kept in the cache, where run --model
    CHECKPOINT finds it too.
    """
    from rich.console import Console

    from edgevlm.apps.bundles.cache import kept_bundle
    from edgevlm.apps.bundles.export_target import Target, target_of
    from edgevlm.errors import UserError
    from edgevlm.export import export_checkpoint
    from edgevlm.export.checkpoint import checkpoint_folder
    from edgevlm.packages import needed
    from edgevlm.runtime.graph_profiles import ONNXRUNTIME

    camera = pixels(frame_size)
    keep: KVType | None = None if kv is None else kv.value
    if device is None and jetpack is not None:
        raise UserError("--jetpack goes with --device; give both")
    target = Target(ONNXRUNTIME, precision, keep or "fp32", "")
    if device is not None:
        target = target_of(checkpoint_folder(checkpoint), device, jetpack, precision, keep, camera)
        note(target.line)
    options: dict[str, Any] = {
        "st_spattn_from": st_spattn, "camera": camera, "text_gguf": text_gguf, "precision": target.precision,
        "vision_precision": vision_precision, "kv": target.kv, "profile": target.profile,
    }  # fmt: skip
    command = export_checkpoint if scaling is Scaling.NONE else needed("edgevlm.apps.bundles.awq", "exporting").export_scaled
    with Console(stderr=True).status("reading the checkpoint") as status:
        if out is None:
            scaled = scaling is not Scaling.NONE
            path = kept_bundle(checkpoint, status.update, note, force=force, scaled=scaled, **options)
        else:
            path = command(checkpoint, out, progress=status.update, notice=note, force=force, **options)
    typer.echo(str(path))


def build(
    bundle: Annotated[str, typer.Argument(help="A bundle that edgevlm export --device wrote.")],
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Refuse to build on anything but this device.", show_default="this machine's GPU"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="N|6k", help="The largest budget of sessions that will run it.", show_default="as run"),
    ] = None,
    workspace: Annotated[int, typer.Option(metavar="MB", help="Memory that a layer may work with.")] = 1024,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes/--no-probes", help="Without, for policies that do not look at attention, calls take less memory."
        ),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Build engines that are there too.")] = False,
    json: Json = False,
) -> None:
    """Build a bundle's TensorRT engines on this device, which takes minutes each; prints where they are.

    Engines that are there and match are left alone. When it is stopped or killed, the same command goes on.
    """
    from rich.console import Console

    from edgevlm.apps.bundles import build as command
    from edgevlm.apps.run.launch import parse_count

    wanted = None if budget is None else parse_count(budget)
    request = command.BuildRequest(bundle, device, wanted, workspace, probes, force)
    with Console(stderr=True).status("reading the bundle") as status:
        for line in command.build(request, note, status.update, json):
            typer.echo(line)


def bundles(
    remove: Annotated[
        str | None, typer.Option(metavar="NAME|all", help="Remove a bundle, or all and what was left unfinished.")
    ] = None,
    json: Json = False,
) -> None:
    """List the bundles that are kept of checkpoints, with their sizes. EDGEVLM_CACHE names another folder for them."""
    from edgevlm.apps.bundles.cache import list_bundles, remove_bundles

    if remove is not None:
        for path in remove_bundles(remove):
            note(f"removed {path}")
        return
    for line in list_bundles(json):
        typer.echo(line)
