"""Speculation changes the time that an answer takes, and nothing of the answer."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from dragoman.decoding.constraints import Constraints
from dragoman.decoding.greedy import greedy_search
from dragoman.decoding.sampling import Filter, path_seed
from dragoman.decoding.speculative import Reader, Speculation, WholePass

V, PAD, BOS, EOS = 9, 0, 2, 3
SOURCES = [[5, 4, 6, EOS], [4, EOS], [6, 7, 5, 4, 5, EOS]]


def speculation(model, draft, source, banned=(PAD, BOS), bos_id=BOS, **rules) -> Speculation:
    src = torch.tensor([source])
    constraints = Constraints.of(EOS, 1, banned=banned, **rules)
    return Speculation(model, draft, src, torch.ones_like(src, dtype=torch.bool), constraints, bos_id=bos_id)


@pytest.mark.parametrize("draft_seed", [0, 1, 2], ids=["its own draft", "a stranger", "another"])
def test_greedy_output_is_that_of_the_model_alone(make_model, draft_seed) -> None:
    draft = make_model(V, draft_seed)
    for seed in range(4):
        model = make_model(V, seed)
        for source in SOURCES:
            for cap in (1, 4, 12):
                (plain,) = greedy_search(model, torch.tensor([source]), None, cap, BOS, EOS)
                with torch.no_grad():
                    ids, log_probs = speculation(model, draft, source).greedy(cap)
                assert ids == plain.ids
                assert log_probs == pytest.approx(plain.token_log_probs, abs=1e-4)


def test_a_good_draft_saves_passes_of_the_model(make_model) -> None:
    model = make_model(V, 1)
    passes = 0

    class Counting(WholePass):
        def after(self, tokens, n_last=1):
            nonlocal passes
            passes += 1
            return super().after(tokens, n_last)

    source = SOURCES[2]
    one = speculation(model, model, source, banned=(PAD, BOS, EOS))
    src = torch.tensor([source])
    one.model = Counting(model, src, torch.ones_like(src, dtype=torch.bool))
    with torch.no_grad():
        ids, _ = one.greedy(20)
    assert len(ids) == 20
    assert passes == 4  # four proposals and one token of its own a pass


@pytest.mark.parametrize("filters", [Filter(), Filter(temperature=0.8, top_k=4, top_p=0.9)])
def test_samples_follow_the_model_and_not_the_draft(make_model, reference, filters) -> None:
    model, draft, source, n = make_model(V, 2, sharpness=1.5), make_model(V, 5, sharpness=1.5), SOURCES[0], 700
    with torch.no_grad():
        one = speculation(model, draft, source, banned=(PAD, 1, BOS, 7, 8))
        counts = Counter(tuple(one.sample(2, filters, path_seed(0, source, k))[0]) for k in range(n))
    next_log_probs = reference.NextLogProbs(model, source, BOS)

    def law(ids):
        logits = torch.tensor(next_log_probs(ids))
        logits[[PAD, 1, BOS, 7, 8]] = float("-inf")
        return filters.distribution(logits[None])[0].tolist()

    expected = {}
    for token, p in enumerate(law(())):
        if token == EOS and p > 0:
            expected[(EOS,)] = n * p
        elif p > 0:
            expected |= {(token, then): n * p * q for then, q in enumerate(law((token,))) if q > 0}
    assert set(counts) <= set(expected)
    statistic = sum((counts[ids] - e) ** 2 / e for ids, e in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 3.3 * math.sqrt(2 * freedom)  # beyond 0.1 %


def test_the_same_seed_gives_the_same_sample(make_model) -> None:
    model, draft = make_model(V, 2, sharpness=1.5), make_model(V, 5, sharpness=1.5)
    with torch.no_grad():
        runs = [
            [speculation(model, draft, SOURCES[0]).sample(9, Filter(), seed) for seed in (1, 2, 3)] for _ in range(2)
        ]
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids, _ in runs[0]}) > 1


def test_rules_hold_for_speculation_too(make_model) -> None:
    model, draft = make_model(V, 1), make_model(V, 2)
    rules = {"min_length": 5, "prefixes": [[7, 7]], "no_repeat_ngram": 2, "banned_sequences": [[7, 5]]}
    with torch.no_grad():
        for one in (
            speculation(model, draft, SOURCES[0], **rules).greedy(9)[0],
            speculation(model, draft, SOURCES[0], **rules).sample(9, Filter(), 4)[0],
        ):
            assert one[:2] == [7, 7]
            assert one[2] != 5
            assert EOS not in one[:4]
            pairs = list(itertools.pairwise(one))
            assert len(pairs) == len(set(pairs))


def test_a_decoder_that_starts_with_pad(make_model) -> None:
    """As imported Marian models do: a whole pass would not see the first token."""
    model, draft = make_model(V, 1), make_model(V, 2)
    (plain,) = greedy_search(model, torch.tensor([SOURCES[0]]), None, 9, PAD, EOS)
    with torch.no_grad():
        assert speculation(model, draft, SOURCES[0], bos_id=PAD, banned=(PAD,)).greedy(9)[0] == plain.ids


def test_a_reader_goes_back_as_easily_as_on(make_model) -> None:
    model = make_model(V, 1)
    src = torch.tensor([SOURCES[0]])
    mask = torch.ones_like(src, dtype=torch.bool)
    with torch.no_grad():
        reader, whole = Reader(model, src, mask), WholePass(model, src, mask)
        for tokens in ([BOS, 5, 6, 7], [BOS, 5, 4], [BOS], [BOS, 5, 4, 4, 4]):
            n = len(tokens)
            assert torch.allclose(reader.after(tokens, n), whole.after(tokens, n), atol=1e-5)
