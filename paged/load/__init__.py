"""Load on schedulers, and what their callers see of it: what `paged bench` and `benchmarks.serving` have in common."""
