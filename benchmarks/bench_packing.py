"""Benchmark `dualpipe data pack` next to the `encode_batch` of `tokenizers` alone.

The text is Python's standard library as JSON lines, in records of a few KB. The tokenizer is a byte-level BPE trained
on it, or a file. All ways take turns in every round. The best round counts, because other load can only add time.

    encode_batch        all records in one call, from strings in memory; encode_batch_fast leaves out offsets
    pack                ours: reads the file, encodes, and writes tokens, hashes and checksums into a new directory
    one by one          encodes one record at a time, in one thread
    CPU                 CPU time per token, of all threads
    ratio               tokens per second of pack over those of the faster batch call

    python benchmarks/bench_packing.py [--mb 5] [--rounds 15] [--vocab 16000] [--tokenizer FILE.json] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tokenizers
from gpu_bench import add_save, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dualpipe.train.data.pack import pack
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.token_stream import PackedTokens
from dualpipe.train.data.tokenizer import FileTokenizer

END = "<|endoftext|>"
RECORD = 4000  # characters
GOAL = 0.8
RIVALS = ("encode_batch", "encode_batch_fast")


class Times(NamedTuple):
    """Seconds of one call. cpu: CPU time of all threads of the process."""

    wall: float
    cpu: float


def read_texts(megabytes: float) -> list[str]:
    """Return records of the standard library's source."""
    texts: list[str] = []
    size = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        records = [text[start : start + RECORD] for start in range(0, len(text), RECORD)]
        texts += records
        size += sum(map(len, records))
        if size >= megabytes * 1e6:
            break
    return texts


def train_tokenizer(texts: list[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on the texts, and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def timed(call: Callable[[], object]) -> Times:
    wall = time.perf_counter()
    cpu = time.process_time()
    call()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def check(packed: Path, expected: list[list[int]], end: int) -> None:
    """Raise AssertionError unless the packed tokens equal those of `tokenizers`, each record followed by `end`."""
    tokens = [token for shard in PackedTokens(packed).shards for token in shard.tolist()]
    assert tokens == [token for ids in expected for token in [*ids, end]], "packed tokens differ from encode_batch's"


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return tokens per second and CPU nanoseconds per token of every way, the ratio, and the number of tokens."""
    texts = read_texts(args.mb)
    tokenizer_file = Path(args.tokenizer or folder / "tokenizer.json")
    if not args.tokenizer:
        train_tokenizer(texts, args.vocab, tokenizer_file)
    records = folder / "records.jsonl"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rival = Tokenizer.from_file(str(tokenizer_file))
    rival.no_truncation()
    rival.no_padding()
    ours = FileTokenizer(tokenizer_file)
    sources = find_sources([records])
    out = folder / "packed"

    def pack_records() -> None:
        pack(sources, ours, out, overwrite=True)

    def encode_one_by_one() -> None:
        for text in texts:
            rival.encode(text, add_special_tokens=False)

    calls: dict[str, Callable[[], object]] = {
        "encode_batch": lambda: rival.encode_batch(texts, add_special_tokens=False),
        "encode_batch_fast": lambda: rival.encode_batch_fast(texts, add_special_tokens=False),
        "pack": pack_records, "one by one": encode_one_by_one,
    }
    pack_records()
    expected = [encoding.ids for encoding in rival.encode_batch_fast(texts, add_special_tokens=False)]
    check(out, expected, ours.end_of_document)
    num_tokens = sum(map(len, expected))
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(args.rounds)]
    result: dict[str, float] = {"tokens": num_tokens}
    for name in calls:
        result[f"{name}: tokens/s"] = num_tokens / min(row[name].wall for row in rounds)
        result[f"{name}: CPU ns"] = min(row[name].cpu for row in rounds) / num_tokens * 1e9
    result["ratio"] = result["pack: tokens/s"] / max(result[f"{name}: tokens/s"] for name in RIVALS)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=5.0, help="of text (default: 5)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocab", type=int, default=16000, help="of the trained tokenizer (default: 16000)")
    parser.add_argument("--tokenizer", help="a tokenizer.json instead")
    add_save(parser, "bench_packing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(args, Path(folder))
    if args.save:
        save("bench_packing", [row], args.save, load=os.getloadavg()[0], tokenizers=tokenizers.__version__,
             rounds=args.rounds)
    print(f"{row['tokens']:,} tokens, {os.cpu_count()} cores, tokenizers {tokenizers.__version__}")
    for name in ("encode_batch", "encode_batch_fast", "pack", "one by one"):
        print(f"{name:18} {row[f'{name}: tokens/s']:12,.0f} tokens/s {row[f'{name}: CPU ns']:8,.0f} ns of CPU a token")
    is_met = row["ratio"] >= GOAL
    verdict = "met" if is_met else "MISSED"
    print(f"goal: pack at least {GOAL} of tokenizers' batch encode: {row['ratio']:.2f}, {verdict}")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
