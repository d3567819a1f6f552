"""Text to ids and back: the contract every tokenizer answers, and the one that dragoman trains, over SentencePiece.

What the contract promises, whatever the text and whatever the ids:

- `decode(encode(text)) == normalise(text)` where the model has byte fallback (ours have it by default);
- no text that a user types becomes a control id: `<s>` typed is four characters or so, never BOS;
- any ids decode to valid UTF-8 on one line: control ids give nothing, bytes that form no character give U+FFFD.

SentencePiece has no NFC rule, and its default one (nmt_nfkc) turns full-width Chinese punctuation into ASCII. So the
Unicode form is ours, applied first (`text.normalise`), and the models that we train normalise nothing of themselves.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from dragoman.errors import ConfigError, DataError, ModelError
from dragoman.text.normalise import Form, normalise
from dragoman.tokens.files import write_atomically
from dragoman.tokens.sample import sample

MODEL_FILE = "tokenizer.model"
FACTS_FILE = "tokenizer.json"
FORMAT_VERSION = 1

# Cc but TAB, as in text.normalise: byte pieces can spell them, and a line feed would make two lines of one.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")

# Below this many texts, starting threads costs more than they save.
_THREADED_FROM = 64

# Characters; at most four bytes each. Longer lines are cut for training.
_TRAINING_LINE = 4000

# SentencePiece keeps one seed for the whole process, so two seeded samplings must not interleave. Its generators are
# one a thread; up to 0.2.2 a seed is only heeded by a thread that has not drawn yet, so each draw needs a fresh one.
_SAMPLING = threading.Lock()
_RESEEDS = tuple(int(number) for number in re.findall(r"\d+", sentencepiece.__version__)[:3]) >= (0, 2, 3)

_WHAT_IS_LOST = (
    "control characters (category Cc) other than TAB are dropped; U+2581 is read as a space; runs of U+0020 become "
    "one, those at the ends go; then the Unicode form named by `normalization`"
)


@dataclass(frozen=True)
class TokenizerConfig:
    """`[tokenizer]`: one joint SentencePiece model for both sides, trained or brought along."""

    kind: Literal["bpe", "unigram"] = "bpe"
    """How pieces are learnt: "bpe" (byte-pair encoding) or "unigram"."""
    model: str | None = None
    """A SentencePiece `.model` file of one's own, used instead of training one."""
    vocab_size: int = 8000
    """At most this many pieces, special ones included; lowered with a message where the corpus carries fewer."""
    character_coverage: float = 0.9995
    """The share of the characters seen that get a piece each; the rarest are spelt in bytes."""
    byte_fallback: bool = True
    """Spell characters outside the vocabulary in UTF-8 bytes, so that nothing is ever unknown."""
    normalization: Form = "nfc"
    """The Unicode form of text before it is cut: "nfc", "nfkc" (rewrites full-width punctuation) or "identity"."""
    sample: int = 1_000_000
    """Train on at most this many sentences of either side, drawn with the run's seed."""

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in ("bpe", "unigram"):
            problems.append(f'tokenizer.kind is "bpe" or "unigram", not {self.kind!r}')
        if self.normalization not in ("nfc", "nfkc", "identity"):
            problems.append(f'tokenizer.normalization is "nfc", "nfkc" or "identity", not {self.normalization!r}')
        if self.vocab_size < 5:
            problems.append(f"tokenizer.vocab_size counts pieces, four of them special: {self.vocab_size} is too few")
        if not 0.98 <= self.character_coverage <= 1.0:
            problems.append(f"tokenizer.character_coverage is between 0.98 and 1, not {self.character_coverage}")
        if self.sample < 1:
            problems.append(f"tokenizer.sample counts sentences: at least 1, not {self.sample}")
        if problems:
            raise ConfigError(problems)


