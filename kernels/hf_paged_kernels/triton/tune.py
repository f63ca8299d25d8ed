"""Measures tile sizes on the GPU at hand and writes them into its configuration file.

    python -m hf_paged_kernels.triton.tune [--shapes narrow wide] [--dtypes bf16] [--dry-run]

Contract: for each entry of `attend_kernel` that is asked for, every candidate first has to give the reference's
numbers on the card, then the fastest by median time is kept; the other entries stay as they are. Decode is timed
on 16 sequences of 4,096 tokens, prefill on 2,048 tokens after 2,048; entries for 8-bit caches, which all formats
share, on float8_e4m3fn with a scale for each token and head. Needs a GPU, and minutes for each entry.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator

import torch
import triton

from .. import reference
from ..quantize import dynamic_scale, quantize
from . import runtime, variants
from .paged_attention import paged_decode, paged_prefill

KV_HEADS, GROUP, BLOCK_SIZE, CONTEXT = 8, 4, 16, 4096
CANDIDATES = {
    "narrow": {"BLOCK_M": [16], "BLOCK_N": [16, 32, 64, 128], "num_warps": [2, 4, 8], "num_stages": [2, 3, 4, 5]},
    "wide": {"BLOCK_M": [32, 64, 128], "BLOCK_N": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3]},
    "unaligned": {"BLOCK_M": [16], "BLOCK_N": [16, 32], "num_warps": [4, 8], "num_stages": [1, 2]},
}
CANDIDATES |= {f"{shape}_8bit": axes for shape, axes in CANDIDATES.items()}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 3e-3}  # far above rounding, far below a wrong tile


def candidates(shape: str) -> Iterator[dict]:
    """Entries of a configuration file that are worth trying."""
    axes = CANDIDATES[shape]
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def problem(shape: str, dtype: torch.dtype, head_pad: int, device: str):
    """(operator, its name in `reference`, arguments, options): one call of the kind that an entry is for."""
    kind, _, coded = shape.partition("_")
    head_dim = head_pad - 1 if kind == "unaligned" else head_pad
    num_seqs, num_queries = (1, CONTEXT // 2) if kind == "wide" else (16, 1)
    max_blocks = CONTEXT // BLOCK_SIZE
    caches = [
        torch.randn(num_seqs * max_blocks, KV_HEADS, BLOCK_SIZE, head_dim, dtype=dtype, device=device) for _ in "kv"
    ]
    query = torch.randn(num_seqs * num_queries, KV_HEADS * GROUP, head_dim, dtype=dtype, device=device)
    table = torch.randperm(num_seqs * max_blocks, device=device).int().view(num_seqs, max_blocks)
    lens = torch.full((num_seqs,), CONTEXT, dtype=torch.int32, device=device)
    options = dict(scale=head_dim**-0.5, max_seq_len=CONTEXT)
    if coded:
        scales = [dynamic_scale(cache, torch.float8_e4m3fn) for cache in caches]
        caches = [quantize(x, s[..., None], torch.float8_e4m3fn) for x, s in zip(caches, scales, strict=True)]
        options.update(zip(("k_scale", "v_scale"), scales, strict=True))
    if kind != "wide":
        return paged_decode, "paged_decode", (query, *caches, table, lens), options
    bounds = torch.tensor([0, num_queries], dtype=torch.int32, device=device)
    options["max_query_len"] = num_queries
    return paged_prefill, "paged_prefill", (query, *caches, table, bounds, lens), options


def use(arch: str, shape: str, dtype: str, head_pad: int, entry: dict) -> None:
    """Let dispatch take an entry from now on."""
    variants.config(arch)["attend"][shape][dtype][str(head_pad)] = entry
    variants.attend.cache_clear()


def best(arch: str, shape: str, dtype: str, head_pad: int, device: str) -> tuple[dict, float]:
    """The fastest entry and its median milliseconds; the one in use counts as a candidate."""
    torch_dtype = next(key for key, name in runtime.TYPES.items() if name == dtype)
    operator, name, arguments, options = problem(shape, torch_dtype, head_pad, device)
    wanted = getattr(reference, name)(*arguments, **options).float()
    current = variants.config(arch)["attend"][shape][dtype][str(head_pad)]
    tried, chosen = [current, *(entry for entry in candidates(shape) if entry != current)], None
    for entry in tried:
        use(arch, shape, dtype, head_pad, entry)
        try:
            error = (operator(*arguments, **options).float() - wanted).abs().max().item()
        except Exception as failure:  # too much shared memory, or a tile that Triton cannot compile
            print(f"    {entry}: {type(failure).__name__}")
            continue
        if not error <= TOLERANCE[dtype] * wanted.abs().max().item():
            raise RuntimeError(
                f"{arch} {shape} {dtype} {head_pad} {entry}: wrong by {error}, which no tile size excuses"
            )
        took = triton.testing.do_bench(lambda: operator(*arguments, **options), return_mode="median")
        print(f"    {entry}: {took:.4f} ms", flush=True)
        if chosen is None or took < chosen[1]:
            chosen = entry, took
    if chosen is None:
        raise RuntimeError(f"{arch} {shape} {dtype} {head_pad}: none of {len(tried)} candidates runs")
    use(arch, shape, dtype, head_pad, chosen[0])
    return chosen


def format_config(config: dict) -> str:
    """JSON with an entry on each line."""

    def lines(value: dict, indent: str) -> str:
        if not any(isinstance(inner, dict) for inner in value.values()) and indent:
            return json.dumps(value)
        inner = [
            f"{indent}  {json.dumps(key)}: {lines(x, indent + '  ') if isinstance(x, dict) else json.dumps(x)}"
            for key, x in value.items()
        ]
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"

    return lines(config, "") + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_paged_kernels.triton.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--dtypes", nargs="+", choices=variants.DTYPES, default=list(variants.DTYPES))
    parser.add_argument("--dry-run", action="store_true", help="print the file, write nothing")
    options = parser.parse_args(arguments)
    if runtime.interpreted() or not torch.cuda.is_available():
        print("no GPU here (or TRITON_INTERPRET is set): tune measures the card whose file it writes", file=sys.stderr)
        return 2
    device = "cuda"
    arch = runtime.architecture_of(torch.empty(0, device=device))
    for shape, dtype in itertools.product(options.shapes, options.dtypes):
        for head_pad in variants.config(arch)["attend"][shape][dtype]:
            print(f"{arch} {shape} {dtype} {head_pad}", flush=True)
            entry, took = best(arch, shape, dtype, int(head_pad), device)
            print(f"  -> {entry}: {took:.4f} ms", flush=True)
    name = torch.cuda.get_device_name()
    what = f"{', '.join(options.shapes)} of {', '.join(options.dtypes)}"
    config = variants.config(arch) | {"note": f"{name}. Measured by tune, Triton {triton.__version__}: {what}."}
    path = variants.CONFIGS / f"{arch}.json"
    if options.dry_run:
        print(format_config(config))
    else:
        path.write_text(format_config(config))
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
