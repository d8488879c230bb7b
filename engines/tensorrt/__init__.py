"""The TensorRT backend: ``edgevlm build`` builds engines from a bundle's graphs on the target device; the backend runs them.

We have not yet built or run a TensorRT engine; docs/internals/engines.md lists what we checked instead.
"""
