"""paged_decode and paged_prefill on a CPU, as ratios to torch's attention, measured in one run.

    python kernels/benchmarks/bench_attention.py                  the demo model's heads, float32 and bfloat16
    python kernels/benchmarks/bench_attention.py --shape llama    32 query heads over 8 of 128

Peers: "gather" copies the blocks into dense K and V and calls scaled_dot_product_attention, what a paged cache
does without kernels of its own; "kept" does so into the same room in every layer, the least that a gather can cost;
"contiguous" calls it on K and V that already lie together, the best that a dense cache could do. A ratio says how
many times as long the peer takes. Bytes read are K and V once; more than the machine's read bandwidth means that a
small case stayed in a cache.
"""

from __future__ import annotations

import functools
import gc
import itertools
from dataclasses import dataclass

import torch
from dense_peers import Gather, decode_ways, prefill_ways
from measure import (
    GIB,
    Others,
    arguments,
    console,
    fastest,
    finish,
    fits,
    groups,
    in_turns,
    layers_of,
    parse,
    prepare,
    summary,
    table_of,
    tracked,
)

import hf_paged_kernels as kernels

SHAPES = {"demo": (9, 3, 64), "llama": (32, 8, 128)}  # query heads, KV heads, head_dim
PEERS = ("gather", "kept", "contiguous")
PREFILL_LAYERS = 2  # arithmetic takes the time, and reads K and V many times over
SIZES = dict(batches=[1, 8, 32, 128], contexts=[128, 1024, 4096], chunks=[512, 2048], pasts=[0, 2048])
QUICK = dict(batches=[1, 8], contexts=[128], chunks=[64], pasts=[0, 64])
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-3}  # of the largest value; peers round weights, too


@dataclass
class Problem:
    """Sequences of equal length, each attending with its last num_queries tokens."""

    op: str
    num_seqs: int
    num_queries: int
    past: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def length(self) -> int:
        return self.past + self.num_queries

    @property
    def name(self) -> str:
        if self.op == "paged_decode":
            return f"{self.num_seqs} x {self.length}"
        return f"{self.num_queries} over {self.past}"

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """K and V that one call reads."""
        itemsize = getattr(torch, self.dtype).itemsize
        return 2 * self.num_seqs * self.kv_heads * self.length * self.head_dim * itemsize

    @property
    def bytes_needed(self) -> int:
        """With one layer: the pool, contiguous K and V, the room to gather them."""
        return 3 * self.kv_bytes


class Layers:
    """The same problem in several layers: pools with blocks in random order, and the same K and V contiguous."""

    def __init__(self, problem: Problem, count: int):
        dtype = getattr(torch, problem.dtype)
        num_blocks = problem.length // problem.block_size
        heads = (problem.kv_heads, problem.block_size, problem.head_dim)
        total = problem.num_seqs * num_blocks
        self.table = torch.randperm(total).view(problem.num_seqs, num_blocks).int()
        pool = [torch.randn(total, *heads, dtype=dtype) for _ in range(2)]
        self.pools = [pool] + [[cache.clone() for cache in pool] for _ in range(count - 1)]
        self.gather = Gather(*self.pools[0], self.table)
        self.dense = [self.gather(*pool) for pool in self.pools]
        rows = problem.num_seqs * problem.num_queries
        self.query = torch.randn(rows, problem.heads, problem.head_dim, dtype=dtype)
        self.seq_lens = torch.full((problem.num_seqs,), problem.length, dtype=torch.int32)
        self.bounds = torch.arange(problem.num_seqs + 1, dtype=torch.int32) * problem.num_queries


def contenders(problem: Problem, layers: Layers, backends: list[str], seconds: float) -> tuple[dict, str]:
    """What to run, by name, each through all layers, and the way that the peers take."""
    decode = problem.op == "paged_decode"
    tensors = (layers.table, layers.seq_lens) if decode else (layers.table, layers.bounds, layers.seq_lens)
    options = dict(scale=problem.head_dim**-0.5, max_seq_len=problem.length)
    if not decode:
        options["max_query_len"] = problem.num_queries
    operator = getattr(kernels, problem.op)

    def paged(backend):
        def run():
            with kernels.backend(backend):
                for pool in layers.pools:
                    out = operator(layers.query, *pool, *tensors, **options)
            return out

        return run

    if decode:
        ways, query, back = decode_ways(problem.group), layers.query, lambda out: out
    else:
        ways = prefill_ways(problem.group, problem.num_queries, problem.length, layers.query.dtype)
        query, back = layers.query.transpose(0, 1)[None], lambda out: out[0].transpose(0, 1)
    if problem.kv_bytes * problem.group > GIB:  # copying all that again cannot be the fastest
        ways = {name: way for name, way in ways.items() if "repeated" not in name}

    def contiguous(way):
        def run():
            for k, v in layers.dense:
                out = way(query, k, v)
            return out

        return run

    tried = {name: contiguous(way) for name, way in ways.items()}
    label = f"{problem.op} {problem.name} {problem.dtype}"
    want = paged("reference")()
    for name, attempt in tried.items():
        agree(f"{label} {name}", back(attempt()), want, problem.dtype)
    way = fastest(tried, seconds / 4)

    def gathered(kept=False):
        for pool in layers.pools:
            out = ways[way](query, *layers.gather(*pool, kept))
        return out

    agree(f"{label} gather", back(gathered()), want, problem.dtype)
    runs = {"gather": gathered, "kept": functools.partial(gathered, True), "contiguous": tried[way]}
    for backend in backends:
        runs[backend] = paged(backend)
        agree(f"{label} {backend}", runs[backend](), want, problem.dtype)
    return runs, way