class Tokenizer(ABC):
    """What every station may ask of a tokenizer. Ids never include BOS or EOS: batches add those."""

    kind: str
    normalization: Form = "nfc"
    pad_id: int
    unk_id: int
    bos_id: int
    """What the decoder starts with (an imported model may start with its pad)."""
    eos_id: int

    @abstractmethod
    def __len__(self) -> int:
        """The vocabulary's size, special ids included."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each source text. Raises DataError for text that is not valid Unicode."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """One line of valid text for any ids of the vocabulary; IndexError for ids outside it."""

    @abstractmethod
    def id_to_piece(self, index: int) -> str:
        """The piece as it stands in the vocabulary, such as `▁the` or `<0x0A>`."""

    @abstractmethod
    def piece_to_id(self, piece: str) -> int:
        """The id of a piece; `unk_id` for one that the vocabulary lacks. This is how to name control ids: by piece."""

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes all that `load_tokenizer` needs into `folder`, which is made if need be."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they give equal ids."""

    def normalise(self, text: str) -> str:
        """The text as the model sees it; decoding gives this back, not what was typed."""
        return normalise(text, self.normalization)

    def split_language_code(self, text: str) -> tuple[str, str]:
        """The code of the target language that a text begins with, and the rest: the code goes before each part of it.

        "" and the text as it is where there is none.
        """
        return "", text

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_target(self, text: str) -> list[int]:
        return self.encode_target_batch([text])[0]

    def encode_target_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same as `encode_batch` for a joint vocabulary; a tokenizer of two models overrides it."""
        return self.encode_batch(texts)

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        return [self.decode(ids) for ids in batch]

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that a search must never choose."""
        return tuple(sorted({self.pad_id, self.unk_id, self.bos_id} - {self.eos_id}))


class SentencePieceTokenizer(Tokenizer):
    """One SentencePiece model for both sides. Safe to use from many threads at once."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, normalization: Form = "nfc", facts: dict[str, Any] | None = None) -> None:
        """`model` is the content of a `.model` file; `facts` is what is known of its making, kept by `save`."""
        _silence()
        self.model = model
        self.normalization = normalization
        self.facts = dict(facts or {})
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError, OSError, TypeError):
            raise ModelError("this is not a SentencePiece model, or it is damaged") from None
        if len(self) == 0:
            raise ModelError("this SentencePiece model is empty")
        self.unk_id = int(self._processor.unk_id())
        self.pad_id, self.bos_id, self.eos_id = self._special_ids()

    def _special_ids(self) -> tuple[int, int, int]:
        """Pad, BOS and EOS as the model itself names them; every one that is missing is told at once.

        SentencePiece gives -1 for a piece that is not a control piece, so that what is found no text can hold.
        """
        problems = []
        found = []
        for name, use in (("pad", "padding"), ("bos", "the start of a sentence"), ("eos", "the end of a sentence")):
            found.append(int(getattr(self._processor, f"{name}_id")()))
            if not 0 <= found[-1] < len(self):
                default = "there is none by default" if name == "pad" else "its piece not among user_defined_symbols"
                problems.append(
                    f"the SentencePiece model has no control piece for {use}: train it with --{name}_id ({default})"
                )
        if problems:
            raise ModelError(problems)
        pad, bos, eos = found
        return pad, bos, eos

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_normalised([self.normalise(text) for text in texts])

    def encode_normalised(self, texts: list[str], **options: Any) -> list[list[int]]:
        """Ids of texts that have been through `normalise`; `options` are those of SentencePiece's `encode`."""
        options.setdefault("num_threads", 1 if len(texts) < _THREADED_FROM else -1)
        try:
            ids: list[list[int]] = self._processor.encode(texts, out_type=int, **options)
        except (RuntimeError, UnicodeEncodeError, TypeError):
            _refuse_surrogates(texts)
            raise
        return ids

    def encode_sampled(self, text: str, alpha: float, nbest: int = -1, *, seed: int) -> list[int]:
        return self.encode_sampled_batch([text], alpha, nbest, seeds=[seed])[0]

    def encode_sampled_batch(
        self, texts: Sequence[str], alpha: float, nbest: int = -1, *, seeds: Sequence[int]
    ) -> list[list[int]]:
        """Ids of a segmentation drawn at random for each text, by the seed that goes with it: subword regularisation.

        For BPE, each merge is left out with probability `alpha` (BPE-dropout, Provilkov et al. 2020); for unigram, one
        of the `nbest` best segmentations (-1: of all) is drawn in proportion to its probability to the power `alpha`
        (Kudo 2018). The ids depend on the text, alpha, nbest and its seed alone; every draw decodes to the same text.
        """
        plain = [self.normalise(text) for text in texts]
        result: list[list[int]] = []

        def draw(text: str, seed: int) -> None:
            sentencepiece.set_random_generator_seed(seed % 2**32)
            options = {"enable_sampling": True, "alpha": alpha, "nbest_size": nbest, "num_threads": 1}
            result.extend(self.encode_normalised([text], **options))

        _refuse_surrogates(plain)
        with _SAMPLING:
            for text, seed in zip(plain, seeds, strict=True):
                if _RESEEDS:
                    draw(text, seed)
                else:
                    thread = threading.Thread(target=draw, args=(text, seed))
                    thread.start()
                    thread.join()
        return result

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._processor.decode([int(index) for index in ids])
        return _CONTROL.sub("", text)

    def id_to_piece(self, index: int) -> str:
        return str(self._processor.id_to_piece(int(index)))

    def piece_to_id(self, piece: str) -> int:
        return int(self._processor.piece_to_id(piece))

    @cached_property
    def banned_ids(self) -> tuple[int, ...]:
        """Pad, unk, BOS and every other control piece but EOS: none of them is text."""
        control = [index for index in range(len(self)) if self._processor.is_control(index)]
        return tuple(sorted({self.unk_id, *control} - {self.eos_id}))

    @cached_property
    def byte_fallback(self) -> bool:
        """Whether a character outside the vocabulary is spelt in bytes; without it, it is lost to `<unk>`."""
        return all(self._processor.is_byte(self.piece_to_id(f"<0x{byte:02X}>")) for byte in range(256))

    @cached_property
    def sha256(self) -> str:
        """Of the model file."""
        return hashlib.sha256(self.model).hexdigest()

    @property
    def fingerprint(self) -> str:
        return f"{self.kind}:{self.normalization}:{self.sha256}"

    def save(self, folder: str | os.PathLike[str]) -> None:
        facts = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "normalization": self.normalization,
            "normalization_drops": _WHAT_IS_LOST,
            "vocab_size": len(self),
            "pad_id": self.pad_id,
            "unk_id": self.unk_id,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "byte_fallback": self.byte_fallback,
            "sha256": self.sha256,
            "made": self.facts,
        }
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        # The facts go last: a folder that has them has the model.
        write_atomically(target / MODEL_FILE, self.model)
        write_atomically(target / FACTS_FILE, json.dumps(facts, ensure_ascii=False, indent=2).encode() + b"\n")


