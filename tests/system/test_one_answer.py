"""The promise of docs/decoding.md on real sentences and a trained model: one translation a line, and its numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dragoman.checkpoints.store import WEIGHTS
from dragoman.exchange.huggingface import import_folder
from dragoman.translator import Translator, load

CORPORA = {
    "flickr": ("multi30k-en-de/test_2016_flickr.en", False),
    "tatoeba-en-de": ("tatoeba-en-de/test.tsv", True),
    "tatoeba-en-zh": ("tatoeba-en-zh/test.tsv", True),
}
DEMO = Path(__file__).resolve().parents[2] / "runs" / "demo"
OPTIONS = {
    "greedy": ({"greedy": True}, 1000),
    "beam": ({"beam_size": 4, "n_best": 4}, 1000),
    "power": ({"penalty": "power", "alpha": 1.0}, 150),
    "rules": ({"no_repeat_ngram": 3, "min_length": 6, "ban": ("Mann", "in der"), "prefix": "Ein"}, 150),
    "sample": ({"sample": True, "n_best": 2}, 150),
    "nucleus": ({"sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, 150),
}


def marian(shared: Path, out: Path) -> Path:
    import_folder(shared / "models" / "marian-small-en-de", out, src_lang="en", tgt_lang="de")
    return out


def shuffled_marian(shared: Path, out: Path) -> Path:
    """A random model: the same numbers in other places, so that outputs are long and hypotheses close together."""
    file = marian(shared, out) / WEIGHTS
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view(weight.shape)
        for name, weight in load_file(file).items()
    }
    save_file(weights, file)
    return out


def demo(shared: Path, out: Path) -> Path:
    if not DEMO.exists():
        pytest.skip("make demo has not been run here")
    return DEMO


MODELS = {each.__name__: each for each in (marian, shuffled_marian, demo)}


@pytest.fixture(scope="module", params=["marian"])
def translator(request: pytest.FixtureRequest, shared: Path, tmp_path_factory) -> Translator:
    return load(MODELS[request.param](shared, tmp_path_factory.mktemp(request.param) / "model"))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


CASES = [
    pytest.param(model, corpus, name, marks=[] if model == "marian" and corpus == "flickr" else pytest.mark.long)
    for model in MODELS
    for corpus in CORPORA
    for name in OPTIONS
    if model == "marian" or name in ("greedy", "beam")
]


@pytest.mark.slow
@pytest.mark.parametrize(("translator", "corpus", "name"), CASES, indirect=["translator"])
def test_batch_order_neighbours_and_threads_change_nothing(shared, translator, threads, corpus, name) -> None:
    file, is_tsv = CORPORA[corpus]
    options, n = OPTIONS[name]
    lines = (shared / "data" / file).read_text(encoding="utf-8").split("\n")
    lines = [line.split("\t")[0] if is_tsv else line for line in lines if line][:n]
    order = random.Random(1).sample(range(len(lines)), len(lines))
    whole = translator.translate(lines, **options)

    threads(1)
    shuffled = translator.translate([lines[i] for i in order], batch_tokens=900, **options)
    found = {"shuffled": dict(zip(order, shuffled, strict=True))}
    threads(3)
    for size in (7, 64):
        starts = range(0, len(lines), size)
        answers = [t for start in starts for t in translator.translate(lines[start : start + size], **options)]
        found[f"by {size}"] = dict(enumerate(answers))
    found["alone"] = {i: translator.translate(lines[i], **options) for i in order[:40]}
    for how, translations in found.items():
        for i, t in translations.items():
            expected = whole[i].hypotheses
            assert [h.text for h in t.hypotheses] == [h.text for h in expected], f"{how}: {lines[i]}"
            assert [h.score for h in t.hypotheses] == pytest.approx([h.score for h in expected], abs=1e-4)

    pairs = [(t.source, h) for t in whole for h in t.hypotheses]
    rule = {key: value for key, value in options.items() if key in ("penalty", "alpha")}
    for (_, h), scored in zip(pairs, translator.score(pairs, **rule), strict=True):
        assert scored.score == pytest.approx(h.score, abs=1e-4)
        assert scored.log_prob == pytest.approx(h.log_prob, abs=1e-3)
        assert (scored.text, scored.length, scored.finished) == (h.text, h.length, h.finished)
