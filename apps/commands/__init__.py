"""The commands of ``edgevlm`` and their options; ``edgevlm/cli.py`` lists them."""
