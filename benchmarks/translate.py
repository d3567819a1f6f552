"""Decoding speed beside CTranslate2 and Hugging Face `generate`, on the same weights, in one run, alternating.

    python benchmarks/translate.py ../shared/models/marian-small-en-de \
        --src ../shared/data/multi30k-en-de/test_2016_flickr.en --ref ../shared/data/multi30k-en-de/test_2016_flickr.de

Every engine gets the same source tokens and gives tokens: tokenisation is nobody's. Two threads on every side, medians
of `--turns`. CTranslate2 counts in the best of its settings of inter and intra threads and batch size, searched here
for each case. BLEU stands beside each speed, so that nobody wins by answering worse. Beams divide by the length to the
power of 0.6 there and by the paper's penalty with alpha 0.6 here, and end as each engine ends them by default.
`--size base` makes a base-sized model with random weights and forces all outputs to 15 tokens.

Two more tables, greedy and in float32: `--cost length` is one sentence of 20 tokens on one thread with outputs forced
to 64 ... 2,048 tokens by a model with random weights and positions enough, and the memory that 16 of them take;
`--cost batch` is the same lines given so many at a time.

The floor, for d = d_model, f = d_ff, V words, N layers: a source token costs N (4 d^2 + 2 d f) multiplications in the
encoder and 2 N d^2 for its keys and values in the decoder; a target token N (6 d^2 + 2 d f) + V d. For the small model
(256, 1024, 8000, 3 + 3) that is 2.8 M and 4.8 M; a sentence of 13 + 14 tokens takes 0.2 GFLOP, so a matrix product peak
of 150 GFLOP/s allows about 750 sentences/s in float32. One sentence at a time every target token reads all 4.8 M
weights: 19 MB in float32, 5 MB in int8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Ids = list[list[int]]
FORCED_LENGTH = 15
ALPHA = 0.6
BASE = {
    "d_model": 512,
    **{f"{side}_layers": 6 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 8 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")},
}


@dataclass
class Case:
    """One row of the table."""

    size: str
    precision: str
    search: str
    mode: str
    engine: str
    setting: str = ""
    speeds: list[float] = field(default_factory=list)
    bleu: float | None = None

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


@dataclass
class Engine:
    """Something that turns source tokens into target tokens."""

    name: str
    translate: Callable[[Sequence[list[int]], int], Ids]
    """(sources ending in EOS, beam size) -> targets without EOS."""
    one_at_a_time: Callable[[Sequence[list[int]], int], Ids]
    setting: str = ""


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    cases: list[Case] = []
    if arguments.cost:
        with tempfile.TemporaryDirectory() as work:
            {"length": cost_of_length, "batch": cost_of_batch}[arguments.cost](Path(work), arguments)
        return
    with tempfile.TemporaryDirectory() as work:
        for size in arguments.size.split(","):
            folder = (
                Path(arguments.model)
                if size == "small"
                else random_model(Path(arguments.model), Path(work) / "base", **BASE)
            )
            cases += measure(size, folder, Path(work) / f"work-{size}", arguments)
    show(cases)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([case.__dict__ | {"speed": case.speed} for case in cases], indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help="a Hugging Face Marian folder")
    parser.add_argument("--src", required=True)
    parser.add_argument("--ref", required=True)
    parser.add_argument("--size", default="small", help="small, base or both, separated by a comma")
    parser.add_argument("--precision", default="float32,bfloat16,int8")
    parser.add_argument("--search", default="greedy,beam4")
    parser.add_argument("--mode", default="bulk,single")
    parser.add_argument("--cost", choices=("length", "batch"), help="only this table")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--single-lines", type=int, default=100)
    parser.add_argument("--hf-lines", type=int, default=200, help="Hugging Face gets fewer lines; 0 leaves it out")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    return parser.parse_args()


def measure(size: str, folder: Path, work: Path, arguments: argparse.Namespace) -> list[Case]:
    from dragoman.exchange.huggingface import import_folder
    from dragoman.translator import load

    work.mkdir(parents=True)
    ours = work / "ours"
    import_folder(folder, ours)
    translator = load(ours)
    tokenizer = translator.tokenizer
    lines = Path(arguments.src).read_text("utf-8").split("\n")[: arguments.lines]
    references = Path(arguments.ref).read_text("utf-8").split("\n")[: arguments.lines]
    sources = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(lines)]
    forced = FORCED_LENGTH if size == "base" else None

    cases = []
    for precision in arguments.precision.split(","):
        engines = [our_engine(translator.model, tokenizer, precision, forced, arguments.threads)]
        peer_precision = "float32" if precision == "bfloat16" else precision  # it has no bfloat16 on most processors
        engines.append(ctranslate2_engine(ours, work, peer_precision, forced, tokenizer, arguments.threads))
        if precision == "float32" and arguments.hf_lines:
            engines.append(hugging_face_engine(folder, forced, arguments.threads))
        for search in arguments.search.split(","):
            beam = 1 if search == "greedy" else 4
            for mode in arguments.mode.split(","):
                cases += run_case(
                    size, precision, search, beam, mode, engines, sources, references, tokenizer, arguments
                )
    return cases


def run_case(
    size: str,
    precision: str,
    search: str,
    beam: int,
    mode: str,
    engines: list[Engine],
    sources: Ids,
    references: list[str],
    tokenizer: Any,
    arguments: argparse.Namespace,
) -> list[Case]:
    n_default = len(sources) if mode == "bulk" else arguments.single_lines
    row = []
    for engine in engines:
        if engine.name == "ctranslate2":
            engine.setting = engine.tune(sources[: min(400, n_default)], beam, mode)  # type: ignore[attr-defined]
        row.append(Case(size, precision, search, mode, engine.name, engine.setting))
    for turn in range(arguments.turns):
        for engine, case in zip(engines, row, strict=True):
            n = (
                min(n_default, arguments.hf_lines if mode == "bulk" else 20)
                if engine.name == "huggingface"
                else n_default
            )
            if engine.name == "huggingface" and turn:
                continue
            call = engine.translate if mode == "bulk" else engine.one_at_a_time
            if turn == 0:
                call(sources[: min(n, 64 if mode == "bulk" else 5)], beam)  # buffers, caches, threads
            begun = time.perf_counter()
            targets = call(sources[:n], beam)
            case.speeds.append(n / (time.perf_counter() - begun))
            if mode == "bulk" and size == "small" and turn == 0:
                case.bleu = bleu([tokenizer.decode(ids) for ids in targets], references[:n])
    for case in row:
        print(f"{size} {precision} {search} {mode} {case.engine} {case.setting}: {case.speed:.0f}/s", file=sys.stderr)
    return row


def bleu(hypotheses: list[str], references: list[str]) -> float:
    import sacrebleu

    return round(sacrebleu.corpus_bleu(hypotheses, [references]).score, 2)


# Engines


def our_engine(model: Any, tokenizer: Any, precision: str, forced: int | None, threads: int) -> Engine:
    from dragoman.decoding.engine import Job, Rules, decode
    from dragoman.decoding.options import DecodingConfig
    from dragoman.decoding.precision import prepared

    decoder = prepared(model, precision)
    rules = Rules(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tuple(tokenizer.banned_ids))

    def search(sources: Sequence[list[int]], beam: int) -> Ids:
        options = DecodingConfig(greedy=beam == 1, beam_size=beam, alpha=ALPHA, min_length=forced or 0)
        jobs = [Job(source, forced or len(source) + 50) for source in sources]
        found = decode(decoder, jobs, options, rules)
        return [[i for i in hypotheses[0].ids if i != tokenizer.eos_id] for hypotheses in found]

    # CTranslate2 sets the number of OpenMP threads of whoever calls it, and PyTorch has the same one.
    def translate(sources: Sequence[list[int]], beam: int) -> Ids:
        torch.set_num_threads(threads)
        return search(sources, beam)

    def one_at_a_time(sources: Sequence[list[int]], beam: int) -> Ids:
        torch.set_num_threads(1)
        return [search([source], beam)[0] for source in sources]

    return Engine("dragoman", translate, one_at_a_time)


class CTranslate2(Engine):
    """CTranslate2 in whatever setting was last found best."""

    def __init__(self, folder: Path, forced: int | None, tokenizer: Any, threads: int, precision: str) -> None:
        super().__init__("ctranslate2", self._bulk, self._single)
        self.folder, self.forced, self.tokenizer, self.threads = folder, forced, tokenizer, threads
        self.precision = precision
        self.batch_size = 64
        self.loaded: dict[tuple[int, int], Any] = {}
        self.use = (threads, 1)

    def translator(self, inter: int, intra: int) -> Any:
        import ctranslate2

        if (inter, intra) not in self.loaded:
            self.loaded[inter, intra] = ctranslate2.Translator(
                str(self.folder), inter_threads=inter, intra_threads=intra, compute_type=self.precision
            )
        return self.loaded[inter, intra]

    def tune(self, sources: Sequence[list[int]], beam: int, mode: str) -> str:
        """Look for the fastest setting; says which it is."""
        if mode == "single":
            self.use, self.batch_size = (1, 1), 1
            return "1 x 1"
        settings = [
            ((inter, intra), batch)
            for inter, intra in ((self.threads, 1), (1, self.threads))
            for batch in ((16, 32, 64, 128, 256) if inter > 1 else (64,))
        ]
        times = []
        for use, batch in settings:
            self.use, self.batch_size = use, batch
            self._bulk(sources[:64], beam)
            begun = time.perf_counter()
            self._bulk(sources, beam)
            times.append(time.perf_counter() - begun)
        self.use, self.batch_size = settings[times.index(min(times))]
        return f"{self.use[0]} x {self.use[1]}, batch {self.batch_size}"

    def _call(self, sources: Sequence[list[int]], beam: int, batch_size: int) -> Ids:
        # Its folder says that EOS is appended there.
        pieces = [[self.tokenizer.id_to_piece(i) for i in source[:-1]] for source in sources]
        extra: dict[str, Any] = (
            {"min_decoding_length": self.forced, "max_decoding_length": self.forced}
            if self.forced
            else {"max_decoding_length": max(map(len, sources)) + 50}
        )
        results = self.translator(*self.use).translate_batch(
            pieces, beam_size=beam, max_batch_size=batch_size, batch_type="examples", length_penalty=ALPHA, **extra
        )
        return [[self.tokenizer.piece_to_id(piece) for piece in result.hypotheses[0]] for result in results]

    def _bulk(self, sources: Sequence[list[int]], beam: int) -> Ids:
        return self._call(sources, beam, self.batch_size)

    def _single(self, sources: Sequence[list[int]], beam: int) -> Ids:
        return [self._call([source], beam, 1)[0] for source in sources]


def ctranslate2_engine(
    ours: Path, work: Path, precision: str, forced: int | None, tokenizer: Any, threads: int
) -> CTranslate2:
    """From our own folder, so that the weights are the same and padding cannot be generated there either."""
    from dragoman.exchange.formats import export_model

    converted = work / f"ctranslate2-{precision}"
    if not converted.exists():
        export_model(ours, "ctranslate2", converted, precision=precision)  # type: ignore[arg-type]
    return CTranslate2(converted, forced, tokenizer, threads, precision)


def hugging_face_engine(folder: Path, forced: int | None, threads: int) -> Engine:
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(folder).eval()
    pad = model.config.pad_token_id
    lengths = {"min_new_tokens": forced, "max_new_tokens": forced} if forced else {"max_new_tokens": 100}

    def batch(sources: Sequence[list[int]], beam: int) -> Ids:
        torch.set_num_threads(threads)
        longest = max(map(len, sources))
        ids = torch.tensor([[*source, *[pad] * (longest - len(source))] for source in sources])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=(ids != pad).long(),
                num_beams=beam,
                do_sample=False,
                length_penalty=ALPHA,
                **lengths,
            )
        return [[i for i in row if i not in (pad, model.config.eos_token_id)] for row in out.tolist()]

    def translate(sources: Sequence[list[int]], beam: int) -> Ids:
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        found: Ids = [[] for _ in sources]
        for start in range(0, len(order), 64):
            chosen = order[start : start + 64]
            for i, row in zip(chosen, batch([sources[i] for i in chosen], beam), strict=True):
                found[i] = row
        return found

    return Engine("huggingface", translate, lambda sources, beam: [batch([source], beam)[0] for source in sources])


def random_model(like: Path, folder: Path, **sizes: int) -> Path:
    """A Marian with random weights, otherwise like another, of which it has the tokenizer."""
    import shutil

    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(**MarianConfig.from_pretrained(like).to_dict() | sizes)
    MarianMTModel(config).save_pretrained(folder)
    for name in ("source.spm", "target.spm", "vocab.json"):
        shutil.copy(like / name, folder / name)
    settings = json.loads((like / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = config.max_position_embeddings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


# What a translation costs by its length, and by how many are given at once


def cost_of_length(work: Path, arguments: argparse.Namespace) -> None:
    from dragoman.exchange.huggingface import import_folder
    from dragoman.translator import load

    folder = random_model(Path(arguments.model), work / "random", max_position_embeddings=2304)
    import_folder(folder, work / "ours")
    translator = load(work / "ours")
    tokenizer = translator.tokenizer
    source = [[*(tokenizer.encode("a man in a blue shirt is standing on a ladder cleaning a window") * 2)[:19]]]
    source[0].append(tokenizer.eos_id)
    lengths = (64, 128, 256, 512, 1024, 2048)
    memory_peak()
    start = memory_peak()  # what there is now: the call before forgot what there had been
    peaks = {}
    for length in lengths:  # before CTranslate2 takes any
        our_engine(translator.model, tokenizer, "float32", length, arguments.threads).translate(source * 16, 1)
        peaks[length] = memory_peak() - start
    print("| target tokens | dragoman, us a token | CTranslate2, us a token | dragoman, peak MiB of 16 sentences |")
    print("|---:|---:|---:|---:|")
    for length in lengths:
        engines: list[Any] = [our_engine(translator.model, tokenizer, "float32", length, 1)]
        engines.append(ctranslate2_engine(work / "ours", work, "float32", length, tokenizer, 1))
        engines[1].tune(source, 1, "single")
        times: list[list[float]] = [[], []]
        for _ in range(arguments.turns + 1):
            for engine, taken in zip(engines, times, strict=True):
                begun = time.perf_counter()
                engine.one_at_a_time(source, 1)
                taken.append((time.perf_counter() - begun) / length * 1e6)
        ours, theirs = (statistics.median(taken[1:]) for taken in times)
        print(f"| {length:,} | {ours:.0f} | {theirs:.0f} | {peaks[length]:.0f} |")


def memory_peak() -> float:
    """MiB that this process had in memory at most since the last call; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the next peak starts from what there is now
    except OSError:
        return 0.0
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def cost_of_batch(work: Path, arguments: argparse.Namespace) -> None:
    from dragoman.exchange.huggingface import import_folder
    from dragoman.translator import load

    import_folder(Path(arguments.model), work / "ours")
    translator = load(work / "ours")
    tokenizer = translator.tokenizer
    lines = Path(arguments.src).read_text("utf-8").split("\n")[: arguments.lines]
    sources = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(lines)]
    ours = our_engine(translator.model, tokenizer, "float32", None, arguments.threads)
    theirs = ctranslate2_engine(work / "ours", work, "float32", None, tokenizer, arguments.threads)
    print("| lines at a time | dragoman, sentences/s | CTranslate2, sentences/s | its setting |")
    print("|---:|---:|---:|---|")
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024):
        some = sources[: min(len(sources), 30 * size)]
        speeds: dict[str, list[float]] = {}
        for _ in range(arguments.turns):
            settings = [((arguments.threads, 1), max(1, size // arguments.threads)), ((1, arguments.threads), size)]
            for name in ("dragoman", *map(str, range(len(settings)))):
                if name != "dragoman":
                    theirs.use, theirs.batch_size = settings[int(name)]
                call = ours.translate if name == "dragoman" else theirs.translate
                begun = time.perf_counter()
                for start in range(0, len(some), size):
                    call(some[start : start + size], 1)
                speeds.setdefault(name, []).append(len(some) / (time.perf_counter() - begun))
        medians = {name: statistics.median(each) for name, each in speeds.items()}
        best = max(("0", "1"), key=medians.__getitem__)
        (inter, intra), batch = settings[int(best)]
        told = f"{inter} x {intra}, batch {batch}"
        print(f"| {size:,} | {medians['dragoman']:.0f} | {medians[best]:.0f} | {told} |")


def show(cases: list[Case]) -> None:
    """The table: each case's speed, its ratio to CTranslate2 and its BLEU."""
    print("| size | precision | search | mode | engine | setting | sentences/s | ratio to CTranslate2 | BLEU |")
    print("|---|---|---|---|---|---|---:|---:|---:|")
    peers = {(c.size, c.precision, c.search, c.mode): c.speed for c in cases if c.engine == "ctranslate2"}
    for c in cases:
        ratio = c.speed / peers[c.size, c.precision, c.search, c.mode]
        told = "" if c.bleu is None else f"{c.bleu:.2f}"
        print(
            f"| {c.size} | {c.precision} | {c.search} | {c.mode} | {c.engine} | {c.setting} "
            f"| {c.speed:.0f} | {ratio:.2f} | {told} |"
        )


if __name__ == "__main__":
    main()
