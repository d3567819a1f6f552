"""Training throughput: dragoman beside a plain torch.nn.Transformer loop and Hugging Face's Marian, in one run.

    python benchmarks/train.py --data ../shared/data/multi30k-en-de --size small --precision bfloat16

Same text (Multi30k en-de), joint BPE of 8,000, the same batches of at most 4,096 padded tokens a side, dropout 0.1,
label smoothing 0.1; forward, backward, clipping and fused Adam. Each engine is a process of its own with the same
number of threads; they take turns over the same batches, so that a busy machine is busy for all, and the median of
the turns counts. `--precision bfloat16` gives each peer what it is best at: autocast, and for Marian weights in
bfloat16 throughout as well, with both of its attentions. MFU is model FLOPs of real tokens per second over the best
matrix product of 2,048 that the same run could do in that precision on all threads.

The floor. With n_s, n_t real source and target tokens of an update, a pass forward is 2 FLOPs for each of
    n_s (4 d^2 + 2 d f) N                           encoder
    n_t (6 d^2 + 2 d f) N + n_s 2 d^2 N + n_t V d   decoder, its keys and values of the memory, softmax
multiplications, plus 4 d FLOPs for each pair of positions that an attention compares; backward is twice that. Small
(d 256, f 1,024, N 3) is 46 MFLOPs a target token, base (d 512, f 2,048, N 6) 293. At 4,000 tokens a side the products
of small are 180 GFLOPs: on two cores of Zen 4 (about 180 GFLOP/s in float32, 420 in bfloat16) 1.0 and 0.44 seconds.
Bytes: of each activation [n, d] some 30 passes a layer and direction without fusion, 6 with it. At 4,000 tokens and
d 256 a pass is 2 MB in bfloat16, 0.1 ms from the caches, so 9 layers are 50 ms against 10; logits are 64 MB a pass,
20 ms each. Adam reads and writes 28 bytes a parameter: 7.7 M of small 0.2 GB, 10 ms; 48 M of base 1.3 GB, 70 ms of 3 s.
Dropout by PyTorch's own generator is 6 ns an element and core, 17 M elements a step: 50 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VOCABULARY, BATCH_TOKENS = 8_000, 4_096


class Size(NamedTuple):
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int


SIZES = {"small": Size(256, 1_024, 3, 4), "base": Size(512, 2_048, 6, 8)}
OURS = "dragoman"
ENGINES = {
    "float32": {OURS: "ours", "nn.Transformer": "plain", "Marian sdpa": "marian-sdpa", "Marian eager": "marian-eager"},
    "bfloat16": {
        OURS: "ours",
        "nn.Transformer autocast": "plain-autocast",
        "Marian sdpa autocast": "marian-sdpa-autocast",
        "Marian eager autocast": "marian-eager-autocast",
        "Marian sdpa pure": "marian-sdpa-pure",
        "Marian eager pure": "marian-eager-pure",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k-en-de"))
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--precision", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7, help="turns of every engine; the median counts")
    parser.add_argument("--updates", type=int, help="updates a turn (5 of small, 1 of base)")
    parser.add_argument("--only", nargs="+", help="engines whose name contains one of these, beside ours")
    parser.add_argument(
        "--curve", type=int, metavar="N", help="instead: the loss of ours over N updates, each precision"
    )
    parser.add_argument("--json", type=Path, help="write all figures here too")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "BATCHES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker, SIZES[arguments.size[0]], arguments.precision[0], arguments.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        batches = prepare(arguments.data, Path(folder))
        if arguments.curve:
            curve(arguments.size[0], batches, arguments)
            return
        results = [
            compare(size, precision, batches, arguments) for size in arguments.size for precision in arguments.precision
        ]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# The engines, each in a process that does an update when it is told to
# ---------------------------------------------------------------------------------------------------------------------


def work(engine: str, path: str, size: Size, precision: str, threads: int) -> None:
    """Read a line "FIRST COUNT" for updates over those batches, or "peak"; answer with a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    arrays = np.load(path)
    batches = [
        tuple(torch.from_numpy(arrays[f"{side}{i}"]) for side in ("src", "in", "out")) for i in range(len(arrays) // 3)
    ]
    update = None if engine == "peak" else (ours if engine == "ours" else peer)(engine, size, precision, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        if update is None:
            print(json.dumps(peak(precision)), flush=True)
            continue
        first, count = map(int, line.split())
        chosen = [batches[i % len(batches)] for i in range(first, first + count)]
        wall, cpu, loss, tokens = time.perf_counter(), time.process_time(), 0.0, 0
        for src, tgt_in, tgt_out in chosen:
            n = int((tgt_out != 0).sum())
            loss, tokens = loss + update(src, tgt_in, tgt_out, n) / count, tokens + n
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"tokens": tokens, "wall": wall, "cpu": cpu, "loss": loss}), flush=True)


