"""What must hold before any test module is imported."""

import os

# Triton reads this when it is first imported, which transformers may do from any test: the kernels then run in its
# interpreter, for there need not be a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
