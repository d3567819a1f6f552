"""A run from its config to its model folder: prepares the data, drives the loop, validates, saves, resumes, averages.

The counterpart of `translator.py`: everything that the loop itself must not know is joined here. Under `torchrun` every
rank runs this; the first one prepares, validates, writes and speaks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dragoman.batches.regularise import STRETCH
from dragoman.batches.stream import Stream
from dragoman.checkpoints import provenance, resuming, snapshots, store
from dragoman.checkpoints.atomic import sweep, write_folder
from dragoman.checkpoints.average import average_weights
from dragoman.checkpoints.metrics import Metrics
from dragoman.checkpoints.weights import load_into, load_tensors, save_tensors
from dragoman.decoding.options import DecodingConfig
from dragoman.errors import ConfigError, TrainingError
from dragoman.run import RunConfig
from dragoman.scores.metrics import bleu, chrf
from dragoman.text.clean import training_pairs
from dragoman.text.corpus import CleanConfig, Pair, read_pairs
from dragoman.tokens.binarize import binarize
from dragoman.tokens.paired import PairedIds
from dragoman.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from dragoman.training import parallel
from dragoman.training.feed import Feed, Ids, Regularise
from dragoman.training.loop import Loop, Report
from dragoman.training.observer import Dev, Observer, Outcome
from dragoman.training.precision import choose
from dragoman.training.stopping import stopping_at_signals
from dragoman.training.validation import DevSet
from dragoman.translator import Translator

BETWEEN_BEATS = 256
"""Lines that a validation translates between two signs of life."""


class Run:
    """One run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        observer: Observer,
        world: parallel.World,
        *,
        start_from: Path | None = None,
        resume: bool = False,
    ) -> None:
        """Prepare: tokenizer, binarised data, model. The folder `out` is made, and is not yet a model."""
        self.world = world
        training = replace(
            config.training,
            precision=choose(config.training.precision, self.world.device),
            # Sums depend on their order, so a run keeps the number that it began with.
            lanes=config.training.lanes or torch.get_num_threads(),
        )
        self.config = replace(config, training=training)
        self.out, self.observer = out, observer
        self.metrics = Metrics(out / store.METRICS)
        self.say: Callable[[str], None] = observer.say if self.world.is_first else lambda message: None
        self.warn: Callable[[str], None] = observer.warn if self.world.is_first else lambda message: None
        self.watchdog = self.world.watchdog(training.hang_seconds)
        self.best: list[tuple[float, int]] = []
        self.waiting = 0
        self.best_dev: Dev | None = None
        self.last_saved: int | None = None
        self.last_validated = 0
        prepared = self.world.lead("data", lambda: self._prepare(start_from, resume))
        tokenizer, data, dev = prepared or self._prepare(start_from, resume=True)
        self.tokenizer, self.data = tokenizer, data
        ids = Ids(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
        sampling = training.subword_regularisation
        if sampling and not hasattr(tokenizer, "encode_sampled_batch"):
            raise ConfigError("training.subword_regularisation needs one joint SentencePiece model on both sides")
        self.stream = Stream(
            data.src_lengths,
            data.tgt_lengths,
            # A sentence that is cut anew may come out longer; the batch stays within its budget all the same.
            int(training.batch_tokens / STRETCH) if sampling else training.batch_tokens,
            training.seed,
            bounds=data.bounds,
            weights=data.weights,
        )
        if self.stream.dropped:
            self.warn(
                f"{self.stream.dropped:,} pairs are longer than training.batch_tokens = {training.batch_tokens:,}: "
                "they are left out"
            )
        self.dev = DevSet(dev, ids, training.batch_tokens) if dev is not None else None
        if self.dev is not None and self.dev.dropped:
            self.warn(
                f"{self.dev.dropped:,} pairs of the dev set are longer than training.batch_tokens = "
                f"{training.batch_tokens:,}: they have no part in its loss"
            )
        self.feed = Feed(
            data,
            self.stream,
            ids,
            accumulation=training.accumulation,
            rank=self.world.rank,
            size=self.world.size,
            workers=training.workers,
            device=self.world.device,
            regularise=Regularise(cast("Any", tokenizer), sampling) if sampling else None,
        )
        torch.manual_seed(training.seed)
        model = config.model.build(len(tokenizer), tokenizer.pad_id)
        if start_from is not None:
            self.say(
                f"weights and tokenizer are those of {start_from}; step, optimizer, schedule and data start afresh"
            )
        elif resume and resuming.holds_starting_point(out):
            start_from = out
        self.starts_from = start_from
        if start_from is not None:
            weights, _ = load_tensors(start_from / store.WEIGHTS)
            load_into(model, weights, str(start_from / store.WEIGHTS), f"the tokenizer of {start_from}")
        self.loop = Loop(
            model,
            training,
            d_model=getattr(config.model, "d_model", 512),
            pad_id=tokenizer.pad_id,
            world=self.world,
            total_steps=self._total_steps(),
            beat=self.watchdog.beat,
            warn=self.warn,
        )

    # -- preparing ---------------------------------------------------------------------------------------------------

    def _prepare(self, start_from: Path | None, resume: bool) -> tuple[Tokenizer, PairedIds, PairedIds | None]:
        config = self.config
        quiet: Callable[[str], None] = self.say
        if resume and (self.out / "tokenizer.json").exists():
            tokenizer = load_tokenizer(self.out)
        elif start_from is not None:
            tokenizer = load_tokenizer(start_from)
        else:
            texts = (text for pair in training_pairs(config.data) for text in (pair.src, pair.tgt))
            tokenizer = train_tokenizer(texts, config.tokenizer, self.out, config.training.seed, quiet)
        if self.world.is_first:
            for folder in (self.out, self.out / store.TRAINING, self.out / "best"):
                sweep(folder)  # what a kill left unfinished
            store.prepare(self.out, tokenizer, config)
            if start_from is not None:  # until there is a checkpoint this is what a killed run goes on from
                self._put(load_tensors(start_from / store.WEIGHTS)[0], resuming.STARTING_POINT)
        corpora = config.data.train_corpora
        data = binarize(corpora, tokenizer, config.data, self.out / store.TRAINING / "data" / "train", quiet, self.warn)
        self.say(f"training data: {data.counts.describe()}")
        corpus = config.data.dev_corpus
        if corpus is None:
            self.say("there is no data.dev: nothing is validated, and the model kept is the last")
            return tokenizer, data, None
        plain = replace(config.data, clean=CleanConfig())
        dev = binarize([corpus], tokenizer, plain, self.out / store.TRAINING / "data" / "dev", quiet, self.warn)
        self.say(f"dev data: {dev.counts.describe()}")
        return tokenizer, data, dev

    def _total_steps(self) -> int | None:
        training = self.config.training
        ends = [training.max_steps] if training.max_steps is not None else []
        if training.max_epochs is not None:
            ends.append(self.stream.expected_batches(training.max_epochs))
        return min(ends, default=None)

    def _dev_pairs(self) -> list[Pair]:
        corpus = self.config.data.dev_corpus
        assert corpus is not None
        data = self.config.data
        return list(read_pairs(corpus, bad_rows=data.bad_rows, invalid_utf8=data.invalid_utf8))

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, reset: frozenset[str] = frozenset()) -> None:
        """Go on from the newest intact checkpoint, but for what `reset` names. Says what was restored."""
        snapshot = snapshots.newest_intact(self.out, self.warn)
        if snapshot is None:
            beginning = "the beginning" if self.starts_from is None else "the weights that it was to start from"
            self.say(f"{self.out} has no checkpoint yet: training starts from {beginning}")
            if self.world.is_first and self.metrics.path.exists():
                self.metrics.go_back_to(0, 0)
            return
        facts = snapshot.facts
        resuming.check_origin(facts, snapshot.folder, self.tokenizer.fingerprint, self.data.fingerprint, reset)
        raw = {key.removeprefix("weights."): t for key, t in snapshot.state.items() if key.startswith("weights.")}
        self.loop.restore_weights(raw or snapshot.weights, snapshot.weights)
        restored = ["weights"]
        if "optimizer" not in reset:
            self.loop.restore_optimizer(snapshot.state)
            restored.append("optimizer")
        self.loop.restore_facts(facts["loop"], reset)
        restored += [what for what in ("step", "schedule", "data") if what not in reset]
        if "step" in reset:
            self.best, self.waiting, self.best_dev = [], 0, None
        else:
            self.best = [(float(score), int(step)) for score, step in facts["best"]]
            self.waiting = int(facts["waiting"])
            self.best_dev = Dev(**facts["best_dev"]) if facts["best_dev"] else None
            self.last_validated = int(facts["validated"])
        self.world.barrier()  # nobody reads the old checkpoints any more
        if self.world.is_first:
            self.metrics.go_back_to(self.loop.step, self.last_validated)
        self.last_saved = None if "step" in reset else snapshot.step
        if "step" in reset:
            earlier = [folder for folder in snapshots.folders(self.out) if folder != snapshots.folder_of(self.out, 0)]
            self._save(prune=False)  # a kill now must not find nothing
            if self.world.is_first:
                for folder in earlier:
                    shutil.rmtree(folder, ignore_errors=True)
        position = self.loop.position
        self.say(
            f"resumed from {snapshot.folder.name}: restored {', '.join(restored)}"
            + (f"; reset {', '.join(sorted(reset))}" if reset else "")
            + f"; going on after step {self.loop.step} at epoch {position.epoch}, batch {position.batch}, "
            f"learning rate {self.loop.rate():.3g}"
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Train to an end of the config, to the patience's end or to a signal; leave the folder a model."""
        training, loop = self.config.training, self.loop
        self.watchdog.start()
        if self.world.is_first:
            self._record_surroundings()
        try:
            with stopping_at_signals(loop):
                if self.starts_from is not None and self.last_saved is None:
                    self._save(prune=False)  # a kill before the next one must not find nothing
                why = self._catch_up()
                if not loop.is_done() and not why:
                    loop.try_out(self.feed.largest())
                for report in loop.run(self.feed.shares(loop.position)) if not why else ():
                    if self.world.is_first:
                        self._log(report)
                        self.observer.reported(report, loop)
                    done = loop.is_done()
                    # First validate, then save: a checkpoint knows all that was found out up to its step.
                    due = report.stop is None and (done or report.step % training.validate_every == 0)
                    if self.dev is not None and due and self._validate() and not done:
                        why = self._no_better()
                    scheduled = report.step % training.save_every == 0 or done or bool(why)
                    if scheduled or report.stop is not None:
                        self._save(interrupted=not scheduled)
                    if report.stop is not None:
                        return Outcome(loop.step, report.stop.name, self.best_dev, "", report.stop)
                    if why:
                        break
            return self._finish(why or self._why())
        except (TrainingError, torch.OutOfMemoryError) as error:
            if self.last_saved is not None and isinstance(error, TrainingError):
                where = snapshots.folder_of(self.out, self.last_saved)
                raise TrainingError(f"{error}. The last good checkpoint is {where}") from None
            raise
        finally:
            self.watchdog.stop()
            loop.gradients.close()

    def _catch_up(self) -> str:
        """What an earlier process had still to do when it ended; why training is over, if it is."""
        training, step = self.config.training, self.loop.step
        over = training.patience is not None and self.waiting >= training.patience
        if self.dev is not None and step and step % training.validate_every == 0 and self.last_validated != step:
            over = self._validate()  # a signal came in the update before it
            self._save_again(interrupted=step % training.save_every != 0)
        return self._no_better() if over else ""

    def _no_better(self) -> str:
        return f"no better {self.config.training.metric} in {self.config.training.patience} validations"

    def _why(self) -> str:
        training, loop = self.config.training, self.loop
        if training.max_steps is not None and loop.step >= training.max_steps:
            return f"max_steps = {training.max_steps:,}"
        if training.max_minutes is not None and loop.minutes >= training.max_minutes:
            return f"max_minutes = {training.max_minutes:g}"
        return f"max_epochs = {training.max_epochs}"

    def _log(self, report: Report) -> None:
        if report.step % self.config.training.log_every == 0:
            names = ["step", "loss", "nll", "lr", "grad_norm", "tokens", "src_padded", "tgt_padded", "seconds"]
            self.metrics.append({"kind": "train", **{name: getattr(report, name) for name in names}})

    def _validate(self) -> bool:
        """Score the dev set; keep the model if it is the best. True: patience is at its end (on all ranks)."""
        over = 0.0
        self.last_validated = self.loop.step
        with self._plain_model() as (model, world):
            if model is not None and (dev := self.score_dev(model, world)) is not None:
                over = float(self._judge(model, dev))
        return self.world.sum([over])[0] > 0

    def _judge(self, model: nn.Module, dev: Dev) -> bool:
        training = self.config.training
        self.metrics.append({"kind": "dev", **{k: v for k, v in dataclasses.asdict(dev).items() if v is not None}})
        score = dev.score(training.metric)
        is_best = math.isfinite(score) and (not self.best or score > self.best[0][0])
        if math.isfinite(score):
            self._keep_best(model, score, dev.step, is_best)
        if is_best:
            self.best_dev, self.waiting = dev, 0
        else:
            self.waiting += 1
        self.observer.validated(dev, is_best)
        return training.patience is not None and self.waiting >= training.patience

    def score_dev(self, model: nn.Module, world: parallel.World) -> Dev | None:
        """Loss, and BLEU and chrF of greedy translations where the config wants them.

        The ranks of `world` share the work, so each must call this with the same weights; the others than its first
        get None.
        """
        assert self.dev is not None
        training = self.config.training
        loss = self.dev.loss(model, training, self.loop.precision, world, self.watchdog.beat)
        dev = Dev(self.loop.step, loss.loss, loss.nll, loss.perplexity)
        if not training.validate_bleu:
            return dev if world.is_first else None
        # Only the first rank's node need have the text.
        pairs = self._dev_pairs() if world.is_first else []
        sources = world.gather_texts([pair.src for pair in pairs])[0]
        shares = world.gather_texts(self._translate(model, sources[world.rank :: world.size]))
        if not world.is_first:
            return None
        texts = [shares[place % world.size][place // world.size] for place in range(len(pairs))]
        references = [pair.tgt for pair in pairs]
        language = self.config.data.tgt_lang or None
        return replace(dev, bleu=bleu(texts, references, language).score, chrf=chrf(texts, references, language).score)

    def _translate(self, model: nn.Module, sources: list[str]) -> list[str]:
        model.eval()
        translator = Translator(model, self.tokenizer, replace(self.config, decoding=DecodingConfig(greedy=True)))
        texts: list[str] = []
        logging.disable(logging.WARNING)  # an untrained model's empty lines need not be named one by one
        try:
            while len(texts) < len(sources):
                some = sources[len(texts) : len(texts) + BETWEEN_BEATS]
                texts += [translation.text for translation in translator.translate(some)]
                self.watchdog.beat()
        finally:
            logging.disable(logging.NOTSET)
        return texts

    # -- saving ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _plain_model(self) -> Iterator[tuple[nn.Module | None, parallel.World]]:
        """The model as it would be used, and the ranks that have it: all, or with `fsdp` the first, and elsewhere None.

        Every rank must enter.
        """
        loop = self.loop
        if self.world.size > 1 and self.config.training.parallel == "fsdp":
            weights = loop.kept_weights()
            yield self._from_weights(weights) if self.world.is_first else None, self.world.alone()
        else:
            with loop.ema.in_place() if loop.ema is not None else contextlib.nullcontext():
                yield loop.model, self.world

    def _from_weights(self, weights: Mapping[str, Tensor]) -> nn.Module:
        model = store.empty_model(self.config.model, self.tokenizer)
        load_into(model, weights, "the model in training")
        return model.to(self.world.device)

    def _keep_best(self, model: nn.Module, score: float, step: int, is_best: bool) -> None:
        """The best model goes to the folder itself; with keep_best > 1 the best few stand in `best/` as well."""
        training = self.config.training
        if is_best:
            self._put(model.state_dict(), {"step": str(step), "kept": f"best by {training.metric} on the dev set"})
        ranked = sorted([*self.best, (score, step)], key=lambda entry: (-entry[0], entry[1]))
        self.best = ranked[: training.keep_best]
        if training.keep_best > 1 and (score, step) in self.best:
            notes = {"step": str(step)}
            folder = self.out / "best" / f"step-{step:08d}"
            write_folder(
                folder, lambda temporary: store.save_model(temporary, model, self.tokenizer, self.config, notes)
            )
            for _, worse in ranked[training.keep_best :]:
                shutil.rmtree(self.out / "best" / f"step-{worse:08d}", ignore_errors=True)
        self.watchdog.beat()

    def _put(self, weights: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        save_tensors(self.out / store.WEIGHTS, weights, {"format_version": "1", **notes})

    def _save_again(self, interrupted: bool = False) -> None:
        """Write the checkpoint of this step with what was found out since."""
        self.last_saved = None
        self._save(interrupted=interrupted)

    def _save(self, prune: bool = True, interrupted: bool = False) -> None:
        """Write a checkpoint; every rank must call this. Raises TrainingError where the weights are not good.

        interrupted: it stands at no regular step and only because of a signal; the mean at the end leaves it out.
        """
        loop, training = self.loop, self.config.training
        if self.last_saved == loop.step:
            return
        loop.check_copies()
        loop.check_finite()
        kept = loop.kept_weights()
        state = loop.optimizer_tensors()
        if loop.ema is not None:
            state |= {f"weights.{name}": tensor for name, tensor in loop.weights().items()}
        self.last_saved = loop.step
        if not self.world.is_first:
            return
        facts = {
            "loop": loop.facts(),
            "best": [list(entry) for entry in self.best],
            "waiting": self.waiting,
            "validated": self.last_validated,
            "best_dev": dataclasses.asdict(self.best_dev) if self.best_dev else None,
            "precision": loop.precision,
            "data": self.data.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "interrupted": interrupted,
        }
        self.metrics.sync()
        snapshots.save(self.out, loop.step, kept, state, facts)
        self.world.note("saved")
        self.watchdog.beat()
        if not self.best:
            self._put(kept, {"step": str(loop.step), "kept": "the last"})
        if prune:
            snapshots.prune(self.out, loop.step, training.keep_last, training.average_last)

    def _finish(self, why: str) -> Outcome:
        """The last validation and checkpoint, and the mean of the last ones where the config wants it."""
        training, loop = self.config.training, self.loop
        if self.dev is not None and self.last_validated != loop.step:
            self._validate()
            self._save_again()
        self._save()
        if not self.world.is_first:
            return Outcome(loop.step, why, self.best_dev, "")
        kept = "the last model"
        if training.average_last > 1:
            kept = self._average()
        elif self.best_dev is not None:
            kept = f"the best by {training.metric} on the dev set, of step {self.best_dev.step:,}"
        return Outcome(loop.step, why, self.best_dev, kept)

    def _average(self) -> str:
        found = snapshots.for_mean(self.out, self.config.training.average_last, self.warn)
        weights = average_weights(load_tensors(folder / store.WEIGHTS)[0] for folder in found)
        steps = ", ".join(f"{snapshots.step_of(folder):,}" for folder in reversed(found))
        self._put(weights, {"average_of": str(len(found)), "kept": f"the mean of steps {steps}"})
        if self.dev is not None:
            dev = self.score_dev(self._from_weights(weights), self.world.alone())
            assert dev is not None
            scores = {key: value for key, value in dataclasses.asdict(dev).items() if value is not None}
            self.metrics.append({"kind": "average", "of": len(found), **scores})
            self.observer.validated(dev, is_best=False)
        if len(found) < self.config.training.average_last:
            self.warn(f"there are {len(found)} checkpoints to average, not {self.config.training.average_last}")
        return f"the mean of the last {len(found)} checkpoints (steps {steps})"

    def _record_surroundings(self) -> None:
        provenance.write(
            self.out,
            {
                "ranks": self.world.size,
                "device": str(self.world.device),
                "precision": self.loop.precision,
                "gradients_by": self.loop.gradients.how,
                "parameters": self.n_parameters,
                "data": self.data.fingerprint,
                "tokenizer": self.tokenizer.fingerprint,
                "from_step": self.loop.step,
            },
        )

    @property
    def n_parameters(self) -> int:
        """Of the model, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.loop.parameters.values())
