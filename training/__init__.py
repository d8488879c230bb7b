"""Trains the demo model, the vision tower first, then the decoder: `python -m training --help`."""
