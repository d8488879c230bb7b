"""``edgevlm bench report``: results as one HTML page that needs nothing else, its JSON inside it."""
