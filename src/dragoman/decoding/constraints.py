"""What a translation may not be: candidates are left out of the choice, and nobody's probability is changed by it.

The log-probabilities that a search reports stay those of the model over its whole vocabulary, so that scoring the same
tokens gives the same number. Letters: B sentences, N hypotheses of each, L tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

NEVER = float("-inf")
FREE = -1
"""In `prefix`: a position that is not prescribed."""


@dataclass(frozen=True)
class Constraints:
    """The rules of B sentences in flight. Row b of every tensor belongs to sentence b."""

    eos_id: int
    banned: Tensor
    """[n] ids that are never chosen."""
    min_length: Tensor
    """[B] fewest tokens, EOS included."""
    prefix: Tensor
    """[B, P] the tokens that a translation begins with; `FREE` after its end."""
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of two tokens and more that are never completed."""
    no_repeat_ngram: int = 0
    """No run of this many tokens comes twice; 0 allows it."""
    has_min_length: bool = True
    has_prefix: bool = True

    @classmethod
    def of(
        cls,
        eos_id: int,
        n_sentences: int,
        *,
        banned: Sequence[int] = (),
        banned_sequences: Sequence[Sequence[int]] = (),
        min_length: int | Sequence[int] = 0,
        prefixes: Sequence[Sequence[int]] | None = None,
        no_repeat_ngram: int = 0,
        device: torch.device | str | None = None,
    ) -> Constraints:
        """Rules from plain lists. `banned_sequences` of one token join `banned`; empty ones are passed over."""
        single = {*banned, *(ids[0] for ids in banned_sequences if len(ids) == 1)} - {eos_id}
        least = [min_length] * n_sentences if isinstance(min_length, int) else list(min_length)
        texts = [list(ids) for ids in prefixes or [[]] * n_sentences]
        longest = max(map(len, texts), default=0)
        return cls(
            eos_id,
            torch.tensor(sorted(single), dtype=torch.long, device=device),
            torch.tensor(least, dtype=torch.long, device=device),
            torch.tensor(
                [ids + [FREE] * (longest - len(ids)) for ids in texts], dtype=torch.long, device=device
            ).reshape(n_sentences, longest),
            tuple(tuple(ids) for ids in banned_sequences if len(ids) > 1),
            no_repeat_ngram,
            any(n > 1 for n in least),
            longest > 0,
        )

    @property
    def needs_history(self) -> bool:
        """Whether `apply` must be given the tokens so far."""
        return self.no_repeat_ngram > 0 or bool(self.banned_sequences)

    def barred(self, lengths: Tensor, width: int) -> np.ndarray | None:
        """The same rules as a list of tokens for each of `width` rows a sentence, [B * width, n] int32, ending in -1.

        None where a rule depends on more than a length: then only `apply` can tell.
        """
        if self.needs_history or self.has_prefix:
            return None
        rows = lengths.size(0) * width
        barred = np.full((rows, self.banned.size(0) + 2), -1, dtype=np.int32)
        barred[:, : self.banned.size(0)] = self.banned.numpy()
        if self.has_min_length:
            too_short = (lengths + 1 < self.min_length).numpy().repeat(width)
            barred[too_short, self.banned.size(0)] = self.eos_id
        return barred

    def select(self, sentences: Tensor) -> Constraints:
        """The rules of those sentences [B'], in that order."""
        if not (self.has_min_length or self.has_prefix):
            # Equal rules for all: only the number of rows changes.
            n = sentences.size(0)
            return replace(self, min_length=self.min_length[:n], prefix=self.prefix[:n])
        return replace(self, min_length=self.min_length[sentences], prefix=self.prefix[sentences])

    def join(self, other: Constraints) -> Constraints:
        """The rules of these sentences and then of those; what holds for all must be the same in both."""
        width = max(self.prefix.size(1), other.prefix.size(1))
        prefixes = [torch.nn.functional.pad(p, (0, width - p.size(1)), value=FREE) for p in (self.prefix, other.prefix)]
        return replace(
            self,
            min_length=torch.cat([self.min_length, other.min_length]),
            prefix=torch.cat(prefixes),
            has_min_length=self.has_min_length or other.has_min_length,
            has_prefix=self.has_prefix or other.has_prefix,
        )

    def apply(self, logits: Tensor, lengths: Tensor, history: Tensor | None = None) -> Tensor:
        """logits [B, N, V] -> a copy with minus infinity at whatever may not come next.

        lengths [B]: tokens so far; history [B, N, L]: the tokens themselves, where `needs_history`.
        """
        raw = logits
        logits = logits.index_fill(-1, self.banned, NEVER)
        if self.has_min_length:
            too_short = lengths + 1 < self.min_length  # [B]
            logits[..., self.eos_id].masked_fill_(too_short[:, None], NEVER)
        if self.needs_history:
            if history is None:
                raise ValueError("these constraints look at the tokens so far, and were not given them")
            self._ban_sequences(logits, lengths, history)
            self._ban_repeats(logits, lengths, history)
        if self.has_prefix:
            logits = self._force_prefix(logits, raw, lengths)
        return logits

    def _force_prefix(self, logits: Tensor, raw: Tensor, lengths: Tensor) -> Tensor:
        """A prescribed token is the only candidate, whatever the other rules say of it."""
        width = self.prefix.size(1)
        wanted = self.prefix.gather(1, lengths.clamp(max=width - 1)[:, None])[:, 0]  # [B]
        wanted = wanted.masked_fill(lengths >= width, FREE)
        forced = wanted != FREE
        only = torch.full_like(logits, NEVER)
        index = wanted.clamp(min=0)[:, None, None].expand(-1, logits.size(1), 1)  # [B, N, 1]
        only.scatter_(-1, index, raw.gather(-1, index))
        return torch.where(forced[:, None, None], only, logits)

    def _ban_sequences(self, logits: Tensor, lengths: Tensor, history: Tensor) -> None:
        for sequence in self.banned_sequences:
            head, last = sequence[:-1], sequence[-1]
            if last == self.eos_id or history.size(2) < len(head):
                continue
            at = lengths[:, None] - len(head) + torch.arange(len(head), device=lengths.device)  # [B, len(head)]
            tail = history.gather(2, at.clamp(min=0)[:, None].expand(-1, history.size(1), -1))  # [B, N, len(head)]
            same = (tail == torch.tensor(head, device=tail.device)).all(-1) & (lengths >= len(head))[:, None]
            logits[..., last].masked_fill_(same, NEVER)

    def _ban_repeats(self, logits: Tensor, lengths: Tensor, history: Tensor) -> None:
        n = self.no_repeat_ngram
        if not n or history.size(2) < n:
            return
        windows = history.unfold(2, n, 1)  # [B, N, L - n + 1, n]
        at = lengths[:, None] - (n - 1) + torch.arange(n - 1, device=lengths.device)  # [B, n - 1]
        tail = history.gather(2, at.clamp(min=0)[:, None].expand(-1, history.size(1), -1))  # [B, N, n - 1]
        complete = torch.arange(windows.size(2), device=lengths.device) + n <= lengths[:, None]  # [B, L - n + 1]
        repeats = (windows[..., :-1] == tail[:, :, None]).all(-1) & complete[:, None]  # [B, N, L - n + 1]
        # Several windows may name one token: adding minus infinity twice is adding it once.
        penalty = torch.zeros_like(repeats, dtype=logits.dtype).masked_fill_(repeats, NEVER)
        logits.scatter_add_(-1, windows[..., -1].clamp(min=0), penalty)