def train_tokenizer(
    texts: Iterable[str],
    config: TokenizerConfig,
    out: str | os.PathLike[str],
    seed: int = 1,
    log: Callable[[str], None] = lambda message: None,
) -> SentencePieceTokenizer:
    """The tokenizer that `config` asks for, saved into the folder `out`.

    `texts` are raw lines of both sides, streamed; they are not read where `config.model` names a file. Raises DataError
    where there is nothing to learn from, ConfigError for a vocabulary too small to hold the alphabet, ModelError for an
    unfit model of one's own. The same texts, config and seed give the same model, byte for byte.
    """
    if config.model is not None:
        tokenizer = read_model(config.model, config.normalization)
        log(f"tokenizer: {config.model} as it is, {len(tokenizer):,} pieces; nothing trained")
        if not tokenizer.byte_fallback:
            log(f"tokenizer: {config.model} has no byte fallback: characters that it lacks are lost to <unk>")
        tokenizer.save(out)
        return tokenizer
    chosen, total = sample((normalise(text, config.normalization) for text in texts), config.sample, seed)
    lines = [piece for text in chosen for piece in _trainable(text)]
    if not lines:
        raise DataError(
            f"there is nothing to train a tokenizer on: "
            f"{f'all {total:,} lines are blank' if total else 'the corpus has no lines'}"
        )
    model = _learn(lines, config)
    facts = {
        "algorithm": config.kind,
        "vocab_size_asked": config.vocab_size,
        "character_coverage": config.character_coverage,
        "lines": total,
        "lines_sampled": len(chosen),
        "seed": seed,
        "sentencepiece": str(sentencepiece.__version__),
    }
    tokenizer = SentencePieceTokenizer(model, config.normalization, facts)
    drawn = (
        f"a sample of {len(chosen):,} of {total:,} lines (seed {seed})" if len(chosen) < total else f"{total:,} lines"
    )
    log(f"tokenizer: {config.kind} of {len(tokenizer):,} pieces, trained on {drawn}")
    if len(tokenizer) < config.vocab_size:
        log(
            f"tokenizer: vocab_size lowered from {config.vocab_size:,} to {len(tokenizer):,}, "
            "the largest that these texts can fill"
        )
    tokenizer.save(out)
    return tokenizer


def _trainable(text: str) -> Iterator[str]:
    """A normalised text as the trainer can take it, so that none is skipped or stops it.

    SentencePiece leaves out lines beyond a length, and lines with U+2585, which it keeps for itself; a BPE trainer
    aborts on a word of more than 65,535 characters. So long lines are cut, at a space where there is one.
    """
    text = text.replace("\u2585", " ")
    while len(text) > _TRAINING_LINE:
        cut = text.rfind(" ", 1, _TRAINING_LINE)
        cut = cut if cut > 0 else _TRAINING_LINE
        yield text[:cut]
        text = text[cut:].lstrip(" ")
    if text.strip():
        yield text


