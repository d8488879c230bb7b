"""Plans: predict a model's memory and speed on a device. The docstrings contain the formulas and their units."""
