"""Shared prefixes are never stale: weights that change, adapters, salts, and generate calls that share.

The oracle of a changed model is a fresh one that was given its weights.
"""

import accelerate
import pytest
import torch
from batcher_helpers import batcher, check, check_idle, expected, greedy, in_threads, plain
from peft_helpers import draw, lora, text, wrapped
from test_weights import swap_tensors
from tiny_models import assert_same_text, build, padded, prompts, shared
from weights_helpers import q_proj

import hf_paged
from hf_paged.adapters import BASE

ROWS = prompts((33, 21, 48))
PAGED = {"cache_implementation": "paged"}


def texts(outputs) -> list[list[int]]:
    return [list(output.output_token_ids) for output in outputs]


def fresh(model):
    """A new model with the same weights."""
    other = build("llama_gqa", seed=77)
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return other


def check_fresh(model, outputs, rows=ROWS) -> None:
    other = fresh(model)
    for row, output in zip(rows, outputs, strict=True):
        assert_same_text(other, row, list(output.output_token_ids), plain(other, row, **greedy()))


def big_step(**settings):
    """A step of an optimizer, large enough to change the text."""

    def change(model):
        weight = q_proj(model).weight
        optimizer = torch.optim.AdamW([weight], lr=0.5, **settings)
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    return change


