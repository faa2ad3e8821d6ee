"""One model over several processes, each with a share of every layer (tensor parallelism)."""
