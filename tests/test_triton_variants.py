"""What Triton compiles is known: whatever is launched is in `variants`, and Triton adds no form of its own.

`python tests/test_triton_variants.py CHECK ARCH` does what needs a process without the interpreter, which only then
makes the kernels what they are on a GPU. A stand-in for the driver stops launches before they compile.
"""

import json
import os
import random
import re
import subprocess
import sys

import pytest
import torch

from hf_paged_kernels import triton as backend
from hf_paged_kernels.triton import aot, runtime, variants
from hf_paged_kernels.triton.tune import format_config

ARCHS = aot.SUPPORTED
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def random_calls(rng: random.Random):
    """One call of each operator with random sizes, strides, alignments and options; no values that matter."""
    dtype, block_size = rng.choice(DTYPES), rng.choice([1, 3, 16, 64, 256])
    dims = [rng.choice([8, 12, 16, 40, 64, 65, 128, 130, 256]) for _ in "kv"]
    if rng.random() < 0.5:
        dims[1] = dims[0]
    kv_heads, group, num_seqs = rng.choice([1, 2, 8]), rng.choice([1, 4, 16, 17, 71]), rng.choice([1, 2, 16, 50])
    num_tokens = num_seqs + rng.choice([0, 1, 300])

    def tensor(*shape, kind=dtype):
        start = rng.choice([0, 0, 0, 1])
        flat = torch.zeros(torch.Size(shape).numel() + start, dtype=kind)
        return flat[start:].view(shape)

    def rows(count, heads, dim):
        kind = rng.randrange(3)
        if kind == 0:
            return tensor(count, heads, dim)
        return tensor(heads, count, dim).transpose(0, 1) if kind == 1 else tensor(count, heads, 2 * dim)[..., ::2]

    kinds = rng.choice([[dtype] * 2, [rng.choice(CODED)] * 2, rng.choices([dtype, *CODED], k=2)])
    caches = [tensor(2, kv_heads, block_size, dim, kind=kind) for dim, kind in zip(dims, kinds, strict=True)]
    shapes = [(2, kv_heads, block_size), (kv_heads,)]
    scales = [tensor(*rng.choice(shapes), kind=torch.float32) if kind in CODED else None for kind in kinds]
    scales = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    slots = tensor(num_tokens, kind=torch.int64)
    yield backend.reshape_and_cache, (*(rows(num_tokens, kv_heads, d) for d in dims), *caches, slots), scales
    yield backend.copy_blocks, (*caches, tensor(rng.choice([1, 2, 16]), 2, kind=torch.int64)), scales
    options = scales | dict(scale=rng.choice([1.0, 0.125]), softcap=rng.choice([0.0, 1.0, 30.0]))
    options |= dict(sliding_window=rng.choice([0, 1, 16, 4096]), max_seq_len=rng.choice([0, 1, 16, 5000, 200_000]))
    heads = kv_heads * group
    options["sinks"] = rng.choice([None, tensor(heads), tensor(heads, kind=torch.float32)])
    options["seq_starts"] = rng.choice([None, tensor(num_seqs, kind=torch.int32)])
    table = tensor(num_seqs, rng.choice([1, 16, 1000]), kind=torch.int32)
    lens = tensor(num_seqs, kind=torch.int32)
    yield backend.paged_decode, (rows(num_seqs, heads, dims[0]), *caches, table, lens), options
    bounds = tensor(num_seqs + 1, kind=torch.int32)
    options = options | {"max_query_len": rng.choice([1, 4, 16, 300])}
    yield backend.paged_prefill, (rows(num_tokens, heads, dims[0]), *caches, table, bounds, lens), options


@pytest.mark.parametrize("arch", [*ARCHS, "default", "sm_75"])
def test_what_is_launched_is_in_the_list(arch, monkeypatch):
    launched = []
    monkeypatch.setattr(runtime, "launch", lambda variant, grid, *arguments: launched.append((variant, grid)))
    monkeypatch.setattr(runtime, "architecture_of", lambda tensor: arch)
    monkeypatch.setattr(runtime, "num_sms", lambda device: 132)
    rng = random.Random(1)
    for _ in range(900):
        for operator, arguments, options in random_calls(rng):
            operator(*arguments, **options)
    known, seen = variants.variants(arch), {variant for variant, _ in launched}
    assert len(known) == len(set(known)) and seen <= set(known)
    assert len(seen) > 0.8 * len(known)  # the list is no wish list either
    assert all(0 < x < 2**31 and y < 2**16 and z < 2**16 for _, (x, y, *rest) in launched for z in [*rest, 1])
    assert any(grid[2] > 1 for variant, grid in launched if variant.kernel == "attend_kernel")


def test_there_are_few_variants():
    # Of them 27 for caches of the query's own dtype; the others read or write 8-bit codes.
    assert {arch: len(variants.variants(arch)) for arch in ARCHS} == dict.fromkeys(ARCHS, 75)


def no_interpreter():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_triton_specializes_nothing(arch):
    subprocess.run([sys.executable, __file__, "specialization", arch], check=True, env=no_interpreter())


def test_code_loads_16_bytes_at_64_bit_addresses():
    subprocess.run([sys.executable, __file__, "code", "sm_90"], check=True, env=no_interpreter())


