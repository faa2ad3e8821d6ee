"""The parts of `benchmarks.gpu_check`: a section a file, and what they share."""
