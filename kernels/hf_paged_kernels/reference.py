"""Plain-torch oracle of every operator, on any device.

Contract: the functions here define what an operator means; every other backend is tested against them.
Arguments arrive already checked (see the package's `__init__`, which also documents shapes and units).
float16 and bfloat16 accumulate in float32, float32 and float64 in themselves; autocast is kept out.
No autograd is recorded. A slot that no query may read never reaches the output, NaN included.

Sources: PagedAttention, Kwon et al. 2023 (arXiv 2309.06180); grouped-query attention, Ainslie et al.
2023 (2305.13245); softmax statistics (lse), Dao et al. 2022 (2205.14135); softcap, Gemma 2 report 2024
(2408.00118); attention sinks, Xiao et al. 2023 (2309.17453), as learned logits in gpt-oss (2508.10925).
"""

import torch

from .quantize import QMAX, dequantize, dynamic_scale, quantize

# Bounds of the temporaries, chosen on a CPU: tiles that stay in its caches beat larger ones.
DECODE_TILE_BYTES = 4 * 2**20  # gathered K and V of one tile of sequences
PREFILL_TILE_BYTES = 2 * 2**20  # attention scores of one tile of queries; 4 queries at least


def slot_ids(block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of every entry of a block table, in order.

    block_tables [..., MB] integer block ids, -1 for none -> [..., MB * block_size] int64 slots, -1 for none.
    int64 before the product: block 2**27 of 256 tokens starts at slot 2**35.
    """
    blocks = block_tables.to(torch.int64).unsqueeze(-1)
    offsets = torch.arange(block_size, device=block_tables.device)
    return torch.where(blocks < 0, -1, blocks * block_size + offsets).flatten(-2)


# Not no_grad: caches made under inference_mode could not be written outside it.
@torch.inference_mode()
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the K and V of T tokens into their slots, in place (Kwon et al. 2023, section 4), as codes where the
    cache holds codes; then scales of tokens and heads are written with them."""
    if slot_mapping.shape[0] == 0:
        return
    # Boolean indexing would wait for the device. Instead a token without a slot repeats the write of the
    # first token that has one (same slot, same bytes); if none has one, slot 0 receives what it holds.
    kept = slot_mapping >= 0
    tokens = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    tokens = torch.where(kept, tokens, kept.to(torch.uint8).argmax())
    slots = slot_mapping.index_select(0, tokens)
    none_kept = slots[:1, None, None] < 0  # [1,1,1]: after the redirection the first slot is -1 only then
    slots = slots.clamp(min=0)
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        rows = rows.index_select(0, tokens)
        if scale is not None:
            dynamic = scale.dim() == 3
            new = dynamic_scale(rows, cache.dtype) if dynamic else scale
            rows = quantize(rows, new[None] if new.dim() == 2 and not dynamic else new[..., None], cache.dtype)
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
            if dynamic:
                scale[blocks, :, offsets] = torch.where(none_kept[..., 0], scale[0, :, 0], new)
        cache[blocks, :, offsets] = torch.where(none_kept, cache[0, :, 0], rows)


@torch.inference_mode()
def copy_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pairs: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy whole blocks and the scales of their tokens, in place; copy-on-write (Kwon et al. 2023, section 4.4)."""
    if pairs.shape[0] == 0:
        return
    scales = [scale for scale in (k_scale, v_scale) if scale is not None and scale.dim() == 3]
    for blocks in (_bytes(key_cache), _bytes(value_cache), *scales):
        # index_select makes a copy, so every source is read before any destination is written.
        blocks.index_copy_(0, pairs[:, 1], blocks.index_select(0, pairs[:, 0]))


@torch.no_grad()
def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    return_lse: bool = False,
    max_seq_len: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
):
    """Attention of one new token per sequence: gather the blocks, mask by position, attend.

    Each sequence gathers from its own first visible block, so a window costs its width, not the context.
    """
    num_seqs, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, head_dim_v = value_cache.shape
    max_blocks = block_tables.shape[1]
    acc = _accumulator(query.dtype)
    grouped = query.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
    out, lse = _outputs_of_nothing(query, head_dim_v, sinks)

    ends = seq_lens.to(torch.int64)
    firsts = torch.zeros_like(ends) if seq_starts is None else seq_starts.to(torch.int64)
    if sliding_window:
        firsts = torch.maximum(firsts, ends - sliding_window)
    firsts = firsts.clamp(min=0)
    first_blocks = firsts // block_size
    width = _decode_width(ends, first_blocks, max_blocks, block_size, sliding_window, max_seq_len)
    if width == 0:
        return (out, lse) if return_lse else out

    columns = first_blocks[:, None] + torch.arange(width, device=query.device)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=query.device)).flatten(1)
    visible = (positions >= firsts[:, None]) & (positions < ends[:, None])
    # Columns past the table and entries of -1 become something readable, which the mask hides.
    blocks = block_tables.gather(1, columns.clamp(max=max_blocks - 1)).clamp(min=0)

    bytes_per_seq = width * block_size * num_kv_heads * (head_dim + head_dim_v) * acc.itemsize
    tile = max(1, DECODE_TILE_BYTES // bytes_per_seq)
    k_scratch, v_scratch = _scratch(key_cache, blocks[:tile]), _scratch(value_cache, blocks[:tile])
    for begin in range(0, num_seqs, tile):
        rows = slice(begin, begin + tile)
        seen = visible[rows]
        k = _widened(_gather(key_cache, blocks[rows], k_scratch), k_scale, blocks[rows], acc)
        v = _gather(value_cache, blocks[rows], v_scratch)
        if v_scale is None:
            _zero_hidden(v, seen)
        v = _widened(v, v_scale, blocks[rows], acc)
        if v_scale is not None:  # a scale that is not seen may be NaN, too
            _zero_hidden(v, seen)
        q = grouped[rows].to(acc)
        tile_out, tile_lse = _attend(q, k, v, seen[:, None, None, None], scale, softcap, sinks)
        out[rows] = tile_out.flatten(1, 3)
        lse[rows] = tile_lse.flatten(1)
    return (out, lse) if return_lse else out


@torch.no_grad()
def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    return_lse: bool = False,
    max_seq_len: int | None = None,
    max_query_len: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
):
    """Causal attention of packed chunks: one sequence at a time, in tiles of queries.

    A tile multiplies only the positions that some query of it may see, so neither what lies behind the
    window nor what lies after the tile costs anything. The loop needs the lengths on the host anyway, so
    max_seq_len and max_query_len are not used here.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, head_dim_v = value_cache.shape
    acc = _accumulator(query.dtype)
    out, lse = _outputs_of_nothing(query, head_dim_v, sinks)
    bounds, lens = query_start_loc.tolist(), seq_lens.tolist()
    starts = [0] * len(lens) if seq_starts is None else seq_starts.tolist()
    _check_host_values(bounds, lens, num_tokens, block_tables.shape[1] * block_size)

    for seq, (begin, end, seq_len, start) in enumerate(zip(bounds, bounds[1:], lens, starts, strict=False)):
        shift = seq_len - end  # query row t sits at position t + shift
        first = _first_visible(begin + shift, start, sliding_window)
        if begin == end or first >= seq_len:
            continue
        first_block = first // block_size
        base = first_block * block_size  # position of the first gathered slot
        blocks = block_tables[seq, first_block : -(-seq_len // block_size)][None]  # all are read: none is -1
        k = _widened(_gather(key_cache, blocks, _scratch(key_cache, blocks)), k_scale, blocks, acc)
        v = _widened(_gather(value_cache, blocks, _scratch(value_cache, blocks)), v_scale, blocks, acc)
        tile = max(4, PREFILL_TILE_BYTES // (num_heads * (seq_len - first) * acc.itemsize))
        for row in range(begin, end, tile):
            stop_row = min(row + tile, end)
            low = _first_visible(row + shift, start, sliding_window)
            stop = stop_row + shift
            if low >= stop:
                continue
            # Every position in [low, stop) is seen by some query of the tile: nothing unread is multiplied.
            tile_k, tile_v = k[:, :, low - base : stop - base], v[:, :, low - base : stop - base]
            at = torch.arange(row + shift, stop, device=query.device)[:, None]
            positions = torch.arange(low, stop, device=query.device)
            visible = positions <= at
            if sliding_window:
                visible &= positions > at - sliding_window
            q = query[row:stop_row].to(acc).view(1, stop_row - row, num_kv_heads, -1, head_dim)
            q = q.permute(0, 2, 3, 1, 4)
            tile_out, tile_lse = _attend(q, tile_k, tile_v, visible, scale, softcap, sinks)
            out[row:stop_row] = tile_out[0].flatten(0, 1).transpose(0, 1)
            lse[row:stop_row] = tile_lse[0].flatten(0, 1).transpose(0, 1)
    return (out, lse) if return_lse else out


def _attend(q, k, v, visible, scale, softcap, sinks):
    """Softmax attention with its statistics.

    q [B,KH,G,R,Dk], k [B,KH,L,Dk], v [B,KH,L,Dv], visible bool that broadcasts to [B,KH,G,R,L], sinks [H]
    -> out [B,KH,G,R,Dv], lse [B,KH,G,R]. The G query heads of a group share one product, K is not repeated.
    A row that sees nothing has out 0 and lse -inf (the sink, where there is one).
    """
    _, num_kv_heads, group, rows, _ = q.shape
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.matmul((q * scale).flatten(2, 3), k.mT).unflatten(2, (group, rows))
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(~visible, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sinks = sinks.to(scores.dtype).view(num_kv_heads, group, 1, 1)
            top = torch.maximum(top, sinks)
        top.masked_fill_(top == float("-inf"), 0)  # -inf - -inf would be NaN
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += (sinks - top).exp()
        out = torch.matmul(weights.flatten(2, 3), v).unflatten(2, (group, rows))
        out /= total.masked_fill(total == 0, 1)
        return out, (top + total.log()).squeeze(-1)


def _scratch(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Room for `_gather` of these blocks; made once a call, since fresh memory costs more than the copy."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    return cache.new_empty(blocks.shape[0], num_kv_heads, blocks.shape[1] * block_size, head_dim)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """[num_blocks, KH, block_size, D] and block ids [B, n], none of them -1 -> [B, KH, n * block_size, D].

    Indexing block and head together puts a head's tokens in order in one copy, into scratch; int64
    before the product.
    """
    _, num_kv_heads, block_size, head_dim = cache.shape
    heads = torch.arange(num_kv_heads, device=cache.device)[:, None]
    rows = (blocks.to(torch.int64)[:, None] * num_kv_heads + heads).flatten()
    gathered = scratch[: blocks.shape[0]]
    run = block_size * head_dim
    torch.index_select(_bytes(cache).view(-1, run), 0, rows, out=_bytes(gathered).view(-1, run))
    return gathered


def _widened(gathered: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, acc: torch.dtype):
    """What `_gather` returned for these blocks, as values that are computed with: [B, KH, L, D].

    scale  [num_blocks, KH, block_size] or [KH], of codes; else None
    """
    if scale is None:
        return gathered.to(acc)
    if scale.dim() == 3:
        rows = scale.unsqueeze(-1)
        scale = _gather(rows, blocks, _scratch(rows, blocks))
    else:
        scale = scale[:, None, None]
    return dequantize(gathered, scale, acc)


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    """A cache of codes as one of bytes: torch indexes those, too. Any other cache as it is."""
    return cache.view(torch.uint8) if cache.dtype in QMAX else cache


def _zero_hidden(v: torch.Tensor, seen: torch.Tensor) -> None:
    """Zero v [B, KH, L, D], in place, where seen [B, L] is false: a weight of 0 would not silence NaN.

    By and-ing bits, which on a CPU is ten times as fast as masked_fill_ under a broadcast mask.
    """
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[v.itemsize]
    v.view(bits).bitwise_and_(-seen.to(bits)[:, None, :, None])  # -1 has every bit set


def _decode_width(ends, first_blocks, max_blocks, block_size, sliding_window, max_seq_len) -> int:
    """Blocks to gather for each sequence: exact from the tensors, or a host bound that spares the sync."""
    if ends.shape[0] == 0:
        return 0
    if max_seq_len is None:
        longest = int(ends.max())
        if longest > max_blocks * block_size:
            raise ValueError(_too_long(longest, max_blocks * block_size))
        return max(0, int((-(-ends // block_size) - first_blocks).max()))
    width = min(-(-max_seq_len // block_size), max_blocks)
    if sliding_window:  # w tokens touch most blocks when the first of them is the last of its block
        width = min(width, (sliding_window + block_size - 2) // block_size + 1)
    return width


def _first_visible(position: int, start: int, sliding_window: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, start, position - sliding_window + 1 if sliding_window else 0)


def _outputs_of_nothing(query, head_dim_v, sinks):
    """What queries without any visible position return: zeros, and -inf or the sink."""
    num_rows, num_heads, _ = query.shape
    out = query.new_zeros(num_rows, num_heads, head_dim_v)
    lse = torch.full((num_rows, num_heads), float("-inf"), dtype=torch.float32, device=query.device)
    if sinks is not None:
        lse[:] = sinks
    return out, lse


def _check_host_values(bounds, lens, num_tokens, capacity) -> None:
    """Values that only a host copy can show; the shapes were checked before."""
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > num_tokens:
        raise ValueError(f"query_start_loc: expected a rise within 0..{num_tokens}, got {bounds}")
    if lens and max(lens) > capacity:
        raise ValueError(_too_long(max(lens), capacity))


def _too_long(longest: int, capacity: int) -> str:
    return f"seq_lens: expected at most {capacity} tokens, what block_tables can hold, got {longest}"


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
