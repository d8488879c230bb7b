"""``edgevlm bench stream``: a stream as it grows, where a frame's time goes, and how both compare with transformers."""
