"""The folder of what has been measured: the same for the same settings, gone when all is written."""

from contextlib import suppress

import pytest

from edgevlm.calib.write import checkpoint_folder
from edgevlm.errors import UserError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def stopped(target, settings, text=None):
    """Work that ends before all is done; returns its folder."""
    with suppress(KeyboardInterrupt), checkpoint_folder(target, settings) as folder:
        if text is not None:
            (folder / "done").write_text(text)
        raise KeyboardInterrupt
    return folder


def test_what_was_put_there_is_there_again_and_goes_at_the_end(tmp_path):
    target = tmp_path / "bundle"
    folder = stopped(target, {"seed": 1}, "half")
    assert stopped(target, {"seed": 2}, "of other settings") != folder
    (tmp_path / ".bundle.other").mkdir()
    with checkpoint_folder(target, {"seed": 1}) as again:
        assert again == folder
        assert (again / "done").read_text() == "half"
    assert names(tmp_path) == [".bundle.other"]


def test_nothing_is_left_where_nothing_was_checkpoint_folder(tmp_path):
    stopped(tmp_path / "new" / "bundle", {})
    assert names(tmp_path / "new") == []


def test_two_processes_do_not_work_in_one(tmp_path):
    """A lock of another open file stands for another process."""
    target = tmp_path / "bundle"
    with checkpoint_folder(target, {}) as folder:
        with pytest.raises(UserError, match="another process is calibrating it"), checkpoint_folder(target, {}):
            pass
        (folder / "done").write_text("mine")
        with checkpoint_folder(target, {"other": "settings"}):
            pass
        assert (folder / "done").exists(), "somebody is at work in it"
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot be written \(.*\); give another --out"),
        checkpoint_folder(tmp_path / "file" / "x", {}),
    ):
        pass
