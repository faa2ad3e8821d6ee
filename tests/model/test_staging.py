"""Columns arrive as they were given, whatever was in the buffer before; results come back the caller's own."""

import numpy as np
import torch

from executor_svc.model.staging import ALIGNMENT, Readback, Staging

CPU = torch.device("cpu")
DTYPES = [np.int64, np.int32, np.uint8, np.bool_, np.float32, np.float64]


def random_columns(generator, most: int) -> dict[str, np.ndarray]:
    columns = {}
    for i in range(generator.integers(1, 12)):
        shape = tuple(generator.integers(0, most, size=generator.integers(1, 3)))
        columns[f"column {i}"] = generator.integers(0, 100, shape).astype(DTYPES[generator.integers(len(DTYPES))])
    return columns


def test_every_column_arrives_with_its_dtype_and_shape_in_steps_of_all_sizes():
    generator, staging = np.random.default_rng(0), Staging(CPU)
    for most in [3, 40, 200, 2, 500, 5, 5, 5]:
        columns = random_columns(generator, most)
        tensors = staging.to_device(columns)
        assert list(tensors) == list(columns)
        for name, column in columns.items():
            assert tensors[name].numpy().dtype == column.dtype
            np.testing.assert_array_equal(tensors[name].numpy(), column)
            assert not column.size or tensors[name].data_ptr() % ALIGNMENT == 0


def test_the_same_shapes_again_carry_the_new_values():
    staging = Staging(CPU)
    for value in range(3):
        given = {"ids": np.full(5, value), "table": np.full((4, 6), value, np.int32)[:, ::2]}
        tensors = staging.to_device(given)
        given["ids"][:] = 99  # the columns are the caller's again
        assert tensors["ids"].tolist() == [value] * 5
        assert tensors["table"].tolist() == [[value] * 3] * 4


def test_results_are_not_overwritten_by_later_ones():
    readback, source = Readback(CPU), torch.arange(4)
    first, flags = readback.read([source.clone(), source > 1])
    readback.read([source + 10, source > 9])
    assert first.tolist() == [0, 1, 2, 3]
    assert flags.tolist() == [False, False, True, True]


def test_a_buffer_that_grew_within_a_step_is_written_to_between_steps():
    """A step works in torch's inference mode; rows begin and are forked outside of it."""
    staging = Staging(torch.device("meta"))
    with torch.inference_mode():
        staging.to_device({"tables": np.zeros(1 << 18, np.int32)})
    assert staging.to_device({"parents": np.zeros(3, np.int64)})["parents"].shape == (3,)
