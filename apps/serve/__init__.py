"""``edgevlm serve``: an HTTP server, with a web page, for models that watch cameras."""
