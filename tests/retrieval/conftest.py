"""Tiny random models, loaded once."""

from tiny_models import checkpoint, family, model

__all__ = ["checkpoint", "family", "model"]