def check_specialization(arch: str) -> None:
    """Run random calls up to the point where Triton would compile, and compare what it would with the variant.

    The host may not look into a tensor meanwhile: every bound is given, so nothing has to wait for a device.
    """
    import triton

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return aot.TARGETS[arch].gpu

    def no_look(self, *arguments):
        raise AssertionError("the host read a value of a tensor")

    triton.runtime.driver.set_active(Driver())
    runtime.architecture_of, runtime.num_sms = lambda tensor: arch, lambda device: 132
    known, asked, compiled = set(variants.variants(arch)), [], set()
    for kernel in runtime.KERNELS.values():

        def do_compile(key, signature, device, constexprs, options, attrs, warmup, kernel=kernel):
            variant = asked[-1]
            assert variant in known and runtime.KERNELS[variant.kernel] is kernel
            assert signature == variant.signature(), (signature, variant)
            names = list(signature)
            assert {names[i]: value for (i,), value in constexprs.items()} == dict(variant.constants)
            assert not any(attrs.values()), attrs
            assert {name: getattr(options, name) for name in variant.options()} == variant.options()
            compiled.add(variant)

        kernel.jit._do_compile = do_compile
    launch = runtime.launch
    runtime.launch = lambda variant, *rest: (asked.append(variant), launch(variant, *rest))
    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "numpy", "cpu"):
        setattr(torch.Tensor, name, no_look)
    rng = random.Random(2)
    for _ in range(900):
        for operator, arguments, options in random_calls(rng):
            operator(*arguments, **options)
    assert len(compiled) > 0.8 * len(known), len(compiled)
    print(f"{len(asked)} launches on {arch}, {len(compiled)} of {len(known)} variants, nothing specialized")


def check_code(arch: str) -> None:
    """Rows that are aligned move 16 bytes at a time, and what a row number is multiplied with is 64 bits wide."""
    for variant in (
        variants.attend(arch, "bf16", 64, True, 1),
        variants.reshape_and_cache(arch, True),
        variants.copy_blocks(arch, True),
    ):
        compiled = aot.compile_variant(arch, variant)
        ptx = compiled.asm["ptx"]
        stores = re.findall(r"st\.global\.(\S+)", ptx)
        assert set(stores) <= {"v4.b32", "b32"} and "v4.b32" in stores, stores  # b32: lse
        assert "ld.global.v4.b32" in ptx and "ld.global.b16" not in ptx
        if variant.kernel == "attend_kernel":
            copies = re.findall(r"cp\.async\.cg\.shared\.global .*?(0x\w+)", ptx)
            assert copies and set(copies) == {"0x10"}
        if variant.kernel != "copy_blocks_kernel":  # where the place within a block is a product, too
            check_addresses(compiled.asm["ttir"], "bf16" if variant.dtype else "i16")
    print("16 bytes at a time, 64-bit addresses")


def check_addresses(ttir: str, element: str) -> None:
    """Offsets into the caches' memory that come from a product are int64; int32 are only lanes of a row."""
    made_by = {}
    for line in ttir.splitlines():
        if match := re.match(r"\s*(%[\w#]+)(?::\d+)? = (\S+) ([^:]*)", line):
            made_by[match[1]] = match[2], re.findall(r"%[\w#]+", match[3])

    def operations(value):
        name, operands = made_by.get(value, ("argument", []))
        return {name}.union(*map(operations, operands)) if name != "arith.extsi" else {name}

    hint = r"(?:\{[^}]*\} )?"
    found = re.findall(rf"tt\.addptr %\S+, (%\S+) {hint}: \S*ptr<{element}>+, (?:tensor<[\dx]*)?(i32|i64)", ttir)
    widths = {width for offset, width in found if "arith.muli" in operations(offset)}
    assert len(found) >= 6 and widths == {"i64"}, found


# -- configuration files ---------------------------------------------------------------------------


def test_configuration_files():
    assert {path.stem for path in variants.CONFIGS.glob("*.json")} == {*ARCHS, "default"}
    for path in variants.CONFIGS.glob("*.json"):
        config = json.loads(path.read_text())
        assert format_config(config) == path.read_text()
        assert "measured" in config["note"].lower()
        for shape, dtypes in config["attend"].items():
            pads = ["256"] if shape.startswith("unaligned") else list(map(str, variants.HEAD_PADS))
            fewer = shape in ("narrow_8bit", "wide_8bit") and list(dtypes) == ["bf16", "fp16"]  # float32: unaligned
            assert (fewer or list(dtypes) == list(variants.DTYPES)) and all(
                list(tiles) == pads for tiles in dtypes.values()
            )
            for tile in (tile for tiles in dtypes.values() for tile in tiles.values()):
                assert list(tile) == ["BLOCK_M", "BLOCK_N", "num_warps", "num_stages"]
                assert all(size >= 16 and size & (size - 1) == 0 for size in (tile["BLOCK_M"], tile["BLOCK_N"]))
    assert variants.config("sm_75") == variants.config("default") != variants.config("sm_90")


def test_dispatch_takes_the_shape_that_fits():
    narrow, wide = (variants.attend("sm_90", "bf16", 100, True, rows) for rows in (16, 17))
    assert narrow["BLOCK_M"] == 16 < wide["BLOCK_M"] and narrow["HEAD_PAD"] == wide["HEAD_PAD"] == 128
    assert narrow["VEC"] == 8 and variants.attend("sm_90", "fp32", 8, True, 1)["VEC"] == 4
    assert variants.attend("sm_90", "bf16", 8, True, 1)["HEAD_PAD"] == 64
    assert (
        str(narrow) == "attend_kernel bf16 KEY=own VALUE=own HEAD_PAD=128 VEC=8 BLOCK_M=16 BLOCK_N=64 warps=4 stages=5"
    )


if __name__ == "__main__":
    {"specialization": check_specialization, "code": check_code}[sys.argv[1]](sys.argv[2])
