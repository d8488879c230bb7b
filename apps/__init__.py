"""The programs people run: the command line, the sources, the demo."""
