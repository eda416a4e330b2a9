"""Benchmarks: ratios within one run, against the memory-bandwidth floor and against public implementations."""
