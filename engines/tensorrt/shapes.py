"""How a bundle's graphs are called: TensorRT's optimisation profiles, and the dimensions that are fixed when they are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.graph_profiles import EngineShapes

Dims = tuple[int, ...]
Range = tuple[Dims, Dims, Dims]  # least, usual and most
USUAL_QUESTION = 64  # rows that kernels for text are chosen by

ONE, ROWS, QUESTION = "one-token", "chunk", "question"
DECODER_CALLS = (ONE, ROWS, QUESTION)  # the order of an engine's profiles


@dataclass(frozen=True, slots=True)
class CallShapes:
    """One kind of call of a graph: the least, usual and largest shape of each input that has dimensions to give."""

    name: str
    inputs: Mapping[str, Range]


def decoder_calls(bundle: Bundle, capacity: int) -> list[CallShapes]:
    """Of the ``whole`` graph with ``capacity`` rows in every layer: one token, a chunk's rows, a question's rows.

    One row of logits is asked for of a chunk or a token, up to as many as there are of a question. No call has more rows than
    the memory.
    """
    spec, given = bundle.decoder, _shapes(bundle)
    shapes = replace(given, rows=min(given.rows, capacity), question=min(given.question, capacity))
    half, width = spec.head_dim // 2, spec.row_width
    usual = min(USUAL_QUESTION, shapes.question)
    sizes: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
        ONE: ((1, 1, 1), (1, 1, 1)),
        ROWS: ((1, shapes.rows, shapes.rows), (1, 1, 1)),
        QUESTION: ((1, usual, shapes.question), (1, 1, shapes.question)),
    }
    calls = []
    for name, (rows, logits) in sizes.items():
        inputs = {
            "inputs_embeds": _range(rows, _rows_of(width)),
            "cos": _range(rows, _rows_of(half)),
            "sin": _range(rows, _rows_of(half)),
            "logit_rows": _range(logits, lambda n: (n,)),
        }
        read = _range((1, capacity, capacity), lambda n: (n,))
        inputs |= {f"columns{layer}": read for layer in range(spec.layers)}
        calls.append(CallShapes(name, inputs))
    return calls


def vision_calls(bundle: Bundle) -> list[CallShapes]:
    """Of the tower: up to as many groups of frames as a chunk has."""
    vision = bundle.vision
    most = max(1, _shapes(bundle).frames // vision.group)
    frames = _range((1, most, most), lambda n: (n, 3 * vision.group, *vision.size))
    return [CallShapes("frames", {"pixel_values": frames})]


def projection_calls(bundle: Bundle) -> list[CallShapes]:
    """Of the ``projections`` graph: a guidance text's rows."""
    spec, most = bundle.decoder, _shapes(bundle).question
    rows, half = (1, min(USUAL_QUESTION, most), most), spec.head_dim // 2
    widths = {"inputs_embeds": spec.hidden, "cos": half, "sin": half}
    return [CallShapes("texts", {name: _range(rows, _rows_of(width)) for name, width in widths.items()})]


def fixed_dimensions(bundle: Bundle, capacity: int) -> dict[str, int]:
    """Symbolic dimensions that a build of the ``whole`` graph gives a number: the rows of each layer's memory."""
    return {f"C{layer}": capacity for layer in range(bundle.decoder.layers)}


def pieces(rows: int, most: int) -> Iterator[slice]:
    """``rows`` rows in slices of ``most`` at the most."""
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _range(sizes: tuple[int, int, int], dims: Callable[[int], Dims]) -> Range:
    least, usual, most = sizes
    return dims(least), dims(usual), dims(most)


def _rows_of(width: int) -> Callable[[int], Dims]:
    return lambda n: (1, n, width)


def _shapes(bundle: Bundle) -> EngineShapes:
    if bundle.shapes is None:
        raise ValueError(f"{bundle.path} is of profile {bundle.profile}, which has no shapes for engines")
    return bundle.shapes
