"""Plans: predict a model's memory and speed on a device; docstrings have each formula and its units."""
