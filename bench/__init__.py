"""Benchmarks beside their peers, in one run; figures are printed, never asserted."""
