"""Find which patches of a frame to encode again, and which of its tokens to append again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime import kernels
from edgevlm.runtime.bundle import Bundle, VisionSpec
from edgevlm.runtime.engine import Engine, TowerBuffer
from edgevlm.runtime.free_memory import available
from edgevlm.runtime.settings import INTERVAL, TAU, AppendChanged, EncodeChanged
from edgevlm.runtime.stateful import State, Stateful

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Levels = NDArray[np.uint8]

FULL_FRAME_ABOVE = 0.7  # a frame is encoded whole if more than this fraction of its patches changed
MARGIN = 1.5
LOUDEST = 0.5
MOST_WRONG = 0.01  # a kept token is wrong if its distance exceeds the noise or this number,
WRONG = 0.05  # and at most this fraction of the kept tokens may be wrong
PROOF = 16
MANY = 0.1  # camera effects are considered only if more than this fraction of the patches seem changed
EXPLAINED = 0.5
BRIGHTER = 4 / 3  # exposure changes by more than this factor are ignored,
SHIFTED = 0.15  # as are shifts of fewer pixels than this
STANDS_OUT = 3.0
MOST_NOISE = 0.25


class References(Stateful):
    """Finds the tokens of a frame that differ from those in the memory.

    A frame is compared with what was last *appended*, not with the previous frame, so slow drift is not missed. Distances are 1
    minus the cosine similarity. The camera's noise is estimated as the median distance between consecutive frames. A smaller
    median found later lowers the estimate. A token has changed if its distance exceeds both 1 - tau and the noise limit. The
    noise limit is STANDS_OUT times the noise. The limit is at most MOST_NOISE times the distance between a frame's patches, so
    that a frame in which everything moves is still appended.
    """

    state_fields = ("_features", "_age", "seq", "_noise", "_spread")

    def __init__(self, settings: AppendChanged, tokens: int, width: int) -> None:
        self.settings = settings
        self._features = np.zeros((tokens, width), np.float32)
        self._age = np.zeros(tokens, np.int32)
        self.seq = np.full(tokens, -1, np.int64)  # the sequence number of each patch's last appended token
        self._noise: NDArray[np.float32] | None = None
        self._spread: NDArray[np.float32] | None = None  # the largest mean distance so far between the patches of a frame

    def changed(self, features: Float32) -> Bool:
        """Return which of a frame's tokens to append, bool ``[tokens]``. All tokens of the first frame are appended."""
        distances, noise, spread = self._compare(unit_features(features))
        least = 1 - self.settings.tau
        if noise is not None:
            least = max(least, min(STANDS_OUT * float(noise), MOST_NOISE * float(spread)))
        changed: Bool = distances > least
        return changed | (self._age + 1 >= self.settings.refresh) if self.settings.refresh else changed

    def _compare(self, unit: Float32) -> tuple[Float32, NDArray[np.float32] | None, NDArray[np.float32]]:
        """Return each feature's distance from the remembered feature, and new estimates of noise and spread."""
        mean = unit.mean(0)
        spread = np.maximum(self._spread or 0, 1 - mean @ mean, dtype=np.float32)
        distances: Float32 = 1 - np.einsum("pw,pw->p", unit, self._features)
        if self._spread is None:
            return distances, None, spread
        noise = np.float32(np.median(distances))
        is_next = 2 * np.count_nonzero(self._age == 0) > len(self._age)  # with older references, the median includes drift
        return distances, noise if self._noise is None or is_next else np.minimum(noise, self._noise), spread

    def appended(self, features: Float32, changed: Bool, seq: NDArray[np.int64]) -> None:
        """Record that a frame's changed tokens are now in the memory. ``seq``: the ``seq`` of the changed tokens."""
        unit = unit_features(features)
        _, self._noise, self._spread = self._compare(unit)
        self.seq[changed] = seq
        self._features[changed] = unit[changed]
        self._age += 1
        self._age[changed] = 0

    def copy(self) -> References:
        other = copy.copy(self)
        other._features, other._age, other.seq = self._features.copy(), self._age.copy(), self.seq.copy()
        return other


