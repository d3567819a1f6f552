"""Corpora of any size: memory, speed and the second start, at 0.5M and at 5M pairs.

    python benchmarks/corpus.py data/multi30k-en-de/train.en.gz data/multi30k-en-de/train.de.gz

Pairs are made of the given ones: two joined, and a word of a third added on either side, so that lengths are about
those of news text and hardly any pair is there twice. Each measurement is a process of its own. What is asked for:
anonymous memory (RssAnon) that grows by less than 100 MB from the small corpus to the large, 50,000 sentences/s on two
cores, a second start (process start to first batch) of less than 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BATCH_TOKENS = 25_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", help="source text, a sentence a line (.gz, .xz, .zst by suffix)")
    parser.add_argument("tgt", help="target text, line for line")
    parser.add_argument("--pairs", type=int, nargs="+", default=[500_000, 5_000_000])
    parser.add_argument("--work", help="folder for the corpora, about 1 GB for 5M pairs; a temporary one by default")
    parser.add_argument("--measure", nargs=2, metavar=("CORPUS", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*map(Path, arguments.measure))
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        compare(Path(folder), arguments.src, arguments.tgt, arguments.pairs)


def compare(folder: Path, src: str, tgt: str, sizes: list[int]) -> None:
    from dragoman.text.corpus import Corpus, read_pairs
    from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer

    raw = ((pair.src.replace("\t", " "), pair.tgt.replace("\t", " ")) for pair in read_pairs(Corpus(src=src, tgt=tgt)))
    pairs = [pair for pair in raw if all(pair)]
    train_tokenizer((text for pair in pairs for text in pair), TokenizerConfig(), folder / "tokenizer", 1, say)
    anon: dict[int, float] = {}
    for size in sizes:
        corpus = folder / f"{size}.tsv"
        with corpus.open("w", encoding="utf-8") as file:
            file.writelines(f"{a}\t{b}\n" for a, b in varied(pairs, size))
        first, second = (start(src, tgt, corpus, folder / f"{size}.ids") for _ in range(2))
        anon[size] = max(first["anon_mb"], second["anon_mb"])
        tokens = first["tokens"] / first["pairs"] / 2
        print(
            f"{size:,} pairs of {tokens:.0f} tokens a side: "
            f"{2 * size / first['binarise_s']:,.0f} sentences/s by the clock, "
            f"{2 * size / first['cpu_s']:,.0f} for each second of a core's work; "
            f"{first['anon_mb']:.0f} MB anonymous at most; "
            f"an epoch of {first['batches']:,} batches in {first['epoch_s']:.1f} s, "
            f"{100 * first['padding']:.1f} % padding; second start {second['ready_s']:.2f} s to the first batch",
            flush=True,
        )
    if len(sizes) > 1:
        print(f"anonymous memory, largest against smallest corpus: {anon[max(sizes)] - anon[min(sizes)]:+.0f} MB")
    print(f"cores: {len(os.sched_getaffinity(0))}; load average while measuring: {os.getloadavg()[1]:.1f}")


def varied(pairs: list[tuple[str, str]], size: int) -> Iterator[tuple[str, str]]:
    """`size` pairs made of the given ones."""
    draw = random.Random(1)
    words = [[word for pair in pairs[:5000] for word in pair[side].split()] for side in (0, 1)]
    for _ in range(size):
        a, b = draw.choice(pairs), draw.choice(pairs)
        yield f"{a[0]} {b[0]} {draw.choice(words[0])}", f"{a[1]} {b[1]} {draw.choice(words[1])}"


def start(src: str, tgt: str, corpus: Path, out: Path) -> dict[str, float]:
    """One start of a training in a process of its own, up to its first batch, and then an epoch of batches."""
    command = [sys.executable, __file__, src, tgt, "--measure", str(corpus), str(out)]
    before = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    result["ready_s"] = result["ready_at"] - before
    return result


def measure(corpus: Path, out: Path) -> None:
    from dragoman.batches.batch import collate
    from dragoman.batches.stream import Stream
    from dragoman.text.corpus import Corpus, DataConfig
    from dragoman.tokens.binarize import binarize
    from dragoman.tokens.tokenizer import load_tokenizer

    most = [0.0]

    def watch() -> None:
        while True:
            most[0] = max(most[0], anonymous_mb())
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    tokenizer = load_tokenizer(corpus.parent / "tokenizer")
    clock, cpu = time.monotonic(), time.process_time()
    data = binarize([Corpus(tsv=str(corpus))], tokenizer, DataConfig(), out, say)
    clock, cpu = time.monotonic() - clock, time.process_time() - cpu
    stream = Stream(data.src_lengths, data.tgt_lengths, BATCH_TOKENS, 1, bounds=data.bounds, weights=data.weights)
    batches = real = held = 0
    ready_at = walked = 0.0
    for batch in stream.iterate():
        if batch.position.epoch:
            break
        for tile in batch.tiles:
            collate(data, tile, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
        if not batches:
            ready_at, walked = time.time(), time.monotonic()
        batches += 1
        real += batch.src_tokens + batch.n_tokens
        held += batch.src_padded + batch.tgt_padded
    facts = {
        "pairs": data.n,
        "tokens": real - 2 * data.n,
        "binarise_s": clock,
        "cpu_s": cpu,
        "ready_at": ready_at,
        "batches": batches,
        "epoch_s": time.monotonic() - walked,
        "padding": 1 - real / held,
        "anon_mb": most[0],
    }
    print(json.dumps(facts))


def anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
