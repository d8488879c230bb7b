"""Code that ``edgevlm calibrate`` and ``edgevlm bench accuracy`` share to compare policies at equal bytes."""
