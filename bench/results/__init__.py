"""Results of benches in one file that only grows: written by ``bench all``, read by ``bench report`` and ``bench compare``."""
