"""Lanes: however many there are and however a batch is cut, the update is the same."""

from __future__ import annotations

import copy
import platform
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dragoman.model.transformer import Transformer, TransformerConfig
from dragoman.training.lanes import Lanes, keep_large_blocks
from dragoman.training.loss import nll, smoothed_cross_entropy

PAD = 0


@dataclass(frozen=True)
class Padded:
    src: Tensor
    tgt_in: Tensor
    tgt_out: Tensor


def model(dropout: float = 0.0) -> Transformer:
    torch.manual_seed(1)
    return Transformer(TransformerConfig(61, n_layers=2, d_model=32, d_ff=64, n_heads=2, dropout=dropout, pad_id=PAD))


def batch(B: int = 7, S: int = 9, T: int = 8) -> Padded:
    generator = torch.Generator().manual_seed(2)
    src, tgt_in, tgt_out = (torch.randint(1, 61, (B, n), generator=generator) for n in (S, T, T))
    for row in range(B):
        src[row, S - row % 4 :] = PAD
        tgt_in[row, T - row % 5 :] = PAD
        tgt_out[row, T - row % 5 :] = PAD
    return Padded(src, tgt_in, tgt_out)


def gradients(model: Transformer) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    difference = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(y.square().sum()) for y in b)) ** 0.5


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_gradient_is_that_of_the_plain_model(n: int) -> None:
    ours, plain, pairs = model(), model(), batch()
    n_tokens = int((pairs.tgt_out != PAD).sum())
    with Lanes(ours, n) as lanes:
        loss_sum, nll_sum = lanes.gradients([pairs], n_tokens)
    logits = plain(pairs.src, pairs.tgt_in)
    loss, _ = smoothed_cross_entropy(logits, pairs.tgt_out, 0.1, PAD)
    (loss / n_tokens).backward()
    assert loss_sum == pytest.approx(loss.item(), rel=1e-6)
    assert nll_sum == pytest.approx(nll(logits, pairs.tgt_out, PAD)[0].item(), rel=1e-6)
    assert len(gradients(ours)) == len(list(ours.parameters()))
    assert distance(gradients(ours), gradients(plain)) < 1e-6


def test_however_the_pairs_are_cut_into_micro_batches_and_lanes() -> None:
    pairs, results = batch(), []
    n_tokens = int((pairs.tgt_out != PAD).sum())
    cuts = [[slice(0, 7)], [slice(0, 1), slice(1, 7)], [slice(0, 3), slice(3, 5), slice(5, 7)]]
    for n, cut in [(1, cuts[0]), (2, cuts[1]), (3, cuts[2]), (8, cuts[0])]:
        ours = model()
        with Lanes(ours, n) as lanes:
            lanes.gradients([Padded(pairs.src[s], pairs.tgt_in[s], pairs.tgt_out[s]) for s in cut], n_tokens)
        results.append(gradients(ours))
    assert all(distance(result, results[0]) < 1e-6 for result in results[1:])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_is_a_function_of_its_seed(precision: str) -> None:
    ours, pairs = model(dropout=0.2).train(), batch()
    with Lanes(ours, 2, precision) as lanes:  # type: ignore[arg-type]
        runs = []
        for seed in (5, 5, 6):
            losses = lanes.gradients([pairs, pairs], 90, seed)
            runs.append((losses, gradients(ours)))
    with Lanes(copy.deepcopy(ours), 2, precision) as other:  # type: ignore[arg-type]
        assert other.gradients([pairs, pairs], 90, 5) == runs[0][0]
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_without_training_mode_there_is_no_dropout() -> None:
    ours, pairs = model(dropout=0.5).eval(), batch()
    with Lanes(ours, 2) as lanes:
        assert lanes.gradients([pairs], 10, 1) == lanes.gradients([pairs], 10, 2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_learns(precision: str) -> None:
    ours, pairs = model(dropout=0.1).train(), batch()
    n_tokens = int((pairs.tgt_out != PAD).sum())
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    with Lanes(ours, 2, precision) as lanes:  # type: ignore[arg-type]
        for step in range(25):
            nll_sum = lanes.gradients([pairs], n_tokens, step)[1]
            optimizer.step()
            if step == 0:
                first = nll_sum
    assert nll_sum < 0.3 * first


def test_the_gradient_is_not_finite_where_the_model_is_not() -> None:
    ours, pairs = model(), batch()
    with torch.no_grad():
        ours.encoder.layers[0].feed_forward.inner.weight[3, 4] = float("nan")  # type: ignore[union-attr, operator, index]
    with Lanes(ours, 2) as lanes:
        loss_sum, _ = lanes.gradients([pairs], 10)
    assert loss_sum != loss_sum


def test_an_error_in_a_lane_reaches_the_caller_and_threads_are_as_before() -> None:
    threads, pairs = torch.get_num_threads(), batch()
    broken = Padded(pairs.src + 1000, pairs.tgt_in, pairs.tgt_out)
    with Lanes(model(), 2) as lanes:
        with pytest.raises(IndexError):
            lanes.gradients([broken], 10)
        loss_sum, _ = lanes.gradients([pairs], 10)
    assert loss_sum > 0
    assert torch.get_num_threads() == threads


def test_what_it_cannot_do_it_refuses_by_name() -> None:
    with pytest.raises(ValueError, match="at least one lane"):
        Lanes(model(), 0)
    with pytest.raises(ValueError, match="float32 or bfloat16, not 'float16'"):
        Lanes(model(), 1, "float16")  # type: ignore[arg-type]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc has no mallopt")
def test_glibc_can_be_told_to_keep_its_memory() -> None:
    assert keep_large_blocks()
