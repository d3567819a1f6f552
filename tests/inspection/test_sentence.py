"""A pair under the lens: log-probabilities of the forward pass, shapes of the maps, alignment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dragoman.errors import DataError
from dragoman.inspection.sentence import LONGEST, best_links, look


def test_a_given_pair(translator: Any) -> None:
    translator.model.train()
    seen = look(translator, "the cat sees", "die katze sieht")
    assert seen.source_pieces == ("the", "cat", "sees", "</s>")
    assert seen.input_pieces == ("<s>", "die", "katze", "sieht")
    assert [token.piece for token in seen.tokens] == ["die", "katze", "sieht", "</s>"]
    assert seen.given
    assert translator.model.training  # put back as it was

    model = translator.model.eval()
    encode = translator.tokenizer.encode
    logits = model(torch.tensor([[*encode("the cat sees"), 3]]), torch.tensor([[2, *encode("die katze sieht")]]))
    expected = logits[0].log_softmax(-1)
    for i, index in enumerate([*encode("die katze sieht"), 3]):
        assert seen.tokens[i].log_prob == pytest.approx(expected[i, index].item(), abs=1e-6)
        best = seen.tokens[i].alternatives
        assert len(best) == 5
        assert best[0][1] == pytest.approx(expected[i].max().item(), abs=1e-6)
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    assert seen.log_prob == pytest.approx(sum(token.log_prob for token in seen.tokens))


def test_every_map_of_the_pair(translator: Any) -> None:
    seen = look(translator, "the cat and the dog", "die katze und der hund sieht")
    assert len(seen.maps) == 6
    assert {found.weights.shape for found in seen.maps} == {(1, 3, 6, 6), (1, 3, 7, 6), (1, 3, 7, 7)}
    assert seen.alignment.shape == (7, 6)
    torch.testing.assert_close(seen.alignment.sum(-1), torch.ones(7))
    assert len(seen.links) == 6
    assert all(link is not None and link < 5 for link in seen.links)


def test_without_a_target_the_models_own_is_looked_at(translator: Any) -> None:
    seen = look(translator, "the cat sees")
    assert seen.target == "die katze sieht"
    assert not seen.given
    assert [token.piece for token in seen.tokens] == ["die", "katze", "sieht", "</s>"]


def test_a_translation_in_pieces_is_encoded_again(translator: Any) -> None:
    translator.answer = SimpleNamespace(
        text="die katze der hund", tokens=["die", "katze", "</s>", "der", "hund", "</s>"]
    )
    seen = look(translator, "the cat the dog")
    assert [token.piece for token in seen.tokens] == ["die", "katze", "der", "hund", "</s>"]


def test_what_cannot_be_shown_is_said(translator: Any) -> None:
    with pytest.raises(DataError, match="the source is blank"):
        look(translator, "  ")
    with pytest.raises(DataError, match="the target is blank"):
        look(translator, "the", "")
    with pytest.raises(DataError, match=rf"the source has 201 tokens, and {LONGEST} can be shown"):
        look(translator, "cat " * 200)
    with pytest.raises(DataError, match="the target has 151 tokens"):
        look(translator, "cat", "hund " * 150)


def test_links_leave_the_end_of_sentence_out() -> None:
    alignment = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.1, 0.4], [0.0, 0.0, 1.0]])
    assert best_links(alignment, n_source=2, n_target=2) == (1, 0)
    assert best_links(torch.zeros(0, 0), 2, 2) == (None, None)


def test_a_trained_model_aligns_what_it_translates(shared: Path, tmp_path: Path) -> None:
    """Real weights, of another family, whose decoder starts with the pad token."""
    from dragoman.checkpoints.store import load_model
    from dragoman.exchange.huggingface import import_folder

    import_folder(shared / "models" / "marian-small-en-de", tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    translator: Any = SimpleNamespace(model=loaded.model, tokenizer=loaded.tokenizer)
    seen = look(
        translator,
        "A young girl in a red dress is playing with two brown dogs.",
        "Ein junges Mädchen in einem roten Kleid spielt mit zwei braunen Hunden.",
    )
    words = [piece.strip("▁") for piece in seen.source_pieces]
    partners = [words[link] for link in seen.links if link is not None]
    expected = ["A", "young", "girl", "in", "a", "red", "dress", "playing", "with", "two", "brown", "dogs", "."]
    assert sum(a == b for a, b in zip(partners, expected, strict=True)) >= 12
    assert all(token.log_prob > -1 for token in seen.tokens)
    assert len(seen.maps) == 3 * 3
    for found in seen.maps:
        torch.testing.assert_close(found.weights.sum(-1), torch.ones(found.weights.shape[:-1]))
