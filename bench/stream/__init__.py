"""``edgevlm bench stream``: measure growing streams, and compare changes with whole frames, and edgevlm with transformers."""
