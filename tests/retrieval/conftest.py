"""The same tiny random models as the sessions' tests have."""

from runtime.conftest import checkpoint, family, model

__all__ = ["checkpoint", "family", "model"]
