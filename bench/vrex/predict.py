"""What the paper's figures are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from edgevlm.bench.vrex.analytic import Analytic, Call
from edgevlm.bench.vrex.paper import Figure, Paper, System

Quantity = Callable[[Analytic, System, System | None, int, int], float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure and what the model says. error: relative.

    room: of a frame's milliseconds, the share of the rows held that PCIe can bring in them. Where it is less than the ratio,
    the figure and the ratio do not go together, whatever the rest of the machine does.
    """

    figure: Figure
    predicted: float
    room: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.figure.value - 1

    def line(self) -> dict[str, Any]:
        figure = self.figure
        return {
            "bench": "vrex",
            "at": figure.at,
            "quantity": figure.quantity,
            "system": figure.system,
            "over": figure.over,
            "length": figure.length,
            "pick": figure.pick,
            "batch": figure.batch,
            "predicted": round(self.predicted, 4),
            "paper": figure.value,
            "error": round(self.error, 4),
            "fixes": figure.fixes,
            "room": None if self.room is None else round(self.room, 4),
        }


def predictions(model: Analytic) -> Iterator[Prediction]:
    """One for each figure, in the paper's order."""
    for figure in model.paper.figures:
        yield Prediction(figure, predict(model, figure), room(model.paper, figure))


def predict(model: Analytic, figure: Figure) -> float:
    """The figure's quantity; the least or the most of all lengths where it names none."""
    systems = model.paper.systems
    over = systems[figure.over] if figure.over else None
    lengths = model.paper.lengths if figure.length is None else (figure.length,)
    found = [QUANTITIES[figure.quantity](model, systems[figure.system], over, length, figure.batch) for length in lengths]
    return min(found) if figure.pick == "least" else max(found)


def room(paper: Paper, figure: Figure) -> float | None:
    """Of a frame's milliseconds at a length: the time x PCIe's rate over the bytes held."""
    if figure.quantity != "frame_ms" or figure.length is None:
        return None
    rate = 1e9 * paper.systems[figure.system].hardware.link_gb_s
    return figure.value / 1e3 * rate / (figure.batch * figure.length * paper.llm.row_bytes)


def middle_error(found: list[Prediction]) -> float:
    """The median of the errors' sizes, of what fixes no constant."""
    return median(abs(one.error) for one in found if one.figure.fixes is None)


def latencies(model: Analytic) -> Iterator[dict[str, Any]]:
    """A frame's and a token's milliseconds, and a frame's joules, of every system at every length: the bars of Fig. 13a, whose
    heights the text does not give but for V-Rex8's frames."""
    for name, system in model.paper.systems.items():
        if system.hardware.link_gb_s > 4 or not system.offloads:
            continue
        for length in model.paper.lengths:
            frame, token = model.frame(system, length), model.token(system, length)
            yield {
                "bench": "vrex-latency",
                "system": name,
                "length": length,
                "frame_ms": round(1e3 * frame.seconds, 2),
                "token_ms": round(1e3 * token.seconds, 2),
                "frame_j": round(frame.seconds * system.hardware.watts, 3),
                "prefill_ratio": system.method.prefill_ratio,
                "generation_ratio": system.method.generation_ratio,
            }


def _answer(model: Analytic, system: System, held: int) -> tuple[float, float]:
    """Seconds of COIN's frames and question, and of its answer."""
    load = model.paper.workload
    prefill = load.frames * model.frame(system, held).seconds + model.question(system, held).seconds
    return prefill, load.answer * model.token(system, held).seconds


def _ratio(call: Callable[[Analytic, System, int, int], float]) -> Quantity:
    """How many times more the other system takes."""

    def quantity(model: Analytic, system: System, over: System | None, held: int, batch: int) -> float:
        assert over is not None
        return call(model, over, held, batch) / call(model, system, held, batch)

    return quantity


def _share(part: Callable[[Call], float]) -> Quantity:
    """Of a frame's time."""

    def quantity(model: Analytic, system: System, over: System | None, held: int, batch: int) -> float:
        call = model.frame(system, held, batch)
        return part(call) / call.seconds

    return quantity


def _prefill_share(model: Analytic, system: System, over: System | None, held: int, batch: int) -> float:
    prefill, answer = _answer(model, system, held)
    return prefill / (prefill + answer)


def _frame(model: Analytic, system: System, held: int, batch: int) -> float:
    return model.frame(system, held, batch).seconds


def _token(model: Analytic, system: System, held: int, batch: int) -> float:
    return model.token(system, held, batch).seconds


def _tops_a_watt(model: Analytic, system: System, over: System | None, held: int, batch: int) -> float:
    call = model.frame(system, held, batch)
    return call.operations / (1e12 * call.seconds * system.hardware.watts)


QUANTITIES: dict[str, Quantity] = {
    "frame_ms": lambda model, system, over, held, batch: 1e3 * _frame(model, system, held, batch),
    "token_ms": lambda model, system, over, held, batch: 1e3 * _token(model, system, held, batch),
    "frame_speedup": _ratio(_frame),
    "token_speedup": _ratio(_token),
    "answer_speedup": _ratio(lambda model, system, held, batch: sum(_answer(model, system, held))),
    "frame_energy_gain": _ratio(lambda *about: _frame(*about) * about[1].hardware.watts),
    "token_energy_gain": _ratio(lambda *about: _token(*about) * about[1].hardware.watts),
    "frame_tops_a_watt": _tops_a_watt,
    "prefill_share": _prefill_share,
    "prediction_share": _share(lambda call: call.prediction),
    "fetch_share": _share(lambda call: call.waiting),
    "retrieval_share": _share(lambda call: call.prediction + call.waiting),
    "roofline_share": _share(lambda call: call.ideal),
}
