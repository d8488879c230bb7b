"""Keep results in one append-only file, which ``bench all`` writes and ``bench report`` reads and compares."""
