"""The ``edgevlm bench`` commands, which measure performance and accuracy."""
