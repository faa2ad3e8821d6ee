"""Figures that anyone can repeat: `python -m benchmarks.<name> [--json]`. The last line of --json is one object."""
