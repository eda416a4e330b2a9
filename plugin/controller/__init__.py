"""The loop of a job on its driver, and what it decides: queue, batch, passes, records."""
