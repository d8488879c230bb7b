"""The TensorRT backend: ``edgevlm build`` builds engines from a bundle's graphs on the target device; the backend runs them.

Only :mod:`~edgevlm.engines.tensorrt.api` imports TensorRT. We have not yet built or run an engine;
docs/internals/engines.md lists the checks that were made.
"""
