"""Muon against singular value decompositions, against PyTorch's own, and against AdamW for what is not its."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dragoman.training import muon
from dragoman.training.muon import COEFFICIENTS, RMS, STEPS, orthogonal
from dragoman.training.optimizer import Muon


@pytest.fixture(params=["compiled", "torch"])
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with either: the kernel in C, where it can be had, and PyTorch."""
    if request.param == "torch":
        monkeypatch.setattr(muon, "_compiled", lambda: None)
    elif muon._compiled() is None:
        pytest.skip("no C compiler here")


def by_svd(x: Tensor) -> Tensor:
    """What `orthogonal` computes, by the polynomial on singular values in float64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(STEPS):
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ v


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 8, 40), (1, 32, 32), (5, 1, 7)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_singular_vectors_stay_and_singular_values_go_to_one(shape: tuple[int, ...], scale: float) -> None:
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(x)
    torch.testing.assert_close(found.double(), by_svd(x), rtol=0, atol=2e-3)
    well = orthogonal(torch.linalg.qr(x.mT.double())[0].mT.float() + 0.1 * x / x.norm())
    values = torch.linalg.svdvals(well)
    assert 0.6 < values.min() <= values.max() < 1.2


def test_little_rank_and_none_are_no_fault() -> None:
    x = torch.zeros(3, 8, 16)
    x[1] = torch.outer(torch.arange(8.0), torch.arange(16.0))
    x[2, :4] = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    found = orthogonal(x)
    assert not found[0].any()
    torch.testing.assert_close(found[1].double(), by_svd(x[1]), rtol=0, atol=2e-3)
    assert not found[2, 4:].any()
    torch.testing.assert_close(found[2, :4].double(), by_svd(x[2, :4]), rtol=0, atol=2e-3)


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (16, 40), (40, 16)])
def test_a_block_is_a_matrix_of_pytorchs_muon(rows: int, columns: int) -> None:
    """Theirs computes in bfloat16. Blocks are as long as the shorter side: of a square one is the whole."""
    along, side = 0 if rows >= columns else 1, min(rows, columns)
    torch.manual_seed(0)
    model = nn.Linear(columns, rows, bias=False)
    before = model.weight.detach().clone()
    parts = [nn.Parameter(part.clone()) for part in before.split(side, along)]
    theirs = torch.optim.Muon(parts, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    ours = Muon(weight_decay=0.1, momentum=0.9, block=side).build(model)
    ours.param_groups[0]["lr"] = 1e-2
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        gradient = torch.randn(rows, columns, generator=generator)
        for part, its in zip(parts, gradient.split(side, along), strict=True):
            part.grad = its.clone()
        model.weight.grad = gradient
        theirs.step()
        ours.step()
    found, expected = model.weight.detach() - before, torch.cat([part.detach() for part in parts], along) - before
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999
    assert abs(float(found.norm() / expected.norm()) - 1) < 0.02


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize(("rows", "columns"), [(40, 16), (16, 40), (13, 9)])
def test_blocks_are_made_orthogonal_each_for_itself(rows: int, columns: int) -> None:
    """The last is shorter where rows do not divide."""
    model = nn.Linear(columns, rows)
    before = model.weight.detach().clone()
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(4))
    model.weight.grad = gradient.clone()
    optimizer = Muon(momentum=0.0, block=6).build(model)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    tall = gradient if rows > columns else gradient.mT
    update = torch.cat([by_svd(block) for block in tall.split(6)])
    update = (update if rows > columns else update.mT) * RMS * math.sqrt(min(rows, columns))
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * update.float(), rtol=0, atol=1e-3)


@pytest.mark.skipif(muon._compiled() is None, reason="no C compiler here")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(64, 64, 32), (48, 160, 32), (160, 48, 64), (50, 33, 7), (1, 5, 4)]
)
def test_the_kernel_computes_what_pytorch_does(
    rows: int, columns: int, block: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # which the optimiser asks when it is made
    weights, momenta = [], []
    for there in (muon._compiled, lambda: None):
        monkeypatch.setattr(muon, "_compiled", there)
        generator = torch.Generator().manual_seed(5)
        torch.manual_seed(0)
        model = nn.Linear(columns, rows)
        optimizer = Muon(weight_decay=0.3, block=block).build(model)
        for _ in range(3):
            model.weight.grad = torch.randn(rows, columns, generator=generator)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
        weights.append(model.weight.detach())
        momenta.append(optimizer.state[model.weight]["momentum"])
    torch.testing.assert_close(momenta[0], momenta[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-4 * 3e-2)


def test_what_is_no_linear_transformation_is_adamws() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
            self.linear, self.free = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    ours, theirs = Model(), Model()
    spec = Muon(weight_decay=0.5)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=spec.betas, eps=spec.epsilon, weight_decay=0.0)
    optimizer = spec.build(ours)
    for _ in range(5):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            b.grad = torch.randn(b.shape)
            a.grad = b.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        adamw.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name == "linear.weight":
            assert list(optimizer.state[a]) == ["momentum"]
        else:
            assert sorted(optimizer.state[a]) == ["exp_avg", "exp_avg_sq", "step"]
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
