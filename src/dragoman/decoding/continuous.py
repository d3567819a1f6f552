"""Continuous batching on the cores of a CPU: one thread a core, each with a batch that sentences leave and enter.

All threads draw from one queue, longest sentences first and none more than its share, so that they end together. A
thread tops its batch up as soon as a quarter of it is free: a long sentence keeps no short one waiting, and steps stay
large. What shares a batch changes no result (see `model/packed.py`), and nor does the number of threads.

Memory: at most 2 MAX_ROWS hypotheses a thread, or those of one sentence, and no sentence enters that would bring the
source tokens of those in flight, each counted once per hypothesis, above `batch_tokens`; one alone always may.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.search import Hypothesis, Results, Search
from dragoman.model.packed import PackedModel, PackedState
from dragoman.model.packed_weights import PackedWeights

if TYPE_CHECKING:
    from dragoman.decoding.engine import Job

MAX_ROWS = 384
"""Hypotheses in flight in one thread: at this many, what Python does between two steps is a few hundredths of the time.
A beam may have dropped some of its own and have them again at its next step, so that for a few steps it can be up to
twice as many."""

MakeSearch = Callable[[list[int]], tuple[Search, Tensor | None]]
"""Numbers of jobs -> their search, and which job's place each row is, where that is not simply 0, 1, 2, ..."""


class ContinuousDecoder:
    """A packed model that all cores search with. It is a `Decodable` too, for whatever wants single steps."""

    def __init__(self, weights: PackedWeights) -> None:
        self.weights = weights
        self.pad_id = weights.pad_id
        self._idle: list[PackedModel] = []  # their buffers are kept from call to call
        self._lock = threading.Lock()

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> PackedState:
        """src [B, S] ending in EOS, src_mask [B, S] -> the state before the first target token."""
        return PackedModel(self.weights).start(src, src_mask)

    def step(self, tokens: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
        """tokens [R], the newest of each row -> logits [R, V] of the next, and the new state."""
        return state.session.step(tokens, state)

    def run(
        self, jobs: Sequence[Job], make_search: MakeSearch, rows_per_job: int, batch_tokens: int, paths_per_job: int
    ) -> Results:
        """Searches all jobs; gives the hypotheses by the search's own keys, of which each job has `paths_per_job`."""
        queue = deque(sorted(range(len(jobs)), key=lambda i: -len(jobs[i].src)))
        threads = torch.get_num_threads()
        n = max(1, min(threads, len(jobs)))
        lanes: list[_Lane] = []
        sizes = (rows_per_job, paths_per_job, batch_tokens)
        lanes += [_Lane(self, jobs, queue, lanes, make_search, *sizes) for _ in range(n)]
        if n == 1:
            return lanes[0].run()
        with ThreadPoolExecutor(n, thread_name_prefix="decode") as pool:
            found = [pool.submit(lane.run, 1) for lane in lanes]
            results: Results = {}
            try:
                done, _ = wait(found, return_when=FIRST_EXCEPTION)
                for each in done:  # all of them, or one that failed
                    results.update(each.result())
            except BaseException:
                queue.clear()  # the other threads end with what they have
                for lane in lanes:
                    lane.stop = True
                raise
            finally:
                torch.set_num_threads(threads)
        return results

    def borrow(self) -> PackedModel:
        """A model for one thread; give it back after."""
        with self._lock:
            return self._idle.pop() if self._idle else PackedModel(self.weights)

    def give_back(self, model: PackedModel) -> None:
        """Its buffers serve the next call."""
        with self._lock:
            self._idle.append(model)


class _Lane:
    """One thread's batch."""

    def __init__(
        self,
        decoder: ContinuousDecoder,
        jobs: Sequence[Job],
        queue: deque[int],
        lanes: Sequence[_Lane],
        make_search: MakeSearch,
        rows_per_job: int,
        paths_per_job: int,
        batch_tokens: int,
    ) -> None:
        self.decoder = decoder
        self.jobs = jobs
        self.queue = queue
        self.lanes = lanes
        self.in_flight = 0
        self.make_search = make_search
        self.rows_per_job = rows_per_job
        self.paths_per_job = paths_per_job
        self.batch_tokens = batch_tokens
        self.n_vocabulary = decoder.weights.n_vocabulary
        self.stop = False

    def run(self, threads: int | None = None) -> Results:
        """Until the queue is empty and every sentence is done."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.model = self.decoder.borrow()
        results: Results = {}
        search: Search | None = None
        state: PackedState | None = None
        with torch.inference_mode():
            while not self.stop:
                paths = search.n_sentences if search is not None else 0
                self.in_flight = in_flight = -(-paths // self.paths_per_job)
                room = self._room(state, in_flight)
                if not in_flight or (self.queue and 4 * room >= MAX_ROWS):
                    entering = self._take(state, in_flight)
                    if entering:
                        newcomers, their_state = self._enter(entering, results)
                        if not newcomers.n_sentences:
                            continue
                        if search is None or state is None or not in_flight:
                            search, state = newcomers, their_state
                        else:
                            search.join(newcomers)
                            state = state.join(their_state)
                    elif not in_flight:
                        break
                if search is None or state is None:
                    break
                state = self._step(search, state, results)
        self.decoder.give_back(self.model)
        return results

    def _take(self, state: PackedState | None, in_flight: int) -> list[int]:
        """The next jobs that there is room for; at least one where nothing is in flight."""
        room = self._room(state, in_flight)
        tokens = int(state.memory_lengths.sum()) if state is not None and in_flight else 0
        entering: list[int] = []
        while not (in_flight or entering) or (room >= self.rows_per_job and self.in_flight < self._share()):
            try:
                job = self.queue.popleft()
            except IndexError:
                break
            tokens += len(self.jobs[job].src) * self.rows_per_job
            if tokens > self.batch_tokens and (entering or in_flight):
                self.queue.appendleft(job)
                break
            entering.append(job)
            self.in_flight += 1
            room -= self.rows_per_job
        return entering

    def _share(self) -> int:
        """Jobs that each lane would have if all that are in flight or waiting were spread evenly."""
        return -(-(sum(lane.in_flight for lane in self.lanes) + len(self.queue)) // len(self.lanes))

    def _room(self, state: PackedState | None, in_flight: int) -> int:
        """Rows that may still come in."""
        if state is None or not in_flight:
            return MAX_ROWS
        return min(MAX_ROWS - len(state.lengths), 2 * MAX_ROWS - in_flight * self.rows_per_job)

    def _enter(self, entering: list[int], results: dict[int, list[Hypothesis]]) -> tuple[Search, PackedState]:
        """The search and state of new sentences, past their first step, at which a beam is still one row."""
        search, rows = self.make_search(entering)
        state = self.model.encode([self.jobs[i].src for i in entering])
        if rows is not None:
            state = state.select(rows)
        return search, self._step(search, state, results)

    def _step(self, search: Search, state: PackedState, results: dict[int, list[Hypothesis]]) -> PackedState:
        """Every sentence one token further; what is done leaves."""
        barred: np.ndarray | None = search.barred()
        if barred is None:
            logits, state = self.model.step(search.tokens, state)
            advance = search.advance(logits)
        else:
            best, state = self.model.best(search.tokens, state, min(search.n_candidates, self.n_vocabulary), barred)
            advance = search.advance_best(best)
        results.update(advance.done)
        return state if advance.rows is None else state.select(advance.rows)
