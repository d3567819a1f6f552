"""The fused passes against the readable model: the same features, losses and gradients from the same weights."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dragoman.model.compiled import load
from dragoman.model.fused import Joined, features, sdpa, use_sdpa
from dragoman.model.kernels import AttentionShape, Bits, Dropout, Kernels, pack
from dragoman.model.transformer import Transformer, TransformerConfig, attention, causal_mask
from dragoman.training.loss import projected_loss, smoothed_cross_entropy

PAD = 0


def all_kernels() -> list[Kernels]:
    compiled = load()
    return [Kernels()] if compiled is None else [Kernels(), compiled]


KERNELS = pytest.mark.parametrize("kernels", all_kernels(), ids=lambda kernels: kernels.name)


def small_model(dropout: float = 0.0, **sizes: int) -> Transformer:
    torch.manual_seed(7)
    sizes = {"n_layers": 2, "d_model": 48, "d_ff": 80, "n_heads": 3} | sizes
    model = Transformer(TransformerConfig(53, dropout=dropout, pad_id=PAD, **sizes))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or ".norm." in name:
            nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
    return model


def ragged_batch(B: int = 5, S: int = 9, T: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    src, tgt_in, tgt_out = (torch.randint(1, 53, (B, n), generator=generator) for n in (S, T, T))
    for row, (s, t) in enumerate([(9, 7), (5, 2), (1, 7), (8, 1), (9, 4)][:B]):
        src[row, s:] = PAD
        tgt_in[row, t:] = PAD
        tgt_out[row, t:] = PAD
    return src, tgt_in, tgt_out


def loss_and_gradients(
    model: Transformer, kernels: Kernels, dtype: torch.dtype, seed: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    src, tgt_in, tgt_out = ragged_batch()
    joined = Joined(model, dtype, kernels)
    bits = None if seed is None else Bits(seed)
    x, index, real = features(model, joined, src, tgt_in, src != PAD, tgt_out != PAD, bits)
    targets = tgt_out.flatten()[index]
    targets[real:] = PAD
    loss, _ = projected_loss(
        x, model.generator.weight, None, targets, 0.1, PAD, projection=joined.vocabulary, kernels=kernels, chunk=7
    )
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@KERNELS
@pytest.mark.parametrize("sizes", [{}, {"d_k": 16, "d_v": 32}, {"n_heads": 1, "n_layers": 1}])
def test_float32_gives_the_loss_and_every_gradient_of_the_model(kernels: Kernels, sizes: dict[str, int]) -> None:
    model = small_model(**sizes)
    src, tgt_in, tgt_out = ragged_batch()
    want, _ = smoothed_cross_entropy(model(src, tgt_in), tgt_out, 0.1, PAD)
    gradients = torch.autograd.grad(want, list(model.parameters()))
    loss, ours = loss_and_gradients(model, kernels, torch.float32)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for (name, _), got, expected in zip(model.named_parameters(), ours, gradients, strict=True):
        # The gradient of a key bias is zero but for rounding, so the scale is that of the largest gradients.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}")


@KERNELS
def test_features_are_those_of_the_model_at_real_targets(kernels: Kernels) -> None:
    model = small_model()
    src, tgt_in, tgt_out = ragged_batch()
    got, index, real = features(model, Joined(model, torch.float32, kernels), src, tgt_in, src != PAD, tgt_out != PAD)
    assert real == int((tgt_out != PAD).sum())
    want = model.features(src, tgt_in).flatten(0, 1)[index[:real]]
    torch.testing.assert_close(got[:real], want, rtol=1e-5, atol=1e-5)


@KERNELS
def test_a_source_with_nothing_to_see_gives_zeros_not_nan(kernels: Kernels) -> None:
    model = small_model()
    src, tgt_in, tgt_out = ragged_batch()
    src_mask = src != PAD
    src_mask[1] = False
    joined = Joined(model, torch.float32, kernels)
    got, index, real = features(model, joined, src, tgt_in, src_mask, tgt_out != PAD)
    want = model.features(src, tgt_in, src_mask).flatten(0, 1)[index[:real]]
    torch.testing.assert_close(got[:real], want, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(got[:real].square().sum(), [model.embedding.weight])
    assert torch.isfinite(gradients[0]).all()


@KERNELS
def test_bfloat16_is_near_and_its_gradients_point_the_same_way(kernels: Kernels) -> None:
    model = small_model()
    want, expected = loss_and_gradients(model, Kernels(), torch.float32)
    loss, got = loss_and_gradients(model, kernels, torch.bfloat16)
    assert loss.item() == pytest.approx(want.item(), rel=5e-3)
    flat, reference = (torch.cat([g.flatten() for g in gradients]) for gradients in (got, expected))
    assert torch.cosine_similarity(flat, reference, dim=0) > 0.995
    assert all(g.dtype == torch.float32 for g in got)


@pytest.mark.skipif(load() is None, reason="no C compiler here, so PyTorch's kernels stand alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_give_what_those_of_torch_give_dropout_included(dtype: torch.dtype) -> None:
    model, compiled = small_model(dropout=0.3), load()
    assert compiled is not None
    want, expected = loss_and_gradients(model, Kernels(), dtype, seed=11)
    loss, got = loss_and_gradients(model, compiled, dtype, seed=11)
    loose = dtype == torch.bfloat16
    assert loss.item() == pytest.approx(want.item(), rel=5e-3 if loose else 1e-6)
    flat, reference = (torch.cat([g.flatten() for g in gradients]) for gradients in (got, expected))
    assert (flat - reference).norm() < (0.1 if loose else 1e-5) * reference.norm()


@KERNELS
def test_with_dropout_the_gradient_is_that_of_the_loss_it_gave(kernels: Kernels) -> None:
    """Along the gradient, with the same random bits, the loss moves as the gradient says."""
    model = small_model(dropout=0.3)
    first, gradients = loss_and_gradients(model, kernels, torch.float32, seed=5)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    step = 2e-3

    def moved(sign: float) -> Tensor:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, gradient in zip(other.parameters(), gradients, strict=True):
                parameter += sign * step * gradient / norm
        return loss_and_gradients(other, kernels, torch.float32, seed=5)[0]

    slope = (moved(1.0) - moved(-1.0)) / (2 * step)
    assert slope.item() == pytest.approx(norm.item(), rel=0.02)
    assert loss_and_gradients(model, kernels, torch.float32, seed=6)[0] != first


@KERNELS
def test_same_seed_same_bits_and_another_seed_others(kernels: Kernels) -> None:
    model = small_model(dropout=0.1)
    once, again, other = (loss_and_gradients(model, kernels, torch.float32, seed=seed) for seed in (1, 1, 2))
    assert once[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(once[1], again[1], strict=True))
    assert once[0] != other[0]


@KERNELS
def test_dropout_keeps_the_share_and_the_mean(kernels: Kernels) -> None:
    n, D = 400, 64
    y, dropout = torch.ones(n, D), Dropout(0.1)
    bits = Bits(1, 2, 3).draw(n, D)
    _, z, _, _ = kernels.residual_norm(torch.zeros(n, D), y, bits, dropout, torch.ones(D), torch.zeros(D), 1e-5)
    assert (z == 0).float().mean().item() == pytest.approx(0.1, abs=0.006)
    assert z.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.unique(z).tolist() == pytest.approx([0.0, 1 / (1 - 6554 / 65536)])


@KERNELS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("H", "K", "V"), [(3, 16, 48), (2, 64, 64)])
def test_attention_and_its_way_back(kernels: Kernels, causal: bool, H: int, K: int, V: int) -> None:
    torch.manual_seed(9)
    lengths = [(4, 4), (1, 1), (37, 37), (17, 17)] if causal else [(4, 9), (1, 37), (37, 1), (18, 16)]
    q_mask, k_mask = (torch.arange(37) < torch.tensor([pair[side] for pair in lengths])[:, None] for side in (0, 1))
    (_, queries), (_, keys) = pack(q_mask), pack(k_mask)
    shape = AttentionShape(H, K, V, queries, keys, causal)
    q, k, v = torch.randn(queries.n, H * K), torch.randn(keys.n, H * K), torch.randn(keys.n, H * V)
    out, grad = torch.empty(queries.n, H * V), torch.randn(queries.n, H * V)
    lse = kernels.attention(q, k, v, shape, out)
    into = [torch.empty_like(x) for x in (q, k, v)]
    kernels.attention_backward(grad, q, k, v, lse, shape, into)
    starts = list(zip(queries.start.tolist(), keys.start.tolist(), lengths, strict=True))
    for t, s, (T, S) in starts:
        parts = [q[t : t + T].view(T, H, K), k[s : s + S].view(S, H, K), v[s : s + S].view(S, H, V)]
        parts = [x.transpose(0, 1).clone().requires_grad_() for x in parts]
        want = attention(*parts, causal_mask(T) if causal else None)
        torch.testing.assert_close(out[t : t + T], want.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad(want, parts, grad[t : t + T].view(T, H, V).transpose(0, 1))
        for got, expected, (start, n) in zip(into, wanted, [(t, T), (s, S), (s, S)], strict=True):
            torch.testing.assert_close(
                got[start : start + n], expected.transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-5
            )


@KERNELS
def test_a_nan_in_the_logits_is_not_lost(kernels: Kernels) -> None:
    logits = torch.randn(3, 40)
    logits[1, 20] = float("nan")
    loss, nll = kernels.smoothed_loss(logits, torch.tensor([1, 2, 3]), PAD, 0.9, 0.1 / 39, None)
    assert np.isnan(loss)
    assert np.isnan(nll)


def test_packing_keeps_order_and_rounds_up() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    index, rows = pack(mask, multiple=4)
    assert index[: rows.real].tolist() == [0, 1, 6, 7, 8]
    assert (rows.n, rows.real, rows.widest) == (8, 5, 3)
    assert rows.start.tolist() == [0, 2, 2]
    assert rows.length.tolist() == [2, 0, 3]
    assert rows.positions[:5].tolist() == [0, 1, 0, 1, 2]


def test_bits_are_a_function_of_the_seed_and_even() -> None:
    first, second = Bits(1, 2).draw(300, 40), Bits(1, 2).draw(300, 40)
    assert torch.equal(first, second)
    assert not torch.equal(first, Bits(2, 1).draw(300, 40))
    counts = torch.histc(first.float(), bins=16, min=-32768, max=32767)
    assert counts.min() > 600
    assert all(abs(a - b) < 250 for a, b in pairwise(counts.tolist()))


def test_sdpa_is_attention_with_its_rule_for_empty_rows() -> None:
    torch.manual_seed(10)
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    mask = torch.rand(2, 1, 5, 7) > 0.4
    mask[1, :, 2] = False
    got, want = sdpa(q, k, v, mask), attention(q, k, v, mask)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(sdpa(q, k, v), attention(q, k, v))
    ours, theirs = (torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (got, want))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="more dimensions"):
        sdpa(q[0, 0], k[0, 0], v[0, 0], mask)


def test_a_model_on_sdpa_keeps_its_logits_and_its_names() -> None:
    model = small_model()
    src, tgt_in, _ = ragged_batch()
    want, names = model(src, tgt_in), list(model.state_dict())
    torch.testing.assert_close(use_sdpa(model)(src, tgt_in), want, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names


def test_widths_that_the_compiled_kernels_cannot_read_fall_back_or_are_refused() -> None:
    model = small_model(d_model=36)
    assert Joined(model).kernels.name == "torch"
    compiled = load()
    if compiled is not None:
        with pytest.raises(ValueError, match="compiled kernels do not fit the widths"):
            Joined(model, torch.float32, compiled)
    with pytest.raises(ValueError, match="not Linear"):
        Joined(nn.Linear(2, 2))  # type: ignore[arg-type]
