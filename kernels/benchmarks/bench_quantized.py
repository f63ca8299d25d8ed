"""paged_decode over 8-bit pages on a CPU, as ratios to pages of the queries' own dtype, measured in one run.

    python kernels/benchmarks/bench_quantized.py                  the demo model's heads, bfloat16
    python kernels/benchmarks/bench_quantized.py --shape llama    32 query heads over 8 of 128

Every format has a scale for each token and head. A ratio says how many times as long pages of the own dtype take: above
1, codes are faster. The 8-bit pages hold the own ones' numbers, and what comes out must be what the reference makes of
those codes. "write" is the ratio of reshape_and_cache of one token a sequence, where quantising costs something.
"""

from __future__ import annotations

import gc
import itertools
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

SHAPES = {"demo": (9, 3, 64), "llama": (32, 8, 128)}  # query heads, KV heads, head_dim
FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
SIZES = dict(batches=[8, 32], contexts=[1024, 4096])
QUICK = dict(batches=[2], contexts=[64])
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}  # of the largest value


@dataclass
class Problem:
    """One token of each of num_seqs sequences of equal length."""

    num_seqs: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    op: str = "paged_decode"

    @property
    def name(self) -> str:
        return f"{self.num_seqs} x {self.length}"

    @property
    def kv_bytes(self) -> int:
        """K and V in their own dtype."""
        return 2 * self.num_seqs * self.kv_heads * self.length * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def bytes_needed(self) -> int:
        """With one layer: the pool, and each format's."""
        return 4 * self.kv_bytes


class Pools:
    """The same keys and values in several layers, in one storage format (None: their own)."""

    def __init__(self, caches: list[torch.Tensor], form: torch.dtype | None, count: int):
        self.scales = {}
        if form is not None:
            scales = [kernels.dynamic_scale(cache, form) for cache in caches]
            caches = [kernels.quantize(x, scale[..., None], form) for x, scale in zip(caches, scales, strict=True)]
            self.scales = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        self.layers = [caches] + [[cache.clone() for cache in caches] for _ in range(count - 1)]


def contenders(problem: Problem, backend: str, count: int) -> tuple[dict, dict]:
    """Decodes and writes by the name of the format, each through all layers."""
    dtype, shape = getattr(torch, problem.dtype), (problem.kv_heads, problem.block_size, problem.head_dim)
    blocks = problem.length // problem.block_size
    table = torch.randperm(problem.num_seqs * blocks).view(problem.num_seqs, blocks).int()
    lens = torch.full((problem.num_seqs,), problem.length, dtype=torch.int32)
    caches = [torch.randn(table.numel(), *shape, dtype=dtype) for _ in range(2)]
    query = torch.randn(problem.num_seqs, problem.heads, problem.head_dim, dtype=dtype)
    new = torch.randn(problem.num_seqs, problem.kv_heads, problem.head_dim, dtype=dtype)
    last = table[:, -1].long() * problem.block_size + problem.block_size - 1
    options = dict(scale=problem.head_dim**-0.5, max_seq_len=problem.length)
    decodes, writes = {}, {}
    for name, form in {"own": None, **FORMATS}.items():
        pools = Pools(caches, form, count)

        def decode(backend=backend, pools=pools):
            with kernels.backend(backend):
                for layer in pools.layers:
                    out = kernels.paged_decode(query, *layer, table, lens, **options, **pools.scales)
            return out

        def write(pools=pools):
            with kernels.backend(backend):
                for layer in pools.layers:
                    kernels.reshape_and_cache(new, new, *layer, last, **pools.scales)

        agree(f"{problem.name} {problem.dtype} {name} {backend}", decode(), decode("reference"), problem.dtype)
        decodes[name], writes[name] = decode, write
    return decodes, writes


def agree(name: str, got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    """A contender that computes something else would be no peer."""
    error, largest = (got.double() - want.double()).abs().max(), want.double().abs().max()
    if not error <= TOLERANCE[dtype] * largest:
        raise SystemExit(f"{name}: differs from the reference by {error:.3g}, the largest value is {largest:.3g}")


@torch.inference_mode()
def measure(problem: Problem, options) -> list[dict]:
    """One row of results for each backend."""
    count = 1 if options.quick else layers_of(problem.kv_bytes, problem.bytes_needed, int(options.max_gib * GIB))
    rows = []
    for backend in options.backends:
        decodes, writes = contenders(problem, backend, count)
        times, written = in_turns(decodes, options.seconds), in_turns(writes, options.seconds / 8)
        row = dict(vars(problem), case=problem.name, backend=backend, layers=count, rounds=len(times.rounds["own"]))
        row |= {
            "us": times.median("own") / count * 1e6,
            "gigabytes": problem.kv_bytes * count / times.median("own") / 1e9,
        }
        for name in FORMATS:
            row |= {f"{name}_us": times.median(name) / count * 1e6, f"times_{name}": times.ratio("own", name)}
            row |= {f"write_{name}_us": written.median(name) / count * 1e6}
        rows.append(row | {"write_us": written.median("own") / count * 1e6})
    return rows


COLUMNS = {
    "own\nGB/s": ("gigabytes", "{:.1f}"),
    **{f"{name}\nus": (f"{name}_us", "{:,.0f}") for name in FORMATS},
    **{f"times\n{name}": (f"times_{name}", "{:.2f}") for name in FORMATS},
    "write\nown us": ("write_us", "{:,.0f}"),
    **{f"write\n{name}": (f"write_{name}_us", "{:,.0f}") for name in FORMATS},
}


def show(rows: list[dict]) -> None:
    """A table for each backend and dtype, with the least ratios."""
    for part in groups(rows):
        backend, op, dtype = (part[0][name] for name in ("backend", "op", "dtype"))
        columns = {f"{backend}\nown us": ("us", "{:,.0f}"), **COLUMNS}
        console.print(
            table_of(part, f"{op}, queries {dtype}: microseconds a layer, times as fast as {dtype} pages", columns)
        )
        for name in FORMATS:
            console.print(summary(part, name))


def main(argv: list[str] | None = None) -> None:
    parser = arguments("Paged attention over 8-bit pages against pages of the own dtype.", SIZES, QUICK)
    parser.set_defaults(dtypes=["bfloat16"])
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="query heads, KV heads, head_dim: the demo's")
    options = parse(parser, argv, SIZES, QUICK)
    shape = (*SHAPES[options.shape], options.block_size)
    cases = [
        Problem(batch, length, *shape, dtype)
        for dtype, batch, length in itertools.product(options.dtypes, options.batches, options.contexts)
    ]
    for problem in cases:
        if problem.length % problem.block_size:
            raise SystemExit(f"contexts must be multiples of the block size {problem.block_size}, got {problem.length}")
    about = prepare(options)
    others, results = Others(), []
    for problem in tracked([case for case in cases if fits(case, options.max_gib)]):
        results += measure(problem, options)
        gc.collect()
    show(results)
    finish(options, about, results, others)


if __name__ == "__main__":
    main()
