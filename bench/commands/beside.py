"""``edgevlm bench decode``, ``prefill`` and ``vision``: our speed beside that of other runtimes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.errors import UserError

Against = Annotated[str, typer.Option(metavar="NAME,...", help="Others with the same weights, in the same rounds.")]
Threads = Annotated[int, typer.Option(help="CPU threads of each runtime.", min=1, max=256)]
Rounds = Annotated[int, typer.Option(help="Medians are taken over as many; runtimes take turns.", min=1)]


def decode(
    model: Annotated[
        str,
        typer.Option(
            metavar="seeded-135m|seeded-0.5b|seeded-3b|demo|CHECKPOINT",
            help="seeded, demo: the shape with random weights; seeded-3b: Qwen2.5-VL-3B's decoder.",
        ),
    ] = "seeded-135m",
    against: Against = "llama.cpp,transformers",
    context: Annotated[str, typer.Option(metavar="N,...", help="Tokens held.")] = "300,6000",
    precisions: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of weights, as for export --precision.")
    ] = "fp32,int8,int4",
    kv: Annotated[str, typer.Option(metavar="fp32,fp16", help="Of keys and values.")] = "fp32,fp16",
    layers: Annotated[int | None, typer.Option(help="The model's first so many alone.", show_default="all", min=1)] = None,
    threads: Threads = 1,
    rounds: Rounds = 15,
    as_json: Json = False,
) -> None:
    """Time one token beside llama.cpp and transformers: the same weights, the same precision, in turn.

    llama.cpp is measured where llama-cpp-python and gguf are installed, transformers in fp32. It takes
    3 GB of memory with the defaults.
    """
    from edgevlm.packages import needed

    bench = needed("edgevlm.bench.decode", "a model of random weights")
    lines = bench.decode(
        model=model, against=_names(against), contexts=_numbers("--context", context), precisions=_names(precisions),
        kinds=_names(kv), layers=layers, threads=threads, rounds=rounds, progress=_progress,
    )  # fmt: skip
    _print(lines, ("precision", "kv", "context", "runtime"), "token", as_json)


def prefill(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="seeded-0.5b|seeded-135m|demo|CHECKPOINT",
            help="One or more, as for decode.",
            show_default="seeded-0.5b, demo",
        ),
    ] = None,
    against: Against = "transformers",
    held: Annotated[int, typer.Option(help="Tokens in the memory.", min=1)] = 6000,
    chunks: Annotated[str, typer.Option(metavar="N,...", help="Frames appended at once.")] = "4,16",
    tokens_per_frame: Annotated[int | None, typer.Option(help="Of a frame.", show_default="196; demo: 16", min=1)] = None,
    threads: Threads = 1,
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """Time a frame's prefill into a full memory beside transformers with a DynamicCache of the same length."""
    from edgevlm.packages import needed

    bench = needed("edgevlm.bench.prefill", "a model of random weights")
    lines = bench.prefill(
        models=model or bench.MODELS, against=_names(against), held=held, chunks=_numbers("--chunks", chunks),
        tokens_per_frame=tokens_per_frame, threads=threads, rounds=rounds, progress=_progress,
    )  # fmt: skip
    _print(lines, ("model", "frames", "runtime"), "frame", as_json)


def vision(
    tower: Annotated[
        list[str] | None,
        typer.Option(metavar="siglip-so400m-384|qwen2.5-vl-448", help="One or more.", show_default="both"),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of its linears, as for export --vision-precision.")
    ] = "fp32,int8",
    batch: Annotated[str, typer.Option(metavar="N,...", help="Frames in one call.")] = "1,4",
    against: Against = "transformers",
    layers: Annotated[int | None, typer.Option(help="The tower's first so many alone.", show_default="all", min=1)] = None,
    threads: Threads = 1,
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """Time a vision tower of real size with random weights, and say what int8 changes in its features.

    Takes 7 GB of memory and 4 GB of disk for a while with all layers.
    """
    from edgevlm.packages import needed

    bench = needed("edgevlm.bench.vision", "a model of random weights")
    lines = bench.vision(
        towers=tower or tuple(bench.TOWERS), precisions=_names(precision), batches=_numbers("--batch", batch),
        against=_names(against), layers=layers, threads=threads, rounds=rounds, progress=_progress,
    )  # fmt: skip
    _print(lines, ("tower", "batch", "precision", "runtime"), "frame", as_json)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(name) for name in _names(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {text!r}: give whole numbers of 1 or more with commas between them")
    return numbers


def _progress(what: str) -> None:
    typer.echo(what, err=True)


def _print(lines: Iterable[dict[str, Any]], columns: tuple[str, ...], unit: str, as_json: bool) -> None:
    """JSON, or a row a line: its place and its milliseconds, ratio or error."""
    for line in lines:
        if as_json:
            typer.echo(json.dumps(line))
            continue
        place = "".join(f"{line[column]!s:<20}" for column in columns)
        if "ratio" in line:
            spread = f"[{line['low']:.2f}, {line['high']:.2f}]"
            other = " ".join(str(line[key]) for key in ("against", "against_kv") if key in line)
            typer.echo(f"{place}/ {other}: {line['ratio']:.2f} {spread}, processor {line['cpu_ratio']:.2f}")
        elif "cosine" in line:
            typer.echo(
                f"{line['tower']:<20}int8 to fp32: cosine {line['cosine']:.6f}, largest error {line['max_error']:.4f} rms"
            )
        else:
            spread = f"[{line['low']:.1f}, {line['high']:.1f}]"
            cpu = line[f"cpu_ms_per_{unit}"]
            typer.echo(f"{place}{line[f'ms_per_{unit}']:.1f} ms {spread} a {unit}, processor {cpu:.1f} ms")
