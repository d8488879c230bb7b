"""HERMES and InfiniPot-V as their authors' programs have them: our policies with the programs' choices in place of ours."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from reference_decoder import ReferenceDecoder

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import Guidance, Needs, setting
from edgevlm.runtime.policies.hermes import GLOBAL, LAMBDAS, LOCAL, Hermes, normalised, recency, summary_of
from edgevlm.runtime.policies.infinipot_v import WINDOWS, InfiniPotV

ADDED = 1e-6  # to the range of a min-max


@dataclass
class OfficialInfiniPotV(InfiniPotV):
    """The authors' program at 81a4dbe, without pooling; ``tau`` has no effect.

    The i-th oldest token of a head stands for patch ``i % p`` of frame ``i // p``, whatever it was. Of the frames held, the
    ``recent`` fraction is recent, rounded down, one at least; with ``alpha`` 0 none is.
    """

    recent: float = setting(0.25, "fraction of the frames held", at_least=0, at_most=1)

    name = "infinipot-v-official"

    @property
    def basis(self):
        return ""

    @property
    def compress_to(self):
        frames = max(1, super().compress_to // self.shape.tokens_per_frame)
        return frames * self.shape.tokens_per_frame

    @property
    def needs_whole_frames(self):
        return True

    def compress(self, layer):
        """Keep whole frames' worth of vision tokens a head."""
        per_frame, kind, seq = self.shape.tokens_per_frame, layer.kind, layer.seq
        layer.target -= layer.target % per_frame
        target = layer.target
        vision = kind == Kind.VISION
        count = int(vision[0].sum())
        slots = np.argsort(np.where(vision, seq, np.iinfo(np.int64).max), 1, kind="stable")[:, :count]
        held = (layer.cache.dequantize("key", layer.index), layer.values)
        key, value = (np.take_along_axis(part, slots[..., None], 1).astype(np.float64) for part in held)
        order, everything = np.take_along_axis(seq, slots, 1), np.ones(slots.shape, np.bool_)
        score = self.salience(layer, np.linalg.norm(value, axis=-1))
        if self.alpha > 0:
            new = per_frame * max(1, int(self.recent * (count // per_frame)))
            past = everything & (np.arange(count) < count - new)
            distinct = np.zeros(slots.shape)
            distinct[:, : count - new] = distinctness(key, count - new, per_frame)
            quota = max(0, target - round((1 - self.alpha) * target) - new)
            score[~past | kernels.top_k(distinct.astype(np.float32), order, past, quota)] = np.inf
        kept = kernels.top_k(score.astype(np.float32), order, everything, target)
        keep = kind == Kind.PREFIX
        np.put_along_axis(keep, slots, kept, 1)
        layer.keep(keep)

    def salience(self, layer, norms):
        """VaN's score of value norms ``[kv_heads, n]``, oldest first."""
        return norms


def distinctness(key, past, per_frame):
    """Eq. 4 on pseudo-frames: minus the mean cosine with the recent keys of the same patch, ``[H, past]``.

    key: rotated, oldest first, ``[H, n, D]``, the first ``past`` of them old.
    """
    unit = key / (np.linalg.norm(key, axis=-1, keepdims=True) + 1e-9)
    frames = unit.reshape(len(key), -1, per_frame, key.shape[-1])
    old, new = frames[:, : past // per_frame], frames[:, past // per_frame :]
    similarity = np.einsum("hfpd,hpd->hfp", old, new.mean(1))
    return -similarity.reshape(len(key), past)


@dataclass
class OfficialHermes(Hermes):
    """Appends, then compresses, with memory for another ``ahead`` rows; open its session with a budget of these more, eager.

    The prompts of a compression, with the last question and answer, are raw embeddings that ``project`` projects in each layer.
    Layers meet by rank; a deep layer's summary is another one at each compression, after the newest token and evictable. Depths
    are the paper's.
    """

    ahead: int = 0
    project = None  # texts -> Guidance
    last_turn = ""
    name = "hermes-official"

    def attach(self, budget, shape):
        self._compressing = False
        super().attach(budget - self.ahead, replace(shape, calibration=None))

    @property
    def layer_budgets(self):
        return super().layer_budgets + (0 if self._compressing else self.ahead)

    @property
    def needs(self):
        return Needs(guidance=self.guidance if self._compressing else ())

    @property
    def guidance(self):
        return tuple(filter(str.strip, prompts(GLOBAL, LOCAL, self.last_turn)))

    def before_append(self, cache, rows, *others):
        self._compressing = True
        try:
            return super().before_append(cache, 0, lambda: self.project(self.guidance))
        finally:
            self._compressing = False

    def competing(self, layer):
        return np.isin(layer.kind[0], (Kind.VISION, Kind.SUMMARY))

    def summarise(self, layer, keep):
        after = int(layer.cache.position(layer.index)[0, keep].max(initial=-1)) + 1
        return summary_of(layer, ~keep, np.ones(len(keep)), after)

    def smooth(self, layers, scores):
        """The n-th token takes from the n-th of the layer above, by linear interpolation where that has more or fewer."""
        done = list(scores)
        among = [(layer, self.competing(layer)) for layer in layers]
        held = [(layer.seq[0, rows], layer.cache.position(layer.index)[0, rows, 0]) for layer, rows in among]
        order = [np.lexsort(of_layer) for of_layer in held]
        for layer in range(len(done) - 2, -1, -1):
            above, own, weight = done[layer + 1], scores[layer].copy(), LAMBDAS[self.kind_of(layer)]
            if len(above):
                here, there = order[layer], order[layer + 1]
                place = (np.arange(len(own)) + 0.5) * len(above) / max(len(own), 1) - 0.5
                own[here] = (1 - weight) * own[here] + weight * np.interp(place, np.arange(len(above)), above[there])
                done[layer] = own
        return done

    def score_rows(self, layer):
        depth, among = self.kind_of(layer.index), self.competing(layer)
        k, omega = self.fading(layer.index)
        recent, guidance = normalised(recency(layer.seq[0, among], k), ADDED), layer._shared.guide()
        if depth == 0 or not guidance.rows:
            return recent
        texts = guidance.rows[:1] if depth == 2 else guidance.rows[-1:]
        rows = (0 if depth == 2 else sum(guidance.rows[:-1])) + np.arange(sum(texts))
        attended = normalised(
            attention(layer, guidance.queries[layer.index][:, rows], guidance.keys[layer.index][:, rows])[among], ADDED
        )
        return attended if depth == 2 else (1 - omega) * attended + omega * recent


def attention(layer, queries, own_keys):
    """Eq. 2: the attention weight of each row, averaged over heads and guidance rows, which all see one another, ``[n]``."""
    positions = np.full(own_keys.shape[1], layer.seq.max(initial=-1) + 1)
    held = layer.cache.key(layer.index), layer.seq, own_keys, positions, layer.cache.key_scale(layer.index)
    return kernels.attention_mass(queries, positions, *held).sum(0, dtype=np.float64) / (queries.shape[0] * queries.shape[1])


def projected(checkpoint, stream):
    """Make ``project``: each text's embeddings through every layer's norm and projections, rotated to the
    positions after the memory."""
    decoder = ReferenceDecoder(checkpoint)

    def project(texts):
        ids, start = [stream.model.encode(text) for text in texts], stream.positions.next
        places, embeds = [start + np.arange(len(of)) for of in ids], [decoder.embed(of) for of in ids]
        found = {"q": {}, "k": {}}
        for part, layer in itertools.product(found, range(decoder.layers)):
            normed = [decoder._norm(rows, f"layers.{layer}.input_layernorm") for rows in embeds]
            heads = [decoder._heads(layer, part, rows) for rows in normed]
            turned = [[decoder._rotate(head, at) for head in of] for of, at in zip(heads, places, strict=True)]
            found[part][layer] = np.concatenate(turned, 1).astype(np.float32)
        return Guidance(found["q"], found["k"], tuple(map(len, ids)))

    return project


def prompts(global_prompt, local_prompt, last_turn):
    """App. C: the prompt of the deep layers and that of the middle ones, with the last turn of a conversation in both.

    The program's third, only the local prompt, is for the shallow layers, which give its attention no weight.
    """
    if last_turn:
        global_prompt = global_prompt and f"Context summary: {last_turn}. {global_prompt}"
        local_prompt = local_prompt and f"Find recent details related to: {last_turn}. {local_prompt}"
    if not (global_prompt and local_prompt):
        return global_prompt, local_prompt
    return global_prompt, f"{local_prompt}; {global_prompt}"


@dataclass
class PooledInfiniPotV(OfficialInfiniPotV):
    """With the program's --adaptive_pooling, at 81a4dbe (``head``) or at its first commit (``first``)."""

    revision: str = setting("head", "head or first")

    def salience(self, layer, norms):
        """Average over a window, zeros outside, by quarter of the depth.

        The first quarter's is 7 patches wide, at head in time as well; the second's 5; the third's is 3 tokens in a row. At
        head the first two are no larger than the frames held or than a side of the grid.
        """
        per_frame, rows = self.shape.tokens_per_frame, int(layer.row[layer.kind == Kind.VISION].max()) + 1
        quarter = min(3, layer.index // max(1, layer.cache.layers // 4))
        if quarter == 3:
            return norms
        if quarter == 2:
            return zero_padded_mean(norms, (3,))
        grid = norms.reshape(len(norms), -1, rows, per_frame // rows)
        size = WINDOWS[quarter]
        if self.revision == "head":
            size = min(size, *grid.shape[1:])
            size -= size % 2 == 0
        over_time = self.revision == "head" and quarter == 0
        return zero_padded_mean(grid, (size if over_time else 1, size, size)).reshape(norms.shape)


def zero_padded_mean(values, window):
    """Means over a ``window`` of odd sizes along the last axes, zeros beyond the edges; of the shape of ``values``."""
    for axis, size in zip(range(-len(window), 0), window, strict=True):
        pad = [(0, 0)] * values.ndim
        pad[axis] = (size // 2, size // 2)
        values = sliding_window_view(np.pad(values, pad), size, axis).mean(-1)
    return values
