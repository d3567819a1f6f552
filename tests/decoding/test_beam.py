"""Beam search against exhaustive search and against the same search written as plain loops."""

from __future__ import annotations

import pytest
import torch

from dragoman.decoding.beam import BeamSearch, beam_search
from dragoman.decoding.constraints import Constraints
from dragoman.decoding.greedy import greedy_search
from dragoman.decoding.search import run

PAD, BOS, EOS = 0, 2, 3
SOURCES = [[5, 4, 6, EOS], [4, EOS], [6, 6, 5, 4, 5, EOS]]
PENALTIES = [
    ("paper", 0.0),
    ("paper", 0.6),
    ("paper", 2.0),
    ("paper", -0.7),
    ("power", 0.6),
    ("power", 1.3),
    ("power", -0.5),
    ("average", 0.6),
    ("none", 0.6),
]


def others(vocab_size: int) -> list[int]:
    return [token for token in range(vocab_size) if token not in (PAD, BOS, EOS)]


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_a_beam_as_wide_as_the_space_is_exhaustive_search(make_model, pad_batch, reference, penalty, alpha) -> None:
    V, caps = 7, [4, 3, 3]  # 4 tokens beside pad, BOS and EOS: at most 4^4 + ... + 1 = 341 outputs
    for seed in range(2):
        model = make_model(V, seed)
        src, mask = pad_batch(SOURCES)
        found = beam_search(model, src, mask, 350, alpha, torch.tensor(caps), BOS, EOS, 6, penalty)
        for source, cap, hypotheses in zip(SOURCES, caps, found, strict=True):
            best = reference.exhaustive(
                reference.NextLogProbs(model, source, BOS), others(V), EOS, cap, alpha, penalty
            )[:6]
            assert [tuple(h.ids) for h in hypotheses] == [ids for _, ids, _, _ in best]
            assert [h.finished for h in hypotheses] == [finished for _, _, _, finished in best]
            assert [h.score for h in hypotheses] == pytest.approx([score for score, *_ in best], abs=1e-4)
            assert [h.log_prob for h in hypotheses] == pytest.approx([log_prob for _, _, log_prob, _ in best], abs=1e-4)


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
@pytest.mark.parametrize("size", [2, 5])
def test_any_beam_is_the_search_written_as_loops(make_model, pad_batch, reference, size, penalty, alpha) -> None:
    """Covers the stopping rule: the loops keep going for as long as any end could still change the answer."""
    V, caps = 13, [9, 6, 14]
    for seed in range(3):
        model = make_model(V, seed, sharpness=2.0 + seed)
        src, mask = pad_batch(SOURCES)
        found = beam_search(model, src, mask, size, alpha, torch.tensor(caps), BOS, EOS, size, penalty)
        for source, cap, hypotheses in zip(SOURCES, caps, found, strict=True):
            best = reference.beam(reference.NextLogProbs(model, source, BOS), others(V), EOS, cap, size, alpha, penalty)
            assert [tuple(h.ids) for h in hypotheses] == [ids for _, ids, _, _ in best]
            assert [h.finished for h in hypotheses] == [finished for _, _, _, finished in best]
            assert [h.score for h in hypotheses] == pytest.approx([score for score, *_ in best], abs=1e-4)


def test_a_beam_of_one_is_greedy_search(make_model, pad_batch, reference) -> None:
    V = 13
    for seed in range(5):
        model = make_model(V, seed)
        src, mask = pad_batch(SOURCES)
        one = beam_search(model, src, mask, 1, 0.6, 12, BOS, EOS, 1)
        paths = greedy_search(model, src, mask, 12, BOS, EOS)
        for source, (hypothesis,), path in zip(SOURCES, one, paths, strict=True):
            assert tuple(path.ids) == reference.greedy(reference.NextLogProbs(model, source, BOS), others(V), EOS, 12)
            assert path.ids == hypothesis.ids
            assert path.finished == hypothesis.finished == (path.ids[-1] == EOS)
            assert path.score == pytest.approx(hypothesis.score, abs=1e-4)


