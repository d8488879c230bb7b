"""``edgevlm bench stream``: measure growing streams, whole frames against changes only, and edgevlm against transformers."""
