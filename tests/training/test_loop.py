"""The update and the loop: what is summed, what is skipped, when it ends, and that it can be taken up again."""

from __future__ import annotations

import dataclasses
import math
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.batches.batch import Batch, collate
from dragoman.batches.stream import Position
from dragoman.errors import TrainingError
from dragoman.training.feed import Feed, Ids, Regularise, Share
from dragoman.training.gradients import ByAutograd, InLanes, most_likely
from dragoman.training.loop import Loop, Report
from dragoman.training.loss import smoothed_cross_entropy
from dragoman.training.optimizer import Adam, AdamW, Muon, Optimizer

MakeLoop = Callable[..., Loop]
MakeFeed = Callable[..., Feed]
PATHS = [pytest.param({"lanes": 1}, id="lanes"), pytest.param({"activation_checkpointing": True}, id="autograd")]


def gradients(loop: Loop, *shares: Share) -> Tensor:
    """The sum of the gradients of some shares, as one vector."""
    total = torch.zeros(sum(parameter.numel() for parameter in loop.parameters.values()))
    loop.model.train()
    for share in shares:
        loop.model.zero_grad()
        loop.gradients.of(share, 1.0, 0)
        total += torch.cat([parameter.grad.flatten() for parameter in loop.parameters.values()])
    return total


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("accumulation", "size"), [(1, 1), (3, 1), (1, 2), (2, 3), (1, 64)])
def test_gradients_are_the_same_however_an_update_is_cut(
    make_loop: MakeLoop, make_feed: MakeFeed, path: dict[str, object], accumulation: int, size: int
) -> None:
    loop = make_loop(**path)
    assert isinstance(loop.gradients, InLanes if "lanes" in path else ByAutograd)
    whole = next(make_feed().shares(Position()))
    parts = [
        next(make_feed(accumulation=accumulation, rank=rank, size=size).shares(Position())) for rank in range(size)
    ]
    assert {part.n_tokens for part in parts} == {whole.n_tokens}
    assert sum(batch.n_tokens for part in parts for batch in part.batches) == whole.n_tokens
    assert difference(gradients(loop, whole), gradients(loop, *parts)) < 1e-6


def test_a_gradient_is_that_of_the_mean_loss_per_target_token(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    loop = make_loop()
    share = next(make_feed().shares(Position()))
    ours = gradients(loop, share)
    loop.model.zero_grad()
    total, count = torch.zeros(()), 0
    for batch in share.batches:
        for row in range(len(batch)):  # one pair at a time, without its padding
            src, tgt_in, tgt_out = (
                x[row : row + 1, : int((x[row] != 0).sum())] for x in (batch.src, batch.tgt_in, batch.tgt_out)
            )
            loss, n = smoothed_cross_entropy(loop.model(src, tgt_in), tgt_out, 0.1, 0)
            total, count = total + loss, count + n
    (total / count).backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in loop.parameters.values()])
    assert count == share.n_tokens
    assert difference(theirs, ours) < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_padding_by_30_and_rows_of_padding_change_nothing(
    make_loop: MakeLoop, make_feed: MakeFeed, path: dict[str, object]
) -> None:
    loop = make_loop(**path)
    share = next(make_feed().shares(Position()))

    def padded(batch: Batch) -> Batch:
        src, tgt_in, tgt_out = (F.pad(x, (0, 30, 0, 2)) for x in (batch.src, batch.tgt_in, batch.tgt_out))
        tgt_in[-2:, 0] = 2
        return Batch(src, tgt_in, tgt_out, batch.n_tokens, batch.indices)

    wide = replace(share, batches=[padded(batch) for batch in share.batches])
    loop.model.train()
    assert loop.gradients.of(wide, 1.0, 0) == pytest.approx(loop.gradients.of(share, 1.0, 0), rel=1e-6)
    assert difference(gradients(loop, share), gradients(loop, wide)) < 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_without_a_target_token_is_left_out_and_counted(
    make_loop: MakeLoop, corpus: object, ids: Ids, path: dict[str, object]
) -> None:
    loop = make_loop(**path)
    before = [parameter.clone() for parameter in loop.parameters.values()]
    nothing = collate(corpus, np.arange(0), ids.pad_id, ids.bos_id, ids.eos_id)
    share = Share([nothing], Position(), Position(0, 0, 1), 0)
    assert loop.update(share) is None
    assert (loop.step, loop.empty, loop.skipped, loop.position) == (0, 1, 0, Position(0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, loop.parameters.values(), strict=True))
    # In the middle of a job another rank may have the tokens: this one's part is zero, and not NaN.
    assert not gradients(loop, replace(share, n_tokens=5)).any()