def unit_features(features: Float32) -> Float32:
    """Scale features ``[..., width]`` to length 1; zero features stay zero."""
    norms = np.sqrt(np.einsum("...w,...w->...", features, features))[..., None]
    unit: Float32 = features / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit


class FrameChanges(NamedTuple):
    """Which patches of a frame to encode. ``patches``: the patches to encode, bool ``[n]``. ``pixels``: the frame, ``[F, 3, H,
    W]``. ``changed``: the patches that changed or have a changed neighbour, bool ``[n]``.
    """

    patches: Bool
    changed: Bool
    pixels: Float32
    levels: Levels
    exposure: Float32
    noise: float  # in pixel levels, 0 to 255
    size: tuple[int, int]


class PatchChanges(Stateful):
    """Finds the patches of a frame whose pixels differ from those that were last encoded.

    A patch's change is the mean difference of the 10 % of its pixels that changed most, in levels from 0 to 255. The patch
    counts as changed if its change is at least ``threshold`` and at least MARGIN times the noise. The patches around a changed
    patch are encoded too. The noise is estimated as the patches' median distance from the previous frame, but at most LOUDEST
    times the distance between neighbouring patches. A later frame with less noise lowers the estimate. If many patches seem
    changed, the encoder looks for a shift of the picture or a new exposure that explains at least half of the changes. Patches
    whose difference is explained in this way do not count as changed.

    A whole frame is encoded every ``interval`` frames, when most of the picture has changed, and when the camera's frames
    change size. With 0, the interval starts at 1 and grows by one every PROOF frames, up to INTERVAL, while whole frames
    confirm the features that were kept. A whole frame that contradicts kept features resets the interval to 1.
    """

    state_fields = ("_reference", "_sums", "_exposure", "_noise", "_since", "_proven", "_size")

    def __init__(self, settings: EncodeChanged, vision: VisionSpec, grid: tuple[int, int]) -> None:
        self.settings, self.grid = settings, grid
        self._scale = np.tile(np.asarray(vision.std, np.float32) / np.float32(vision.rescale), vision.group)
        self._offset = np.tile(np.asarray(vision.mean, np.float32) / np.float32(vision.rescale), vision.group)
        self._patch = vision.size[0] // grid[0], vision.size[1] // grid[1]
        patches = grid[0] * grid[1]
        self._reference = np.zeros((3 * vision.group, *vision.size), np.uint8)
        self._sums = np.zeros(patches, np.float32)  # the sum of each patch's reference levels
        self._exposure = np.ones(patches, np.float32)
        self._noise = 0.0
        self._since = -1  # the number of frames since a whole frame was encoded; -1 before the first
        self._proven = 0
        self._size = np.zeros(2, np.int32)

    def compare(self, pixels: Float32, size: tuple[int, int]) -> FrameChanges:
        """Find the patches to encode in a frame, or in a group of frames, without changing anything.

        ``pixels``: normalised, ``[F, 3, H, W]``. ``size``: the (height, width) of the camera's picture.
        """
        levels = kernels.levels(pixels.reshape(-1, *pixels.shape[2:]), self._scale, self._offset)
        every = np.ones(len(self._exposure), bool)
        full = FrameChanges(every, every, pixels, levels, np.ones_like(self._exposure), self._noise, size)
        if self._since < 0 or not self.settings.threshold or size != tuple(self._size):
            return full
        distances, beside = self._distances(levels, self._reference), np.roll(levels, self._patch, (1, 2))
        noise = float(np.median(distances)) if not self._since else min(self._noise, float(np.median(distances)))
        noise = min(noise, LOUDEST * float(np.median(self._distances(levels, beside))))
        least = max(self.settings.threshold, MARGIN * noise)
        changed, exposure, moved = distances >= least, self._exposures(levels), levels
        if changed.mean() > MANY:
            for other, low, high, gain in self._explanations(levels, exposure):
                remain = self._distances(other, low, high, gain) >= least
                if remain.sum() <= EXPLAINED * changed.sum():
                    changed, moved = remain, other
                    break
        patches = dilated(changed.reshape(self.grid)).reshape(-1)
        interval = self.settings.interval or min(INTERVAL, 1 + self._proven // PROOF)
        if self._since + 1 >= interval or patches.mean() > FULL_FRAME_ABOVE:
            return full._replace(changed=patches, noise=noise)
        if moved is not levels:
            shape = (len(moved), 1, 1)
            pixels = ((moved - self._offset.reshape(shape)) / self._scale.reshape(shape)).reshape(pixels.shape)
        return FrameChanges(patches, patches, pixels, moved, exposure, noise, size)

    def encoded(self, changes: FrameChanges, right: bool | None = None) -> None:
        """Record that the patches were encoded, for comparison with later frames.

        ``right``: whether the features kept from earlier frames matched the newly encoded ones; None unless the whole frame was
        encoded.
        """
        if changes.patches.all():
            self._reference[:] = changes.levels
            self._proven = self._proven if right is None else (self._proven + self._since + 1) * right
            self._since = 0
        else:
            (rows, columns), (height, width) = self.grid, self._patch
            mask = changes.patches.reshape(self.grid).repeat(height, 0).repeat(width, 1)
            inside = np.s_[:, : rows * height, : columns * width]
            np.copyto(self._reference[inside], changes.levels[inside], where=mask)
            self._since += 1
        self._sums = np.where(changes.patches, kernels.patch_sums(changes.levels, *self.grid), self._sums)
        self._exposure = np.where(changes.patches, changes.exposure, self._exposure)
        self._noise, self._size = changes.noise, np.array(changes.size, np.int32)

    def _distances(self, levels: Levels, low: Levels, high: Levels | None = None, gain: Float32 | None = None) -> Float32:
        """Return how much each patch has changed. For a group of frames, this is the largest change in the group."""
        frames, high = [slice(at, at + 3) for at in range(0, len(levels), 3)], low if high is None else high
        return np.maximum.reduce([kernels.patch_distances(levels[of], low[of], high[of], *self.grid, gain) for of in frames])

    def _exposures(self, levels: Levels) -> Float32:
        """Return the exposure of each patch. Patches in the same row of the grid get the same exposure, because flickering
        lamps cause horizontal stripes.
        """
        sums = kernels.patch_sums(levels, *self.grid)
        bright = self._sums > 16 * len(levels) * self._patch[0] * self._patch[1]
        ratio = np.where(bright, sums / np.maximum(self._sums, 1), 1) * self._exposure
        return np.repeat(np.median(ratio.reshape(self.grid), 1), self.grid[1]).astype(np.float32)

    def _explanations(self, levels: Levels, exposure: Float32) -> Iterator[tuple[Levels, Levels, Levels, Float32 | None]]:
        """Yield exposures and shifts of the camera that may explain why the pixels of an unchanged scene differ."""
        gain = exposure / self._exposure
        gain = np.where((gain < 1 / BRIGHTER) | (gain > BRIGHTER), np.float32(1), gain)
        gained = bool((np.abs(gain - 1) > 1 / 256).any())
        if gained:
            yield levels, self._reference, self._reference, gain
        furthest = min(self._patch) // 2  # beyond this shift, a patch shows mostly what its neighbour showed
        frames = range(0, len(levels), 3)
        shifts = [phase_shift(self._reference[at + 1], levels[at + 1], furthest) for at in frames]
        if max(abs(along) for shift in shifts for along in shift) >= SHIFTED:
            moved = self._reference.copy()
            for at, shift in zip(frames, shifts, strict=True):
                down, across = nearest_shift(self._reference[at + 1], levels[at + 1], shift)
                shift_into(moved[at : at + 3], levels[at : at + 3], down, across)
            yield moved, *neighbourhood(self._reference), gain if gained else None


def dilated(mask: Bool) -> Bool:
    """Return a mask in which the eight neighbours of each true element are true too."""
    return _with_neighbours(mask[None], np.logical_or)[0]


def neighbourhood(levels: Levels) -> tuple[Levels, Levels]:
    """Return the minimum and maximum around each pixel, which bound its value after a shift of less than a pixel."""
    return _with_neighbours(levels, np.minimum), _with_neighbours(levels, np.maximum)


def _with_neighbours(planes: NDArray, combine: np.ufunc) -> NDArray:
    """Combine each element with its eight neighbours. ``planes``: ``[n, rows, columns]``."""
    rows = planes.copy()
    combine(rows[:, 1:], planes[:, :-1], out=rows[:, 1:])
    combine(rows[:, :-1], planes[:, 1:], out=rows[:, :-1])
    both = rows.copy()
    combine(both[..., 1:], rows[..., :-1], out=both[..., 1:])
    combine(both[..., :-1], rows[..., 1:], out=both[..., :-1])
    return both


def phase_shift(before: Levels, after: Levels, furthest: int) -> tuple[float, float]:
    """Return how far a picture moved down and right, in pixels. ``furthest``: the largest movement to look for along each axis.

    Phase correlation of the pictures' centres finds the shift, and a parabola refines it. Large pictures are first reduced to
    half size.
    """
    step = 1 if min(before.shape) < 128 else 2
    height, width = (min(size // step, 128) for size in before.shape)
    top, left = (before.shape[0] - step * height) // 2, (before.shape[1] - step * width) // 2
    window = np.hanning(height)[:, None] * np.hanning(width)
    spectra = []
    for picture in (before, after):
        middle = picture[top : top + step * height, left : left + step * width]
        small = sum(middle[down::step, across::step].astype(np.float64) for down in range(step) for across in range(step))
        spectra.append(np.fft.rfft2((small - np.mean(small)) * window))
    cross = spectra[1] * spectra[0].conj()
    peaks = np.fft.irfft2(cross / np.maximum(np.abs(cross), 1e-9), (height, width))
    reach = min(furthest // step + 1, (height - 1) // 2, (width - 1) // 2)
    near = np.roll(peaks, (reach, reach), (0, 1))[: 2 * reach + 1, : 2 * reach + 1]
    inner = near[1:-1, 1:-1]
    row, column = (int(at) + 1 for at in np.unravel_index(int(inner.argmax()), inner.shape))
    down, across = _vertex(near[row - 1 : row + 2, column]), _vertex(near[row, column - 1 : column + 2])
    return step * (row - reach + down), step * (column - reach + across)


def nearest_shift(before: Levels, after: Levels, about: tuple[float, float]) -> tuple[int, int]:
    """Return the shift near ``about``, in whole pixels, for which the two pictures differ least."""

    def difference(shift: tuple[int, int]) -> float:
        moved = before[None].copy()
        shift_into(moved, after[None], *shift)
        return float(np.minimum(np.abs(moved[0, ::2, ::2].astype(np.int16) - before[::2, ::2]), 32).mean())

    rows, columns = ([round(along) + step for step in (0, -1, 1)] for along in about)
    return min(((down, across) for down in rows for across in columns), key=difference)


def _vertex(three: NDArray[np.float64]) -> float:
    """Return the peak of the parabola through three values at x = -1, 0 and 1, limited to -0.5 to 0.5."""
    bend = three[0] - 2 * three[1] + three[2]
    return float(np.clip((three[0] - three[2]) / (2 * bend), -0.5, 0.5)) if bend < 0 else 0.0


def shift_into(out: Levels, levels: Levels, down: int, across: int) -> None:
    """Undo a shift: copy a picture, moved up by ``down`` and left by ``across``. Other pixels of ``out`` keep their values."""
    height, width = levels.shape[1:]
    to = np.s_[:, max(0, -down) : height - max(0, down), max(0, -across) : width - max(0, across)]
    of = np.s_[:, max(0, down) : height - max(0, -down), max(0, across) : width - max(0, -across)]
    out[to] = levels[of]


def was_right(kept: Float32, whole: Float32) -> bool:
    """Return whether the kept features match the frame encoded whole. At most a fraction WRONG of its tokens may differ."""
    distances = 1 - np.einsum("nw,nw->n", unit_features(kept), unit_features(whole))
    least = np.clip(STANDS_OUT * np.median(distances), 1 - TAU, MOST_WRONG)
    return bool((distances > least).mean() <= WRONG)


class ChangedEncoder(Stateful):
    """Encodes only the changed patches of one stream's frames.

    A patch that is not encoded keeps its features, even if patches that it attended to have changed.
    """

    state_fields = ("changes", "_features", "_tower_cache", "seen", "computed")

    def __init__(self, engine: Engine, bundle: Bundle, settings: EncodeChanged, copies: int = 1) -> None:
        """Prepare the tower. Raises the same errors as ``bind_tower``, and UserError if ``copies`` copies of the tower's cache
        do not fit in free memory.
        """
        vision = bundle.vision
        if (spec := vision.changed) is None:
            height, width = vision.size
            raise UserError(
                f"{bundle.path}: has no graph that encodes only changed patches at {width}x{height}; use --encode "
                "all, or export the checkpoint again (edgevlm export CHECKPOINT_DIR --out DIR)"
            )
        size, free = spec.cache_bytes, available().free
        if copies * size > free:
            raise UserError(
                f"the vision tower's cache needs {copies * size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free; "
                "use --encode all"
            )
        self._tower_cache = np.zeros(size, np.uint8)
        self._tower = engine.bind_tower(TowerBuffer.of(self._tower_cache))
        self.settings, self._group = settings, vision.group
        self.changes = PatchChanges(settings, vision, spec.grid)
        self._features = np.zeros((vision.tokens_per_frame, bundle.decoder.row_width), np.float32)
        at = [(2 * np.arange(count) + 1) * of // (2 * count) for count, of in zip(vision.grid, spec.grid, strict=True)]
        self._patch_of = np.add.outer(spec.grid[1] * at[0], at[1]).reshape(-1)  # the patch at the middle of each token
        self.seen = self.computed = 0

    @property
    def encoded(self) -> float:
        """The fraction of the frames' patches that was encoded."""
        return self.computed / self.seen if self.seen else 1.0

    def encode(self, pixels: Float32, sizes: NDArray[np.int32], *, keep: bool = True) -> Float32:
        """Encode frames like ``Engine.encode``, with the same shapes.

        ``sizes``: the (height, width) of each camera picture, ``[F, 2]``. ``keep``: whether to remember these frames for later
        calls.
        """
        starts = range(0, len(pixels), self._group)
        features = [self._encode(pixels[at : at + self._group], sizes[at : at + self._group], keep) for at in starts]
        return np.stack(features) if features else np.zeros((0, *self._features.shape), np.float32)

    def _encode(self, frames: Float32, sizes: NDArray[np.int32], keep: bool) -> Float32:
        if missing := self._group - len(frames):
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, 0)])
        changed = self.changes.compare(frames, (int(sizes[-1, 0]), int(sizes[-1, 1])))
        features, any_changed = self._features.copy(), changed.patches.any()
        before = self._tower_cache.copy() if any_changed and not keep else None
        try:
            if any_changed:
                found, tokens = self._tower.encode(
                    changed.pixels if self._group > 1 else changed.pixels[0], np.flatnonzero(changed.patches).astype(np.int32)
                )
                features[tokens] = found
        finally:
            if before is not None:
                self._tower_cache[:] = before
        if keep:
            still = ~changed.changed[self._patch_of]
            right = None
            if changed.patches.all() and still.mean() >= 1 - FULL_FRAME_ABOVE:
                right = was_right(self._features[still], features[still])
            self.changes.encoded(changed, right)
            self._features = features
            self.seen += len(changed.patches)
            self.computed += int(changed.patches.sum())
        return features

    def restore(self, state: State) -> None:
        """Restore what :meth:`state` returned."""
        bound = self._tower_cache
        super().restore(state)
        bound[:] = self._tower_cache
        self._tower_cache = bound
