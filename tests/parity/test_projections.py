"""Linear layers against float64: forward, backward and gradients, of odd sizes and on any processor."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from dragoman.model import native, projections
from dragoman.model.projections import LaidOut, Projection

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
SHAPES = [
    (1, 16, (1,)),
    (7, 48, (32, 48, 16)),
    (97, 80, (53,)),
    (130, 64, (64, 64)),
    (200, 256, (100, 30)),
    (6, 128, (513,)),
]
CLASSES = [Projection] if native.loaded("layers.cpp") is None else [Projection, LaidOut]
BOTH = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def made(kind: type[Projection], k: int, sizes: tuple[int, ...], dtype: torch.dtype, biased: bool = True) -> Projection:
    return kind([torch.randn(m, k) / k**0.5 for m in sizes], [torch.randn(m) if biased else None for m in sizes], dtype)


def numbers(n: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, width).to(dtype)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert ((got.double() - want).norm() / want.norm().clamp(min=1e-9)).item() < TOLERANCE[dtype]


def check(kind: type[Projection], n: int, k: int, sizes: tuple[int, ...], dtype: torch.dtype, biased: bool) -> None:
    projection = made(kind, k, sizes, dtype, biased)
    weight = torch.cat(projection.weights).to(dtype).double()  # [M, K]
    bias = torch.cat(projection.biases).double() if biased else torch.zeros(len(weight), dtype=torch.float64)
    x, grad, hidden = numbers(n, k, dtype), numbers(n, sum(sizes), dtype), numbers(n, k, dtype).relu()
    y = x.double() @ weight.t() + bias
    assert_near(projection.forward(x), y, dtype)
    assert_near(projection.forward(x, relu=True), y.relu(), dtype)
    dx = grad.double() @ weight
    assert_near(projection.backward(grad), dx, dtype)
    assert_near(projection.backward(grad, hidden), dx * (hidden > 0), dtype)
    of_weight, of_bias = grad.double().t() @ x.double(), grad.double().sum(0)
    gradients = projection.gradients(grad, x)
    assert gradients[0].dtype == gradients[1].dtype == torch.float32
    assert_near(gradients[0], of_weight, dtype)
    if biased:
        assert_near(gradients[1], of_bias, torch.float32)
    summed = projection.gradients(grad, x, into=(gradients[0].clone(), gradients[1].clone()))
    assert_near(summed[0], 2 * of_weight, dtype)
    if biased:
        assert_near(summed[1], 2 * of_bias, torch.float32)
    parts = projection.split(gradients)
    assert [part.shape for part in parts] == [parameter.shape for parameter in projection.parameters]
    assert torch.equal(torch.cat(parts[: len(sizes)]), gradients[0])


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_linear_layer_and_its_gradients(
    kind: type[Projection], dtype: torch.dtype, shape: tuple[int, int, tuple[int, ...]], biased: bool
) -> None:
    torch.manual_seed(1)
    check(kind, *shape, dtype, biased)


@BOTH
def test_it_takes_over_weights_that_have_changed(kind: type[Projection]) -> None:
    torch.manual_seed(2)
    for dtype in TOLERANCE:
        projection = made(kind, 32, (24, 40), dtype)
        for parameter in projection.parameters:
            parameter.mul_(-3)
        projection.refresh()
        x = numbers(5, 32, dtype)
        want = x.double() @ torch.cat(projection.weights).to(dtype).double().t() + torch.cat(projection.biases).double()
        assert_near(projection.forward(x), want, dtype)


@pytest.mark.skipif(LaidOut not in CLASSES, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_numbers_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    projection = made(LaidOut, 96, (200,), dtype)
    x = numbers(211, 96, dtype)
    whole = projection.forward(x)
    for first, last in [(0, 1), (3, 5), (90, 103), (96, 211)]:
        assert torch.equal(projection.forward(x[first:last]), whole[first:last])


@BOTH
def test_it_reads_what_does_not_lie_in_rows(kind: type[Projection]) -> None:
    torch.manual_seed(5)
    for dtype in TOLERANCE:
        weight = torch.randn(48, 64).t()
        projection = kind([weight], [None], dtype)
        x, grad = numbers(48, 37, dtype).t(), numbers(64, 37, dtype).t()
        hidden = numbers(48, 37, dtype).relu().t()
        assert_near(projection.forward(x), x.double() @ weight.to(dtype).double().t(), dtype)
        assert_near(projection.backward(grad, hidden), grad.double() @ weight.to(dtype).double() * (hidden > 0), dtype)
        assert_near(projection.gradients(grad, x)[0], grad.double().t() @ x.double(), dtype)


@pytest.mark.skipif(LaidOut not in CLASSES, reason="no C++ compiler here")
def test_what_is_not_a_number_does_not_get_lost() -> None:
    for dtype in TOLERANCE:
        projection = made(LaidOut, 32, (33,), dtype)
        for value in (float("nan"), float("inf")):
            x, grad = numbers(9, 32, dtype), numbers(9, 33, dtype)
            x[4, 3], grad[4, 32] = value, value
            for relu in (False, True) if value != value else (False,):
                assert not projection.forward(x, relu=relu)[4].isfinite().any()
            assert not projection.backward(grad)[4].isfinite().any()
            of_weight, of_bias = projection.gradients(grad, x)
            assert not of_weight[:, 3].isfinite().any()
            assert not of_bias[32].isfinite()
            assert projection.forward(x)[5].isfinite().all()


@pytest.mark.skipif(LaidOut not in CLASSES, reason="no C++ compiler here")
def test_weights_that_it_cannot_lay_out_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot lay out weights of 24 inputs"):
        made(LaidOut, 24, (8,), torch.float32)
    with pytest.raises(ValueError, match="cannot lay out"):
        made(LaidOut, 32, (7, 8), torch.bfloat16)
    with pytest.raises(ValueError, match="parameters must be float32"):
        LaidOut([torch.randn(8, 32).bfloat16()], [None], torch.bfloat16)


def test_code_for_other_processors_gives_the_same(
    use_code_for_another_processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_code_for_another_processor("layers.cpp")
    bound = projections._library.__wrapped__()
    monkeypatch.setattr(projections, "_library", lambda: bound)
    torch.manual_seed(4)
    for dtype, shape in product(TOLERANCE, SHAPES):
        check(LaidOut, *shape, dtype, biased=True)


@pytest.mark.skipif(
    platform.system() != "Linux" or not (shutil.which("cc") and shutil.which("c++")), reason="no compilers here"
)
@pytest.mark.parametrize("name", ["training.c", "muon.c", "layers.cpp", "decoding.cpp"])
def test_every_kernel_compiles_where_there_is_a_compiler(name: str) -> None:
    """Otherwise all would go on without it, only slower, and the tests that compare it would be skipped."""
    assert native.loaded(name) is not None
