"""Benchmarks: ratios within one run, printed with medians. Never part of the tests."""
