"""Time to quality: dragoman by a recipe beside a plain torch.nn.Transformer loop, so many minutes each, in one run.

    python benchmarks/quality.py tatoeba-en-zh --data ../shared/data/tatoeba-en-zh --minutes 15
    python benchmarks/quality.py multi30k-en-de --data ../shared/data/multi30k-en-de --minutes 15

The first system is `dragoman train recipes/TASK.toml` as anybody would start it. The others are `nn.Transformer`, once
for each of three peak rates, with all else the same: tokenizer, sizes, batches in the same order, precision, seed,
Adam, label smoothing, dropout, schedule (linear warm-up, then down over the minutes), the dev set translated greedily
every so many updates, and the best model by that kept. Each trains in a process of its own, one after the other, on the
same threads, for so many minutes from its first to its last update, validations included and set-up not. Then both
translate the test set in float32 by the same beam search, and sacreBLEU scores them with the tokenizer of the language.

What favours the peer: the cut of an update into rectangles that is fastest for it is found before its minutes begin;
ours computes the dev loss beside BLEU and writes checkpoints within its minutes, the peer does not; and of its rates
the one counts that is best on the test set itself. If that one is the lowest or the highest, the table says so: then
give other --rates, for the best may lie beyond them. It has final norms behind the encoder and the decoder, as
`nn.Transformer` always has; that is the one difference of the models. What favours ours beside its speed: R-Drop and
Muon, where the recipe has them, which a plain loop has not. In place of Muon it has what that recipe had before: Adam
with betas of 0.9 and 0.999 and a warm-up of at least 600 updates.

DATA holds train.tsv.gz, dev.tsv, test.tsv and perhaps test.refs.json, as `dragoman data get` writes them, or
train.LANG.gz, val.LANG and a test set of two files, which --test names without its ending. --set changes the recipe for
all systems alike. Nothing else should run on the machine: minutes of a busy one are worth less.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.plain_transformer import PlainTransformer

    from dragoman.run import RunConfig
    from dragoman.scores.testset import TestSet
    from dragoman.text.corpus import Pair
    from dragoman.tokens.tokenizer import Tokenizer
    from dragoman.training.feed import Feed, Share

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
OURS = "dragoman"
LONG = 45.0
"""Minutes from which on the recipe for an hour is the better one, where there is one."""


@dataclass(frozen=True)
class Result:
    """One system after its minutes."""

    name: str
    updates: int
    minutes: float
    """From the first to the last update, validations included."""
    epochs: float
    tokens: int
    """Target tokens of all updates."""
    dev_bleu: float
    """Of the model that was kept, greedy."""
    translations: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("tatoeba-en-zh", "multi30k-en-de"), help="which recipe")
    parser.add_argument("--data", type=Path, help="folder of the corpus (../shared/data/TASK)")
    parser.add_argument("--test", default="test_2016_flickr", help="stem of the test set where it is two files")
    parser.add_argument("--minutes", type=float, default=15.0, help="from first to last update, of each system")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="peaks that the peer tries")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", dest="sets", metavar="K=V", action="append", default=[], help="change the recipe")
    parser.add_argument("--out", type=Path, help="keep the model folder and the translations here")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    parser.add_argument("--worker", nargs=2, metavar=("RATE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.getLogger("dragoman").setLevel(logging.ERROR)  # an early dev set is full of empty translations
    data = arguments.data or Path("../shared/data") / arguments.task
    source, target = arguments.task.split("-")[-2:]
    test = read_test(data, source, target, arguments.test)
    if arguments.worker:
        work(float(arguments.worker[0]), Path(arguments.worker[1]), test, arguments.beam, arguments.threads)
        return
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of this process and of those that it starts
    with tempfile.TemporaryDirectory() as temporary:
        out = (arguments.out or Path(temporary)).resolve()
        if (out / OURS).exists():
            raise SystemExit(f"error: {out / OURS} is there already; remove it or give another --out")
        out.mkdir(parents=True, exist_ok=True)
        results = [train_ours(arguments, data, source, target, out, test)]
        results += [train_peer(rate, out) for rate in arguments.rates]
        report(results, arguments, target, out, test)


def read_test(data: Path, source: str, target: str, stem: str) -> TestSet:
    """The test set, with all references that there are."""
    from dragoman.scores.testset import read_test_set

    if (data / "test.tsv").exists():
        references = data / "test.refs.json"
        return read_test_set(tsv=str(data / "test.tsv"), refs_json=str(references) if references.exists() else None)
    return read_test_set(src=str(data / f"{stem}.{source}"), refs=[str(data / f"{stem}.{target}")])


# ---------------------------------------------------------------------------------------------------------------------
# Ours: the command
# ---------------------------------------------------------------------------------------------------------------------


def recipe_for(task: str, minutes: float) -> Path:
    """What keeps a corpus from being learnt by heart in an hour is too much for a quarter of one."""
    longer = RECIPES / f"{task}-hour.toml"
    return longer if minutes >= LONG and longer.exists() else RECIPES / f"{task}.toml"


def train_ours(arguments: argparse.Namespace, data: Path, source: str, target: str, out: Path, test: TestSet) -> Result:
    """`dragoman train` by the recipe, then what its folder says of the run, and the test set translated."""
    folder = out / OURS
    sets = [*corpora(data.resolve(), source, target), f"training.max_minutes={arguments.minutes}", *arguments.sets]
    recipe = recipe_for(arguments.task, arguments.minutes)
    command = [sys.executable, "-m", "dragoman", "train", str(recipe), "--out", str(folder)]
    subprocess.run([*command, "--device", "cpu", *(part for each in sets for part in ("--set", each))], check=True)

    import dragoman
    from dragoman.batches.stream import Position
    from dragoman.checkpoints import snapshots

    last = snapshots.folders(folder)[0]
    facts = json.loads((last / snapshots.FACTS).read_text(encoding="utf-8"))
    feed = feed_of(folder)[2]
    updates = int(facts["loop"]["step"])
    batches = updates + int(facts["loop"]["skipped"]) + int(facts["loop"]["empty"])
    translator = dragoman.load(str(folder))
    translations = translator.translate(test.sources or [], beam_size=arguments.beam)
    best = facts["best_dev"] or {}
    return Result(
        name=OURS,
        updates=updates,
        minutes=float(facts["loop"]["minutes"]),
        epochs=feed.stream.epochs_at(Position(*facts["loop"]["position"])),
        tokens=sum(batch.n_tokens for batch in islice(feed.stream.iterate(), batches)),
        dev_bleu=float(best.get("bleu", float("nan"))),
        translations=[translation.text for translation in translations],
    )


def corpora(data: Path, source: str, target: str) -> list[str]:
    """Values of --set that name the corpora in `data`."""

    def pair(stem: str, ending: str = "") -> str:
        sides = (json.dumps(str(data / f"{stem}.{language}{ending}")) for language in (source, target))
        return "{{src = {}, tgt = {}}}".format(*sides)

    if (data / "train.tsv.gz").exists():
        return [
            f"data.train={json.dumps(str(data / 'train.tsv.gz'))}",
            f"data.dev={json.dumps(str(data / 'dev.tsv'))}",
        ]
    return [f"data.train=[{pair('train', '.gz')}]", f"data.dev={pair('val')}"]


# ---------------------------------------------------------------------------------------------------------------------
# The peer: the plain loop
# ---------------------------------------------------------------------------------------------------------------------


def train_peer(rate: float, out: Path) -> Result:
    """The plain loop at one peak rate, in a process of its own, over the folder of our run."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(rate), str(out)]
    subprocess.run(command, check=True)
    return Result(**json.loads((out / f"plain-{rate:g}.json").read_text(encoding="utf-8")))


