"""One rank of a job for test_parallel.py: trains a small model on random ids and writes what it saw.

torchrun --nproc-per-node 2 tests/training/job.py OUT [--parallel fsdp] [--fault raise|exit|hang|gradient|weight] …
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from dragoman.batches.stream import Stream
from dragoman.checkpoints.weights import load_tensors, save_tensors
from dragoman.model.transformer import Transformer, TransformerConfig, sinusoids
from dragoman.tokens.paired import PairedIds
from dragoman.training import parallel
from dragoman.training.feed import Feed, Ids, Share
from dragoman.training.loop import Loop
from dragoman.training.optimizer import Adam, Muon
from dragoman.training.options import TrainingConfig
from dragoman.training.schedule import Constant


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--autograd", action="store_true", help="not in lanes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fault", default="")
    parser.add_argument("--hang-seconds", type=float, default=60.0)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--batch-tokens", type=int, default=37, help="37: fewer rows than ranks in many batches")
    parser.add_argument("--uneven", action="store_true", help="the last rank makes more passes, and has a longer table")
    parser.add_argument("--muon", action="store_true", help="in place of Adam")
    options = parser.parse_args()

    random = np.random.default_rng(5)
    lengths = random.integers(1, 14, size=(61, 2))
    corpus = PairedIds.from_lists(*([random.integers(4, 23, size=n).tolist() for n in side] for side in lengths.T))
    world = parallel.arrive("cpu")
    with parallel.connected(world):
        train(options, corpus, world)


def train(options: argparse.Namespace, corpus: PairedIds, world: parallel.World) -> None:
    watchdog = world.watchdog(options.hang_seconds)
    config = TrainingConfig(
        max_steps=options.steps,
        precision=options.precision,
        lanes=1,
        parallel=options.parallel,
        activation_checkpointing=options.autograd,
        optimizer=Muon() if options.muon else Adam(),
        schedule=Constant(peak=1e-2),
        clip_norm=0.5,
        ema=0.9,
    )
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(23, n_layers=2, d_model=12, d_ff=20, n_heads=3, dropout=0.0))
    loop = Loop(model, config, d_model=12, pad_id=0, world=world, beat=watchdog.beat)
    if options.load:
        tensors, _ = load_tensors(options.load / "state.safetensors")
        weights, _ = load_tensors(options.load / "weights.safetensors")
        means, _ = load_tensors(options.load / "means.safetensors")
        loop.restore_weights(weights, means)
        loop.restore_optimizer(tensors)
        loop.restore_facts(json.loads((options.load / "facts.json").read_text()))
    stream = Stream(corpus.src_lengths, corpus.tgt_lengths, options.batch_tokens, seed=1)
    feed = Feed(corpus, stream, Ids(0, 2, 3), rank=world.rank, size=world.size)
    watchdog.start()
    faulty = world.rank == world.size - 1
    if options.uneven:
        loop.gradients.most = 1 + world.rank
        if faulty:
            model.position.table = sinusoids(1024, 12)
    if options.fault == "gradient" and faulty:
        of = loop.gradients.of

        def wrong(share: Share, scale: float, seed: int) -> tuple[float, float]:
            sums = of(share, scale, seed)
            next(iter(loop.parameters.values())).grad.mul_(1.5)
            return sums

        loop.gradients.of = wrong
    losses = []
    for report in loop.run(feed.shares(loop.position)):
        losses.append([report.step, report.loss, report.nll, report.grad_norm])
        if report.step == 2 and faulty:
            if options.fault == "weight":
                with torch.no_grad():
                    loop.parameters["encoder.layers.1.feed_forward.outer.weight"].mul_(1.01)
            if options.fault == "raise":
                raise RuntimeError("this rank has had enough")
            if options.fault == "exit":
                os._exit(7)
            if options.fault == "hang":
                time.sleep(600)
    loop.check_copies()
    weights, means, state = loop.weights(), loop.kept_weights(), loop.optimizer_tensors()
    watchdog.stop()
    if options.parallel == "fsdp":  # whole in one place only
        assert bool(weights) == bool(means) == world.is_first
    if world.is_first:
        options.out.mkdir(exist_ok=True)
        save_tensors(options.out / "weights.safetensors", weights)
        save_tensors(options.out / "means.safetensors", means)
        save_tensors(options.out / "state.safetensors", state)
        (options.out / "facts.json").write_text(json.dumps(loop.facts()))
        (options.out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    sys.exit(main())
