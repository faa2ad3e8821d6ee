"""The real runner: a transformers model behind `executor_svc.step.Runner`. The only part that needs torch."""
