"""The output head while a model is checked: most of a small model's weights, and passed through for every token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from executor_svc.model.fused.products import Products
from executor_svc.model.fused.structure import as_linear


@contextmanager
def packed_head(model: PreTrainedModel, products: Products | None) -> Iterator[None]:
    """While it lasts, the model's head multiplies with a packed copy of its weights, in 16 bits.

    For checks that compare logits with logits, of one head both: torch's own takes ten times as long on a CPU without
    instructions for bf16. Whether the product is what the head computes is for `linear.understand` to find out.
    """
    head = None if products is None else model.get_output_embeddings()
    linear = None if head is None else as_linear(head)
    if products is None or head is None or linear is None or not products.are_native(linear.weight.dtype):
        yield
        return
    product = replace(products, int8=False).of(linear)

    def forward(input: torch.Tensor) -> torch.Tensor:
        return product(input)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
