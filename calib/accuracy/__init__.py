"""Code shared by ``edgevlm calibrate`` and ``edgevlm bench accuracy``: variants, cases, workers, equal bytes."""