def _learn(lines: list[str], config: TokenizerConfig) -> bytes:
    """The bytes of a new SentencePiece model; pad 0, unk 1, bos 2, eos 3."""
    _refuse_surrogates(lines)
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=writer,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,  # a limit, not an order: SentencePiece then stops at the largest legal size
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="identity",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            max_sentence_length=4 * _TRAINING_LINE + 1,
            input_sentence_size=0,  # the sample is drawn already
            num_threads=16,  # not the machine's count: unigram's sums depend on it in their last digits
            train_extremely_large_corpus=sum(map(len, lines)) > 2**29,
            minloglevel=3,
        )
    except (RuntimeError, ValueError, OSError) as error:
        smallest = re.search(r"required_chars.*?\d+ vs (\d+)", str(error), re.DOTALL)
        if smallest:
            raise ConfigError(
                f"tokenizer.vocab_size = {config.vocab_size} is too small: these texts need at least "
                f"{int(smallest[1])} (special pieces{', 256 bytes' if config.byte_fallback else ''} and one for each "
                f"character within character_coverage {config.character_coverage}); raise the one or lower the other"
            ) from None
        raise DataError(f"SentencePiece cannot train on these {len(lines):,} lines: {error}") from None
    return writer.getvalue()


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`. Raises ModelError for a missing, damaged or foreign one."""
    path = Path(folder) / FACTS_FILE
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: this is not a model folder, or not all of it was copied") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is damaged: it is not JSON; copy it again from where the model came from") from None
    if not isinstance(facts, dict) or "kind" not in facts:
        raise ModelError(f'{path} is damaged: it names no "kind"')
    load = _LOADERS.get(str(facts["kind"]))
    if load is None:
        known = ", ".join(sorted(_LOADERS))
        raise ModelError(f"{path} asks for a tokenizer of kind {facts['kind']!r}; this version knows {known}")
    return load(Path(folder), facts)


def read_model(path: str | os.PathLike[str], normalization: Form = "nfc") -> SentencePieceTokenizer:
    """A SentencePiece model of one's own as a tokenizer. Raises ModelError naming the file and every fault of it."""
    data = _read(Path(path))
    facts = {"from": Path(path).name}
    try:
        return SentencePieceTokenizer(data, normalization, facts)
    except ModelError as error:
        raise ModelError([f"{path}: {problem}" for problem in error.problems]) from None


def _load_sentencepiece(folder: Path, facts: dict[str, Any]) -> Tokenizer:
    path = folder / MODEL_FILE
    version = facts.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ModelError(
            f"{folder / FACTS_FILE} has format_version {version!r}, and this version of dragoman reads up to "
            f"{FORMAT_VERSION}: a newer dragoman wrote it"
        )
    normalization = facts.get("normalization")
    if normalization not in ("nfc", "nfkc", "identity"):
        raise ModelError(f"{folder / FACTS_FILE} names an unknown normalization {normalization!r}")
    data = _read(path)
    found = hashlib.sha256(data).hexdigest()
    if found != facts.get("sha256"):
        raise ModelError(
            f"{path} is damaged or was exchanged: its SHA-256 is {found}, and {FACTS_FILE} says "
            f"{facts.get('sha256')}; copy the folder again from where the model came from"
        )
    made = facts.get("made")
    try:
        return SentencePieceTokenizer(data, normalization, made if isinstance(made, dict) else None)
    except ModelError as error:
        raise ModelError([f"{path}: {problem}" for problem in error.problems]) from None


def _load_marian(folder: Path, facts: dict[str, Any]) -> Tokenizer:
    from dragoman.tokens import marian

    return marian.load(folder, facts)


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], Tokenizer]] = {
    "sentencepiece": _load_sentencepiece,
    "marian": _load_marian,
}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _refuse_surrogates(texts: Sequence[str]) -> None:
    """Raises DataError for text that UTF-8 cannot carry, naming the first such character of each text."""
    problems = []
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"text {number}, " if len(texts) > 1 else ""
            problems.append(
                f"{where}character {error.start + 1}: U+{ord(text[error.start]):04X} is half of a surrogate pair, "
                "not a character: the text is not valid Unicode"
            )
    if problems:
        raise DataError(problems)


def _silence() -> None:
    """Keeps SentencePiece's own talk off stderr: what matters of it is said in our words."""
    sentencepiece.set_min_log_level(3)
