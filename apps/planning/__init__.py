"""Plans: what a model would take of a device, before anything is built; each formula and its units in a docstring."""
