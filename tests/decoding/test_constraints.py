"""What may come next, against the rules checked token by token in plain Python."""

from __future__ import annotations

import random

import torch

from dragoman.decoding.beam import BeamSearch
from dragoman.decoding.constraints import Constraints
from dragoman.decoding.greedy import Likeliest, PathSearch
from dragoman.decoding.search import run

V, PAD, BOS, EOS = 9, 0, 2, 3


def allowed_by_hand(tokens, banned, sequences, least, prefix, n) -> set[int]:
    if len(tokens) < len(prefix):
        return {prefix[len(tokens)]}
    allowed = set(range(V)) - set(banned)
    if len(tokens) + 1 < least:
        allowed.discard(EOS)
    for token in list(allowed):
        longer = [*tokens, token]
        if any(longer[-len(sequence) :] == list(sequence) for sequence in sequences):
            allowed.discard(token)
        grams = [tuple(longer[i : i + n]) for i in range(len(longer) - n + 1)] if n else []
        if grams and grams[-1] in grams[:-1]:
            allowed.discard(token)
    return allowed


def test_every_rule_at_any_length() -> None:
    draw = random.Random(3)
    for _ in range(200):
        B, N = draw.randint(1, 4), draw.randint(1, 3)
        lengths = [draw.randint(0, 7) for _ in range(B)]
        room = max(lengths) + draw.randint(0, 3)
        # What stands after a row's length means nothing: it is drawn too.
        history = [[[draw.randint(4, 8) for _ in range(room)] for _ in range(N)] for _ in range(B)]
        least = [draw.choice([0, 0, 4, 9]) for _ in range(B)]
        prefixes = [[draw.randint(4, 8) for _ in range(draw.choice([0, 0, 2, 5]))] for _ in range(B)]
        sequences = [[draw.randint(4, 8) for _ in range(draw.randint(2, 3))] for _ in range(draw.randint(0, 3))]
        n = draw.choice([0, 1, 2, 3])
        rules = Constraints.of(
            EOS,
            B,
            banned=[PAD, BOS],
            banned_sequences=[*sequences, [7]],
            min_length=least,
            prefixes=prefixes,
            no_repeat_ngram=n,
        )
        logits = torch.randn(B, N, V)
        before = logits.clone()
        shaped = torch.tensor(history, dtype=torch.long).reshape(B, N, room)
        found = rules.apply(logits, torch.tensor(lengths), shaped)
        assert torch.equal(logits, before)
        for b in range(B):
            for k in range(N):
                tokens = history[b][k][: lengths[b]]
                wanted = allowed_by_hand(tokens, [PAD, BOS, 7], sequences, least[b], prefixes[b], n)
                open_ = [token for token in range(V) if found[b, k, token] > float("-inf")]
                assert set(open_) == wanted
                assert torch.equal(found[b, k, open_], logits[b, k, open_])


def test_rules_follow_their_sentences() -> None:
    rules = Constraints.of(EOS, 3, min_length=[1, 5, 2], prefixes=[[4], [], [5, 6]])
    logits, lengths = torch.randn(3, 1, V), torch.tensor([0, 1, 1])
    whole = rules.apply(logits, lengths)
    order = torch.tensor([2, 0])
    assert torch.equal(rules.select(order).apply(logits[order], lengths[order]), whole[order])
    both = rules.select(torch.tensor([0])).join(rules.select(torch.tensor([1, 2])))
    assert torch.equal(both.apply(logits, lengths), whole)


def test_where_the_rules_leave_nothing_the_search_ends_unfinished(make_model) -> None:
    """Banning all of a vocabulary is no reason to hang or to crash."""
    model = make_model(V, 3)
    src = torch.tensor([[4, 5, EOS], [6, 5, EOS]])
    everything = [token for token in range(V) if token not in (4, EOS)]
    for rows in (1, 2):
        caps = torch.tensor([6, 6])
        rules = Constraints.of(EOS, 2, banned=everything, min_length=[5, 0], no_repeat_ngram=1)
        search = (
            PathSearch([0, 1], caps, rules, Likeliest(), bos_id=BOS)
            if rows == 1
            else BeamSearch([0, 1], caps, rules, beam_size=rows, bos_id=BOS)
        )
        found = run(model, src, None, search)
        assert found[0][0].ids == [4]
        assert not found[0][0].finished
        assert found[1][0].ids in ([EOS], [4, EOS])
