"""R-Drop (arXiv:2106.14448): against torch's own divergence, through both kernels, in lanes and by autograd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.batches.batch import Batch
from dragoman.model.compiled import load
from dragoman.model.fused import Joined, features
from dragoman.model.kernels import Bits, Kernels
from dragoman.model.transformer import Transformer, TransformerConfig
from dragoman.training.gradients import LossModule
from dragoman.training.lanes import Lanes
from dragoman.training.loss import Convention, projected_loss, r_drop_cross_entropy, smoothed_cross_entropy
from dragoman.training.options import TrainingConfig

KERNELS = [kernels for kernels in (Kernels(), load()) if kernels is not None]
PAD = 0


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(4)


def drawn(n: int = 11, V: int = 41) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of two passes [n, V] and their targets [n], of which two are padding."""
    first = torch.randn(n, V, dtype=torch.float64)
    tgt = torch.randint(1, V, (n,))
    tgt[[2, n - 1]] = PAD
    return first, first + torch.randn(n, V, dtype=torch.float64), tgt


@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
def test_the_loss_is_that_of_the_paper_halved(alpha: float) -> None:
    first, second, tgt = drawn()
    real = tgt != PAD
    log_p, log_r = first[real].log_softmax(-1), second[real].log_softmax(-1)
    nll = F.nll_loss(log_p, tgt[real], reduction="sum") + F.nll_loss(log_r, tgt[real], reduction="sum")
    apart = [F.kl_div(b, a, reduction="sum", log_target=True) for a, b in ((log_p, log_r), (log_r, log_p))]
    paper = nll + alpha * sum(apart) / 2  # eq. 4
    torch.testing.assert_close(r_drop_cross_entropy(first, second, tgt, 0.0, PAD, alpha), paper / 2)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("convention", ["paper", "uniform", "skip_pad"])
@pytest.mark.parametrize(("V", "chunk"), [(41, 4), (64, 100), (7, 2)])
def test_from_features_it_has_the_loss_and_the_gradients_of_the_readable_form(
    kernels: Kernels, convention: Convention, V: int, chunk: int
) -> None:
    D, n, alpha = 16, 9, 5.0
    x, weight, bias = torch.randn(2 * n, D), torch.randn(V, D), torch.randn(V)
    tgt = torch.randint(1, V, (n,))
    tgt[[3, 8]] = PAD
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    logits = F.linear(*leaves)
    want = r_drop_cross_entropy(logits[:n], logits[n:], tgt, 0.1, PAD, alpha, convention)
    plain = smoothed_cross_entropy(logits, tgt.repeat(2), 0.0, PAD)[0] / 2
    expected = torch.autograd.grad(want, leaves)
    loss, nll = projected_loss(x, weight, bias, tgt, 0.1, PAD, convention, r_drop=alpha, chunk=chunk, kernels=kernels)
    torch.testing.assert_close((loss, nll), (want, plain))
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(load() is None, reason="no C compiler here, so PyTorch's kernels stand alone")
def test_in_bfloat16_the_compiled_kernel_is_nearer_to_float32_than_rounding() -> None:
    compiled = load()
    assert compiled is not None
    first, second, tgt = drawn(40, 131)
    q = (0.9, 0.1 / 130, None)
    low = [x.bfloat16() for x in (first, second)]
    exact = [x.float() for x in low]
    want = Kernels().r_drop_loss(*exact, tgt, PAD, *q, 5.0)
    got = compiled.r_drop_loss(*low, tgt, PAD, *q, 5.0)
    assert got == pytest.approx(want, rel=1e-5)
    for ours, theirs in zip(low, exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-6)
        assert (ours[[2, 39]] == 0).all()


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_a_nan_in_either_pass_is_not_lost(kernels: Kernels) -> None:
    for broken in (0, 1):
        first, second, tgt = drawn()
        passes = [first.float(), second.float()]
        passes[broken][1, 20] = float("nan")
        loss, _ = kernels.r_drop_loss(*passes, tgt, PAD, 0.9, 0.1 / 40, None, 5.0)
        assert loss != loss


def model(dropout: float) -> Transformer:
    return Transformer(TransformerConfig(41, n_layers=2, d_model=32, d_ff=48, n_heads=2, dropout=dropout, pad_id=PAD))


