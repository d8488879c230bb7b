"""The models that benchmarks measure: the demo, a bundle, or one with random weights whose cache is filled with noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from edgevlm.bench.noise import NoiseEngine
from edgevlm.errors import UserError
from edgevlm.export.checkpoint import ConfigOnly, checkpoint_folder
from edgevlm.packages import needed
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import POLICIES, Policy, create_policy
from edgevlm.runtime.settings import AUTO

SEEDED = "seeded-0.5b"  # LLaVA-OneVision-0.5B's decoder: 3 GB of memory, 1.5 GB of disk for a while
SEEDED_BUDGET = 6144
TOKENS_PER_FRAME = 196


@contextmanager
def open_model(name: str, threads: int, progress: Notify, precision: str = "fp32") -> Iterator[Model]:
    """A loaded model: ``demo``, a bundle's directory, or SEEDED with weights of ``precision``, in a temporary directory."""
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        if name == SEEDED:
            seeded = needed("edgevlm.bench.seeded", "a model of random weights")
            progress(f"{SEEDED}: writing random weights")
            model: Model = seeded.seeded_model(Path(folder), seeded.SHAPES[SEEDED][1], TOKENS_PER_FRAME, threads, precision)
        else:
            model = Model.load(name, threads=threads)
        try:
            yield model
        finally:
            model.close()


def has_noise(model: Model) -> bool:
    """Whether the model's features are noise."""
    return isinstance(model.engine, NoiseEngine)


def filling(model: Model) -> AbstractContextManager[None]:
    """Inside, a seeded model fills its cache with noise; other models work as ever."""
    return model.engine.filling() if isinstance(model.engine, NoiseEngine) else nullcontext()


def budget_of(name: str, budget: int | None) -> int | None:
    """SEEDED_BUDGET for the seeded model unless one is given."""
    return SEEDED_BUDGET if budget is None and name == SEEDED else budget


def check_policies(texts: Sequence[str], fits: Callable[[Policy], bool], but: str) -> None:
    """Raise UserError for a policy that does not exist or does not fit; ``but`` says why it does not."""
    for text in texts:
        if text != AUTO and not fits(create_policy(text)):
            raise UserError(
                f"policy {text} {but}; name one of {', '.join(name for name in POLICIES if fits(create_policy(name)))}"
            )


def open_checkpoint(name: str, temporary: Path, progress: Notify) -> Path:
    """A LLaVA-OneVision checkpoint's directory; SEEDED is written into ``temporary``. Raises UserError for another family."""
    if name == SEEDED:
        folder: Path = needed("edgevlm.bench.seeded", "a model of random weights").write_checkpoint(
            temporary / SEEDED, progress=progress
        )
        return folder
    folder = checkpoint_folder(name)
    if (family := ConfigOnly(folder).config.get("model_type")) != "llava_onevision":
        raise UserError(f"{name}: is of {family}, and only llava_onevision checkpoints are compared with transformers")
    return folder
