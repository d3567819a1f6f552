"""The plain loss: its conventions against PyTorch's own, its padding rule and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.model.compiled import load
from dragoman.model.kernels import Kernels
from dragoman.training.loss import Convention, nll, projected_loss, smoothed_cross_entropy

CONVENTIONS: tuple[Convention, ...] = ("paper", "uniform", "skip_pad")
KERNELS = [kernels for kernels in (Kernels(), load()) if kernels is not None]


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


def compare_with_plain(
    convention: Convention, kernels: Kernels, dtype: torch.dtype, biased: bool, V: int = 37
) -> tuple[float, float]:
    """Relative errors of the fused loss and of its gradients against the plain one in float64."""
    torch.manual_seed(6)
    tgt = torch.randint(1, V, (50,))
    tgt[::9] = 0
    leaves = [torch.randn(50, 24), torch.randn(V, 24), torch.randn(V)]
    ours = [x.to(dtype).requires_grad_() for x in leaves]
    plain = [x.detach().double().requires_grad_() for x in ours]
    loss, nll_sum = projected_loss(
        ours[0], ours[1], ours[2] if biased else None, tgt, 0.1, 0, convention, chunk=16, kernels=kernels
    )
    logits = F.linear(plain[0], plain[1], plain[2] if biased else None)
    want, _ = smoothed_cross_entropy(logits, tgt, 0.1, 0, convention)
    torch.testing.assert_close(nll_sum.double(), nll(logits, tgt, 0)[0], rtol=1e-2, atol=0)
    wanted = 3 if biased else 2
    (loss / 7).backward()
    expected = torch.autograd.grad(want / 7, plain[:wanted])
    errors = [
        ((x.grad.double() - y).norm() / y.norm()).item()
        for x, y in zip(ours, expected, strict=False)
        if x.grad is not None
    ]
    assert len(errors) == wanted
    return abs(loss.item() - want.item()) / want.item(), max(errors)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_without_the_logits_it_is_the_same_loss_and_gradient(
    convention: Convention, kernels: Kernels, biased: bool
) -> None:
    loss, gradient = compare_with_plain(convention, kernels, torch.float32, biased)
    assert loss < 1e-6
    assert gradient < 1e-6
    loss, gradient = compare_with_plain(convention, kernels, torch.bfloat16, biased)
    assert loss < 1e-2
    assert gradient < 2e-2


def test_the_projected_loss_in_float64_passes_gradcheck() -> None:
    torch.manual_seed(7)
    x, weight = torch.randn(9, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    tgt = torch.randint(0, 11, (9,))
    torch.autograd.gradcheck(lambda x, w: projected_loss(x, w, None, tgt, 0.1, 0, chunk=4)[0], (x, weight))


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_the_projected_loss_of_padding_alone_is_zero_with_a_finite_gradient(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(20, 16, requires_grad=True)
    loss, nll_sum = projected_loss(x, weight, None, torch.zeros(5, dtype=torch.long), 0.1, 0, kernels=kernels)
    loss.backward()
    assert (loss.item(), nll_sum.item()) == (0.0, 0.0)
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_frozen_weights_and_no_gradients_at_all() -> None:
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(20, 16)
    tgt = torch.randint(1, 20, (5,))
    loss, _ = projected_loss(x, weight, None, tgt, 0.1, 0)
    want, _ = smoothed_cross_entropy(x @ weight.t(), tgt, 0.1, 0)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(want, x), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(projected_loss(x, weight, None, tgt, 0.1, 0)[0], want)
