"""reshape_and_cache and copy_blocks on a CPU, as ratios to torch's indexing and to a plain copy, in one run.

    python kernels/benchmarks/bench_writes.py

Two peers: "index" is torch's own indexing with its indices made beforehand; "copy" moves as many bytes between two
contiguous tensors, the least that any cache can do. A ratio says how many times as long the peer takes; bytes
a second count what is read and what is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from measure import (
    GIB,
    Others,
    arguments,
    console,
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

SHAPES = {"demo": (3, 64), "llama": (8, 128)}  # KV heads, head_dim
SIZES = dict(tokens=[1, 32, 128, 512, 2048], blocks=[1, 16, 256])
QUICK = dict(tokens=[1, 64], blocks=[4])
POOL_BLOCKS = 2048


@dataclass
class Problem:
    op: str
    count: int  # tokens or blocks
    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.count} {'blocks' if self.op == 'copy_blocks' else 'tokens'}"

    @property
    def bytes_moved(self) -> int:
        """Read and written by one call, K and V."""
        tokens = self.count * (self.block_size if self.op == "copy_blocks" else 1)
        return 4 * tokens * self.kv_heads * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def bytes_needed(self) -> int:
        """With one layer: the pool, and twice what is moved."""
        pool = 2 * self.pool_blocks * self.kv_heads * self.block_size * self.head_dim
        return pool * getattr(torch, self.dtype).itemsize + 2 * self.bytes_moved

    @property
    def pool_blocks(self) -> int:
        return max(POOL_BLOCKS, 2 * self.count)


def contenders(problem: Problem, count: int, backends: list[str]) -> dict:
    """What to run, by name, each through `count` layers."""
    dtype = getattr(torch, problem.dtype)
    shape = (problem.kv_heads, problem.block_size, problem.head_dim)
    pools = [[torch.zeros(problem.pool_blocks, *shape, dtype=dtype) for _ in range(2)] for _ in range(count)]
    total = problem.pool_blocks * (problem.block_size if problem.op == "reshape_and_cache" else 1)
    if problem.op == "reshape_and_cache":
        # As in a prefill: whole blocks, wherever they lie; with few tokens one of each sequence.
        spread = torch.randperm(total)[: problem.count]
        packed = torch.randperm(problem.pool_blocks)[:, None] * problem.block_size + torch.arange(problem.block_size)
        slots = packed.flatten()[: problem.count] if problem.count >= 512 else spread
        at, offsets = slots // problem.block_size, slots % problem.block_size
        rows = (problem.count, problem.kv_heads, problem.head_dim)
        sources = [[torch.randn(rows, dtype=dtype) for _ in range(2)] for _ in range(count)]

        def once(pool, new):
            kernels.reshape_and_cache(*new, *pool, slots)

        def indexed(pool, new):
            for cache, values in zip(pool, new, strict=True):
                cache[at, :, offsets] = values

    else:
        pairs = torch.randperm(total)[: 2 * problem.count].view(-1, 2)
        origin, destination = pairs.unbind(1)
        sources = [[cache[: problem.count] for cache in pool] for pool in pools]

        def once(pool, new):
            kernels.copy_blocks(*pool, pairs)

        def indexed(pool, new):
            for cache in pool:
                cache.index_copy_(0, destination, cache.index_select(0, origin))

    targets = [[torch.empty_like(x) for x in new] for new in sources]

    def copied():
        for new, target in zip(sources, targets, strict=True):
            for value, there in zip(new, target, strict=True):
                there.copy_(value)

    def through(function, backend="reference"):
        def run():
            with kernels.backend(backend):
                for pool, new in zip(pools, sources, strict=True):
                    function(pool, new)

        return run

    runs = {"index": through(indexed), "copy": copied} | {name: through(once, name) for name in backends}
    agree(problem, {name: run for name, run in runs.items() if name != "copy"}, pools[0])
    return runs


def agree(problem: Problem, runs: dict, pool: list) -> None:
    """Every contender leaves the same pool behind."""
    before = [torch.randn(cache.shape).to(cache.dtype) for cache in pool]
    after = {}
    for name, run in runs.items():
        for cache, old in zip(pool, before, strict=True):
            cache.copy_(old)
        run()
        after[name] = [cache.clone() for cache in pool]
    for name, caches in after.items():
        if not all(map(torch.equal, caches, after["index"])):
            raise SystemExit(f"{problem.op} {problem.name}, {problem.dtype}: {name} wrote something else")


@torch.inference_mode()
def measure(problem: Problem, options, copy_bandwidth: float) -> list[dict]:
    """One row of results for each backend."""
    limit = int(options.max_gib * GIB)
    count = 1 if options.quick else layers_of(problem.bytes_moved, problem.bytes_needed, limit)
    times = in_turns(contenders(problem, count, options.backends), options.seconds)
    rows = []
    for backend in options.backends:
        seconds = times.median(backend) / count
        rate = problem.bytes_moved / seconds
        row = dict(
            vars(problem), case=problem.name, backend=backend, layers=count, us=seconds * 1e6, gigabytes=rate / 1e9
        )
        for peer in ("index", "copy"):
            row |= {f"{peer}_us": times.median(peer) / count * 1e6, f"times_{peer}": times.ratio(peer, backend)}
        rows.append(row | {"of_copy_bandwidth": rate / copy_bandwidth, "rounds": len(times.rounds[backend])})
    return rows


COLUMNS = {
    "index": ("index_us", "{:,.1f}"),
    "copy": ("copy_us", "{:,.1f}"),
    "times\nindex": ("times_index", "{:.2f}"),
    "times\ncopy": ("times_copy", "{:.2f}"),
    "GB/s": ("gigabytes", "{:.1f}"),
    "of copy\nbandwidth": ("of_copy_bandwidth", "{:.0%}"),
}


def show(rows: list[dict]) -> None:
    """A table for each backend, operator and dtype."""
    for part in groups(rows):
        backend, op, dtype = (part[0][name] for name in ("backend", "op", "dtype"))
        columns = {backend: ("us", "{:,.1f}"), **COLUMNS}
        console.print(table_of(part, f"{op}, {dtype}: microseconds a layer", columns))
        for peer in ("index", "copy"):
            console.print(summary(part, peer))


def main(argv: list[str] | None = None) -> None:
    parser = arguments("Writes into a paged cache against torch's indexing and against a plain copy.", SIZES, QUICK)
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="KV heads and head_dim: the demo model's")
    options = parse(parser, argv, SIZES, QUICK)
    about = prepare(options)
    others, results = Others(), []
    shape = (*SHAPES[options.shape], options.block_size)
    counts = [("reshape_and_cache", count) for count in options.tokens]
    counts += [("copy_blocks", count) for count in options.blocks]
    cases = [Problem(op, count, dtype, *shape) for dtype in options.dtypes for op, count in counts]
    for problem in tracked([case for case in cases if fits(case, options.max_gib)]):
        results += measure(problem, options, about["bandwidth"]["copy"])
    show(results)
    finish(options, about, results, others)


if __name__ == "__main__":
    main()
