"""``edgevlm bench stream``: measure long streams, compare changes with whole frames, and compare edgevlm with transformers."""
