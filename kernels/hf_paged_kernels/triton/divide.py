"""Division by a number that only the host knows, as a multiplication (Granlund and Montgomery 1994)."""

import functools


@functools.cache
def magic_of(divisor: int) -> tuple[int, int]:
    """(magic, shift) with n // divisor == (2 * n * magic >> 32) >> shift for 0 <= n < 2**31.

    With shift = ceil(log2(divisor)) and magic = ceil(2**(31 + shift) / divisor) < 2**32, n * magic / 2**(31 + shift)
    exceeds n / divisor by less than n / 2**31 / divisor < 1 / divisor: not enough to reach the next integer.
    """
    shift = (divisor - 1).bit_length()
    return -(-(2 ** (31 + shift)) // divisor), shift