def work(rate: float, out: Path, test: TestSet, beam: int, threads: int) -> None:
    """What that process does; its result goes to a file."""
    import torch
    from peers.plain_transformer import PlainTransformer

    from dragoman.batches.stream import Position
    from dragoman.model.choices import PaperSpec
    from dragoman.translator import Translator

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    config, tokenizer, feed = feed_of(out / OURS)
    size = config.model
    if not isinstance(size, PaperSpec):
        raise SystemExit(f'error: nn.Transformer is the 2017 model; it cannot be compared with kind = "{size.kind}"')
    torch.manual_seed(config.training.seed)
    model = PlainTransformer(
        *(len(tokenizer), size.d_model, size.d_ff, size.n_layers, size.n_heads), tokenizer.pad_id, size.dropout
    )
    check(model, next(iter(feed.shares(Position()))))
    name = f"nn.Transformer {rate:g}"
    say(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters in {config.training.precision}")
    updates, minutes, end, tokens, dev_bleu = fit(model, config, tokenizer, feed, rate, name)
    translations = Translator(model, tokenizer, config).translate(test.sources or [], beam_size=beam)
    texts = [translation.text for translation in translations]
    result = Result(name, updates, minutes, feed.stream.epochs_at(end), tokens, dev_bleu, texts)
    (out / f"plain-{rate:g}.json").write_text(json.dumps(vars(result), ensure_ascii=False), encoding="utf-8")


def fit(
    model: PlainTransformer, config: RunConfig, tokenizer: Tokenizer, feed: Feed, rate: float, name: str
) -> tuple[int, float, Any, int, float]:
    """Updates, minutes, place in the data, target tokens, dev BLEU of the model kept, which `model` then is."""
    import torch

    from dragoman.batches.stream import Position
    from dragoman.text.corpus import read_pairs
    from dragoman.training.optimizer import Adam, Muon

    training = config.training
    dev_corpus = config.data.dev_corpus
    assert dev_corpus is not None
    dev = list(read_pairs(dev_corpus, bad_rows=config.data.bad_rows, invalid_utf8=config.data.invalid_utf8))
    if isinstance(training.optimizer, Muon):
        longer = replace(training.schedule, warmup_steps=max(600, training.schedule.warmup_steps))
        training = replace(training, optimizer=Adam(betas=(0.9, 0.999)), schedule=longer)
        config = replace(config, training=training)
    optimizer = training.optimizer.build(model)
    update(model, feed.largest(), config, 1)  # first uses of kernels and memory are set-up, as they are of ours
    pieces = fastest_pieces(model, feed, config)
    say(f"{name}: an update in {pieces} rectangles is the fastest")
    optimizer.zero_grad(set_to_none=True)
    parameters, best = list(model.parameters()), (float("-inf"), copy.deepcopy(model.state_dict()))
    step, skipped, tokens, minutes, end = 0, 0, 0, 0.0, Position()
    begun = time.perf_counter()
    for share in feed.shares(Position()):
        loss = update(model, share, config, pieces)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not norm.isfinite():  # left out, as ours leaves such an update out
            optimizer.zero_grad(set_to_none=True)
            if (skipped := skipped + 1) == training.max_skipped:
                say(f"{name}: {skipped} updates in a row were not finite after step {step:,}; it ends here")
                break
            continue
        if training.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, training.clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step + 1, rate, minutes, config)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, skipped, tokens, end = step + 1, 0, tokens + share.n_tokens, share.next
        minutes = (time.perf_counter() - begun) / 60
        done = minutes >= (training.max_minutes or 0.0) or step == training.max_steps
        if done or step % training.validate_every == 0:
            bleu = dev_score(model, config, tokenizer, dev)
            say(f"{name}: step {step:,}, loss {loss:.3f}, dev BLEU {bleu:.2f}, {minutes:.1f} minutes")
            if bleu > best[0]:
                best = bleu, copy.deepcopy(model.state_dict())
        if done:
            break
    model.load_state_dict(best[1])
    return step, minutes, end, tokens, best[0]


