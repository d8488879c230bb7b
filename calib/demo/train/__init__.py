"""Trains the demo model, the vision tower first, then the decoder: `python -m edgevlm.calib.demo.train --help`."""
