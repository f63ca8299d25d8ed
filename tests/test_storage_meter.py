"""storage_meter counts the bytes of live storages, each once."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM

from hf_paged.storage_meter import PeakMeter, live_bytes, storages


class Holder:
    """A cache that owns the tensors it is given, as PagedCache does."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def storages(self):
        yield from self.tensors


def filled(layers=2, rows=3, heads=2, length=5, size=4):
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.ones(rows, heads, length, size), torch.ones(rows, heads, length, size), layer)
    return cache


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def test_dynamic_cache():
    # 2 layers, K and V, 3 rows, 2 heads, 5 positions, 4 numbers of 4 bytes
    assert live_bytes(filled()) == 2 * 2 * 3 * 2 * 5 * 4 * 4


def test_nothing_holds_nothing():
    assert live_bytes(None) == 0
    assert live_bytes(DynamicCache()) == 0


def test_shared_storage_counts_once_and_a_view_counts_whole():
    tensor = torch.zeros(100)
    assert live_bytes(Holder(tensor, tensor[:10], tensor.view(10, 10))) == 400
    assert live_bytes(Holder(tensor[:1])) == 400
    assert live_bytes(Holder(torch.zeros(100), torch.zeros(100))) == 800


def test_equal_addresses_of_empty_storages_are_not_mixed_up():
    assert len(storages(Holder(torch.empty(0), torch.empty(0)))) == 2


def test_encoder_decoder_cache_is_both():
    both = EncoderDecoderCache(filled(), filled(length=7))
    assert live_bytes(both) == live_bytes(filled()) + live_bytes(filled(length=7))


def test_what_is_no_cache_is_refused():
    with pytest.raises(ValueError, match="list"):
        live_bytes([torch.zeros(1)])


def test_peak_of_a_generation(model):
    ids = torch.tensor([[0, 3, 4, 5], [6, 7, 8, 9]])
    with PeakMeter(model) as meter:
        model.generate(ids, attention_mask=ids.ne(0).long(), max_new_tokens=6, do_sample=False)
    # the last token is never fed back: 4 of the prompt and 5 of the answer are cached
    assert (meter.rows, meter.seq_length, meter.positions, meter.forwards) == (2, 9, 18, 6)
    assert meter.peak_bytes == 2 * 2 * meter.positions * 2 * 4 * 4


def test_peak_survives_a_smaller_later_cache(model):
    with PeakMeter(model) as meter:
        for length in (9, 3):
            model(torch.ones(1, length, dtype=torch.long), past_key_values=DynamicCache(config=model.config))
    assert (meter.seq_length, meter.forwards) == (9, 2)


def test_a_cache_that_the_forward_made_is_seen(model):
    with PeakMeter(model) as meter:
        model(torch.ones(2, 3, dtype=torch.long), use_cache=True)
    assert (meter.positions, meter.forwards) == (6, 1)


def test_no_cache_and_no_hook_left_behind(model):
    with PeakMeter(model) as meter:
        model(torch.ones(1, 3, dtype=torch.long), use_cache=False)
    model(torch.ones(1, 3, dtype=torch.long), use_cache=True)
    assert (meter.peak_bytes, meter.forwards) == (0, 0)
    assert not model._forward_hooks
