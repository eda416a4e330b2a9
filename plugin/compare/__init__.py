"""Offline comparison: log-prob dumps, what-if over corrections, sweeps, the catalog of corrections."""
