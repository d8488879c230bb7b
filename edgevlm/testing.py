"""Check users' extensions, for ``edgevlm check`` and for pytest.

Each function returns a line for each check that passed, and raises UserError at the first failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from inspect import isgeneratorfunction
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgevlm.apps.sources import Frame, SourceOptions, open_source
from edgevlm.errors import UserError, nearest
from edgevlm.runtime.budget import allocate
from edgevlm.runtime.cache import Rows, sight_of
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import IN_FILE, blamed, is_file, load_class, names, place
from edgevlm.runtime.policies import Policy, as_policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.positions import rope_tables
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots.writer import SnapshotWriter

__all__ = ["check", "check_engine", "check_family", "check_policy", "check_source"]
FRAMES, RESUMED = 72, 40  # demo frames that a policy watches, and how many of them precede the snapshot
BUDGETS = (48, 200, 333)  # in tokens: three whole frames, then two numbers that are no multiple of a frame
SLOW_MS = 10_000  # a compression of LAYERS layers may take this long without a warning
LAYERS, ROWS = 36, 6076
OFF = 0.02  # an engine may differ by this fraction of the largest number


def check(name: str, *, checkpoint: str | Path | None = None) -> list[str]:
    """Check a policy, source, family or engine. ``name`` is an installed name or ``./file.py:Thing``.

    ``checkpoint``: the folder of a checkpoint, needed to check a family.
    """
    if is_file(name):
        made, group = load_class("policies", name.removesuffix(":")), ""
        for kind, is_one in KINDS.items():
            group = group or (kind if is_one(made) else "")
    else:
        word = name.partition(":")[0]
        group = next((kind for kind in KINDS if word in names(kind)), "")
        if not group:
            raise UserError(f"{word!r} not found; {nearest(word, chain(*map(names, KINDS)))} {IN_FILE}")
    if group == "families":
        if checkpoint is None:
            raise UserError(f"{name} is a family; add --checkpoint FOLDER, a checkpoint of this family")
        return check_family(name, checkpoint)
    checks: Any = {"policies": check_policy, "sources": check_source, "engines": check_engine}
    if not group:
        raise UserError(f"{name} is neither a policy, a source, a family nor an engine; see edgevlm.extend ({place(made)})")
    found: list[str] = checks[group](name)
    return found


def check_policy(policy: str | Policy | type[Policy]) -> list[str]:
    """Check a policy on the demo: masks, scores, budgets, questions, snapshots and the time to compress 6,000 rows a layer."""
    frames, model = list(islice(open_source("demo"), FRAMES)), Model.load("demo")

    def opened(budget: int, append: str = "all", **more: Any) -> Session:
        return Session.open(model, policy=deepcopy(policy), budget=budget, append=append, **more)

    with ExitStack() as stack:
        stack.callback(model.close)
        kept = as_policy(deepcopy(policy))
        for budget in BUDGETS:
            for append in ["all"] if kept.needs_whole_frames else ["all", "changed"]:
                with opened(budget, append) as session:
                    _watch(session, frames)
                    if (held := session.stats.tokens) > session.budget:
                        raise UserError(
                            f"policy {session.policy} holds {held} tokens, more than its budget of {session.budget}"
                        )
                    session.ask("how many objects are there now?").wait()
        passed = [f"budget: {', '.join(map(str, BUDGETS))} tokens never exceeded in {FRAMES} frames, whole and changed"]
        if isinstance(kept, Retrieval) or not kept.bounded:
            return [
                *passed,
                f"state: not checked, because it keeps {'rows in a store' if kept.bounded else 'everything'}",
            ]
        folder = stack.enter_context(TemporaryDirectory(prefix="edgevlm-check-"))
        whole = stack.enter_context(opened(BUDGETS[1]))
        _watch(whole, frames[:RESUMED])
        whole.save(folder)
        _watch(whole, frames[RESUMED:])
        with opened(BUDGETS[1], state=SnapshotWriter(folder, notify=lambda _: None)) as resumed:
            _watch(resumed, frames[RESUMED:])
            for layer in range(whole.cache.layers):
                if not np.array_equal(np.sort(whole.cache.seq(layer), 1), np.sort(resumed.cache.seq(layer), 1)):
                    what = "keeps different rows after resuming from a snapshot; list its state in state_fields"
                    raise UserError(f"policy {kept.name} {what}, and draw no random numbers ({place(type(kept))})")
    return [*passed, "state: the same rows are kept after resuming from a snapshot", _speed(policy)]


def _watch(session: Session, frames: list[Frame]) -> None:
    for frame in frames:
        session.watch(frame.image, frame.time_s)
    session.flush()


def _speed(policy: str | Policy | type[Policy]) -> str:
    from edgevlm.bench.compression import measure
    from edgevlm.bench.noise import CacheShape

    made, layers = as_policy(deepcopy(policy)), 4
    with blamed(f"policy {made.name}", made):
        took = measure(made, CacheShape(layers=layers, tokens=ROWS), "fp32", 1, 1)["ms"] * LAYERS / layers
    slow = f"; above {SLOW_MS} ms it delays a stream; compare with edgevlm.runtime.kernels" if took > SLOW_MS else ""
    return f"speed: {took:.0f} ms per compression of {LAYERS} layers with {ROWS:,} rows{slow}"


def check_source(source: str, frames: int = 64) -> list[str]:
    """Check the types and times of a source's frames, and what the source does at its end.

    ``source``: a value for ``--camera``. ``frames``: the number of frames to read.
    """
    opened = open_source(source, None, SourceOptions())
    try:
        found = list(islice(opened, frames))
        ended = len(found) < frames
        if not found:
            raise UserError(f"source {source} ends before its first frame")
        if ended and opened.read() is not None:
            raise UserError(f"source {source} returns a frame after its end")
    finally:
        opened.close()
        opened.close()
    height, width = found[0].image.shape[:2]
    end = "no frames after the end" if ended else f"not seen in {frames} frames"
    times = f"{found[0].time_s:g} to {found[-1].time_s:g} s"
    return [f"frames: {len(found)} of {width} x {height} pixels, {times}", f"end: {end}", "close: can be called twice"]


def check_engine(engine: str, model: str | Path = "demo") -> list[str]:
    """Compare an engine with onnxruntime-cpu: features, embeddings, each layer's keys, values and queries, and logits.

    The decoder's results are compared for calls with 23 rows, 8 rows and 1 row. ``model``: a bundle that both engines can load.
    """
    with ExitStack() as stack:
        ours, theirs = (Model.load(model, engine=name) for name in (DEFAULT_ENGINE, engine))
        for each in (ours, theirs):
            stack.callback(each.close)
        with blamed(f"engine {engine}", theirs.engine):
            return list(_compared(engine, ours, theirs))


def _compared(engine: str, ours: Model, theirs: Model) -> Iterator[str]:
    random, bundle, both = np.random.default_rng(0), ours.bundle, (ours, theirs)
    pixels = random.standard_normal((2 * bundle.vision.group, 3, *bundle.vision.size), np.float32)
    yield _close(engine, "features of frames", ours.engine.encode(pixels), theirs.engine.encode(pixels))
    ids = random.integers(0, bundle.decoder.vocab, 32)
    embeds = ours.engine.embed(ids)
    yield _close(engine, "embeddings", embeds, theirs.engine.embed(ids))
    layers = range(bundle.decoder.layers)
    caches, decoders = [], []
    for each in both:
        capacities = [each.engine.capacity(len(ids))] * len(layers)
        caches.append(allocate(each.bundle, capacities, 0, device=each.engine.kv_device))
        decoders.append(each.engine.bind(caches[-1].buffers(), tuple(layers)))
    worst: dict[str, float] = {}
    for start, end in ((0, 23), (23, 31), (31, 32)):
        rows = Rows.text(np.repeat(np.arange(start, end, dtype=np.int32)[:, None], bundle.decoder.axes, 1))
        tables = rope_tables(rows.position, bundle.inv_freq, caches[0].pair_axis)
        results = []
        for cache, decoder in zip(caches, decoders, strict=True):
            sight = sight_of(bundle.decoder, cache, rows)
            cache.reserve(end - start)
            results.append(decoder.step(embeds[start:end], *tables, cache.lengths, **sight))
            cache.commit(replace(rows, seq=rows.seq + start))
        call = f"in a call with {end - start} rows after {start}"
        for layer in layers:
            compared = {part: [cache.dequantize(part, layer) for cache in caches] for part in ("key", "value")}
            compared["queries"] = [result.probes[layer] for result in results]
            for part, (one, other) in compared.items():
                _close(engine, f"{part} of layer {layer}, {call},", one, other, worst)
        _close(engine, f"logits {call}", results[0].logits, results[1].logits, worst)
    yield f"decoder: {len(layers)} layers differ by at most {max(worst.values()):.1e} ({max(worst, key=worst.__getitem__)})"


def _close(engine: str, what: str, ours: Any, theirs: Any, worst: dict[str, float] | None = None) -> str:
    theirs = np.asarray(theirs)
    if theirs.shape != ours.shape:
        raise UserError(f"engine {engine}: {what} are {list(theirs.shape)}, not {list(ours.shape)}")
    off, largest = float(np.abs(ours - theirs).max(initial=0)), float(np.abs(ours).max(initial=1e-6))
    if not off <= OFF * largest:
        raise UserError(f"engine {engine}: {what} differ from {DEFAULT_ENGINE}'s by {off:.2g}, with values up to {largest:.2g}")
    if worst is not None:
        worst[what.rstrip(",")] = off / largest
    return f"{what}: differ by {off / largest:.1e}"


def check_family(family: str, checkpoint: str | Path) -> list[str]:
    """Export a checkpoint and run it; if transformers is installed, compare its features and logits."""
    from edgevlm.export import export_checkpoint

    with TemporaryDirectory(prefix="edgevlm-check-") as folder, ExitStack() as stack:
        path = export_checkpoint(checkpoint, Path(folder) / "bundle", family=family, kv="fp32")
        model = Model.load(path)
        stack.callback(model.close)
        vision, random = model.bundle.vision, np.random.default_rng(0)
        pixels = random.standard_normal((vision.group, 3, *vision.size), np.float32)
        features = model.engine.encode(pixels)
        with Session.open(model, budget=4 * model.rows_per_frame, policy="sliding-window", append="all") as session:
            for image in random.integers(0, 256, (6, *vision.size, 3), np.uint8):
                session.watch(image)
            session.ask("what is there?", max_tokens=4).wait()
        rows, columns = vision.grid
        passed = [f"export: runs with {rows} x {columns} tokens per frame and {model.bundle.decoder.layers} layers"]
        try:
            import torch
            import transformers
        except ImportError:
            return [*passed, "transformers: not compared, because it is not installed"]
        kind: Any = transformers.AutoModelForImageTextToText
        hf = kind.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True).eval()
        with torch.no_grad():
            given = hf.model.get_image_features(pixel_values=torch.from_numpy(pixels))
            given = getattr(given, "pooler_output", given)
            theirs = torch.cat([*given]).reshape(-1, features.shape[-1]).numpy()
            passed.append(_same(family, "tower", features.reshape(theirs.shape), theirs))
            ids = random.integers(0, model.bundle.decoder.vocab, 24)
            embeds = np.concatenate([features[0], model.engine.embed(ids)])
            logits = hf.lm_head(hf.model.language_model(inputs_embeds=torch.from_numpy(embeds)[None])[0])[0].numpy()
        cache = allocate(model.bundle, [model.engine.capacity(len(embeds))] * model.bundle.decoder.layers, 0)
        decoder = model.engine.bind(cache.buffers())
        positions = np.repeat(np.arange(len(embeds), dtype=np.int32)[:, None], model.bundle.decoder.axes, 1)
        tables = rope_tables(positions, model.bundle.inv_freq, cache.pair_axis)
        sight = sight_of(model.bundle.decoder, cache, Rows.text(positions))
        cache.reserve(len(embeds))
        ours = decoder.step(embeds, *tables, cache.lengths, range(len(embeds)), **sight).logits
        passed.append(_same(family, "logits", ours, logits))
        if (ours.argmax(1) != logits.argmax(1)).any():
            raise UserError(f"family {family}: the most likely tokens differ from transformers'")
        return [*passed, f"tokens: the {len(ours)} most likely match transformers'"]


def _same(family: str, what: str, ours: Any, theirs: Any) -> str:
    off, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
    if not off <= 1e-3 * largest:
        raise UserError(f"family {family}: its {what} differ from transformers' by {off:.2g}, with values up to {largest:.2g}")
    return f"{what}: {off / largest:.1e} from transformers'"


def _is_family(made: Any) -> bool:
    from edgevlm.export.families import Family

    return isinstance(made, type) and issubclass(made, Family)


def _is_source(made: Any) -> bool:
    from edgevlm.apps.sources import Source

    return isgeneratorfunction(made) or (isinstance(made, type) and issubclass(made, Source))


KINDS: dict[str, Any] = {
    "policies": lambda made: isinstance(made, type) and issubclass(made, Policy),
    "sources": _is_source,
    "families": _is_family,
    "engines": lambda made: all(hasattr(made, name) for name in ("encode", "embed", "bind")),
}