def fastest_pieces(model: PlainTransformer, feed: Feed, config: RunConfig) -> int:
    """Into how many rectangles to cut an update: many cost a pass each, few are full of padding."""
    from dragoman.batches.stream import Position

    taken: dict[int, float] = {}
    shares = list(islice(feed.shares(Position()), 6))
    for pieces in (1, 2, 4, 8, 16, 32):
        update(model, shares[0], config, pieces)
        begun = time.perf_counter()
        for share in shares[1:]:
            update(model, share, config, pieces)
        taken[pieces] = time.perf_counter() - begun
    return min(taken, key=taken.__getitem__)


def update(model: PlainTransformer, share: Share, config: RunConfig, pieces: int) -> float:
    """Gradients of one update, as the framework's manual would have them; the smoothed loss per target token."""
    import torch
    from torch.nn import functional as F

    from dragoman.batches.batch import gathered

    model.train()
    total = 0.0
    for batch in gathered(share.batches, model.pad_id, pieces):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.training.precision == "bfloat16"):
            logits, targets = model(batch.src, batch.tgt_in, batch.tgt_out)
            smoothing = config.training.label_smoothing
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum") / share.n_tokens
        loss.backward()
        total += loss.item()
    return total


def rate_at(step: int, peak: float, minutes: float, config: RunConfig) -> float:
    """The recipe's schedule with another peak."""
    from dragoman.training.schedule import Noam, Progress

    schedule = config.training.schedule
    if isinstance(schedule, Noam):
        raise SystemExit("error: the peer tries several peaks, and noam has none: set training.schedule.kind")
    progress = Progress(config.training.max_steps, minutes, config.training.max_minutes)
    return replace(schedule, peak=peak).rate(step, getattr(config.model, "d_model", 512), progress)


