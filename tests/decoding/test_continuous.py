"""Continuous batching gives each job what the model alone gives it, whatever shares its batch, on any threads."""

from __future__ import annotations

import random

import pytest
import torch

from dragoman.decoding import continuous
from dragoman.decoding.continuous import ContinuousDecoder
from dragoman.decoding.engine import Job, Rules, decode
from dragoman.decoding.options import DecodingConfig
from dragoman.decoding.precision import Prepared, prepared
from dragoman.decoding.search import Hypothesis
from dragoman.model.packed_weights import can_pack
from dragoman.model.transformer import Transformer, TransformerConfig

RULES = Rules(pad_id=0, bos_id=2, eos_id=3, banned=(0, 1, 2))
OPTIONS = {
    "greedy": DecodingConfig(greedy=True),
    "beam 4": DecodingConfig(beam_size=4),
    "beam 3, n-best, power": DecodingConfig(beam_size=3, n_best=3, penalty="power", alpha=1.0),
    "shortest lengths": DecodingConfig(beam_size=2, min_length=6),
    "no repeats": DecodingConfig(beam_size=2, no_repeat_ngram=2),
    "sampling": DecodingConfig(sample=True, n_best=2, seed=5, top_k=8),
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(11)
    model = Transformer(TransformerConfig(60, 2, 24, 40, 3, dropout=0.1)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    if not can_pack(model):
        pytest.skip("no C++ compiler here: decoding steps through the model itself")
    return model


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    draw = random.Random(3)
    lengths = [draw.choice([1, 2, 3, 5, 8, 13]) for _ in range(60)] + [90]
    sources = [[draw.randrange(4, 60) for _ in range(n)] + [3] for n in lengths]
    return [Job(source, len(source) + 7, (7, 8) if i % 17 == 5 else ()) for i, source in enumerate(sources)]


def assert_equal(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[h.ids for h in each] for each in found] == [[h.ids for h in each] for each in expected]
    for each, other in zip(found, expected, strict=True):
        for h, o in zip(each, other, strict=True):
            assert h.score == pytest.approx(o.score, abs=1e-4)
            assert h.finished == o.finished


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_as_the_model_one_job_at_a_time(
    model: Transformer, jobs: list[Job], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "MAX_ROWS", 20)  # so that sentences leave and enter often
    decoder = prepared(model, "float32")
    assert isinstance(decoder, ContinuousDecoder)
    expected = [decode(model, [job], OPTIONS[name], RULES)[0] for job in jobs]
    assert_equal(decode(decoder, jobs, OPTIONS[name], RULES), expected)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_order_neighbours_and_threads_change_nothing(model: Transformer, jobs: list[Job], precision: str) -> None:
    decoder = prepared(model, precision)
    options = DecodingConfig(beam_size=4)
    expected = decode(decoder, jobs, options, RULES)
    order = list(range(len(jobs)))
    random.Random(1).shuffle(order)
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            shuffled = decode(decoder, [jobs[i] for i in order], options, RULES)
            assert torch.get_num_threads() == n
            assert_equal([shuffled[order.index(i)] for i in range(len(jobs))], expected)
            for size in (1, 7):
                cut = [decode(decoder, jobs[i : i + size], options, RULES) for i in range(0, len(jobs), size)]
                assert_equal([each for part in cut for each in part], expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [DecodingConfig(greedy=True), DecodingConfig(sample=True, n_best=8)])
def test_no_thread_takes_more_than_its_share(
    model: Transformer, jobs: list[Job], options: DecodingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = continuous._Lane._take

    def counted(lane: continuous._Lane, *arguments: object) -> list[int]:
        entering = take(lane, *arguments)  # type: ignore[arg-type]
        taken.append(len(entering))
        return entering

    monkeypatch.setattr(continuous._Lane, "_take", counted)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        decode(prepared(model, "float32"), jobs[:30], options, RULES)
    finally:
        torch.set_num_threads(threads)
    assert sum(taken) == 30
    assert max(taken) <= 10


def test_a_source_longer_than_the_budget_is_searched_alone(model: Transformer, jobs: list[Job]) -> None:
    options = DecodingConfig(beam_size=2, batch_tokens=10)
    found = decode(prepared(model, "float32"), jobs, options, RULES)
    assert_equal(found, [decode(model, [job], options, RULES)[0] for job in jobs])


def test_a_fault_in_one_thread_ends_all_and_is_told(
    model: Transformer, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = prepared(model, "float32")

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(continuous._Lane, "_step", fail)
    with pytest.raises(MemoryError, match="no room"):
        decode(decoder, jobs, DecodingConfig(greedy=True), RULES)


def test_new_weights_are_packed_anew(model: Transformer, jobs: list[Job]) -> None:
    form = Prepared(model, "float32")
    first = form.form()
    assert form.form() is first
    before = model.embedding.weight.detach().clone()
    with torch.no_grad():
        model.embedding.weight.mul_(0.5)
    second = form.form()
    assert second is not first
    assert_equal(
        decode(second, jobs[:5], DecodingConfig(greedy=True), RULES),
        [decode(model, [job], DecodingConfig(greedy=True), RULES)[0] for job in jobs[:5]],
    )
    with torch.no_grad():
        model.embedding.weight.copy_(before)
