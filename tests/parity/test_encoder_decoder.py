"""The open family against the closed one: with 2017 parts it is the paper's model, with others it keeps its word."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from dragoman.config import build, tree_of
from dragoman.model.choices import EncoderDecoderSpec, PaperSpec, Positionwise, PreLN, Sinusoidal
from dragoman.model.positions.sinusoidal import halves_order
from dragoman.model.transformer import sinusoids

SIZES = {"n_layers": 2, "d_model": 24, "d_ff": 40, "n_heads": 3}
V, B, S, T = 37, 2, 5, 7

OPEN = {
    "halves": EncoderDecoderSpec(**SIZES, position=Sinusoidal(layout="halves")),
    "swish": EncoderDecoderSpec(**SIZES, feed_forward=Positionwise(activation="swish"), output_bias=True),
    "pre_norm": EncoderDecoderSpec(**SIZES, residual=PreLN(), feed_forward=Positionwise(activation="gelu")),
    "untied": EncoderDecoderSpec(**SIZES, share_embeddings=False, tie_output=False, scale_embedding=False),
    "uneven": EncoderDecoderSpec(**SIZES, decoder_n_layers=3, decoder_d_ff=16, decoder_n_heads=4, tie_output=False),
}


def made(spec: EncoderDecoderSpec | PaperSpec, pad_id: int = 0) -> nn.Module:
    torch.manual_seed(7)
    model = spec.build(V, pad_id).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero when fresh, where they could hide
                parameter.normal_(std=0.1)
    return model


def tokens(length: int, pad_id: int = 0) -> torch.Tensor:
    ids = torch.randint(1, V - 1, (B, length), generator=torch.Generator().manual_seed(length))
    return ids + (ids >= pad_id if pad_id else 0)


def test_with_2017_parts_it_is_the_paper_model() -> None:
    paper, opened = made(PaperSpec(**SIZES)), made(EncoderDecoderSpec(**SIZES))
    assert list(paper.state_dict()) == list(opened.state_dict())
    opened.load_state_dict(paper.state_dict())
    src, tgt_in = tokens(S), tokens(T)
    src[1, 3:] = 0
    assert torch.equal(paper(src, tgt_in), opened(src, tgt_in))
    ours, theirs = opened.start(src), paper.start(src)
    for t in range(T):
        one, ours = opened.step(tgt_in[:, t], ours)
        other, theirs = paper.step(tgt_in[:, t], theirs)
        assert torch.equal(one, other)


def test_the_same_seed_gives_the_same_fresh_weights() -> None:
    torch.manual_seed(3)
    paper = PaperSpec(**SIZES).build(V, 0).state_dict()
    torch.manual_seed(3)
    opened = EncoderDecoderSpec(**SIZES).build(V, 0).state_dict()
    assert all(torch.equal(paper[name], opened[name]) for name in paper)


@pytest.mark.parametrize("name", OPEN)
def test_step_by_step_is_the_whole_pass(name: str) -> None:
    model = made(OPEN[name])
    src, tgt_in = tokens(S), tokens(T)
    src[1, 3:] = 0
    whole = model(src, tgt_in)
    state = model.start(src).select(torch.tensor([1, 0])).select(torch.tensor([1, 0]))
    for t in range(T):
        logits, state = model.step(tgt_in[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OPEN)
def test_padding_and_later_tokens_change_nothing(name: str) -> None:
    model = made(OPEN[name])
    src, tgt_in = tokens(S), tokens(T)
    alone = model(src, tgt_in)
    padded = model(nn.functional.pad(src, (0, 3)), tgt_in)
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
    changed = tgt_in.clone()
    changed[:, 4] = changed[:, 4] % (V - 1) + 1
    torch.testing.assert_close(model(src, changed)[:, :4], alone[:, :4], atol=0, rtol=0)
    assert not torch.equal(model(src, changed)[:, 4], alone[:, 4])


def test_a_decoder_may_start_with_the_pad_token() -> None:
    model = made(OPEN["halves"], pad_id=V - 1)
    src, tgt_in = tokens(S), tokens(T)
    tgt_in[:, 0] = V - 1
    whole = model(src, tgt_in)
    state = model.start(src)
    for t in range(T):
        logits, state = model.step(tgt_in[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], atol=1e-5, rtol=0)


def test_permuting_the_width_turns_one_layout_into_the_other() -> None:
    order = halves_order(24)
    halves = OPEN["halves"].position.build(24, 0.0)
    torch.testing.assert_close(halves(torch.zeros(1, 9, 24))[0], sinusoids(9, 24)[:, order], atol=0, rtol=0)
    far = halves(torch.zeros(1, 2, 24), start=700)  # beyond the first table
    torch.testing.assert_close(far[0], sinusoids(702, 24)[700:, order], atol=0, rtol=0)


@pytest.mark.parametrize("name", OPEN)
def test_parameters_are_those_that_the_spec_asks_for(name: str) -> None:
    spec = OPEN[name]
    model = made(spec)
    names = {name for name, _ in model.named_parameters()}
    assert ("target_embedding.weight" in names) == (not spec.share_embeddings)
    assert ("generator.weight" in names) == (not spec.tie_output)
    assert ("generator.bias" in names) == spec.output_bias
    assert ("encoder_norm.weight" in names) == isinstance(spec.residual, PreLN)
    model(tokens(S), tokens(T)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", OPEN)
def test_a_spec_survives_toml(name: str) -> None:
    assert build(EncoderDecoderSpec, tree_of(OPEN[name])) == OPEN[name]


def test_impossible_sizes_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"dropout.*d_model must be even.*does not divide into 4 heads"):
        dataclasses.replace(OPEN["halves"], dropout=1.0, d_model=27, n_heads=4)
