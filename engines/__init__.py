"""Backends, one file each: tensors in, tensors out. :func:`edgevlm.runtime.engine.load_engine` finds them by name."""
