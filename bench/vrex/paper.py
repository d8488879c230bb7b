"""What V-Rex's paper says: its hardware, retrieval ratios, systems and figures, from ``paper.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Hardware:
    """A column of Table I. tflops: of 16 bits. dram_gb_s, link_gb_s (PCIe): 1e9 bytes a second. watts: the whole system's."""

    title: str
    tflops: float
    dram_gb_s: float
    link_gb_s: float
    watts: float
    is_gpu: bool
    source: str


@dataclass(frozen=True, slots=True)
class Method:
    """How rows are chosen.

    Ratios: shares of the rows held that are fetched, for a frame or a question and for a token of an answer. is_scattered:
    tokens are chosen one by one, so that they lie apart. prediction: how they are scored; None where all are fetched.
    rows_a_summary: rows that one score stands for. predicts_frames: it chooses for frames too, and not for answers alone.
    """

    title: str
    prefill_ratio: float
    generation_ratio: float
    is_scattered: bool
    prediction: Literal["top_k", "resv"] | None
    rows_a_summary: float | None
    predicts_frames: bool
    source: str


@dataclass(frozen=True, slots=True)
class System:
    """Hardware with a method. offloads: rows are fetched over PCIe. has_kvmu: rows of a cluster lie together (V-Rex alone)."""

    hardware: Hardware
    method: Method
    offloads: bool = True
    has_kvmu: bool = True


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the text. ``at``: its place. length: rows held; where None, ``pick`` of all lengths. over: what it is
    relative to. fixes: the constant that is taken from it, so that it is no prediction."""

    at: str
    quantity: str
    system: str
    value: float
    length: int | None = None
    pick: Literal["least", "most"] | None = None
    over: str | None = None
    batch: int = 1
    fixes: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """The language model's sizes. bytes: of a number."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bytes: int
    source: str

    @property
    def matrices(self) -> int:
        """Parameters of all layers' matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters of the matrix that gives logits."""
        return self.vocab * self.hidden

    @property
    def row_bytes(self) -> int:
        """Keys and values of one row in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes


@dataclass(frozen=True, slots=True)
class Tower:
    """The vision tower's sizes. frame_rows: rows of the decoder that a frame becomes."""

    layers: int
    width: int
    intermediate: int
    patches: int
    frame_rows: int
    source: str

    @property
    def matrices(self) -> int:
        """Parameters of all layers' matrices."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.intermediate)


@dataclass(frozen=True, slots=True)
class Workload:
    """COIN on average: frames, and tokens of a question and of an answer."""

    frames: int
    question: int
    answer: int
    source: str


@dataclass(frozen=True, slots=True)
class Paper:
    """All of it. ``lengths``: rows held that Figs. 13 and 14 sweep."""

    llm: Decoder
    tower: Tower
    workload: Workload
    lengths: tuple[int, ...]
    systems: Mapping[str, System]
    figures: tuple[Figure, ...]

    def fixing(self, constant: str) -> Figure:
        """The figure that a constant is taken from."""
        return next(figure for figure in self.figures if figure.fixes == constant)

    def with_ratios(self, ratios: Mapping[str, tuple[float, float]]) -> Paper:
        """The same with other (prefill, generation) ratios of methods, by their titles."""

        def changed(system: System) -> System:
            if system.method.title not in ratios:
                return system
            prefill, generation = ratios[system.method.title]
            return replace(system, method=replace(system.method, prefill_ratio=prefill, generation_ratio=generation))

        return replace(self, systems={name: changed(system) for name, system in self.systems.items()})


@cache
def load_paper() -> Paper:
    """The paper as it is, with the ratios of its Table II."""
    data = json.loads(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))
    hardware = {name: Hardware(**about) for name, about in data["hardware"].items()}
    methods = {name: Method(**about) for name, about in data["methods"].items()}

    def system(about: dict[str, Any]) -> System:
        return System(**about | {"hardware": hardware[about["hardware"]], "method": methods[about["method"]]})

    return Paper(
        llm=Decoder(**data["llm"]),
        tower=Tower(**data["tower"]),
        workload=Workload(**data["workload"]),
        lengths=tuple(data["lengths"]["value"]),
        systems={name: system(about) for name, about in data["systems"].items()},
        figures=tuple(Figure(**figure) for figure in data["figures"]),
    )