def batch() -> Batch:
    src, tgt = torch.randint(1, 41, (6, 8)), torch.randint(1, 41, (6, 7))
    for row, (s, t) in enumerate([(8, 7), (3, 5), (1, 1), (6, 7), (8, 2)]):
        src[row, s:], tgt[row, t:] = PAD, PAD
    return Batch(src, tgt, tgt, int((tgt != PAD).sum()), np.arange(6))


def test_without_dropout_both_passes_agree_and_nothing_is_added() -> None:
    whole, one = model(0.0), batch()
    plain, twice = LossModule(whole, TrainingConfig(), PAD), LossModule(whole, TrainingConfig(r_drop=5.0), PAD)
    want, want_nll = plain(one.src, one.tgt_in, one.tgt_out)
    expected = torch.autograd.grad(want, list(whole.parameters()))
    loss, nll = twice(one.src, one.tgt_in, one.tgt_out)
    torch.testing.assert_close((loss, nll), (want, want_nll))
    torch.testing.assert_close(torch.autograd.grad(loss, list(whole.parameters())), expected, rtol=1e-4, atol=1e-5)
    with Lanes(whole, 2) as lanes:
        sums = lanes.gradients([one], 1, seed=3, r_drop=5.0)
    assert sums == pytest.approx((want.item(), want_nll.item()), rel=1e-5)
    for parameter, gradient in zip(whole.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


class Whole(torch.nn.Module):
    """A family that gives its logits and no features."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        logits: Tensor = self.model(src, tgt_in)
        return logits


@pytest.mark.parametrize("family", [lambda model: model, Whole], ids=["features", "logits"])
def test_by_autograd_the_two_passes_have_masks_of_their_own(family: Callable[[Transformer], torch.nn.Module]) -> None:
    whole, one = family(model(0.3)).train(), batch()
    module = LossModule(whole, TrainingConfig(r_drop=5.0), PAD)
    torch.manual_seed(8)
    loss, nll = module(one.src, one.tgt_in, one.tgt_out)
    ours = torch.autograd.grad(loss, list(whole.parameters()))
    torch.manual_seed(8)
    first, second = whole(one.src.repeat(2, 1), one.tgt_in.repeat(2, 1)).chunk(2)
    assert not torch.allclose(first, second)
    want = r_drop_cross_entropy(first, second, one.tgt_out, 0.1, PAD, 5.0)
    plain = sum(smoothed_cross_entropy(logits, one.tgt_out, 0.0, PAD)[0] for logits in (first, second)) / 2
    torch.testing.assert_close((loss, nll), (want, plain))
    torch.testing.assert_close(ours, torch.autograd.grad(want, list(whole.parameters())), rtol=1e-4, atol=1e-4)


def test_a_validation_pays_for_one_pass() -> None:
    whole, one = Whole(model(0.3)).eval(), batch()
    rows: list[int] = []
    whole.register_forward_pre_hook(lambda _, given: rows.append(given[0].size(0)))
    LossModule(whole, TrainingConfig(r_drop=5.0), PAD)(one.src, one.tgt_in, one.tgt_out)
    assert rows == [len(one)]


def test_in_a_lane_the_two_passes_have_masks_of_their_own_and_the_loss_of_the_readable_form() -> None:
    whole, one = model(0.3).train(), batch()
    with Lanes(whole, 1) as lanes:
        loss, _ = lanes.gradients([one], 1, seed=3, r_drop=5.0)
        ours = [parameter.grad for parameter in whole.parameters()]
    src, tgt = one.src.repeat(2, 1), one.tgt_out.repeat(2, 1)
    x, _, n = features(whole, Joined(whole), src, tgt, src != PAD, tgt != PAD, Bits(3, 0, 0))
    logits = F.linear(x[:n], whole.generator.weight)
    first, second = logits.chunk(2)
    assert not torch.allclose(first, second)
    want = r_drop_cross_entropy(first, second, one.tgt_out[one.tgt_out != PAD], 0.1, PAD, 5.0)
    assert loss == pytest.approx(want.item(), rel=1e-5)
    for got, gradient in zip(ours, torch.autograd.grad(want, list(whole.parameters())), strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-4)
