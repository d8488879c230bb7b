"""What ``edgevlm calibrate`` and ``edgevlm bench accuracy`` share: variants, cases, workers, intervals, equal bytes."""
