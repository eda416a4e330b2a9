"""Which loss and correction survives which staleness and precision, on a small task, as committed data."""
