"""The codec of 8-bit keys and values, in plain torch: what every backend's numbers must equal, bit for bit.

Contract: a stored code times its scale is the value that attention reads. Formats are torch dtypes:

    float8_e4m3fn  4 exponent bits, 3 of mantissa, up to 448, no infinity (FP8 formats, Micikevicius et al. 2022,
                   arXiv 2209.05433)
    float8_e5m2    5 and 2, up to 57344, with infinities (likewise)
    int8           -127 to 127; -128 stands for NaN

A value is divided by its scale in float32, clamped to the format's range and rounded to nearest even. What was not a
number stays visible: NaN is stored as the code 0x7f (-128 in int8), and so is an infinity where the format has none.
"""

import torch

QMAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}

SMALLEST_SCALE = 2.0**-126  # the least normal float32: a row of zeros has a scale, too
_NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.int8: 0x80}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype holds codes, which need scales."""
    return dtype in QMAX


def dynamic_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale of each row: its largest finite magnitude becomes the format's largest number.

    x [..., D] floating -> [...] float32, 2**-126 at least.
    """
    x = x.float()
    largest = torch.where(x.isfinite(), x.abs(), 0.0).amax(-1)
    # By a tensor: a division by a Python number may become a product with its reciprocal.
    return (largest / torch.full((), QMAX[dtype], device=x.device)).clamp_(min=SMALLEST_SCALE)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of x.

    x      [...] floating, taken as float32
    scale  float32, positive, broadcasts against x
    Returns [...] of `dtype`.
    """
    x = x.float()
    scaled = x / scale
    lost = scaled.isnan()
    clamped = scaled.clamp(-QMAX[dtype], QMAX[dtype])
    if dtype is torch.float8_e5m2:
        codes = torch.where(x.isinf(), x, clamped).to(dtype)
    else:
        lost |= x.isinf()
        codes = (clamped.masked_fill(lost, 0).round() if dtype is torch.int8 else clamped).to(dtype)
    return codes.view(torch.uint8).masked_fill_(lost, _NAN[dtype]).view(dtype)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of codes: the product with the scale is made in float32 (in float64 where that is asked for).

    codes  [...] of a quantized dtype
    scale  float32, broadcasts against codes
    Returns [...] of `dtype`.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    values = codes.to(wide)
    if codes.dtype is torch.int8:
        values.masked_fill_(codes == -128, float("nan"))
    return (values * scale.to(wide)).to(dtype)