def test_n_best_widens_the_list_and_changes_nothing_else(make_model, pad_batch) -> None:
    model = make_model(13, 5)
    src, mask = pad_batch(SOURCES)
    whole = beam_search(model, src, mask, 5, 0.6, 12, BOS, EOS, 5)
    for n in range(1, 5):
        assert beam_search(model, src, mask, 5, 0.6, 12, BOS, EOS, n) == [hypotheses[:n] for hypotheses in whole]
    scores = [[h.score for h in hypotheses] for hypotheses in whole]
    assert scores == [sorted(row, reverse=True) for row in scores]
    assert all(len({tuple(h.ids) for h in hypotheses}) == len(hypotheses) == 5 for hypotheses in whole)


def test_neighbours_change_nothing(make_model, pad_batch) -> None:
    model = make_model(13, 6)
    alone = [beam_search(model, *pad_batch([source]), 4, 0.6, len(source) + 9, BOS, EOS, 4)[0] for source in SOURCES]
    order = [2, 0, 1, 0, 2]
    src, mask = pad_batch([SOURCES[i] for i in order])
    together = beam_search(model, src, mask, 4, 0.6, torch.tensor([len(SOURCES[i]) + 9 for i in order]), BOS, EOS, 4)
    for i, hypotheses in zip(order, together, strict=True):
        assert [h.ids for h in hypotheses] == [h.ids for h in alone[i]]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in alone[i]], abs=1e-4)