Update = Callable[[Any, Any, Any, int], float]


def adam(model: Any) -> Any:
    import torch

    return torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)


def ours(engine: str, size: Size, precision: str, threads: int) -> Update:
    import torch

    from dragoman.batches.batch import Batch
    from dragoman.model.transformer import Transformer, TransformerConfig
    from dragoman.training.lanes import Lanes

    model = Transformer(TransformerConfig(VOCABULARY, size.n_layers, size.d_model, size.d_ff, size.n_heads)).train()
    optimizer, lanes, steps = adam(model), Lanes(model, threads, precision), iter(range(1 << 60))  # type: ignore[arg-type]
    print(f"{OURS}: {lanes.kernels.name} kernels", file=sys.stderr)

    def update(src: Any, tgt_in: Any, tgt_out: Any, n: int) -> float:
        loss, _ = lanes.gradients([Batch(src, tgt_in, tgt_out, n, np.arange(len(src)))], n, next(steps), 0.1)
        torch.set_num_threads(1)  # as the trainer does between gradients and weights
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.set_num_threads(threads)
        return loss / n

    return update


def peer(engine: str, size: Size, precision: str, threads: int) -> Update:
    import torch
    from torch.nn import functional as F

    name, *variants = engine.split("-")
    if name == "plain":
        from peers.plain_transformer import PlainTransformer

        model: Any = PlainTransformer(VOCABULARY, *size, pad_id=0).train()
    else:
        from peers.marian import Marian

        model = Marian(VOCABULARY, *size, pad_id=0, attention="eager" if "eager" in variants else "sdpa").train()
    if "pure" in variants:
        model = model.to(torch.bfloat16)
    optimizer = adam(model)

    def update(src: Any, tgt_in: Any, tgt_out: Any, n: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in variants):
            logits, targets = model(src, tgt_in, tgt_out)
            loss = F.cross_entropy(logits, targets, ignore_index=0, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return update


def peak(precision: str) -> dict[str, float]:
    """The best of a few matrix products of 2,048, in FLOP/s."""
    import torch

    a, b = torch.randn(2, 2048, 2048).to(getattr(torch, precision))
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return {"flops": 2 * 2048**3 / best}


# ---------------------------------------------------------------------------------------------------------------------
# Data, turns and the table
# ---------------------------------------------------------------------------------------------------------------------


def prepare(data: Path, folder: Path) -> Path:
    """Tokenizer and batches of the training text, shuffled, as one file of arrays."""
    from dragoman.batches.batch import collate_lists
    from dragoman.batches.buckets import cut
    from dragoman.text.corpus import read_lines
    from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer

    src, tgt = (list(read_lines(data / f"train.{language}.gz")) for language in ("en", "de"))
    tokenizer = train_tokenizer([*src, *tgt], TokenizerConfig(vocab_size=VOCABULARY), folder, seed=1)
    sides = tokenizer.encode_batch(src), tokenizer.encode_target_batch(tgt)
    assert (len(tokenizer), tokenizer.pad_id) == (VOCABULARY, 0)
    lengths = [np.array([len(ids) for ids in side]) for side in sides]
    batches = cut(*lengths, np.random.default_rng(1).permutation(len(src)), BATCH_TOKENS)
    arrays, real, padded = {}, 0, 0
    for number, position in enumerate(np.random.default_rng(2).permutation(len(batches))):
        rows = batches[position].tolist()
        batch = collate_lists(*([side[row] for row in rows] for side in sides), 0, tokenizer.bos_id, tokenizer.eos_id)
        arrays |= {f"src{number}": batch.src, f"in{number}": batch.tgt_in, f"out{number}": batch.tgt_out}
        real += int((batch.src != 0).sum()) + batch.n_tokens
        padded += batch.src.numel() + batch.tgt_out.numel()
    print(f"{len(src):,} pairs, {len(batches)} batches, {1 - real / padded:.1%} padding", file=sys.stderr)
    np.savez(folder / "batches.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    return folder / "batches.npz"


def flops_per_target_token(path: Path, size: Size) -> float:
    """Model FLOPs of forward and backward over all batches, real tokens only, per target token."""
    d, f, layers = size.d_model, size.d_ff, size.n_layers
    arrays, total, targets = np.load(path), 0, 0
    for i in range(len(arrays) // 3):
        s, t = ((arrays[f"{side}{i}"] != 0).sum(1).astype(np.int64) for side in ("src", "out"))
        n_s, n_t = int(s.sum()), int(t.sum())
        weights = n_s * layers * (4 * d * d + 2 * d * f) + n_t * layers * (6 * d * d + 2 * d * f)
        weights += n_s * layers * 2 * d * d + n_t * VOCABULARY * d
        pairs = int((s * s + t * (t + 1) // 2 + s * t).sum()) * layers
        total += 3 * (2 * weights + 4 * d * pairs)
        targets += n_t
    return total / targets


class Workers:
    """A process for each (engine, precision) under a name, all ready; they end with the block."""

    def __init__(self, engines: dict[str, tuple[str, str]], size: str, batches: Path, threads: int) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for name, (engine, precision) in engines.items():  # one after the other: starting takes all threads too
            command = [sys.executable, __file__, "--worker", engine, str(batches)]
            options = ["--size", size, "--precision", precision, "--threads", str(threads)]
            self._processes[name] = subprocess.Popen(
                [*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._answer(name)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def ask(self, name: str, line: str) -> Any:
        """Send a line, wait for the answer."""
        pipe = self._processes[name].stdin
        assert pipe is not None
        pipe.write(line + "\n")
        pipe.flush()
        return json.loads(self._answer(name))

    def _answer(self, name: str) -> str:
        pipe = self._processes[name].stdout
        assert pipe is not None
        if not (answer := pipe.readline()):
            raise SystemExit(f"error: {name} has ended; its last words are above")
        return answer


def curve(size: str, batches: Path, arguments: argparse.Namespace) -> None:
    """Mean training loss of each tenth of the updates: ours in both precisions, and the plain loop in float32."""
    engines = {
        f"{OURS} float32": ("ours", "float32"),
        f"{OURS} bfloat16": ("ours", "bfloat16"),
        "nn.Transformer float32": ("plain", "float32"),
    }
    step = max(arguments.curve // 10, 1)
    with Workers(engines, size, batches, arguments.threads) as workers:
        print(f"{'updates':>9}" + "".join(f"{name:>24}" for name in engines))
        for first in range(0, arguments.curve, step):
            losses = [workers.ask(name, f"{first} {step}")["loss"] for name in engines]
            print(f"{first + step:>9}" + "".join(f"{loss:>24.4f}" for loss in losses), flush=True)


def compare(size: str, precision: str, batches: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All engines of a precision, turn by turn; prints the table and returns its figures."""
    engines = {
        name: key
        for name, key in ENGINES[precision].items()
        if name == OURS or not arguments.only or any(part in name for part in arguments.only)
    }
    updates = arguments.updates or {"small": 5, "base": 1}[size]
    turns: dict[str, list[Any]] = {name: [] for name in engines}
    best = 0.0
    started = {name: (key, precision) for name, key in {**engines, "peak": "peak"}.items()}
    with Workers(started, size, batches, arguments.threads) as workers:
        for turn in range(-1, arguments.turns):
            for name in engines:  # the turn before the first warms up
                answer = workers.ask(name, f"{(turn + 1) * updates} {updates}")
                said = f"{answer['tokens'] / answer['wall']:,.0f} tokens/s, loss {answer['loss']:.3f}"
                print(f"turn {turn + 1} of {arguments.turns}: {name} {said}", file=sys.stderr)
                if turn >= 0:
                    turns[name].append(answer)
            best = max(best, workers.ask("peak", "peak")["flops"])

    flops = flops_per_target_token(batches, SIZES[size])
    speed = {name: statistics.median(turn["tokens"] / turn["wall"] for turn in of) for name, of in turns.items()}
    per_cpu = {
        name: statistics.median(turn["tokens"] / turn["cpu"] for turn in of) * arguments.threads
        for name, of in turns.items()
    }
    peers = [name for name in engines if name != OURS]
    first = max(peers, key=lambda name: speed[name], default=OURS)
    # Within one turn all engines meet the same batches and much the same load, so the median of ratios is the steadier.
    ratios = [
        (mine["tokens"] / mine["wall"]) / (theirs["tokens"] / theirs["wall"])
        for mine, theirs in zip(turns[OURS], turns[first], strict=True)
    ]
    print(f"\n{size} {precision}, {arguments.threads} threads, matrix-product peak {best / 1e9:.0f} GFLOP/s")
    print(f"{'engine':<26}{'target tokens/s':>16}{'MFU':>7}{'of all CPU':>12}{'loss':>8}")
    for name in sorted(engines, key=lambda name: -speed[name]):
        print(
            f"{name:<26}{speed[name]:>16,.0f}{speed[name] * flops / best:>7.0%}{per_cpu[name]:>12,.0f}"
            f"{turns[name][-1]['loss']:>8.3f}"
        )
    print(f"{OURS} / {first}: {statistics.median(ratios):.2f}", flush=True)
    return {
        "size": size,
        "precision": precision,
        "threads": arguments.threads,
        "peak_flops": best,
        "flops_per_target_token": flops,
        "tokens_per_second": speed,
        "tokens_per_cpu_second_times_threads": per_cpu,
        "mfu": {name: speed[name] * flops / best for name in engines},
        "best_peer": first,
        "ratio": statistics.median(ratios),
        "turns": turns,
    }


if __name__ == "__main__":
    main()