def agree(name: str, got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    """A contender that computes something else would be no peer."""
    error, largest = (got.double() - want.double()).abs().max(), want.double().abs().max()
    if not error <= TOLERANCE[dtype] * largest:
        raise SystemExit(f"{name}: differs from the reference by {error:.3g}, the largest value is {largest:.3g}")


@torch.inference_mode()
def measure(problem: Problem, options, bandwidth: dict) -> list[dict]:
    """One row of results for each backend."""
    count = PREFILL_LAYERS
    if problem.op == "paged_decode":
        count = layers_of(problem.kv_bytes, problem.bytes_needed, int(options.max_gib * GIB))
    count = 1 if options.quick else count
    layers = Layers(problem, count)
    runs, way = contenders(problem, layers, options.backends, options.seconds)
    times = in_turns(runs, options.seconds)
    rows = []
    for backend in options.backends:
        seconds = times.median(backend) / count
        rate = problem.kv_bytes / seconds
        rows.append(
            dict(vars(problem), case=problem.name, backend=backend, layers=count, rounds=len(times.rounds[backend]))
            | {f"{name}_us": times.median(name) / count * 1e6 for name in PEERS}
            | dict(us=seconds * 1e6, dense_way=way, gigabytes=rate / 1e9)
            | {f"times_{name}": times.ratio(name, backend) for name in PEERS}
            | {f"of_{name}_bandwidth": rate / value for name, value in bandwidth.items()}
        )
    return rows


def problems(options) -> list[Problem]:
    """The cases of these options, of one dtype after the other."""
    shape = (*SHAPES[options.shape], options.block_size)
    made = []
    for dtype in options.dtypes:
        if "decode" in options.ops:
            sizes = itertools.product(options.batches, options.contexts)
            made += [Problem("paged_decode", batch, 1, context - 1, *shape, dtype) for batch, context in sizes]
        if "prefill" in options.ops:
            sizes = itertools.product(options.pasts, options.chunks)
            made += [Problem("paged_prefill", 1, chunk, past, *shape, dtype) for past, chunk in sizes]
    for problem in made:
        if problem.length % problem.block_size or problem.past < 0 or problem.num_queries < 1:
            lengths = f"{problem.past} + {problem.num_queries}"
            raise SystemExit(f"lengths must be multiples of the block size {problem.block_size}, got {lengths}")
    return made


COLUMNS = {
    "gather": ("gather_us", "{:,.0f}"),
    "kept": ("kept_us", "{:,.0f}"),
    "con-\ntiguous": ("contiguous_us", "{:,.0f}"),
    "times\ngather": ("times_gather", "{:.2f}"),
    "times\nkept": ("times_kept", "{:.2f}"),
    "times con-\ntiguous": ("times_contiguous", "{:.2f}"),
    "read\nGB/s": ("gigabytes", "{:.1f}"),
    "of\ncopy": ("of_copy_bandwidth", "{:.0%}"),
    "of\nread": ("of_read_bandwidth", "{:.0%}"),
}


def show(rows: list[dict]) -> None:
    """A table for each backend, operator and dtype, with the least ratios."""
    for part in groups(rows):
        backend, op, dtype = (part[0][name] for name in ("backend", "op", "dtype"))
        columns = {backend: ("us", "{:,.0f}"), **COLUMNS}
        console.print(table_of(part, f"{op}, {dtype}: microseconds a layer", columns))
        for peer in PEERS:
            console.print(summary(part, peer))
        ways = {}
        for row in part:
            ways.setdefault(row["dense_way"], []).append(row["case"])
        console.print("SDPA's fastest way: " + "; ".join(f"{way}: {', '.join(cases)}" for way, cases in ways.items()))


def main(argv: list[str] | None = None) -> None:
    parser = arguments("Paged attention against gather + SDPA and SDPA on contiguous K and V.", SIZES, QUICK)
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="query heads, KV heads, head_dim: the demo's")
    parser.add_argument("--ops", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"])
    options = parse(parser, argv, SIZES, QUICK)
    cases = problems(options)
    about = prepare(options)
    others, results = Others(), []
    for problem in tracked([case for case in cases if fits(case, options.max_gib)]):
        results += measure(problem, options, about["bandwidth"])
        gc.collect()
    show(results)
    finish(options, about, results, others)


if __name__ == "__main__":
    main()
