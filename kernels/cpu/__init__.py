"""The native kernels of a CPU."""
