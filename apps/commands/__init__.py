"""The commands of ``edgevlm``: their options as typed, and what runs them; ``edgevlm/cli.py`` lists them."""
