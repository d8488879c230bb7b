"""Backends, one file each, which run a bundle's graphs; :func:`edgevlm.runtime.engine.load_engine` finds them by name."""
