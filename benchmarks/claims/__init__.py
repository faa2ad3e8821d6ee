"""What paged attention promises, measured on this engine: `python -m benchmarks.claims`. See docs/claims.md."""
