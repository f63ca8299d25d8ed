"""The operators as torch sees them: custom ops with fakes, for torch.compile, export and tracing."""

import pytest
import torch
from kernel_cases import build

import hf_paged_kernels as kernels

BACKENDS = [name for name in ("reference", "c") if name in kernels.BACKENDS]
ops = torch.ops.hf_paged


def problem(op, **options):
    chunks = [5, 2, 0] if op == "paged_prefill" else None
    return build([9, 2, 6], chunks, window=4, softcap=2.0, sinks=True, starts=[1, 0, 2], head_dim_v=6, **options)


def arguments(case, return_lse):
    options = dict(case.options, return_lse=return_lse)
    names = ["scale", "sliding_window", "softcap", "sinks", "seq_starts", "return_lse", "max_seq_len"]
    names += ["max_query_len"] if case.op == "paged_prefill" else []
    return case.query, case.key_cache, case.value_cache, *case.index, *(options[name] for name in names)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_attention_is_a_sound_custom_op(op, return_lse, backend):
    case = problem(op)
    case.key_cache.nan_to_num_(0, 0, 0)  # opcheck compares arguments before and after: NaN is never equal
    case.value_cache.nan_to_num_(0, 0, 0)
    case.query.nan_to_num_(0)
    with kernels.backend(backend):
        torch.library.opcheck(getattr(ops, op).default, arguments(case, return_lse), test_utils=CHECKS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_is_a_sound_custom_op(backend):
    caches = torch.zeros(4, 2, 4, 6), torch.zeros(4, 2, 4, 5)
    rows = torch.randn(3, 2, 6), torch.randn(3, 2, 5)
    with kernels.backend(backend):
        torch.library.opcheck(ops.reshape_and_cache.default, (*rows, *caches, torch.tensor([3, -1, 9])))
        torch.library.opcheck(ops.copy_blocks.default, (*caches, torch.tensor([[0, 2], [2, 3]])))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_torch_compile_sees_through_without_a_graph_break(op, backend):
    case = problem(op)
    wanted = case.run(backend)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, key_cache, value_cache, rows, slots):
        kernels.reshape_and_cache(rows, rows[..., :6], key_cache, value_cache, slots)
        out, lse = getattr(kernels, op)(query * 1.0, key_cache, value_cache, *case.index, **case.options)
        return out + 1, lse

    kernels.reset_op_calls()
    rows, slots = torch.ones(1, 2, 8), torch.tensor([-1])
    with kernels.backend(backend):
        out, lse = step(case.query, case.key_cache, case.value_cache, rows, slots)
    assert torch.equal(out - 1, wanted[0] + 1 - 1) and torch.equal(lse, wanted[1])
    assert kernels.op_calls()[op] == 1 and kernels.op_calls()["reshape_and_cache"] == 1


def test_the_compiled_and_the_traced_call_refuse_what_the_plain_one_refuses():
    case = problem("paged_decode")
    with pytest.raises(Exception, match="scale: expected a number"):
        torch.compile(kernels.paged_decode, backend="eager")(
            case.query, case.key_cache, case.value_cache, *case.index, scale=None
        )


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_fake_tensors_get_the_shapes_of_real_results(op):
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = problem(op, dtype=torch.bfloat16)
    out, lse = case.run("reference")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (case.query, case.key_cache, case.value_cache, *case.index)]
        options = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
        fake_out, fake_lse = getattr(kernels, op)(*fakes, **options)
        only = getattr(kernels, op)(*fakes, **options | {"return_lse": False})
    for fake, real in ((fake_out, out), (fake_lse, lse), (only, out)):
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert fake.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_autograd_is_recorded(backend):
    case = problem("paged_decode")
    case.query.requires_grad_()
    with torch.enable_grad():
        for out in (*case.run(backend), *torch.compile(case.run, backend="eager")(backend)):
            assert not out.requires_grad