def dev_score(model: PlainTransformer, config: RunConfig, tokenizer: Tokenizer, dev: list[Pair]) -> float:
    """BLEU of the dev set, greedy, as our run has it."""
    from dragoman.decoding.options import DecodingConfig
    from dragoman.scores import bleu
    from dragoman.translator import Translator

    translator = Translator(model, tokenizer, replace(config, decoding=DecodingConfig(greedy=True)))
    texts = [translation.text for translation in translator.stream(pair.src for pair in dev)]
    return bleu(texts, [pair.tgt for pair in dev], config.data.tgt_lang).score


def check(model: PlainTransformer, share: Share) -> None:
    """Step by step the peer must say what it says in one pass, or its translations would not be its own."""
    import torch

    batch = share.batches[0]
    with torch.no_grad():
        model.eval()
        expected, _ = model(batch.src, batch.tgt_in, batch.tgt_out)
        state, steps = model.start(batch.src), []
        for tokens in batch.tgt_in.unbind(1):
            logits, state = model.step(tokens, state)
            steps.append(logits)
        found = torch.stack(steps, 1)[batch.tgt_out != model.pad_id]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# What both share, and the table
# ---------------------------------------------------------------------------------------------------------------------


def feed_of(folder: Path) -> tuple[RunConfig, Tokenizer, Feed]:
    """Of our run's folder: the resolved config, the tokenizer and the batches in its order."""
    from dragoman.batches.regularise import STRETCH
    from dragoman.batches.stream import Stream
    from dragoman.checkpoints.store import TRAINING, read_config
    from dragoman.tokens.binarize import binarize
    from dragoman.tokens.tokenizer import load_tokenizer
    from dragoman.training.feed import Feed, Ids, Regularise

    config, tokenizer = read_config(folder), load_tokenizer(folder)
    training, sampling = config.training, config.training.subword_regularisation
    data = binarize(config.data.train_corpora, tokenizer, config.data, folder / TRAINING / "data" / "train")
    stream = Stream(
        data.src_lengths,
        data.tgt_lengths,
        int(training.batch_tokens / STRETCH) if sampling else training.batch_tokens,
        training.seed,
        bounds=data.bounds,
        weights=data.weights,
    )
    ids = Ids(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    sampler: Any = tokenizer
    regularise = Regularise(sampler, sampling) if sampling else None
    return config, tokenizer, Feed(data, stream, ids, accumulation=training.accumulation, regularise=regularise)


def report(results: list[Result], arguments: argparse.Namespace, target: str, out: Path, test: TestSet) -> None:
    """Score and print all systems, ours against the best of the peer's rates."""
    from dragoman.checkpoints.store import read_config
    from dragoman.scores import bleu

    config = read_config(out / OURS)
    scores = [bleu(result.translations, test.references, target) for result in results]
    print(
        f"\n{arguments.task}: {arguments.minutes:g} minutes each on {arguments.threads} threads in "
        f"{config.training.precision}, beam {arguments.beam}, {len(test):,} lines of {test.name}"
    )
    print(f"{'system':<24}{'BLEU':>7}{'dev BLEU':>10}{'updates':>9}{'epochs':>8}{'tokens/s':>10}{'minutes':>9}")
    rows = []
    for result, score in zip(results, scores, strict=True):
        speed = result.tokens / (60 * result.minutes)
        print(
            f"{result.name:<24}{score.score:>7.2f}{result.dev_bleu:>10.2f}{result.updates:>9,}{result.epochs:>8.1f}"
            f"{speed:>10,.0f}{result.minutes:>9.2f}"
        )
        figures = {key: value for key, value in vars(result).items() if key != "translations"}
        rows.append({**figures, "bleu": score.score, "tokens_per_second": speed})
        path = out / f"{result.name.replace(' ', '-')}.{target}"
        path.write_text("".join(text + "\n" for text in result.translations), encoding="utf-8")
    print(scores[0].signature)
    best = max(range(1, len(results)), key=lambda number: scores[number].score)
    print(f"{OURS} - {results[best].name}: {scores[0].score - scores[best].score:+.2f} BLEU", flush=True)
    rate = arguments.rates[best - 1]
    if rate in (min(arguments.rates), max(arguments.rates)):
        print(f"note: {rate:g} is at an end of --rates; a rate beyond it may be better", flush=True)
    if arguments.json:
        whole = {"task": arguments.task, "minutes": arguments.minutes, "threads": arguments.threads}
        whole |= {"precision": config.training.precision, "beam": arguments.beam, "signature": scores[0].signature}
        arguments.json.write_text(json.dumps({**whole, "systems": rows}, indent=1) + "\n", encoding="utf-8")


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