CHANGES = {
    "adamw": big_step(),
    "adamw_fused": big_step(fused=True),
    "in_place": torch.no_grad()(lambda model: q_proj(model).weight.mul_(-1.5)),
    "data_in_place": lambda model: q_proj(model).weight.data.mul_(-1.5),
    "data_replaced": lambda model: setattr(q_proj(model).weight, "data", q_proj(model).weight.data * -1.5),
    "numpy": lambda model: q_proj(model).weight.detach().numpy().__imul__(-1.5),
    "load_state_dict": lambda model: model.load_state_dict(build("llama_gqa", seed=5).state_dict()),
    "swap_tensors": swap_tensors,
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_of_other_weights_is_used(name):
    model = build("llama_gqa")
    with batcher(model) as one:
        before = one.generate(ROWS, greedy())
        CHANGES[name](model)
        after, again = one.generate(ROWS, greedy()), one.generate(ROWS, greedy())
        check_fresh(model, after)
        assert texts(before) != texts(after) == texts(again)  # else a stale prefix would not show
        assert [output.num_cached_tokens for output in after] == [0, 0, 0]
        assert [output.num_cached_tokens for output in again] == [32, 20, 47]
        assert one.stats().prefix_invalidations > 0
        check_idle(one)


def test_a_model_made_under_inference_mode():
    with torch.inference_mode():
        model = build("llama_gqa")
    with batcher(model) as one:
        before = one.generate(ROWS, greedy())
        assert [output.num_cached_tokens for output in one.generate(ROWS, greedy())] == [32, 20, 47]
        with torch.inference_mode():
            q_proj(model).weight.mul_(-1.5)
        after = one.generate(ROWS, greedy())
        check_fresh(model, after)
        assert texts(before) != texts(after) and not any(output.num_cached_tokens for output in after)
        check_idle(one)


@pytest.mark.parametrize("name", ["adamw_fused", "in_place", "data_replaced", "load_state_dict", "told"])
def test_a_change_while_requests_run(name):
    """What is running goes on with what it has; whoever comes later computes its prompt with the new weights."""
    model = build("llama_gqa")
    with batcher(model) as one:
        one.generate(ROWS, greedy())
        running = one.add_request(ROWS[0], generation_config=greedy(30))
        for _ in range(4):
            one.step()
        if name == "told":
            CHANGES["data_in_place"](model)
            hf_paged.weights_changed(model)
        else:
            CHANGES[name](model)
        ids = [one.add_request(row, generation_config=greedy()) for row in ROWS]
        while one.step():
            one.check_integrity()
        outputs = [one.result(request_id) for request_id in ids]
        check_fresh(model, outputs)
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
        assert one.result(running).finish_reason == "length"
        # What ran across the change has left nothing behind.
        longer = [*ROWS[0], *one.result(running).output_token_ids, 7]
        check_fresh(model, one.generate([longer], greedy()), [longer])
        check_idle(one)


def test_steady_running_forgets_nothing():
    """Training, scoring, switching modes and asking for gradients change no weights."""
    model = build("llama_gqa")
    with batcher(model) as one:
        for turn in range(4):
            outputs = one.generate(ROWS, greedy())
            check("llama_gqa", ROWS, outputs)
            assert all(output.num_cached_tokens > 0 for output in outputs) == (turn > 0)
            model.train()
            model(torch.tensor([ROWS[1]]), labels=torch.tensor([ROWS[1]])).loss.backward()
            model.zero_grad()
            model.eval()
            q_proj(model).weight.requires_grad_(turn % 2 == 0)
            plain(model, ROWS[0], **greedy(3))
            model.generate(torch.tensor([ROWS[1]]), **greedy(3), **PAGED)
            # In the middle of a run as well.
            request_id = one.add_request(ROWS[2], generation_config=greedy())
            one.step()
            model(torch.tensor([ROWS[1]]))
            assert one.result(request_id).num_cached_tokens == 47
        assert one.stats().prefix_invalidations == 0
        check_idle(one)
    hf_paged.release(model)


def test_steady_running_of_an_offloaded_model():
    model = build("llama_gqa")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with batcher(model) as one:
        for turn in range(3):
            outputs = one.generate(ROWS, greedy(6))
            check("llama_gqa", ROWS, outputs, 6)
            assert [output.num_cached_tokens for output in outputs] == ([32, 20, 47] if turn else [0, 0, 0])
        assert one.stats().prefix_invalidations == 0
        check_idle(one)


# Adapters and salts

PROMPT = prompts((48,), seed=31)[0]
WHO = [(name, salt) for name in ("x", "y", BASE, None) for salt in (None, "x", "y", BASE)]


def ask(one, model, name, salt=None):
    output = one.generate([PROMPT], greedy(), adapter_name=name, cache_salt=salt)[0]
    assert_same_text(model, PROMPT, list(output.output_token_ids), text(model, name, PROMPT))
    return output.num_cached_tokens


def test_no_hit_across_adapters_and_salts():
    """Every pair of adapter and salt is a tenant of its own, also where a salt is called as an adapter is."""
    model = wrapped()
    assert len({tuple(text(model, name, PROMPT)) for name in ("x", "y", BASE)}) == 3
    with batcher(model, cache_config={"num_blocks": 400}) as one:
        assert [ask(one, model, *who) for who in WHO] == [0] * len(WHO)
        assert [ask(one, model, *who) for who in reversed(WHO)] == [47] * len(WHO)
        assert one.stats().prefix_invalidations == 0  # switching to run them is no change
        # All of them in one step, mixed.
        outputs = one.generate([PROMPT] * len(WHO), greedy(), **_columns(WHO))
        for (name, _), output in zip(WHO, outputs, strict=True):
            assert_same_text(model, PROMPT, list(output.output_token_ids), text(model, name, PROMPT))
        assert {output.num_cached_tokens for output in outputs} == {47}
        check_idle(one)


def _columns(who) -> dict:
    return {"adapter_name": [name for name, _ in who], "cache_salt": [salt for _, salt in who]}


def test_an_adapter_loaded_anew_under_its_name():
    model = wrapped()
    with batcher(model) as one:
        old = text(model, "x", PROMPT)
        assert [ask(one, model, name) for name in ("x", "y", BASE, "x")] == [0, 0, 0, 47]
        model.delete_adapter("x")
        model.add_adapter("x", lora())
        draw(model, seed=9).eval()
        assert [ask(one, model, name) for name in ("x", "y", BASE)] == [0, 0, 0]
        assert text(model, "x", PROMPT) != old and ask(one, model, "x") == 47
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".x." in name:
                    weight.data.mul_(-2)
        assert ask(one, model, "x") == 0 and ask(one, model, "x") == 47
        check_idle(one)


def test_the_active_adapter_merged_switched_and_disabled():
    model = wrapped()
    with batcher(model) as one:
        for turn in (lambda: None, lambda: model.set_adapter("y"), lambda: model.merge_adapter(["y"])):
            turn()
            right = plain(model, PROMPT, **greedy())
            outputs = one.generate([PROMPT], greedy()) + one.generate([PROMPT], greedy())
            for output, count in zip(outputs, (0, 47), strict=True):
                assert_same_text(model, PROMPT, list(output.output_token_ids), right)
                assert output.num_cached_tokens == count
        model.unmerge_adapter()
        with model.disable_adapter():
            right = plain(model, PROMPT, **greedy())
            output = one.generate([PROMPT], greedy())[0]
            assert_same_text(model, PROMPT, list(output.output_token_ids), right)
            assert output.num_cached_tokens == 0
        check_idle(one)


def test_tenants_with_other_salts_never_share():
    row = ROWS[0]
    with batcher() as one:
        for turn, count in ((0, 0), (1, 32)):
            for salt in ("tenant a", "tenant b", "", None):
                outputs = one.generate([row], greedy(), cache_salt=salt)
                check("llama_gqa", [row], outputs)
                assert outputs[0].num_cached_tokens == count, (turn, salt)
        together = one.generate([PROMPT] * 6, greedy(), cache_salt=["a", "b", "a", None, "b", None])
        check("llama_gqa", [PROMPT] * 6, together)
        assert [output.num_cached_tokens for output in together] == [0, 0, 47, 0, 47, 47]
        # Salts that are used no more leave nothing behind.
        for index in range(50):
            one.generate([row[:9]], greedy(1), cache_salt=f"user {index}")
        one.reset_prefix_cache()
        assert len(one._engine.prefix.tree.roots) == 0
        check_idle(one)


# generate


def kept(model):
    return vars(model)["_hf_paged_batchers"].batcher


def test_generate_shares_across_its_calls():
    model = build("llama_gqa")
    ids, mask = padded(ROWS)
    want = [expected("llama_gqa", row) for row in ROWS]

    def call(**config):
        out = model.generate(ids, attention_mask=mask, **greedy(), **PAGED, cache_config=config)
        for row, got, right in zip(ROWS, out[:, ids.shape[1] :].tolist(), want, strict=True):
            assert_same_text(model, row, got, right)
        return kept(model)

    one = call()
    assert one.stats().prefix_hit_tokens == 0
    assert call() is one and one.stats().prefix_hit_tokens == 32 + 20 + 47
    longer, more = padded([[*row, *text[:7]] for row, text in zip(ROWS, want, strict=True)])
    out = model.generate(longer, attention_mask=more, **greedy(5), **PAGED)
    assert out[:, longer.shape[1] :].tolist() == [text[7:12] for text in want]
    assert one.stats().prefix_hit_tokens > 2 * (32 + 20 + 47)
    for _ in range(2):
        other = call(enable_prefix_caching=False)
    assert other is not one and other.stats().prefix_hit_tokens == other.stats().blocks_cached == 0
    hf_paged.release(model)


@pytest.mark.parametrize("name", ["adamw_fused", "data_in_place", "numpy", "load_state_dict"])
def test_generate_after_a_change(name):
    model = build("llama_gqa")
    ids = torch.tensor([ROWS[2]])

    def paged():
        return model.generate(ids, **greedy(), **PAGED)[0, ids.shape[1] :].tolist()

    before = paged()
    assert paged() == before and kept(model).stats().prefix_hit_tokens == 47
    CHANGES[name](model)
    right = plain(fresh(model), ROWS[2], **greedy())
    assert before != right
    assert_same_text(model, ROWS[2], paged(), right)
    assert kept(model).stats().prefix_hit_tokens == 47
    paged()
    assert kept(model).stats().prefix_hit_tokens == 94
    hf_paged.release(model)


def test_concurrent_generate_calls_share():
    model = shared("llama_gqa")
    rows = [[*PROMPT, token] for token in range(5, 13)]

    def call(row):
        ids = torch.tensor([row])
        return [model.generate(ids, **greedy(), **PAGED)[0, len(row) :].tolist() for _ in range(2)]

    for row, results in zip(rows, in_threads(*(lambda row=row: call(row) for row in rows)), strict=True):
        for got in results:
            assert_same_text(model, row, got, expected("llama_gqa", row))
    stats = kept(model).stats()
    assert stats.prefix_hit_tokens >= 8 * 48 and stats.prefix_invalidations == 0
    check_idle(kept(model))
    hf_paged.release(model)


def test_sampled_calls_draw_the_same_from_shared_prefixes():
    model = shared("llama_gqa")
    ids, mask = padded(ROWS)
    settings = {"do_sample": True, "max_new_tokens": 9, "attention_mask": mask, "temperature": 0.8}
    drawn = []
    for extra in ({}, PAGED, PAGED):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, **settings, **extra).tolist())
    assert drawn[0] == drawn[1] == drawn[2] and kept(model).stats().prefix_hit_tokens > 0
    hf_paged.release(model)


def test_autocast_computes_other_keys_and_values():
    """The same weights give other keys and values in another precision; neither is taken for the other."""
    model = build("llama_gqa")

    def logprobs(one):
        return [token.logprob for token in one.generate([PROMPT], greedy(4), logprobs=0)[0].logprobs]

    with batcher(model) as one:
        right = logprobs(one)
        with torch.autocast("cpu", torch.bfloat16):
            lower = logprobs(one)
        assert max(abs(a - b) for a, b in zip(right, lower, strict=True)) > 1e-3
        assert logprobs(one) == pytest.approx(right, abs=1e-5)
    with batcher(model) as one, torch.autocast("cpu", torch.bfloat16):
        assert logprobs(one) == pytest.approx(lower, abs=1e-5)
