"""edgevlm: watch a video stream within a fixed memory budget and answer questions about it."""

from importlib.metadata import version

__version__ = version("edgevlm")
__all__ = ["__version__"]
