"""The operators in Triton, for the GPUs that it reaches: float32, bfloat16 and float16, head sizes up to 256, and
caches of 8-bit codes.

Contract: a backend (see the package's `__init__`) whose arguments are already checked. Importing it needs no GPU;
calling it on CPU tensors raises RuntimeError, unless TRITON_INTERPRET=1 was set before anything imported triton:
then the kernels run in Python. `python -m hf_paged_kernels.triton.aot` compiles all of `variants` without a GPU,
`python -m hf_paged_kernels.triton.tune` measures configurations on one.
"""

from .copy_blocks import copy_blocks
from .paged_attention import paged_decode, paged_prefill
from .reshape_and_cache import reshape_and_cache

__all__ = ["copy_blocks", "paged_decode", "paged_prefill", "reshape_and_cache"]
