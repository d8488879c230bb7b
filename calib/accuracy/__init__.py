"""Code that ``edgevlm calibrate`` and ``edgevlm bench accuracy`` share: variants, cases, workers, equal-byte budgets."""
