"""Trains the demo model, the vision tower first, then the decoder: `python -m edgevlm.apps.demo.train --help`."""
