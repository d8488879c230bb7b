"""``edgevlm serve``: cameras on models behind an HTTP server, with a page."""
