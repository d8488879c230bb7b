"""Write what a release leaves on a disk: ``PYTHONPATH=tests:tests/export python tests/kept/make.py NAME`` makes NAME.tar.xz.

A bundle whose weights have two values, so that it compresses; state of two policies, events, a journal and a configuration.
"""

import shutil
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import checkpoints
import numpy as np
from safetensors.numpy import load_file, save_file

from edgevlm.apps.journal import Journal, Line
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.export import export_checkpoint
from edgevlm.runtime.session import Session

POLICIES = {"evicted": ("infinipot-v", 16), "stored": ("rekv", 32)}
CONFIG = """
state = "state"
[cameras.door]
source = "rtsp://camera/stream"
model = "org/name"
policy = "infinipot-v"
budget = 1000
[[watches]]
question = "is there a parcel?"
schedule = ["mon-fri 08:00-18:00"]
[events]
days = 7
"""


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        checkpoint = checkpoints.make_checkpoint(
            folder / "checkpoint", layers=2, heads=2, kv_heads=1, hidden=16, intermediate=16, side=2, vision_layers=1,
        )  # fmt: skip
        weights = checkpoint / "model.safetensors"
        rounded = {each: np.copysign(np.float32(1 / 16), tensor) for each, tensor in load_file(weights).items()}
        save_file(rounded, weights, {"format": "pt"})
        bundle = export_checkpoint(checkpoint, folder / "bundle")
        shutil.rmtree(checkpoint)
        for state, (policy, budget) in POLICIES.items():
            with Session.open(bundle, policy=policy, budget=budget, chunk=1, state=folder / state) as session:
                for number in range(12):
                    session.watch(np.full((28, 28, 3), 20 * number, np.uint8), float(number))
        event = WatchEvent("door", "parcel", "open", 1.8e9, 0.9, 1.8e9, ({"frame": 3, "time_s": 1.5},), "is there a parcel?")
        with closing(EventStore(folder, days=1e6)) as events:
            events.record(event, [b"\xff\xd8 a picture"], ["phone"])
        with closing(Journal(folder, days=1e6)) as journal:
            journal.add(Line("door", 1.8e9, "somebody brought a parcel"))
        (folder / "edgevlm.toml").write_text(CONFIG)
        with tarfile.open(Path(__file__).parent / f"{name}.tar.xz", "w:xz") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name)


if __name__ == "__main__":
    main(sys.argv[1])
