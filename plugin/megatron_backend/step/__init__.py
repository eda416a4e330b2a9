"""One training step: packing, schedule, closures, loss scaling, metrics, agreement of ranks."""
