"""Parts of `benchmarks.throughput`: what is asked for, who serves it, and what the machine could do at best."""
