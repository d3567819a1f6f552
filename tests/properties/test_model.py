"""What must hold of the 2017 model whatever its weights; sizes are unequal, so that a swapped axis cannot hide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dragoman.model.transformer import Transformer, TransformerConfig

B, S, T, H, V = 2, 5, 7, 3, 17


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(V, 2, 24, 40, H, d_k=5, d_v=7, dropout=0.1)).eval()


@pytest.fixture
def src() -> Tensor:
    tokens = torch.randint(1, V, (B, S))
    tokens[1, 3:] = 0
    return tokens


@pytest.fixture
def tgt() -> Tensor:
    return torch.randint(1, V, (B, T))


def test_a_later_token_never_moves_an_earlier_logit(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    before = model(src, tgt)
    for t in range(T - 1):
        changed = tgt.clone()
        changed[:, t + 1] = changed[:, t + 1] % (V - 1) + 1
        after = model(src, changed)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.allclose(after[:, t + 1], before[:, t + 1])


def test_step_by_step_is_the_whole_pass(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    whole = model(src, tgt)
    state = model.start(src)
    for t in range(T):
        logits, state = model.step(tgt[:, t], state)
        assert torch.allclose(logits, whole[:, t], atol=1e-5)


def test_padding_and_neighbours_change_nothing(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    together = model(torch.nn.functional.pad(src, (0, 30)), torch.nn.functional.pad(tgt, (0, 30)))
    for row, length in ((0, 5), (1, 3)):
        alone = model(src[row : row + 1, :length], tgt[row : row + 1])
        assert torch.allclose(together[row, :T], alone[0], atol=1e-5)


def test_padding_changes_neither_summed_loss_nor_gradients(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    from dragoman.training.loss import smoothed_cross_entropy

    def loss_and_gradients(src: Tensor, tgt: Tensor) -> tuple[float, list[Tensor]]:
        model.zero_grad()
        loss, n_tokens = smoothed_cross_entropy(model(src, tgt[:, :-1]), tgt[:, 1:], 0.1, 0)
        assert int(n_tokens) == B * (T - 1)
        loss.backward()
        return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    loss, gradients = loss_and_gradients(src, tgt)
    padded_loss, padded_gradients = loss_and_gradients(
        torch.nn.functional.pad(src, (0, 30)), torch.nn.functional.pad(tgt, (0, 30))
    )
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    assert len(gradients) == len(padded_gradients) > 50
    for one, other in zip(gradients, padded_gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_an_empty_source_and_an_all_pad_target_stay_finite(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    src, tgt = src.clone(), tgt.clone()
    src[0] = 0
    tgt[1] = 0
    logits = model(src, tgt)
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_an_explicit_mask_is_the_default_one(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    assert torch.equal(model(src, tgt), model(src, tgt, src != 0))
    hidden = model(src, tgt, torch.tensor([[True, True, True, True, False], [True, True, True, False, False]]))
    assert torch.allclose(hidden[0], model(src[:1, :4], tgt[:1])[0], atol=1e-5)


def test_select_reorders_repeats_and_drops_rows(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    _, state = model.step(tgt[:, 0], model.start(src))
    rows = torch.tensor([1, 1, 0])
    logits, _ = model.step(tgt[rows, 1], state.select(rows))
    expected, _ = model.step(tgt[:, 1], state)
    assert torch.allclose(logits, expected[rows], atol=1e-6)


def test_a_state_is_never_changed_by_a_step(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    start = model.start(src)
    first, _ = model.step(tgt[:, 0], start)
    again, _ = model.step(tgt[:, 0], start)
    assert torch.equal(first, again)
    assert start.length == 0


def test_dropout_is_off_in_eval_and_on_in_training(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    assert torch.equal(model(src, tgt), model(src, tgt))
    model.train()
    assert not torch.equal(model(src, tgt), model(src, tgt))


def test_without_positions_order_would_not_matter(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    shuffled = src[:1, [3, 0, 4, 1, 2]]
    assert not torch.allclose(model(src[:1], tgt[:1]), model(shuffled, tgt[:1]), atol=1e-3)
    model.position.table = torch.zeros_like(model.position.table)
    assert torch.allclose(model(src[:1], tgt[:1]), model(shuffled, tgt[:1]), atol=1e-5)
