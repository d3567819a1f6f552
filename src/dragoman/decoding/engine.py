"""From sentences in tokens to hypotheses in tokens: sorted by length, searched in batches, given back in order.

Nothing here knows text. What bounds memory is `batch_tokens`: rows (sentences times beams or samples) times the longest
source of a batch. What a batch holds changes no result: each sentence has its own cap, rules, seed and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.beam import BeamSearch
from dragoman.decoding.constraints import Constraints
from dragoman.decoding.force import cut, mask_of, padded
from dragoman.decoding.greedy import Choice, Likeliest, PathSearch
from dragoman.decoding.options import DecodingConfig
from dragoman.decoding.sampling import Draw, Filter, path_seed
from dragoman.decoding.search import Hypothesis, evaluating, run
from dragoman.decoding.speculative import Speculation


@dataclass(frozen=True)
class Job:
    """One sentence to translate."""

    src: list[int]
    """Its tokens, EOS at the end."""
    cap: int
    """The most target tokens, EOS included."""
    prefix: tuple[int, ...] = ()
    """The target tokens that every hypothesis begins with."""


@dataclass(frozen=True)
class Rules:
    """What holds for all sentences of a call: the special ids of their tokenizer, and what is never generated."""

    pad_id: int
    bos_id: int
    """What the decoder reads first."""
    eos_id: int
    banned: tuple[int, ...]
    banned_sequences: tuple[tuple[int, ...], ...] = ()


def decode(
    model: Any,
    jobs: Sequence[Job],
    options: DecodingConfig,
    rules: Rules,
    *,
    device: torch.device | str | None = None,
    draft: Any = None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each job, best first (samples: in the order of their draws), in the order of the jobs.

    `draft` is a faster model over the same vocabulary, which proposes what `model` then accepts or not: the answers
    stay those of `model`. It takes part in greedy search and in sampling.
    """
    if draft is not None:
        return [_speculated(model, draft, job, options, rules, device) for job in jobs]
    width = options.n_best if options.sample else 1 if options.greedy else options.beam_size
    results: list[list[Hypothesis]] = [[] for _ in jobs]
    for batch in cut([len(job.src) for job in jobs], max(1, options.batch_tokens // width)):
        for index, found in zip(batch, _search([jobs[i] for i in batch], model, options, rules, device), strict=True):
            results[index] = found
    return results


def unroll(
    model: Any, job: Job, options: DecodingConfig, rules: Rules, *, device: torch.device | str | None = None
) -> Iterator[list[int]]:
    """Greedy search of one job, giving the tokens so far after each step; the last list is the whole hypothesis."""
    src, src_mask, caps, constraints = _tensors([job], options, rules, device, 1)
    search = PathSearch([0], caps, constraints, Likeliest(), bos_id=rules.bos_id)
    with torch.no_grad(), evaluating(model):
        state = model.start(src, src_mask)
        while True:
            logits, state = model.step(search.tokens, state)
            advance = search.advance(logits)
            if advance.done:
                yield advance.done[0][1][0].ids
                return
            yield search.path_tokens[0, : int(search.lengths[0])].tolist()


def _search(
    jobs: Sequence[Job], model: Any, options: DecodingConfig, rules: Rules, device: torch.device | str | None
) -> list[list[Hypothesis]]:
    """One batch, whole."""
    copies = options.n_best if options.sample else 1
    src, src_mask, caps, constraints = _tensors(jobs, options, rules, device, copies)
    if not options.greedy and not options.sample:
        beams = BeamSearch(
            range(len(jobs)),
            caps,
            constraints,
            beam_size=options.beam_size,
            bos_id=rules.bos_id,
            alpha=options.alpha,
            penalty=options.penalty,
            n_best=options.n_best,
        )
        found = run(model, src, src_mask, beams)
        return [found[i] for i in range(len(jobs))]
    choice: Choice = Likeliest()
    rows: Tensor | None = None
    if options.sample:
        seeds = [path_seed(options.seed, job.src, sample) for job in jobs for sample in range(copies)]
        choice = Draw(torch.tensor(seeds, dtype=torch.long, device=device), filter_of(options))
        rows = torch.arange(len(jobs), device=device).repeat_interleave(copies) if copies > 1 else None
    paths = PathSearch(
        range(len(jobs) * copies),
        caps,
        constraints,
        choice,
        bos_id=rules.bos_id,
        alpha=options.alpha,
        penalty=options.penalty,
    )
    found = run(model, src, src_mask, paths, rows)
    return [[found[i * copies + sample][0] for sample in range(copies)] for i in range(len(jobs))]


def filter_of(options: DecodingConfig) -> Filter:
    """Which part of the distribution sampling draws from."""
    return Filter(options.temperature, options.top_k, options.top_p, options.min_p)


def _tensors(
    jobs: Sequence[Job], options: DecodingConfig, rules: Rules, device: torch.device | str | None, copies: int
) -> tuple[Tensor, Tensor, Tensor, Constraints]:
    """src and src_mask [B, S], then caps and constraints for `copies` rows of each job."""
    sources = [job.src for job in jobs]
    repeated = [job for job in jobs for _ in range(copies)]
    caps = torch.tensor([job.cap for job in repeated], dtype=torch.long, device=device)
    constraints = Constraints.of(
        rules.eos_id,
        len(repeated),
        banned=rules.banned,
        banned_sequences=rules.banned_sequences,
        min_length=options.min_length,
        prefixes=[job.prefix for job in repeated],
        no_repeat_ngram=options.no_repeat_ngram,
        device=device,
    )
    return padded(sources, rules.pad_id, device), mask_of(sources, device), caps, constraints


def _speculated(
    model: Any, draft: Any, job: Job, options: DecodingConfig, rules: Rules, device: torch.device | str | None
) -> list[Hypothesis]:
    """One job by speculative decoding, in as many samples as are asked for."""
    src, src_mask, _, constraints = _tensors([job], options, rules, device, 1)
    found = []
    with torch.no_grad(), evaluating(model), evaluating(draft):
        for sample in range(options.n_best if options.sample else 1):
            speculation = Speculation(model, draft, src, src_mask, constraints, bos_id=rules.bos_id)
            if options.sample:
                seed = path_seed(options.seed, job.src, sample)
                ids, log_probs = speculation.sample(job.cap, filter_of(options), seed)
            else:
                ids, log_probs = speculation.greedy(job.cap)
            found.append(Hypothesis.of(ids, log_probs, rules.eos_id, options.alpha, options.penalty))
    return found
