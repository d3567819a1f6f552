"""What sacreBLEU gives, with guards: strings in, scores with signatures out.

`metrics` BLEU, chrF and TER of a corpus and of single lines · `references` the shapes in which references come ·
`languages` which tokenizer a target language asks for · `bootstrap` is one system better than another ·
`faults` empty outputs and outputs that loop.
"""

from dragoman.scores.bootstrap import Comparison, paired_bootstrap
from dragoman.scores.faults import empty_outputs, find_loop, looping_outputs
from dragoman.scores.languages import guess_language, tokenizer_for
from dragoman.scores.metrics import LineScore, Score, bleu, chrf, line_scores, ter
from dragoman.scores.references import streams_of

__all__ = [
    "Comparison",
    "LineScore",
    "Score",
    "bleu",
    "chrf",
    "empty_outputs",
    "find_loop",
    "guess_language",
    "line_scores",
    "looping_outputs",
    "paired_bootstrap",
    "streams_of",
    "ter",
    "tokenizer_for",
]
