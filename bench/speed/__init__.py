"""``edgevlm bench speed``: decode, prefill, vision towers, precisions and graphs, compared with other runtimes."""
