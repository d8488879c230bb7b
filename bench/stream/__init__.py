"""``edgevlm bench stream``: a stream as it grows, where a frame's time goes, and both beside transformers."""
