"""What the scheduler counts, as Prometheus reads it. Nothing here runs before somebody asks."""
