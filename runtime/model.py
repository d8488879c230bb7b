"""Load a model, which is a bundle with its engine and tokenizer."""

from __future__ import annotations

import weakref
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgevlm.errors import BundleError, UserError
from edgevlm.progress import progress
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.chat import encode_inside
from edgevlm.runtime.engine import DEFAULT_ENGINE, Engine, load_engine
from edgevlm.runtime.files import refuse_address
from edgevlm.runtime.plugins import load_class
from edgevlm.runtime.positions import position_rule
from edgevlm.runtime.sandbox import try_tokenizer
from edgevlm.runtime.scheduler import Scheduler

LARGEST_TOKENIZER = 1 << 27  # the maximum size of a tokenizer file, in bytes
MOST_FRAMES = 10**9
FURTHEST = 10 * 365.25 * 86400.0


@dataclass(eq=False)
class Model:
    """A loaded bundle with its engine. Any number of sessions can share a model.

    ``scheduler``: runs the sessions' work in one thread, the only one that calls the engine. ``is_demo``: whether this is the
    demo model that edgevlm ships, or a copy of it.
    """

    bundle: Bundle
    engine: Engine
    tokenizer: Tokenizer
    closing: NDArray[np.float32]  # the rows that follow a video's last frame, [n, hidden]
    is_demo: bool = False
    scheduler: Scheduler = field(init=False, repr=False, compare=False)
    origin: Model | None = field(default=None, init=False, repr=False, compare=False)  # set if this model is a view of another

    def __post_init__(self) -> None:
        self.scheduler = Scheduler()
        weakref.finalize(self, self.scheduler.stop)

    @property
    def name(self) -> str:
        """The model's name, which is ``demo``, or the folder or ``ORG/NAME`` that the bundle was exported from."""
        return "demo" if self.is_demo else self.bundle.source

    def __repr__(self) -> str:
        return f"Model({self.name}, {type(self.engine).__name__}, {self.bundle.decoder.layers} layers)"

    def for_frames(self, size: tuple[int, int]) -> Model:
        """Return this model for another frame size, (height, width). The engine and the scheduler are shared.

        Returns the model itself if its tower accepts frames of only one size. Raises UserError for an invalid size.
        """
        vision = self.bundle.vision.for_frames(*size)
        if vision is self.bundle.vision:
            return self
        return self._view(replace(self.bundle, vision=vision))

    def in_fp32(self) -> Model:
        """Return a model like this one whose sessions use fp32 keys and values. The engine and the scheduler are shared.

        Returns the model itself if its keys and values are not fp16, or if its engine's graphs compute attention.
        """
        return self._view(self.bundle.in_fp32()) if self.bundle.decoder.kv == "fp16" and self.engine.by_layer else self

    def _view(self, bundle: Bundle) -> Model:
        view = copy(self.origin or self)
        view.bundle, view.origin = bundle, self.origin or self
        return view

    @classmethod
    def load(
        cls, name: str | Path, *, engine: str = DEFAULT_ENGINE, threads: int | None = None, positions: str | None = None
    ) -> Model:
        """Load ``demo``, the directory of a bundle or a checkpoint, or a hub model ``ORG/NAME[@revision]``.

        ``engine``: the name of the backend that runs the graphs. ``threads``: the CPU threads used for a call, 1 to 256; by
        default, one per physical core. ``positions``: the position rule, ``trained`` or ``transformers``; by default, the
        bundle's own. Raises BundleError for a bundle that is missing, truncated or of an unsupported version. Raises UserError
        for an engine that is unknown or not installed, or that does not accept the bundle or the number of threads.
        """
        bundle = Bundle.load(find_bundle(name, engine), verify="size")
        if positions is not None:
            vision = bundle.vision
            bundle = replace(bundle, vision=replace(vision, positions=position_rule(vision.positions, positions)))
        tokenizer = load_tokenizer(bundle)
        return cls(bundle, load_engine(engine, bundle, threads=threads), tokenizer, bundle.closing_rows(), is_demo(bundle))

    def encode(self, text: str) -> list[int]:
        """Encode text that follows the video token in a prompt. Raises UserError for text with a lone surrogate."""
        return encode_inside(self.tokenizer, self.bundle.chat, text)

    def embed(self, text: str) -> NDArray[np.float32]:
        """Return the embeddings ``[n, hidden]`` of text that follows the video. Raises the same errors as :meth:`encode`."""
        self.scheduler.check_process()
        return self.engine.embed(np.asarray(self.encode(text), np.int64))

    @property
    def rows_per_frame(self) -> int:
        """The most rows that a frame, or a group of merged frames, can append, including the text around it."""
        text = sum(len(self.encode(text)) for text in self.frame_text(FURTHEST, MOST_FRAMES) if text)
        return self.bundle.vision.tokens_per_frame + text

    def frame_text(self, seconds: float, frame: int) -> tuple[str, str]:
        """Return the texts before and after a frame. ``seconds``: the frame's time. ``frame``: the frame's number, from 0."""
        full = int(seconds)
        vision = self.bundle.vision
        time = {"seconds": seconds, "minutes": full // 60, "second": full % 60, "frame": frame + 1}
        return vision.before.format(**time), vision.after.format(**time)

    def close(self) -> None:
        """Cancel waiting calls, wait for the running call and close the engine; this model's sessions then raise UserError.

        Closing a model again, or in a forked process, does nothing.
        """
        if self.scheduler.is_forked:
            return
        self.scheduler.close()
        self.engine.close()


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """Return a bundle's tokenizer. Raises BundleError for a file that is invalid or does not match the model."""
    path, chat = bundle.file(bundle.chat.tokenizer), bundle.chat
    again = "export the model again"
    if bundle.files[path.name].bytes > LARGEST_TOKENIZER:
        raise BundleError(f"{path}: is larger than {LARGEST_TOKENIZER >> 20} MB; {again}")
    try:
        try_tokenizer(path)
        tokenizer = Tokenizer.from_file(str(path))
    except UserError as error:
        raise BundleError(f"{path}: cannot be read ({error}); {again}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= bundle.decoder.vocab:
        raise BundleError(f"{path}: has token {largest}, but the model's vocabulary size is {bundle.decoder.vocab}; {again}")
    if chat.placeholder_id >= 0 and tokenizer.id_to_token(chat.placeholder_id) is None:
        raise BundleError(f"{path}: has no token {chat.placeholder_id}, the video placeholder; {again}")
    return tokenizer


def find_bundle(name: str | Path, engine: str) -> Path:
    """Return a bundle's folder by name. If needed, export a checkpoint or download a hub model first.

    A plugin of the group ``edgevlm.models`` does the export and the download. Raises the same errors as :meth:`Model.load`.
    """
    folder = bundle_folder(name)
    if str(name) == "demo" or (folder / MANIFEST).exists() or not (isinstance(name, str) or folder.exists()):
        return folder
    with progress("reading the model") as step:
        return Path(load_class("models", "hub")(str(name), step, step.print, engine))


def bundle_folder(name: str | Path) -> Path:
    """Return a bundle's folder. ``name``: ``demo`` or a path. Raises UserError for a URL."""
    refuse_address(name)
    return demo_bundle() if str(name) == "demo" else Path(name)


def is_demo(bundle: Bundle) -> bool:
    """Return whether a bundle's weights are those of the embedded demo model."""
    try:
        shipped = Bundle.load(demo_bundle(), verify="size").files
    except BundleError:
        return False
    return all(bundle.files.get(name) == record for name, record in shipped.items() if name.endswith(".weights"))


def demo_bundle() -> Path:
    """Return the folder of the embedded demo model's bundle."""
    return Path(str(files("edgevlm.runtime").joinpath("demo")))
