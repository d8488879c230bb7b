"""What a plan needs to know of a model: sizes of its decoder and of its tower, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BLOCK = 32  # weights of a row that share a scale, unless a checkpoint that was rounded already says otherwise


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower. A grid is what one frame becomes, or ``group`` frames together: ``tokens`` rows of the decoder.

    parameters: all that it stores, constants of its graph among them. block_parameters: of the matrices that every patch of
    ``patches`` goes through; projector_parameters: of those that each of ``projected`` rows goes through. attended: keys that a
    patch sees, the mean over ``blocks``. size: (height, width) of a frame, pixels. text: rows of text around each grid.
    precision: of its linears.
    """

    parameters: int
    block_parameters: int
    projector_parameters: int
    projected: int
    tokens: int
    patches: int
    attended: float
    blocks: int
    width: int
    inner: int
    heads: int
    size: tuple[int, int]
    group: int = 1
    text: int = 0
    precision: str = "fp32"

    @property
    def rows(self) -> int:
        """Rows of the decoder for each grid."""
        return self.tokens + self.text


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model. matrices: parameters of all layers' matrices; vectors: of norms and biases; tied: the head is the embedding.

    inner: width of the MLP. prefix: rows never evicted; closing: rows that close a video. limit: positions of a stream.
    files: bytes of its weights where it is a bundle, by ``decoder``, ``embedding`` and ``vision``. precision: of those, or of a
    checkpoint that has been rounded already; group: weights of a matrix that share a scale, where they are rounded. kv: what
    its graphs keep keys and values as.
    """

    name: str
    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    matrices: int
    vectors: int
    tied: bool
    axes: int
    limit: int
    tower: Tower
    prefix: int
    closing: int = 0
    deepstack: int = 0
    precision: str = "fp32"
    group: int = BLOCK
    kv: str = "fp32"
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def text_room(self) -> int:
        """Rows set aside for a question's turn, as :class:`edgevlm.runtime.budget.TextRoom` divides them."""
        return 3 * min(256, self.limit // 16) + self.closing

    @property
    def least_budget(self) -> int:
        """The smallest budget that any policy takes: two frames."""
        return 2 * self.tower.rows

    @property
    def most_budget(self) -> int:
        """The largest budget that the model's positions leave room for."""
        return self.limit - self.prefix - self.text_room

    def capacity(self, budget: int) -> int:
        """Rows of each layer's cache at a budget: prefix + |M| + text room."""
        return self.prefix + budget + self.text_room


def layer_matrices(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> int:
    """Parameters of one layer's matrices: q, k, v, o of attention and the gate, up and down of its MLP."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
