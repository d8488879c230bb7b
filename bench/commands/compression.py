"""``edgevlm bench compression``."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, check_kv
from edgevlm.errors import UserError

if TYPE_CHECKING:
    from edgevlm.bench.compression import Shape


class Place(str, Enum):
    """Of the cache."""

    cpu = "cpu"
    cuda = "cuda"


def compression(
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default="every bounded policy")
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = 36,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=2)] = 128,
    tokens: Annotated[int, typer.Option(help="Held in each layer.", min=1)] = 6076,
    dtype: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Of keys and values.", show_default="all")] = None,
    threads: Annotated[int, typer.Option(help="That kernels use.", min=1, max=256)] = 1,
    rounds: Annotated[int, typer.Option(help="Medians are taken over as many.", min=1)] = 5,
    device: Annotated[Place, typer.Option(help="cuda: its kernels, beside a copy within its memory.")] = Place.cpu,
    as_json: Json = False,
) -> None:
    """Time each policy's compression beside a numpy rendition and beside one plain read of all keys and values."""
    from edgevlm.bench.compression import Shape, run

    if device is Place.cuda:
        _on_cuda(Shape(layers, kv_heads, head_dim, tokens), dtype or ["fp32", "fp16"], rounds, as_json)
        return
    head = f"{'policy':<24}{'dtype':>6}{'ms':>10}{'read ms':>10}{'pass/read':>11}{'numpy ms':>11}"
    if not as_json:
        typer.echo(f"{layers} layers x {kv_heads} KV heads x {tokens} tokens x {head_dim}, threads: {threads}\n{head}")
    dtypes = [str(check_kv(kind)) for kind in dtype or ("fp32", "fp16", "int8")]
    for result in run(policy or [], Shape(layers, kv_heads, head_dim, tokens), dtypes, threads, rounds):
        line = result.line()
        typer.echo(
            json.dumps(line) if as_json else f"{result.policy:<24}{result.dtype:>6}{result.ms:>10.2f}{result.read_ms:>10.2f}"
            f"{line['pass_over_read']:>11.2f}{result.reference_ms:>11.1f}"
        )  # fmt: skip


def _on_cuda(shape: Shape, dtypes: list[str], rounds: int, as_json: bool) -> None:
    """The kernels' bandwidth; one line on stderr, and no more, without a device."""
    from edgevlm.bench.compression_cuda import measure
    from edgevlm.runtime.cuda.driver import open_driver

    try:
        name = open_driver().device.name
    except UserError as error:
        typer.echo(f"skipped: {error}", err=True)
        return
    if not as_json:
        typer.echo(f"{name}, {shape.layers} layers x {shape.kv_heads} KV heads x {shape.tokens} tokens x {shape.head_dim}")
        typer.echo(f"{'part':<14}{'dtype':>6}{'ms':>10}{'GB/s':>9}{'copy GB/s':>11}{'share':>8}")
    for kind in dtypes:
        for reached in measure(shape, kind, rounds):
            line = reached.line()
            typer.echo(
                json.dumps(line) if as_json else f"{line['part']:<14}{line['dtype']:>6}{line['ms']:>10.4f}{line['gb_s']:>9.1f}"
                f"{line['copy_gb_s']:>11.1f}{line['share_of_copy']:>8.0%}"
            )  # fmt: skip
