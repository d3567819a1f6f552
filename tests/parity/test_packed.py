"""The packed decoder against the model it was packed from: the same numbers, by another road."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dragoman.model import packed as packed_module
from dragoman.model.choices import EncoderDecoderSpec, PaperSpec, Positionwise, Sinusoidal
from dragoman.model.packed import PackedModel
from dragoman.model.packed_weights import PackedWeights, can_pack

V = 1_100  # more than one block of the vocabulary, and the last one partly filled
SPECS = {
    "paper": PaperSpec(n_layers=2, d_model=24, d_ff=40, n_heads=3, d_k=5, d_v=7),
    "marian": EncoderDecoderSpec(
        n_layers=1,
        decoder_n_layers=2,
        d_model=36,
        d_ff=50,
        n_heads=2,
        decoder_n_heads=3,
        position=Sinusoidal(layout="halves"),
        feed_forward=Positionwise(activation="swish"),
        share_embeddings=False,
        tie_output=False,
        output_bias=True,
    ),
    "gelu": EncoderDecoderSpec(
        n_layers=2, d_model=16, d_ff=40, n_heads=2, feed_forward=Positionwise(activation="gelu"), scale_embedding=False
    ),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2, "int8": 1e-1}


@pytest.fixture(params=SPECS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(5)
    model = SPECS[request.param].build(V, 0).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms away from zeros and ones, so that a forgotten one shows
            nn.init.normal_(parameter, std=0.3)
    if not can_pack(model):
        pytest.skip("no C++ compiler here: decoding steps through the model itself")
    return model


def sources() -> Tensor:
    src = torch.randint(1, V, (3, 9))
    src[1, 4:] = 0
    return src


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_steps_selections_and_joins_give_the_models_logits(model: nn.Module, precision: str) -> None:
    packed = PackedModel(PackedWeights(model, precision))  # type: ignore[arg-type]
    src, tgt = sources(), torch.randint(1, V, (5, 45))
    state, theirs = packed.start(src), model.start(src)  # type: ignore[operator]
    worst = 0.0
    for t in range(45):
        rows = len(state.lengths)
        logits, state = packed.step(tgt[:rows, t], state)
        expected, theirs = model.step(tgt[:rows, t], theirs)  # type: ignore[operator]
        worst = max(worst, (logits - expected).abs().max().item() / expected.std().item())
        if t in (4, 20):
            order = torch.tensor([2, 0, 0, 1, 2]) if t == 4 else torch.tensor([1, 4, 0])
            state, theirs = state.select(order), theirs.select(order)
    assert worst < TOLERANCE[precision]


@pytest.mark.parametrize(
    ("n_heads", "d_k", "d_v"),
    [
        *((1, 32, 48), (2, 8, 24), (3, 16, 112), (4, 64, 40), (6, 8, 32), (8, 24, 66), (12, 4, 48), (16, 17, 8)),
        *((5, 13, 16), (6, 10, 8), (7, 5, 5), (8, 3, 2), (32, 8, 8)),  # no whole vectors, or no kernel of their own
    ],
)
@torch.no_grad()
def test_heads_of_any_number_and_width(n_heads: int, d_k: int, d_v: int) -> None:
    torch.manual_seed(6)
    model = PaperSpec(n_layers=1, d_model=32, d_ff=48, n_heads=n_heads, d_k=d_k, d_v=d_v).build(V, 0).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if not can_pack(model):
        pytest.skip("no C++ compiler here: decoding steps through the model itself")
    packed = PackedModel(PackedWeights(model, "float32"))
    src, tgt = sources(), torch.randint(1, V, (3, 11))  # up to 9 and 11 positions: fours, and what is left of them
    state, theirs = packed.start(src), model.start(src)
    for t in range(11):
        logits, state = packed.step(tgt[:, t], state)
        expected, theirs = model.step(tgt[:, t], theirs)
        assert (logits - expected).abs().max() < 1e-5 * expected.std()


@torch.no_grad()
def test_a_source_without_tokens_is_a_memory_of_nothing(model: nn.Module) -> None:
    src = torch.tensor([[5, 6, 7], [0, 0, 0]])
    packed = PackedModel(PackedWeights(model, "float32"))
    state, theirs = packed.start(src), model.start(src)  # type: ignore[operator]
    logits, _ = packed.step(torch.tensor([1, 1]), state)
    expected, _ = model.step(torch.tensor([1, 1]), theirs)  # type: ignore[operator]
    assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "int8"])
@torch.no_grad()
def test_a_row_does_not_know_its_neighbours_or_when_they_came(model: nn.Module, precision: str) -> None:
    weights = PackedWeights(model, precision)  # type: ignore[arg-type]
    src, tgt = sources(), torch.randint(1, V, (3, 8))

    def alone(row: int) -> list[Tensor]:
        packed = PackedModel(weights)
        state = packed.encode([[token for token in src[row].tolist() if token]])
        answers = []
        for t in range(8):
            logits, state = packed.step(tgt[row : row + 1, t], state)
            answers.append(logits[0])
        return answers

    expected = [alone(row) for row in range(3)]
    packed = PackedModel(weights)
    ages = [0]
    state = packed.encode([src[0].tolist()])
    seen = []
    for t in range(8):
        if t == 3:  # two more sentences enter, younger than the first
            state = state.join(packed.start(src[1:]))
            ages += [0, 0]
        tokens = torch.tensor([tgt[row, age] for row, age in enumerate(ages)])
        logits, state = packed.step(tokens, state)
        seen += [(row, age, logits[row]) for row, age in enumerate(ages)]
        ages = [age + 1 for age in ages]
    for row, age, logits in seen:
        assert torch.allclose(logits, expected[row][age], atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_a_row_has_the_same_bits_among_any_number_of_rows(model: nn.Module, precision: str) -> None:
    weights = PackedWeights(model, precision)  # type: ignore[arg-type]
    src, tgt = sources(), torch.randint(1, V, (1, 4))
    answers = []
    for rows in (1, 3, 6, 7, 97, 500):
        packed = PackedModel(weights)
        state = packed.start(src).select(np.zeros(rows, dtype=np.int64))
        for t in range(4):
            logits, state = packed.step(tgt[:, t].expand(rows), state)
        answers += [logits[0], logits[-1]]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@torch.no_grad()
def test_a_long_row_among_short_ones_does_not_keep_what_they_leave(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "FEW_LINES", 64)
    monkeypatch.setattr(packed_module, "PAGE_BITS", 6)  # so that what is moved together takes several pages
    weights = PackedWeights(model, "float32")
    packed, alone = PackedModel(weights), PackedModel(weights)
    source = [5, 6, 3]
    tokens = torch.randint(1, V, (150,))
    state, theirs = packed.encode([source]), alone.encode([source])
    for t in range(150):
        if t % 3 == 0:
            state = state.select(np.zeros(1, dtype=np.int64)).join(packed.encode([[7, 3]] * 30))
        given = torch.full((len(state.lengths),), 9)
        given[0] = tokens[t]
        logits, state = packed.step(given, state)
        expected, theirs = alone.step(tokens[t : t + 1], theirs)
        assert torch.equal(logits[0], expected[0])
    assert sum(page.lines for page in state.pages.values()) < 1500  # of 4,650 that were written


@torch.no_grad()
def test_a_token_outside_the_vocabulary_is_an_error_not_a_reading_of_other_memory(model: nn.Module) -> None:
    packed = PackedModel(PackedWeights(model, "float32"))
    with pytest.raises(IndexError, match="vocabulary"):
        packed.encode([[5, V, 3]])
    with pytest.raises(IndexError, match="vocabulary"):
        packed.step(torch.tensor([-1]), packed.encode([[5, 3]]))


@torch.no_grad()
def test_the_best_tokens_are_those_of_the_whole_row(model: nn.Module) -> None:
    packed = PackedModel(PackedWeights(model, "float32"))
    tokens = torch.tensor([3, 4, 5])
    state = packed.start(sources())
    logits, _ = packed.step(tokens, state)
    barred = np.array([[0, 1, -1], [V - 1, -1, -1], [-1, -1, -1]], dtype=np.int32)
    best, _ = packed.best(tokens, state, 7, barred)
    assert torch.allclose(best.totals, logits.logsumexp(-1), atol=1e-5)
    allowed = logits.clone()
    for row, ids in enumerate(barred.tolist()):
        allowed[row, [token for token in ids if token >= 0]] = -torch.inf
    expected = allowed.topk(7)
    assert torch.allclose(best.logits, expected.values, atol=1e-6)
    assert torch.equal(best.tokens.long(), expected.indices)


def assert_same_logits(model: nn.Module, precision: str, rows: int) -> None:
    packed = PackedModel(PackedWeights(model, precision))  # type: ignore[arg-type]
    src, tgt = sources(), torch.randint(1, V, (rows, 12))
    state = packed.start(src).select(np.arange(rows) % 3)
    theirs = model.start(src).select(torch.arange(rows) % 3)  # type: ignore[operator]
    barred = np.full((rows, 1), -1, dtype=np.int32)
    for t in range(12):
        best, state = packed.best(tgt[:, t], state, V, barred)
        expected, theirs = model.step(tgt[:, t], theirs)  # type: ignore[operator]
        logits = torch.empty(rows, V).scatter_(1, best.tokens.long(), best.logits)
        assert (logits - expected).abs().max().item() < TOLERANCE[precision] * expected.std().item()
        assert torch.allclose(best.totals, logits.logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 4, 11, 200])  # parts of a tile, a tile and a part, more than a block
@torch.no_grad()
def test_any_number_of_rows_gives_the_models_logits(model: nn.Module, precision: str, rows: int) -> None:
    assert_same_logits(model, precision, rows)


@torch.no_grad()
def test_code_for_other_processors_gives_the_same_logits(use_code_for_another_processor: Callable[[str], None]) -> None:
    use_code_for_another_processor("decoding.cpp")
    torch.manual_seed(5)
    for precision in TOLERANCE:
        assert_same_logits(SPECS["marian"].build(V, 0).eval(), precision, rows=11)


@torch.no_grad()
def test_pages_that_nobody_looks_back_to_are_let_go(model: nn.Module) -> None:
    packed = PackedModel(PackedWeights(model, "float32"))
    for _ in range(3):
        state = packed.start(sources())
        for _ in range(20):
            _, state = packed.step(torch.tensor([3, 4, 5]), state)
    del state
    gc.collect()
    assert packed._n_pages <= 41
    assert len(packed._free_pages) == packed._n_pages
    # A long stream of sentences, each joining before the one before it has left, keeps only what it still needs.
    state = packed.encode([[5, 6, 3]])
    for _ in range(100):
        for _ in range(3):
            _, state = packed.step(torch.full((len(state.lengths),), 7), state)
        state = state.select(np.array([len(state.lengths) - 1])).join(packed.encode([[5, 6, 3]]))
    assert len(state.pages) < 60
    assert len(state.memories) < 60
