"""Offline: log-prob dumps, every loss and correction replayed on them, sweeps, the catalog."""
