"""What a policy is: it looks at the cache when rows are coming and says which rows stay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy asks of the session beyond the cache.

    probe_layers: layers whose queries it wants after each chunk. guidance: text of a guidance forward before each
    compression. variant: the decoder graph to prefill with. per_layer_selection: keys are chosen between layers.
    """

    probe_layers: tuple[int, ...] = ()
    guidance: str | None = None
    variant: str = "whole"
    per_layer_selection: bool = False


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What a policy may know of the model: ``layers``, ``tokens_per_frame`` p, and ``prefix``, the rows never evicted."""

    layers: int
    tokens_per_frame: int
    prefix: int


class Policy(ABC):
    """A policy with a vision budget |M| per layer.

    Subclasses are dataclasses whose fields are the settings, and write one method, :meth:`select`. ``compress_to`` is |C|:
    the rows a compression leaves.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    bounded: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs()

    budget: int
    shape: StreamShape

    def attach(self, budget: int, shape: StreamShape) -> None:
        """Fix the budget |M| (vision tokens per layer) and the stream's shape, before the first row."""
        self.budget, self.shape = budget, shape

    @property
    def compress_to(self) -> int:
        """|C|, vision tokens per layer after a compression with nothing pressing."""
        return self.budget

    @property
    def room(self) -> int:
        """The most rows to append at once: what one compression makes free, and never less than a frame."""
        return max(self.budget - self.compress_to, self.shape.tokens_per_frame)

    def before_append(self, cache: KVCache, rows: int) -> list[Bool | None] | None:
        """Say what stays so that ``rows`` more fit in |M| in every layer.

        Returns per layer a mask ``[kv_heads, n_l]``, or None for a layer left as it is; None altogether when nothing is due.
        """
        held = cache.lengths - self.shape.prefix
        if not self.bounded or np.all(held + rows <= self.budget):
            return None
        target = max(0, min(self.compress_to, self.budget - rows))
        return [self.select(cache, layer, target) if held[layer] > target else None for layer in range(cache.layers)]

    @abstractmethod
    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        """Rows of ``layer`` to keep: a mask ``[kv_heads, n_l]`` with the prefix and exactly ``target`` others per head."""


def tokens_of(fraction: float, whole: int) -> int:
    """``floor(fraction * whole)`` that does not fall below an exact product by rounding (0.75 * 4 is 3)."""
    return math.floor(fraction * whole + 1e-9)


def newest(seq: NDArray[np.int64], among: Bool, count: int) -> Bool:
    """Per head the ``count`` newest rows by ``seq``: all arrays ``[kv_heads, n]``."""
    from edgevlm.runtime.primitives import top_k

    return top_k(np.zeros(seq.shape, np.float32), seq, among, count)


def parse_settings(text: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its settings."""
    name, _, rest = text.partition(":")
    pairs: Sequence[str] = [part for part in rest.split(",") if part]
    return name, {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
