"""An ensemble is the mean of its members' probabilities, to every search alike."""

from __future__ import annotations

import pytest
import torch

from dragoman.decoding.beam import beam_search
from dragoman.decoding.ensemble import Ensemble
from dragoman.decoding.force import token_log_probs
from dragoman.decoding.greedy import greedy_search

PAD, BOS, EOS = 0, 2, 3


def test_probabilities_are_averaged(make_model) -> None:
    models = [make_model(11, seed) for seed in range(3)]
    src, tgt_in = torch.tensor([[5, 6, EOS], [7, EOS, PAD]]), torch.tensor([[BOS, 4, 5, 6], [BOS, 8, 9, 4]])
    with torch.no_grad():
        expected = torch.stack([model(src, tgt_in).double().softmax(-1) for model in models]).mean(0)
        ensemble = Ensemble(models)
        assert torch.allclose(ensemble(src, tgt_in).double().softmax(-1), expected, atol=1e-6)
        state = ensemble.start(src)
        for t in range(tgt_in.size(1)):
            logits, state = ensemble.step(tgt_in[:, t], state)
            assert torch.allclose(logits.double().exp(), expected[:, t], atol=1e-5)
        # The states of all members follow the beam.
        logits, _ = ensemble.step(torch.tensor([4, 4, 4]), state.select(torch.tensor([1, 0, 1])))
        assert torch.allclose(logits[0], logits[2])
        assert not torch.allclose(logits[0], logits[1])


def test_one_model_twice_is_that_model(make_model, pad_batch) -> None:
    model = make_model(11, 4)
    src, mask = pad_batch([[5, 6, EOS], [7, EOS]])
    alone = beam_search(model, src, mask, 3, 0.6, 9, BOS, EOS, 3)
    twice = beam_search(Ensemble([model, model]), src, mask, 3, 0.6, 9, BOS, EOS, 3)
    for a, b in zip(alone, twice, strict=True):
        assert [h.ids for h in a] == [h.ids for h in b]
        assert [h.score for h in a] == pytest.approx([h.score for h in b], abs=1e-4)


def test_an_ensemble_scores_what_it_finds(make_model, pad_batch) -> None:
    ensemble = Ensemble([make_model(11, seed) for seed in (1, 2)])
    sources = [[5, 6, EOS], [7, EOS]]
    found = greedy_search(ensemble, *pad_batch(sources), 9, BOS, EOS)
    forced = token_log_probs(ensemble, sources, [h.ids for h in found], BOS, PAD)
    for hypothesis, log_probs in zip(found, forced, strict=True):
        assert log_probs == pytest.approx(hypothesis.token_log_probs, abs=1e-4)


def test_members_in_training_are_put_to_evaluation_and_back(make_model, pad_batch) -> None:
    models = [make_model(11, seed).train() for seed in (1, 2)]
    src, mask = pad_batch([[5, 6, EOS]])
    scores = {beam_search(Ensemble(models), src, mask, 2, 0.6, 9, BOS, EOS)[0][0].score for _ in range(2)}
    assert len(scores) == 1
    assert all(model.training for model in models)
