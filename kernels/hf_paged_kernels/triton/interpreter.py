"""Triton's interpreter, mended where it would not run these kernels as a GPU does.

Contract: `mend`, once a process and only where kernels are interpreted, changes three things in versions 3.6 to 3.9:
- bfloat16 is rounded to nearest even, as the compiled conversion does; the interpreter cuts the bits off.
- tl.dot multiplies bfloat16 numbers; the interpreter multiplies the integers of their bits.
- a number becomes a loop bound also under NumPy 2.4, which refuses int() of an array of one element (3.6 alone).
"""

import functools

import triton.language as tl


@functools.cache
def mend() -> None:
    from triton.runtime import interpreter

    builder, np = interpreter.InterpreterBuilder, interpreter.np
    extend, truncate, dot, patch_tensor = (
        builder.create_fp_ext,
        builder.create_fp_trunc,
        builder.create_dot,
        interpreter._patch_lang_tensor,
    )

    def widened(handle):
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_fp_ext(self, source, target):
        if (source.dtype.scalar, target.scalar) == (tl.bfloat16, tl.float32):
            return widened(source)
        return extend(self, source, target)

    def create_fp_trunc(self, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return truncate(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(source.data), (bits >> 16) | 0x40, rounded)
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    def create_dot(self, a, b, *rest):
        a, b = (widened(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.create_fp_ext, builder.create_fp_trunc, builder.create_dot = create_fp_ext, create_fp_trunc, create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor
