"""Runs a recording again: `paged replay FILE`, or `python -m executor_svc.replay FILE`."""