def poison(loop: Loop, *calls: int) -> None:
    """Let the gradients of these calls (from 1) be infinite."""
    plain, count = loop.gradients.of, 0

    def of(share: Share, scale: float, seed: int) -> tuple[float, float]:
        nonlocal count
        count += 1
        result = plain(share, scale, seed)
        if count in calls:
            next(iter(loop.parameters.values())).grad[0] = math.inf
        return result

    loop.gradients.of = of


def test_an_update_that_is_not_finite_is_left_out_and_counted(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    said: list[str] = []
    loop = make_loop(warn=said.append, max_steps=4)
    poison(loop, 2)
    reports = list(loop.run(make_feed().shares(Position())))
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert [report.skipped for report in reports] == [0, 1, 1, 1]
    assert loop.position.batch == 5  # its data was passed over
    assert len(said) == 1
    assert "after step 1" in said[0]
    assert all(torch.isfinite(parameter).all() for parameter in loop.parameters.values())


def test_training_ends_where_nothing_is_finite_any_more(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    loop = make_loop(max_skipped=3, warn=lambda message: None)
    poison(loop, 2, 4, 5, 6)
    with pytest.raises(TrainingError, match="3 updates in a row were not finite after step 2"):
        list(loop.run(make_feed().shares(Position())))


def test_clipping_scales_the_gradient_and_reports_the_norm_before(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    share = next(make_feed().shares(Position()))
    free, clipped = make_loop(), make_loop(clip_norm=0.01)
    seen: list[float] = []

    def watch(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(float(torch.nn.utils.get_total_norm(found)))

    for loop in (free, clipped):
        loop.optimizer.register_step_pre_hook(watch)
    reports = [loop.update(share) for loop in (free, clipped)]
    assert reports[0].grad_norm == reports[1].grad_norm == pytest.approx(seen[0], rel=1e-6)
    assert seen[0] > 0.01
    assert seen[1] == pytest.approx(0.01, rel=1e-5)


def test_a_report_says_what_the_update_was(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    loop, feed = make_loop(label_smoothing=0.1), make_feed()
    share = next(feed.shares(Position()))
    model = loop.model.eval()
    smooth = plain = 0.0
    for batch in share.batches:
        logits = model(batch.src, batch.tgt_in).detach()
        smooth += float(smoothed_cross_entropy(logits, batch.tgt_out, 0.1, 0)[0])
        plain += float(smoothed_cross_entropy(logits, batch.tgt_out, 0.0, 0)[0])
    report = loop.update(share)
    assert isinstance(report, Report)
    assert report.loss == pytest.approx(smooth / share.n_tokens, rel=1e-5)
    assert report.nll == pytest.approx(plain / share.n_tokens, rel=1e-5)
    assert report.lr == 1e-3
    assert report.tokens == sum(int((batch.tgt_out != 0).sum()) for batch in share.batches)
    assert report.tgt_padded == sum(batch.tgt_out.numel() for batch in share.batches) <= 150
    assert report.src_padded == sum(batch.src.numel() for batch in share.batches) <= 150
    assert report.seconds > 0


def test_it_ends_by_steps_epochs_or_minutes(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    def steps(**ends: object) -> int:
        loop = make_loop(**ends)
        return len(list(loop.run(make_feed().shares(Position()))))

    two_epochs = sum(make_feed().stream.batches_per_epoch(epoch) for epoch in (0, 1))
    assert steps(max_steps=3) == 3
    assert steps(max_steps=None, max_epochs=2) == two_epochs
    assert steps(max_steps=3, max_epochs=2) == 3
    assert 1 <= steps(max_steps=None, max_minutes=0.01) < 2000


def test_a_signal_ends_it_after_the_update(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    loop = make_loop()
    seen = []
    for report in loop.run(make_feed().shares(Position())):
        seen.append(report.stop)
        if report.step == 2:
            loop.request_stop(signal.SIGTERM)
    assert seen == [None, None, signal.SIGTERM]


def test_guesses_leave_every_weight_its_gradient(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    """autocast keeps the weights that a pass without gradients has cast, and the next pass would take them."""
    loop = make_loop(precision="bfloat16", scheduled_sampling=0.5, max_steps=3)
    share = next(iter(make_feed().shares(Position())))
    loop.gradients.sample(0.5)
    loop.gradients.of(share, 1.0, 0)
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in loop.parameters.values())


RESUMED = [
    {"precision": "float32"},
    {"precision": "bfloat16"},
    {"precision": "float32", "lanes": 2},
    {"precision": "bfloat16", "activation_checkpointing": True},
    {"precision": "float32", "ema": 0.9, "optimizer": AdamW()},
    {"precision": "float32", "lanes": 2, "optimizer": Muon(weight_decay=0.1)},
    {"precision": "float32", "scheduled_sampling": 0.5, "total_steps": 9},
]


@pytest.mark.parametrize("config", RESUMED, ids=lambda config: " ".join(map(str, config.values())))
def test_resumed_is_uninterrupted_to_the_bit(
    make_loop: MakeLoop, make_feed: MakeFeed, config: dict[str, object]
) -> None:
    def losses(loop: Loop, feed: Feed) -> list[tuple[float, float, float]]:
        return [(r.loss, r.nll, r.grad_norm) for r in loop.run(feed.shares(loop.position))]

    whole = losses(make_loop(dropout=0.2, max_steps=9, **config), make_feed(accumulation=2, workers=2))
    first = make_loop(dropout=0.2, max_steps=4, **config)
    begun = losses(first, make_feed(accumulation=2, workers=2))
    kept = {name: tensor.clone() for name, tensor in first.kept_weights().items()}
    weights = {name: tensor.clone() for name, tensor in first.weights().items()}
    state = {name: tensor.clone() for name, tensor in first.optimizer_tensors().items()}
    facts = first.facts()
    torch.manual_seed(99)  # nothing may depend on what was drawn meanwhile
    torch.rand(7)
    second = make_loop(dropout=0.2, max_steps=9, **config)
    second.restore_weights(weights, kept)
    second.restore_optimizer(state)
    second.restore_facts(facts)
    assert second.position.batch == 4
    assert begun + losses(second, make_feed(accumulation=2)) == whole
    assert len(whole) == 9


@pytest.mark.parametrize("kinds", [(Adam(), Muon()), (Muon(), AdamW())], ids=lambda kinds: kinds[1].kind)
def test_the_state_of_another_optimiser_is_refused(
    make_loop: MakeLoop, make_feed: MakeFeed, kinds: tuple[Optimizer, Optimizer]
) -> None:
    loop = make_loop(max_steps=1, optimizer=kinds[0])
    list(loop.run(make_feed().shares(Position())))
    with pytest.raises(TrainingError, match="--reset optimizer"):
        make_loop(optimizer=kinds[1]).restore_optimizer(loop.optimizer_tensors())


def test_what_is_reset_starts_afresh(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    loop = make_loop(max_steps=4)
    list(loop.run(make_feed().shares(Position())))

    def restored(*reset: str) -> Loop:
        again = make_loop()
        again.restore_facts(loop.facts(), frozenset(reset))
        return again

    assert (restored().step, restored().schedule_step, restored().position.batch) == (4, 4, 4)
    assert (restored("step").step, restored("step").schedule_step) == (0, 4)
    assert (restored("schedule").step, restored("schedule").schedule_step) == (4, 0)
    assert restored("data").position == Position()


class Splitter:
    """Cuts texts anew as a tokenizer would: every second draw doubles the ids of a row."""

    pad_id, unk_id, bos_id, eos_id = 0, 1, 2, 3

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def encode_sampled_batch(
        self, texts: list[str], alpha: float, nbest: int = -1, *, seeds: list[int]
    ) -> list[list[int]]:
        rows = [[int(word) for word in text.split()] for text in texts]
        return [row * 2 if seed % 2 and len(row) > 3 else row for row, seed in zip(rows, seeds, strict=True)]


def test_sentences_cut_anew_count_as_they_come_out(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    regularise = Regularise(Splitter(), 0.1)
    plain = next(make_feed(75).shares(Position()))
    whole = next(make_feed(75, regularise=regularise).shares(Position()))
    count = sum(batch.n_tokens for batch in whole.batches)
    assert count > plain.n_tokens == whole.n_tokens
    report = make_loop(label_smoothing=0.0).update(whole)
    assert report.tokens == count
    assert report.tgt_padded == sum(batch.tgt_out.numel() for batch in whole.batches) <= 150
    loop = make_loop(label_smoothing=0.0)
    total = torch.zeros(())
    for batch in whole.batches:
        total = total + smoothed_cross_entropy(loop.model(batch.src, batch.tgt_in), batch.tgt_out, 0.0, 0)[0]
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in loop.parameters.values()])
    assert report.loss == pytest.approx(total.item() / count, rel=1e-5)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)
    later = next(make_feed(75, regularise=regularise).shares(Position(1)))
    again = next(make_feed(75, regularise=regularise, workers=2).shares(Position(1)))
    assert all(torch.equal(a.src, b.src) for a, b in zip(later.batches, again.batches, strict=True))


def test_scheduled_sampling_replaces_inputs_by_guesses_and_nothing_else(
    make_loop: MakeLoop, make_feed: MakeFeed
) -> None:
    loop = make_loop(scheduled_sampling=0.5)
    (batch, *_) = next(make_feed().shares(Position())).batches
    module = loop.gradients.loss
    module.sampled = 0.999999
    mixed = module.guess(batch.src, batch.tgt_in)
    guessed = loop.model(batch.src, batch.tgt_in).argmax(-1)
    assert torch.equal(mixed[:, 0], batch.tgt_in[:, 0])
    real = (batch.tgt_in[:, 1:] != 0) & (guessed[:, :-1] != 0)
    assert torch.equal(mixed[:, 1:][real], guessed[:, :-1][real])
    assert torch.equal(mixed[:, 1:][~real], batch.tgt_in[:, 1:][~real])
    assert (mixed != batch.tgt_in).any()
    module.eval()
    loss = module(batch.src, batch.tgt_in, batch.tgt_out)[0]
    module.sampled = 0.0
    assert torch.equal(loss, module(batch.src, batch.tgt_in, batch.tgt_out)[0])  # the dev loss never samples


def test_guesses_are_made_without_the_logits_of_the_whole_batch(
    make_loop: MakeLoop, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_loop().model
    (batch, *_) = next(make_feed().shares(Position())).batches
    rows: list[int] = []
    model.generator.register_forward_hook(lambda module, given, logits: rows.append(logits.shape[:-1].numel()))
    monkeypatch.setattr("dragoman.training.gradients.chunk_of", lambda features, vocab_size: 7)
    features = model.features(batch.src, batch.tgt_in)
    guessed = most_likely(features, model.generator)
    assert max(rows) == 7 < sum(rows) == batch.tgt_in.numel()
    assert torch.equal(guessed, model(batch.src, batch.tgt_in).argmax(dim=-1))
    assert most_likely(features[:0], model.generator).shape == (0, features.size(1))


def test_guesses_become_more_with_the_updates_or_the_minutes(
    make_loop: MakeLoop, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(scheduled_sampling=0.5, max_minutes=20.0, max_steps=None, total_steps=1000)
    drawn: list[float] = []
    monkeypatch.setattr(loop.gradients, "sample", drawn.append)
    shares = make_feed().shares(Position())
    for minutes, steps in ((0.0, 0), (5.0, 0), (5.0, 500), (19.0, 10)):
        loop.minutes, loop.schedule_step = minutes, steps
        loop.update(next(shares))
    assert drawn == [0.0, 0.125, 0.25, 0.475]


def test_the_running_mean_is_the_running_mean(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    loop = make_loop(max_steps=3, ema=0.5)
    name = "embedding.weight"
    mean = loop.parameters[name].detach().double().clone()
    for report in loop.run(make_feed().shares(Position())):
        decay = min(0.5, (1 + report.step) / (10 + report.step))
        mean = decay * mean + (1 - decay) * loop.parameters[name].detach().double()
    assert torch.allclose(loop.kept_weights()[name].double(), mean, atol=1e-6)
    assert loop.kept_weights()["generator.weight"] is loop.kept_weights()[name]
    before = loop.parameters[name].detach().clone()
    with loop.ema.in_place():
        assert torch.allclose(loop.parameters[name].double(), mean, atol=1e-6)
    assert torch.equal(loop.parameters[name], before)


def test_adamw_decays_matrices_only() -> None:
    model = torch.nn.Linear(3, 2)
    groups = AdamW(weight_decay=0.1).build(model).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (1, 0.0)]


def test_adam_is_the_papers_by_default() -> None:
    (group,) = Adam().build(torch.nn.Linear(3, 2)).param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_where_compiling_fails_it_goes_on_without_and_says_so(
    make_loop: MakeLoop, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: torch.nn.Module, **_: object) -> None:
        def call(*args: object) -> None:
            raise RuntimeError("no compiler at hand\nand more")

        self._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", broken)
    said: list[str] = []
    loop, plain = make_loop(compile=True, warn=said.append), make_loop(activation_checkpointing=True)
    feed = make_feed()
    loop.try_out(feed.largest())
    assert said == ["torch.compile does not work here (no compiler at hand); training goes on without it"]
    share = next(feed.shares(Position()))
    assert loop.update(share).loss == plain.update(share).loss


def test_trying_the_largest_batch_leaves_no_trace(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    feed = make_feed()
    tried, untried = make_loop(dropout=0.1), make_loop(dropout=0.1)
    tried.try_out(feed.largest())
    assert not tried.optimizer.state
    share = next(feed.shares(Position()))
    a, b = tried.update(share), untried.update(share)
    assert dataclasses.replace(a, seconds=0, minutes=0) == dataclasses.replace(b, seconds=0, minutes=0)


def test_the_largest_batch_is_tried_beside_adams_means_and_with_guesses(
    make_loop: MakeLoop, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, feed = make_loop(scheduled_sampling=0.5), make_feed()
    room, of = loop._room_for_means, loop.gradients.of
    made: list[weakref.ref[Tensor]] = []
    seen: list[tuple[int, float]] = []

    def noted() -> list[Tensor]:
        tensors = room()
        made.extend(map(weakref.ref, tensors))
        return tensors

    def computed(share: Share, scale: float, seed: int) -> tuple[float, float]:
        held = [tensor.numel() for each in made if (tensor := each()) is not None]
        seen.append((sum(held), loop.gradients.loss.sampled))
        return of(share, scale, seed)

    monkeypatch.setattr(loop, "_room_for_means", noted)
    monkeypatch.setattr(loop.gradients, "of", computed)
    loop.try_out(feed.largest())
    assert seen == [(2 * sum(parameter.numel() for parameter in loop.parameters.values()), 0.5)]
    loop.update(next(feed.shares(Position())))
    loop.try_out(feed.largest())
    assert seen[-1] == (0, 0.5)  # now there are real means


def test_any_model_with_a_forward_can_be_trained(make_loop: MakeLoop, make_feed: MakeFeed) -> None:
    class Bag(torch.nn.Module):
        """Predicts each token from the one before."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(23, 23)

        def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
            logits: Tensor = self.table(tgt_in)
            return logits

    loop = make_loop(model=Bag(), max_steps=30, label_smoothing=0.0)
    loop.config = replace(loop.config, schedule=type(loop.config.schedule)(peak=0.1))
    losses = [report.loss for report in loop.run(make_feed().shares(Position()))]
    assert losses[-1] < losses[0] - 0.3
