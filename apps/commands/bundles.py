"""``edgevlm export`` and ``edgevlm bundles``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.typed import note, pixels
from edgevlm.bench.cli import KV


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
    vision_precision: Annotated[str, typer.Option(metavar="fp32|int8", help="Of the vision tower's linears.")] = "fp32",
    kv: Annotated[KV, typer.Option(help="What the cache keeps keys and values as.")] = KV.fp32,
) -> None:
    """Turn a checkpoint into a bundle that edgevlm runs: ONNX graphs, weights, tokenizer, manifest; prints where it is.

    When it is stopped or killed, the same command goes on. Without --out the bundle is kept in the cache, where run --model
    CHECKPOINT finds it too.
    """
    from rich.console import Console

    from edgevlm.apps.bundles import kept_bundle
    from edgevlm.bench import writing
    from edgevlm.export import export_checkpoint

    options: dict[str, Any] = {
        "st_spattn_from": st_spattn, "camera": pixels(frame_size), "text_gguf": text_gguf, "precision": precision,
        "vision_precision": vision_precision, "kv": kv.value,
    }  # fmt: skip
    command = export_checkpoint if scaling is Scaling.NONE else writing("edgevlm.apps.scaling").export_scaled
    with Console(stderr=True).status("reading the checkpoint") as status:
        if out is None:
            scaled = scaling is not Scaling.NONE
            path = kept_bundle(checkpoint, status.update, note, force=force, scaled=scaled, **options)
        else:
            path = command(checkpoint, out, progress=status.update, notice=note, force=force, **options)
    typer.echo(str(path))


def bundles(
    remove: Annotated[
        str | None, typer.Option(metavar="NAME|all", help="Remove a bundle, or all and what was left unfinished.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """List the bundles that are kept of checkpoints, with their sizes. EDGEVLM_CACHE names another folder for them."""
    from edgevlm.apps.bundles import list_bundles, remove_bundles

    if remove is not None:
        for path in remove_bundles(remove):
            note(f"removed {path}")
        return
    for line in list_bundles(json):
        typer.echo(line)
