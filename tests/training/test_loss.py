"""The plain loss: its conventions against PyTorch's own, its padding rule and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.training.loss import Convention, nll, smoothed_cross_entropy

CONVENTIONS: tuple[Convention, ...] = ("paper", "uniform", "skip_pad")


def by_hand(logits: Tensor, tgt: Tensor, eps: float, pad_id: int, convention: str) -> float:
    """-Σ q log p in float64, one entry at a time, with q written from the definitions."""
    total, V = 0.0, logits.size(-1)
    for row, target in zip(logits.double().reshape(-1, V), tgt.reshape(-1).tolist(), strict=True):
        if target == pad_id:
            continue
        log_z = math.log(sum(math.exp(x) for x in row.tolist()))
        for entry, x in enumerate(row.tolist()):
            if convention == "uniform":
                q = eps / V + (1 - eps) * (entry == target)
            elif convention == "paper":
                q = 1 - eps if entry == target else eps / (V - 1)
            else:
                q = 1 - eps if entry == target else eps / (V - 2) * (entry != pad_id)
            total -= q * (x - log_z)
    return total


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("pad_id", [0, 3])
def test_every_convention_is_the_sum_over_its_distribution(convention: Convention, pad_id: int) -> None:
    torch.manual_seed(1)
    logits, tgt = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    tgt[0, 3:] = pad_id
    loss, n_tokens = smoothed_cross_entropy(logits, tgt, 0.1, pad_id, convention)
    assert n_tokens == int((tgt != pad_id).sum())
    assert loss.item() == pytest.approx(by_hand(logits, tgt, 0.1, pad_id, convention), rel=1e-6)


def test_uniform_is_the_loss_of_torch() -> None:
    torch.manual_seed(2)
    logits, tgt = torch.randn(7, 13), torch.randint(1, 13, (7,))
    tgt[-1] = 0
    loss, _ = smoothed_cross_entropy(logits, tgt, 0.2, 0, "uniform")
    theirs = F.cross_entropy(logits, tgt, ignore_index=0, label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(loss, theirs)


def test_without_smoothing_all_are_the_negative_log_likelihood() -> None:
    torch.manual_seed(3)
    logits, tgt = torch.randn(6, 9), torch.randint(1, 9, (6,))
    want = F.cross_entropy(logits, tgt, reduction="sum")
    for convention in CONVENTIONS:
        torch.testing.assert_close(smoothed_cross_entropy(logits, tgt, 0.0, 0, convention)[0], want)
    torch.testing.assert_close(nll(logits, tgt, 0)[0], want)


def test_padding_weighs_nothing_in_the_loss_and_the_gradient() -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, 4, 8, requires_grad=True)
    tgt = torch.tensor([[3, 4, 0, 0], [5, 0, 0, 0]])
    loss, n_tokens = smoothed_cross_entropy(logits, tgt, 0.1, 0)
    loss.backward()
    alone, _ = smoothed_cross_entropy(logits[tgt != 0], tgt[tgt != 0], 0.1, 0)
    assert n_tokens == 3
    torch.testing.assert_close(loss, alone)
    assert logits.grad is not None
    assert not logits.grad[tgt == 0].any()
    assert logits.grad[tgt != 0].abs().sum() > 0


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_all_padding_is_zero_with_a_finite_gradient(convention: Convention) -> None:
    logits = torch.randn(2, 3, 8, requires_grad=True)
    loss, n_tokens = smoothed_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long), 0.1, 0, convention)
    loss.backward()
    assert (loss.item(), n_tokens) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    torch.manual_seed(5)
    logits, tgt = torch.randn(400, 50).bfloat16(), torch.randint(1, 50, (400,))
    loss, _ = smoothed_cross_entropy(logits, tgt, 0.1, 0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand(logits.float(), tgt, 0.1, 0, "paper"), rel=1e-5)


def test_what_it_cannot_do_it_refuses_by_name() -> None:
    logits, tgt = torch.zeros(1, 4), torch.ones(1, dtype=torch.long)
    with pytest.raises(ValueError, match="convention must be paper, uniform or skip_pad, not 'annotated'"):
        smoothed_cross_entropy(logits, tgt, 0.1, 0, "annotated")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing must be at least 0"):
        smoothed_cross_entropy(logits, tgt, 1.5, 0)
