"""What must hold of decoding whatever the model's family, the sources and the options."""

from __future__ import annotations

import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.engine import Job, Rules, decode
from dragoman.decoding.force import token_log_probs
from dragoman.decoding.options import DecodingConfig
from dragoman.model.choices import ModelSpec, PaperSpec

V, PAD, UNK, BOS, EOS = 17, 0, 1, 2, 3
RULES = Rules(PAD, BOS, EOS, (PAD, UNK, BOS))
SIZES = {"n_layers": 2, "d_model": 12, "d_ff": 20, "n_heads": 3}
FAMILIES = typing.get_args(ModelSpec) or (PaperSpec,)


def build(family: type) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = family(**SIZES).build(V, PAD).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embedding" in name:
                    parameter.mul_(3.0)
                elif "bias" in name:
                    parameter.normal_(std=0.3)
    return model


MODELS = {family.kind: build(family) for family in FAMILIES}

sources = st.lists(st.lists(st.integers(4, V - 1), max_size=7), min_size=1, max_size=6)
options = st.one_of(
    st.builds(
        DecodingConfig,
        beam_size=st.integers(1, 5),
        alpha=st.floats(-1, 2),
        penalty=st.sampled_from(["paper", "none", "power", "average"]),
        min_length=st.integers(0, 4),
        no_repeat_ngram=st.integers(0, 3),
    ),
    st.builds(DecodingConfig, greedy=st.just(True), no_repeat_ngram=st.integers(0, 3)),
    st.builds(
        DecodingConfig,
        sample=st.just(True),
        n_best=st.integers(1, 3),
        temperature=st.floats(0.5, 2),
        top_k=st.integers(0, 20),
        seed=st.integers(-5, 5),
    ),
)


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(sources=sources, options=options, extra=st.integers(4, 9), batch_tokens=st.sampled_from([1, 40, 4096]))
def test_a_sentence_has_one_answer_and_its_numbers_can_be_recomputed(
    kind, sources, options, extra, batch_tokens
) -> None:
    model = MODELS[kind]
    jobs = [Job([*source, EOS], len(source) + 1 + extra) for source in sources]
    together = decode(model, jobs, options, RULES)
    alone = [decode(model, [job], options, RULES)[0] for job in jobs]
    other = decode(model, jobs[::-1], type(options)(**{**vars(options), "batch_tokens": batch_tokens}), RULES)[::-1]
    for job, a, b, c in zip(jobs, together, alone, other, strict=True):
        assert [h.ids for h in a] == [h.ids for h in b] == [h.ids for h in c]
        assert [h.score for h in a] == pytest.approx([h.score for h in b], abs=1e-4)
        assert [h.score for h in a] == pytest.approx([h.score for h in c], abs=1e-4)
        for h in a:
            assert len(h.ids) <= job.cap
            assert h.finished == (h.ids[-1:] == [EOS])
            assert h.finished or len(h.ids) == job.cap
            assert EOS not in h.ids[:-1]
            assert not {PAD, UNK, BOS} & set(h.ids)
            assert len(h.ids) >= options.min_length or not h.finished
    forced = token_log_probs(
        model,
        [job.src for job, a in zip(jobs, together, strict=True) for _ in a],
        [h.ids for a in together for h in a],
        BOS,
        PAD,
    )
    for log_probs, h in zip(forced, (h for a in together for h in a), strict=True):
        assert log_probs == pytest.approx(h.token_log_probs, abs=1e-4)
        assert sum(log_probs) == pytest.approx(h.log_prob, abs=1e-4)


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(sources=sources, size=st.integers(2, 5))
def test_the_first_of_a_beam_is_the_first_whatever_is_asked_for(kind, sources, size) -> None:
    jobs = [Job([*source, EOS], len(source) + 6) for source in sources]
    many = decode(MODELS[kind], jobs, DecodingConfig(beam_size=size, n_best=size), RULES)
    one = decode(MODELS[kind], jobs, DecodingConfig(beam_size=size), RULES)
    greedy = decode(MODELS[kind], jobs, DecodingConfig(greedy=True), RULES)
    narrow = decode(MODELS[kind], jobs, DecodingConfig(beam_size=1), RULES)
    assert [found[:1] for found in many] == one
    assert [[h.ids for h in found] for found in narrow] == [[h.ids for h in found] for found in greedy]
    assert all(len({tuple(h.ids) for h in found}) == len(found) for found in many)
