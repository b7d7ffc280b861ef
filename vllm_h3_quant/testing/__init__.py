"""Helpers for tests, benchmarks and the demo. Production code must not import this package."""
