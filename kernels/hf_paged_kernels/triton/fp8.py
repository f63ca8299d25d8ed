"""The codec of 8-bit keys and values on a GPU: `quantize`'s numbers, bit for bit.

Contract: `encode` and `decode` take one of three formats, and both work on the bits of numbers, as integers. Triton's
own conversions would not do: that from float32 to float8 is wrong in its interpreter where rounding carries into the
exponent, and that of e4m3 is missing before sm_89, while gfx942 knows another e4m3 (the one without infinities *and*
without a negative zero). Where a GPU reads our e4m3 by itself, the format "e4m3nv" says so.

A format is a name where the compiler knows it, or "any": then its number says at run time which it is. Both go
through the same few operations, whose parameters the compiler folds where it can.
"""

import torch
import triton
import triton.language as tl

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
NUMBERS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}

E5M2 = tl.constexpr(1)
INT8 = tl.constexpr(2)


@triton.jit
def decode(code, DTYPE: tl.constexpr, FORMAT: tl.constexpr, number):
    """Codes (uint8) as numbers of DTYPE, float16 or wider: exactly, NaN included.

    number: of the format, if that is "any"; else not read.
    """
    if FORMAT == "e4m3nv":
        return code.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif FORMAT == "any":
        return _decode(code, number).to(DTYPE)
    else:
        return _decode(code, 0 if FORMAT == "e4m3" else (1 if FORMAT == "e5m2" else 2)).to(DTYPE)


@triton.jit
def _decode(code, number):
    """float16 holds all three formats. The bits of e5m2 are the upper half of its own; those of e4m3, one place
    further down, have an exponent that is 8 too small, denormals like the others; and int8, as the last bits of
    1024 .. 1279, whose steps are 1, are 1152 too large."""
    is_e5m2 = number == E5M2
    is_int8 = number == INT8
    bits = code.to(tl.int32)
    sign_up = tl.where(is_int8, 0, 8)
    magnitude_up = tl.where(is_int8, 0, tl.where(is_e5m2, 8, 7))
    half = ((bits & 0x80) << sign_up) | ((bits & 0x7F) << magnitude_up)
    half = half ^ tl.where(is_int8, 0x6480, 0)  # 1024, and the sign bit turned: -128 becomes 0
    x = half.to(tl.int16).to(tl.float16, bitcast=True)
    factor = tl.where(is_int8 | is_e5m2, 1.0, 256.0).to(tl.float16)
    offset = tl.where(is_int8, 1152.0, 0.0).to(tl.float16)
    # NaN of e5m2 is one of float16 already: its mask lets no code through.
    mask = tl.where(is_int8, 0xFF, tl.where(is_e5m2, 0, 0x7F))
    nan = tl.where(is_int8, 0x80, 0x7F)
    return tl.where((bits & mask) == nan, float("nan"), x * factor - offset)


@triton.jit
def largest_of(number):
    """The largest number of a format, QMAX."""
    return tl.where(number == INT8, 127.0, tl.where(number == E5M2, 57344.0, 448.0))


@triton.jit
def encode(x, scale, number):
    """Codes (uint8) of x / scale, both float32, to nearest even; see `quantize`."""
    is_e5m2 = number == E5M2
    is_int8 = number == INT8
    quotient = tl.div_rn(x, scale).to(tl.int32, bitcast=True)
    magnitude = quotient & 0x7FFFFFFF
    infinite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0x7F800000
    lost = (magnitude > 0x7F800000) | (infinite & (number != E5M2))
    negative = quotient < 0
    # As integers magnitudes are in the order of the numbers. 448 is 0x43E00000, and so on.
    magnitude = tl.minimum(magnitude, tl.where(is_int8, 0x42FE0000, tl.where(is_e5m2, 0x47600000, 0x43E00000)))

    # Below the format's normal numbers steps are equal: 1 for int8, all of whose numbers are such, 2**-9 and 2**-16.
    # They are the last bits of numbers of 2**23 steps, and the sum with 2**23 steps is rounded to them.
    base = tl.where(is_int8, 0x4B000000, tl.where(is_e5m2, 0x43000000, 0x46800000))
    total = magnitude.to(tl.float32, bitcast=True) + base.to(tl.float32, bitcast=True)
    small = total.to(tl.int32, bitcast=True) - base

    # Above, the mantissa is cut to 2 or 3 bits; half a step less the last bit that stays makes it nearest even, and a
    # carry goes to the exponent, whose bias becomes 15 or 7 from 127.
    cut = tl.where(is_e5m2, 21, 20)
    normal = magnitude + ((1 << (cut - 1)) - 1) + ((magnitude >> cut) & 1)
    normal = (normal >> cut) - tl.where(is_e5m2, (127 - 15) << 2, (127 - 7) << 3)
    first_normal = tl.where(is_int8, 0x7F800000, tl.where(is_e5m2, 0x38800000, 0x3C800000))  # 2**-14, 2**-6
    code = tl.where(magnitude < first_normal, small, normal)
    code = tl.where(infinite, 0x7C, code)  # or `lost`
    signed = tl.where(is_int8, -code, code | 0x80)
    code = tl.where(negative, signed, code)
    return tl.where(lost, tl.where(is_int8, 0x80, 0x7F), code).to(tl.uint8)
