"""Open the models that benchmarks measure: the demo, a bundle, or a model with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE, load_engine
from edgevlm.runtime.model import Model

SEEDED = "seeded-0.5b"  # LLaVA-OneVision-0.5B's decoder, which takes 3 GB of memory and, temporarily, 1.5 GB of disk
TOKENS_PER_FRAME = 196


@contextmanager
def open_model(name: str, threads: int, engine: str = DEFAULT_ENGINE) -> Iterator[Model]:
    """Load a model: ``demo``, a bundle's directory, or SEEDED, which is first written to a temporary directory."""
    if name != SEEDED:
        with closing(Model.load(name, engine=engine, threads=threads)) as model:
            yield model
        return
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        seeded = needed("edgevlm.bench.seeded", "a model of random weights")
        show(f"{SEEDED}: writing random weights")
        bundle = seeded.decoder_bundle(Path(folder), seeded.SHAPES[SEEDED][1], TOKENS_PER_FRAME)
        made = load_engine(engine, bundle, threads=threads)
        with closing(Model(bundle, made, seeded.word_tokenizer(), bundle.closing_rows())) as model:
            yield model


@contextmanager
def open_checkpoint(name: str, layers: int | None) -> Iterator[tuple[Path, Path]]:
    """Yield the directory of a LLaVA-OneVision checkpoint and a temporary directory for its bundles.

    ``layers``: the number of SEEDED's tower and decoder layers (default: all). Raises UserError for a model of another family.
    """
    with TemporaryDirectory(prefix="edgevlm-bench-") as temporary:
        place = Path(temporary)
        if name == SEEDED:
            seeded = needed("edgevlm.bench.seeded", "a model of random weights")
            yield seeded.write_checkpoint(place / SEEDED, seeded.llava_onevision_config(layers)), place
            return
        from edgevlm.export.checkpoint import ConfigOnly, checkpoint_folder

        folder = checkpoint_folder(name)
        if (family := ConfigOnly(folder).config.get("model_type")) != "llava_onevision":
            raise UserError(
                f"{name}: family {family} is not supported; only llava_onevision checkpoints can be compared with transformers"
            )
        yield folder, place
