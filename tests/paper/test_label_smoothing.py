"""§5.4: the three readings of label smoothing give the three numbers that their own implementations give."""

from __future__ import annotations

import math

import pytest
import torch

from dragoman.training.loss import Convention, nll, smoothed_cross_entropy, smoothing

LOGITS = torch.tensor([[2.0, 1.0, 0.1, -1.0, 0.5]], dtype=torch.float64)
TARGET = torch.tensor([3])


@pytest.mark.parametrize(
    ("convention", "expected"),
    [
        ("uniform", 3.430419671049769),  # torch.nn.functional.cross_entropy
        ("paper", 3.3924196710497694),  # tensor2tensor before it subtracts the entropy; fairseq since February 2021
        ("skip_pad", 3.429086337716436),  # The Annotated Transformer, as cross-entropy
    ],
)
def test_five_classes(convention: Convention, expected: float) -> None:
    loss, n_tokens = smoothed_cross_entropy(LOGITS, TARGET, 0.1, 0, convention)
    assert n_tokens == 1
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert nll(LOGITS, TARGET, 0)[0].item() == pytest.approx(3.5824196710497693, abs=1e-6)


def entropy(V: int, convention: Convention) -> float:
    q = smoothing(V, 0.1, 0, convention)
    others = V - 1 if q.never is None else V - 2
    return -(q.on_target * math.log(q.on_target) + others * q.elsewhere * math.log(q.elsewhere))


def test_each_distribution_sums_to_one() -> None:
    for convention, others in (("paper", 4), ("uniform", 4), ("skip_pad", 3)):
        q = smoothing(5, 0.1, 0, convention)  # type: ignore[arg-type]
        assert q.on_target + others * q.elsewhere == pytest.approx(1.0, abs=1e-12)


def test_the_entropy_is_what_the_authors_subtract() -> None:
    assert entropy(5, "paper") == pytest.approx(0.4637124095034373, abs=1e-12)
    loss, _ = smoothed_cross_entropy(LOGITS, TARGET, 0.1, 0, "paper")
    assert loss.item() - entropy(5, "paper") == pytest.approx(2.9287072615463323, abs=1e-6)
    loss, _ = smoothed_cross_entropy(LOGITS, TARGET, 0.1, 0, "skip_pad")
    assert loss.item() - entropy(5, "skip_pad") == pytest.approx(2.9941421354581768, abs=1e-6)


def test_the_floor_of_the_smoothed_loss_at_the_papers_vocabulary() -> None:
    assert entropy(37_000, "uniform") == pytest.approx(1.3769132225560563, abs=1e-9)
    assert entropy(37_000, "paper") == pytest.approx(1.3769475898148582, abs=1e-9)


def test_a_batch_with_a_padded_target() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.1, -1.0, 0.5], [0.0, 0.0, 3.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    loss, n_tokens = smoothed_cross_entropy(logits, torch.tensor([3, 2, 0]), 0.1, 0, "uniform")
    assert n_tokens == 2
    assert loss.item() == pytest.approx(3.8520312037291293, abs=1e-5)
