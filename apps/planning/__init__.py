"""What a model would take of a device, worked out before anything is built: formulas, their units in each docstring."""
