"""The simulated runner: exact, without a model, behind `executor_svc.step.Runner`."""
