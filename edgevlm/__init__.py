"""edgevlm: watch a video stream within a fixed memory budget and answer questions about it."""

from importlib.metadata import version

from edgevlm.errors import UserError
from edgevlm.runtime.answer import Answer
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

__version__ = version("edgevlm")
__all__ = ["Answer", "Model", "Session", "UserError", "__version__"]
