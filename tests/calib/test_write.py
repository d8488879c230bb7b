"""A calibration is in its bundle whole or not at all, and a bundle with one is as well verified as one without."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest

from edgevlm.calib import check_writable, write_calibration
from edgevlm.calib.write import checkpoint_folder
from edgevlm.errors import BundleError, UserError
from edgevlm.runtime.bundle import MANIFEST, Bundle, hash_file, seal_manifest
from edgevlm.runtime.calibration import CALIBRATION, Calibration


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "bundle")


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def reseal(folder, raw):
    """Put other bytes into calibration.json, hashed and sealed as if they belonged there."""
    (folder / CALIBRATION).write_bytes(raw)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    record = hash_file(folder / CALIBRATION)
    manifest["files"][CALIBRATION] = {"bytes": record.bytes, "sha256": record.sha256}
    (folder / MANIFEST).write_bytes(seal_manifest(manifest))


def test_what_is_written_is_read_again(copy, made_up):
    before = Bundle.load(copy)
    assert before.calibration() is None
    weights = (copy / "decoder.weights").stat().st_ino
    assert write_calibration(before, made_up()) == copy
    after = Bundle.load(copy)
    assert after.calibration() == made_up()
    assert set(after.files) == {*before.files, CALIBRATION}
    assert (copy / "decoder.weights").stat().st_ino == weights, "linked, not copied"
    assert leftovers(copy.parent) == []
    with (copy / MANIFEST).open("rb") as manifest, (copy / CALIBRATION).open("rb") as calibration:
        write_calibration(after, made_up(flat=0.5))
        assert Calibration.from_json(calibration.read()).flat == 0.1, "whoever reads the old bundle goes on reading it"
        assert json.loads(manifest.read())["files"] == {name: asdict(record) for name, record in after.files.items()}
    assert Bundle.load(copy).calibration().flat == 0.5


def test_a_copy_leaves_the_bundle_as_it_is(copy, made_up, tmp_path):
    before = (copy / MANIFEST).read_bytes()
    out = tmp_path / "out"
    assert write_calibration(Bundle.load(copy), made_up(), out=out) == out
    assert (copy / MANIFEST).read_bytes() == before
    assert not (copy / CALIBRATION).exists()
    assert Bundle.load(out).calibration() == made_up()
    assert (copy / "decoder.weights").stat().st_ino != (out / "decoder.weights").stat().st_ino
    with pytest.raises(UserError, match="bundle already exists"):
        check_writable(Bundle.load(copy), out)


def test_a_bundle_replaced_meanwhile_is_left_alone(copy, made_up):
    measured = Bundle.load(copy)
    write_calibration(measured, made_up())
    with pytest.raises(UserError, match="changed during calibration"):
        write_calibration(measured, made_up(flat=0.5))
    assert Bundle.load(copy).calibration() == made_up()
    assert leftovers(copy.parent) == []


def test_a_read_only_bundle_is_one_line(copy):
    """Root may write anywhere, so a process asks as nobody."""
    copy.chmod(0o755 if os.getuid() == 0 else 0o555)
    program = (
        "import os, sys; from pathlib import Path; from types import SimpleNamespace\n"
        "from edgevlm.calib import check_writable; from edgevlm.errors import UserError\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: check_writable(SimpleNamespace(path=Path(sys.argv[1])), None)\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(copy)], capture_output=True, text=True)
    copy.chmod(0o755)
    assert done.stdout == f"{copy}: is read-only; add --out DIR to write a calibrated copy\n"
    check_writable(Bundle.load(copy), copy.parent / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"thresholds": [0.3, 0.2, 0.1]}, "must increase"),
        ({"cv": [0.1]}, "differ in length"),
        ({"classes": ["deep", "deep", "deep", "deep", "bottomless"]}, "classes"),
        ({"deep_from": 6}, "layer classes"),
        ({"clie": 3}, "or clie"),
    ],
)
def test_what_cannot_be_a_calibration_is_refused(copy, made_up, changes, says):
    raw = json.dumps(json.loads(made_up().to_json()) | changes).encode()
    with pytest.raises(ValueError, match=says):
        Calibration.from_json(raw)
    write_calibration(Bundle.load(copy), made_up())
    reseal(copy, raw)
    with pytest.raises(BundleError, match=r"calibration.json: .*edgevlm calibrate"):
        Bundle.load(copy).calibration()


def test_two_processes_do_not_work_in_one(tmp_path):
    """A lock of another open file stands for another process."""
    target = tmp_path / "bundle"
    with checkpoint_folder(target, {}) as folder:
        with pytest.raises(UserError, match="another process is calibrating it"), checkpoint_folder(target, {}):
            pass
        (folder / "done").write_text("mine")
    assert list(tmp_path.iterdir()) == []
