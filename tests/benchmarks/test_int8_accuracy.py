import pytest
import torch

from benchmarks.int8_accuracy import differences


def test_what_is_the_same_differs_by_nothing():
    right = torch.log_softmax(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), -1)
    assert differences(right, right, torch.arange(5)).tolist() == [0, 0, 0, 5]


def test_what_a_text_loses_may_be_gained_elsewhere():
    right = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    got = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log()
    kl, lost, off, same = differences(got, right, torch.tensor([1, 0])).tolist()
    assert kl == pytest.approx(0.5 * torch.log(torch.tensor(4 / 3)).item())
    assert lost == pytest.approx(-torch.log(torch.tensor(1.5)).item())
    assert off == pytest.approx(-lost)
    assert same == 1
