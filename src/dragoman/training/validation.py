"""The loss on the dev set: that of training, without dropout, and the unsmoothed one from which perplexity comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dragoman.batches.batch import collate
from dragoman.batches.buckets import cut, over_budget
from dragoman.errors import DataError
from dragoman.tokens.paired import PairedIds
from dragoman.training.feed import Ids
from dragoman.training.gradients import LossModule
from dragoman.training.options import TrainingConfig
from dragoman.training.parallel import World
from dragoman.training.precision import Chosen, autocast


@dataclass(frozen=True)
class DevLoss:
    """Means over the target tokens of the dev set, EOS counted."""

    loss: float
    nll: float

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(min(self.nll, 700.0))


class DevSet:
    """A binarised dev set, cut into batches once."""

    def __init__(self, data: PairedIds, ids: Ids, batch_tokens: int) -> None:
        """Raises DataError where no pair fits into `batch_tokens`."""
        self.data, self.ids = data, ids
        large = over_budget(data.src_lengths, data.tgt_lengths, batch_tokens)
        self.dropped = int(large.sum())
        """Pairs larger than a batch by themselves, left out."""
        fitting = np.flatnonzero(~large).astype(np.int64)
        if not len(fitting):
            raise DataError(f"no pair of the dev set fits into training.batch_tokens = {batch_tokens:,}")
        self.batches = cut(data.src_lengths, data.tgt_lengths, fitting, batch_tokens)

    @torch.no_grad()
    def loss(
        self,
        model: nn.Module,
        config: TrainingConfig,
        precision: Chosen,
        world: World,
        beat: Callable[[], None] = lambda: None,
    ) -> DevLoss:
        """The loss of `model`, which is left in the mode it was in.

        The ranks of `world` share the batches and get the same sums; each must call this, with the same weights.
        """
        ids = self.ids
        module = LossModule(model, config, ids.pad_id)
        was_training = model.training
        model.eval()
        sums = np.zeros(3)
        for indices in self.batches[world.rank :: world.size]:  # by length: each rank has some of every kind
            batch = collate(self.data, indices, ids.pad_id, ids.bos_id, ids.eos_id).to(world.device)
            with autocast(precision, world.device):
                loss, plain = module(batch.src, batch.tgt_in, batch.tgt_out)
            sums += (float(loss), float(plain), batch.n_tokens)
            beat()
        model.train(was_training)
        loss_sum, plain_sum, n_tokens = world.sum(sums.tolist())
        return DevLoss(loss_sum / n_tokens, plain_sum / n_tokens)