class Scripted:
    """A Decodable that answers from a table: tokens so far -> probabilities. What it lacks is uniform."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]], vocab_size: int) -> None:
        self.table = table
        self.vocab_size = vocab_size

    class State:
        def __init__(self, read: list[tuple[int, ...]]) -> None:
            self.read = read

        def select(self, rows):
            return Scripted.State([self.read[row] for row in rows.tolist()])

    def start(self, src, src_mask=None):
        return self.State([()] * src.size(0))

    def step(self, tokens, state):
        read = [(*past, token) for past, token in zip(state.read, tokens.tolist(), strict=True)]
        logits = torch.full((len(read), self.vocab_size), float("-inf"))
        for row, past in enumerate(read):
            for token, probability in self.table.get(past[1:], {EOS: 1.0}).items():
                logits[row, token] = torch.tensor(probability).log()
        return logits, self.State(read)


A, B, C = 4, 5, 6


def test_a_finished_beam_goes_on_while_a_running_one_can_win() -> None:
    """Two short outputs are finished early; a longer one overtakes both by the penalty of its length."""
    model = Scripted(
        {
            (): {EOS: 0.5, A: 0.45, B: 0.05},
            (A,): {EOS: 0.1, C: 0.9},
            (A, C): {C: 1.0},
            (A, C, C): {C: 1.0},
            (A, C, C, C): {EOS: 1.0},
            (B,): {EOS: 1.0},
        },
        7,
    )
    src = torch.tensor([[A, EOS]])
    ((best, second),) = beam_search(model, src, None, 2, 1.0, 8, BOS, EOS, 2)
    assert best.ids == [A, C, C, C, EOS]
    assert best.score == pytest.approx(torch.tensor(0.405).log().item() / (10 / 6), abs=1e-6)
    assert second.ids == [EOS]
    # With a cap of two tokens it cannot get there.
    ((best, _),) = beam_search(model, src, None, 2, 1.0, 2, BOS, EOS, 2)
    assert best.ids == [EOS]


def test_a_search_ends_as_soon_as_nothing_can_change(make_model) -> None:
    steps = 0

    class Counting(Scripted):
        def step(self, tokens, state):
            nonlocal steps
            steps += 1
            return super().step(tokens, state)

    model = Counting({(): {EOS: 0.6, A: 0.4}, (A,): {EOS: 0.99, A: 0.01}, (A, A): {A: 1.0}}, 7)
    ((best, second),) = beam_search(model, torch.tensor([[A, EOS]]), None, 2, 0.6, 50, BOS, EOS, 2)
    assert [best.ids, second.ids] == [[EOS], [A, EOS]]
    # 0.4 * 0.01 after two tokens, were it sure of every one up to the cap, is below both.
    assert steps == 2


def test_what_never_ends_stops_at_the_cap_unfinished_and_scored_alike(make_model, pad_batch) -> None:
    never = Scripted({(A,) * n: {A: 0.75, B: 0.25} for n in range(60)}, 7)
    ((hypothesis,),) = beam_search(never, torch.tensor([[A, A, EOS]]), None, 1, 0.6, 53, BOS, EOS, 1)
    assert hypothesis.ids == [A] * 53
    assert not hypothesis.finished
    assert hypothesis.log_prob == pytest.approx(53 * torch.tensor(0.75).log().item(), rel=1e-6)
    assert hypothesis.score == pytest.approx(hypothesis.log_prob / ((5 + 53) / 6) ** 0.6, rel=1e-6)


def test_searches_of_one_kind_can_be_joined_midway(make_model, pad_batch) -> None:
    """Continuous batching: a sentence that enters while others are on their way gets the same answer."""
    model = make_model(13, 7)

    def search(sources, keys):
        caps = torch.tensor([len(source) + 9 for source in sources])
        rules = Constraints.of(EOS, len(sources), banned=[PAD, BOS])
        return BeamSearch(keys, caps, rules, beam_size=3, bos_id=BOS, n_best=3)

    expected = {}
    for key, source in enumerate(SOURCES):
        expected |= run(model, *pad_batch([source]), search([source], [key]))

    early, late = search(SOURCES[:1], [0]), search(SOURCES[1:], [1, 2])
    states = [model.start(*pad_batch(SOURCES[:1])), model.start(*pad_batch(SOURCES[1:]))]
    found = {}

    def advance(one, state):
        logits, state = model.step(one.tokens, state)
        step = one.advance(logits)
        found.update(step.done)
        return state if step.rows is None or not one.n_sentences else state.select(step.rows)

    with torch.no_grad():
        for _ in range(3):
            states[0] = advance(early, states[0])
        states[1] = advance(late, states[1])
        first = early.newest.numel()
        early.join(late)
        while early.n_sentences:
            # Each part at its own position, by its own state; the search sees all rows at once.
            parts = early.tokens.split([first, early.tokens.numel() - first])
            answers = [
                model.step(part, state) if part.numel() else (None, state)
                for part, state in zip(parts, states, strict=True)
            ]
            step = early.advance(torch.cat([logits for logits, _ in answers if logits is not None]))
            found.update(step.done)
            rows = torch.arange(sum(map(len, parts))) if step.rows is None else step.rows
            states = [
                answers[0][1].select(rows[rows < len(parts[0])]),
                answers[1][1].select(rows[rows >= len(parts[0])] - len(parts[0])),
            ]
            first = int((rows < len(parts[0])).sum())
    assert found.keys() == expected.keys()
    for key, hypotheses in expected.items():
        assert [h.ids for h in found[key]] == [h.ids for h in hypotheses]
        assert [h.score for h in found[key]] == pytest.approx([h.score for h in hypotheses], abs=1e-4)


def test_more_hypotheses_than_the_beam_has_are_refused(make_model) -> None:
    with pytest.raises(ValueError, match=r"n_best must be from 1 to beam_size, 2, not 3"):
        beam_search(make_model(), torch.tensor([[4, EOS]]), None, 2, 0.6, 5, BOS, EOS, 3)
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        beam_search(make_model(), torch.tensor([[4, EOS]]), None, 2, 0.6, 0, BOS, EOS, 1)


def test_a_vocabulary_smaller_than_the_beam(make_model) -> None:
    model = make_model(5, 1)  # one token beside pad, unk, BOS and EOS
    (found,) = beam_search(model, torch.tensor([[4, EOS]]), None, 8, 0.6, 3, BOS, EOS, 8, banned=[PAD, 1, BOS])
    assert sorted(tuple(h.ids) for h in found) == [(3,), (4, 3), (4, 4, 3), (4, 4, 4)]
