"""§3.5, against figures computed in float64 elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from dragoman.model.transformer import PositionalEncoding, sinusoids

D_4 = {
    0: [0.0, 1.0, 0.0, 1.0],
    1: [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
    2: [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],
    3: [0.1411200081, -0.9899924966, 0.0299955002, 0.9995500337],
    10: [-0.5440211109, -0.8390715291, 0.0998334166, 0.9950041653],
    100: [-0.5063656411, 0.8623188723, 0.8414709848, 0.5403023059],
    1000: [0.8268795405, 0.5623790763, -0.5440211109, -0.8390715291],
    4999: [-0.6639495211, -0.7477773957, -0.2720112345, 0.9622940758],
}
D_512 = {
    1: {2: 0.82185619, 3: 0.5696950087, 100: 0.1647274795, 255: 0.9999462701, 510: 0.0001036633},
    50: {0: -0.2623748537, 4: 0.5607470371, 101: -0.4078552895, 256: 0.4794255386, 511: 0.9999865674},
    4999: {0: -0.6639495211, 2: 0.0012853239, 100: -0.8437330233, 257: 0.9622940758, 510: 0.4953283795},
}


@pytest.mark.parametrize("position", D_4)
def test_entries_of_width_4(position: int) -> None:
    assert sinusoids(5000, 4)[position].tolist() == pytest.approx(D_4[position], abs=1e-7)


@pytest.mark.parametrize("position", D_512)
def test_entries_of_width_512(position: int) -> None:
    row = sinusoids(5000, 512)[position]
    for dimension, value in D_512[position].items():
        assert row[dimension].item() == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize("width", [4, 64, 512, 768, 1024])
def test_every_position_has_the_norm_of_sqrt_half_the_width(width: int) -> None:
    norms = sinusoids(300, width).norm(dim=1)
    assert torch.allclose(norms, torch.full_like(norms, math.sqrt(width / 2)), rtol=1e-6)


def test_the_dot_product_depends_on_the_offset_alone() -> None:
    table = sinusoids(200, 4).double()
    assert (table[0] @ table[1]).item() == pytest.approx(1.540252306284805, abs=1e-6)
    assert (table[5] @ table[8]).item() == pytest.approx((table[100] @ table[103]).item(), abs=1e-5)


def test_the_slowest_pair_is_the_papers_and_not_10000() -> None:
    # sin(w * 1) with w = 1 / 9646.6162; an implementation that spaces to n - 1 has 1 / 10000 here
    assert sinusoids(2, 512)[1, 510].item() == pytest.approx(1 / 9646.616199111992, rel=1e-6)


def test_the_table_grows_on_demand_and_stays_out_of_the_state_dict() -> None:
    position = PositionalEncoding(6, max_length=3, dropout=0.0)
    x = torch.zeros(1, 11, 6)
    assert torch.equal(position(x)[0], sinusoids(11, 6))
    assert torch.equal(position(x[:, :2], start=40)[0], sinusoids(42, 6)[40:])
    assert position.state_dict() == {}


def test_dropout_falls_on_the_sum() -> None:
    torch.manual_seed(0)
    position = PositionalEncoding(64, dropout=0.5)
    y = position(torch.full((1, 50, 64), 3.0))
    dropped = y == 0
    assert 0.4 < dropped.float().mean().item() < 0.6
    expected = 2 * (3.0 + sinusoids(50, 64))
    assert torch.allclose(y[0][~dropped[0]], expected[~dropped[0]])
