"""``python -m edgevlm`` is the command ``edgevlm``."""

from edgevlm.apps.cli import main

main()
