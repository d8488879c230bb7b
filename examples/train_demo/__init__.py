"""Trains the demo model, the vision tower first, then the decoder: `python examples/train_demo --help`."""
