"""Tasks that are really learnt: copying and reversing made-up sequences, by several seeds, to a bound.

What a mistake in the shift, a mask, the positions or the update would prevent: reversing needs positions, and both need
attention to the source.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from dragoman.batches.batch import collate
from dragoman.batches.stream import Position, Stream
from dragoman.model.transformer import Transformer, TransformerConfig
from dragoman.tokens.paired import PairedIds
from dragoman.training.feed import Feed, Ids
from dragoman.training.loop import Loop
from dragoman.training.options import TrainingConfig
from dragoman.training.schedule import Linear

VOCABULARY = 20
IDS = Ids(pad_id=0, bos_id=2, eos_id=3)


def corpus(task: str, n: int, seed: int) -> PairedIds:
    random = np.random.default_rng(seed)
    src = [random.integers(4, VOCABULARY, size=random.integers(2, 9)).tolist() for _ in range(n)]
    return PairedIds.from_lists(src, src if task == "copy" else [row[::-1] for row in src])


def learn(task: str, seed: int, steps: int, batch_tokens: int = 500) -> tuple[Transformer, float, float]:
    """A model that has seen `steps` batches, the seconds of one core that it took, and its loss in the last ones."""
    config = TrainingConfig(
        max_steps=steps,
        batch_tokens=batch_tokens,
        seed=seed,
        precision="float32",
        schedule=Linear(warmup_steps=steps // 6, peak=4e-3),
    )
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(VOCABULARY, n_layers=2, d_model=48, d_ff=96, n_heads=4, dropout=0.05))
    data = corpus(task, 12_000, seed)
    stream = Stream(data.src_lengths, data.tgt_lengths, config.batch_tokens, seed)
    loop = Loop(model, config, d_model=48, pad_id=0, total_steps=steps)
    begun = time.process_time()
    losses = [report.nll for report in loop.run(Feed(data, stream, IDS).shares(Position()))]
    loop.gradients.close()
    return model.eval(), time.process_time() - begun, sum(losses[-10:]) / 10


@torch.no_grad()
def exactly_right(model: Transformer, task: str) -> float:
    """The share of 300 unseen sequences that greedy decoding gets right from the first token to EOS."""
    data = corpus(task, 300, seed=99)
    right = 0
    for batch in (collate(data, np.arange(300), IDS.pad_id, IDS.bos_id, IDS.eos_id),):
        state = model.start(batch.src)
        tokens = torch.full((len(batch),), IDS.bos_id)
        correct = torch.ones(len(batch), dtype=torch.bool)
        for position in range(batch.tgt_out.size(1)):
            logits, state = model.step(tokens, state)
            tokens = logits.argmax(-1)
            wanted = batch.tgt_out[:, position]
            correct &= (tokens == wanted) | (wanted == IDS.pad_id)
        right += int(correct.sum())
    return right / 300


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_task_is_learnt_to_over_99_percent_within_a_minute(task: str, seed: int) -> None:
    model, seconds, _ = learn(task, seed, steps=700)
    assert exactly_right(model, task) > 0.99
    assert seconds < 60


def test_copying_is_under_way_after_a_few_updates() -> None:
    """The fast form: a model that could not see its source would stay at ln 16 = 2.77 a token, less the ends."""
    _, _, nll = learn("copy", seed=1, steps=120, batch_tokens=300)
    assert nll < 1.8
