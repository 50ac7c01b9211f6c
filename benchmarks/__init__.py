"""Measures the daemon against the library it wraps: `python -m benchmarks`. See docs/benchmarks.md."""
