"""Benchmarks: each module prints one JSON object, whose keys its header explains."""
