"""``edgevlm serve``: models that watch cameras, behind an HTTP server with a web page."""
