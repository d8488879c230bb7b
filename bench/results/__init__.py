"""Results in one file that only grows: written by ``bench all``, read and compared by ``bench report``."""
