"""Pictures of what was watched: which go first, and what a crash, a restart and a broken file leave."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("cv2")

from edgevlm.apps.run.thumbnails import Thumbnails
from edgevlm.errors import UserError

FILE = Thumbnails.FILE

NOISE = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
CAP = 200_000


def filled(count, folder=None, **options):
    ring = Thumbnails(folder, **options)
    for number in range(count):
        ring.add(number, number / 2, 1e9 + number / 2, NOISE)
    return ring


def test_forgotten_frames_go_first_and_the_cap_holds():
    ring = filled(40, cap=CAP)
    size = len(ring.jpeg(0))
    assert 40 * size > CAP
    held = {3, 5, 38}
    ring.keep(held, 37)
    taken = ring.taken()
    assert len(taken) * size <= CAP
    assert held | {38, 39} <= set(taken), "held, and too new to be known"
    assert {number for number, each in taken.items() if each.held} == held | {39}
    assert sum(number < 20 for number in taken) < sum(number >= 20 for number in taken), "oldest first"


def test_a_restart_shows_them_up_to_the_frame_it_goes_on_from(tmp_path):
    filled(10, tmp_path).close()
    ring = Thumbnails(tmp_path)
    ring.begin(6)
    assert list(ring.taken()) == [0, 1, 2, 3, 4, 5]
    assert ring.taken()[5].wall == 1e9 + 2.5
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0, "what a camera saw is the user's alone"


def test_what_was_written_outlives_a_kill(tmp_path):
    program = (
        "import os, numpy as np\n"
        "from pathlib import Path\n"
        "from edgevlm.apps.run.thumbnails import Thumbnails\n"
        f"ring = Thumbnails(Path({str(tmp_path)!r}), every=0)\n"
        "for number in range(100):\n"
        "    ring.add(number, 0.0, 0.0, np.zeros((8, 8, 3), np.uint8))\n"
        "    if number == 20: ring.keep({number}, number)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], env=os.environ).returncode == -9
    assert list(Thumbnails(tmp_path).taken()) == list(range(21))


def test_a_disk_that_is_full_is_told_of_once(tmp_path):
    said = []
    ring = Thumbnails(tmp_path, said.append, every=0)
    pages = ring._database.execute("PRAGMA max_page_count = 8").fetchone()[0]
    for number in range(40):
        ring.add(number, 0.0, 0.0, NOISE)
        ring.keep({number}, number)
    assert len(said) == 1
    assert "full" in said[0]
    assert ring.taken(), "what fitted is still there"
    ring._database.execute(f"PRAGMA max_page_count = {pages * 1000}")
    ring.add(99, 0.0, 0.0, NOISE)
    assert 99 in ring.taken()
    ring.close()
    ring.close()
    assert not (tmp_path / f"{FILE}-journal").exists()


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / FILE).symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="cannot be written"):
        filled(3, tmp_path)
    assert (tmp_path / "other").stat().st_size == 0
