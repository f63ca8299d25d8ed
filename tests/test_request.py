"""Requests and their snapshots."""

import copy
import pickle

import pytest

from hf_paged.request import Request, RequestStatus, TokenLogprobs
from hf_paged.request_output import RequestOutput


def request(**changes) -> Request:
    made = Request("r", [5, 6, 7], **{"key": 3, "max_tokens": 10, **changes})
    made.decode = lambda tokens: " ".join(map(str, tokens))
    return made


def test_tokens_of_prompt_and_output():
    one = request()
    one.output_token_ids.extend([8, 9])
    assert one.num_tokens == 5
    assert one.tokens(0, 5) == [5, 6, 7, 8, 9]
    assert one.tokens(1, 3) == [6, 7] and one.tokens(2, 4) == [7, 8] and one.tokens(3, 5) == [8, 9]


def test_order_is_priority_then_arrival():
    first, second, urgent = request(key=1), request(key=2), request(key=3, priority=-1)
    assert sorted([second, urgent, first], key=lambda one: one.order) == [urgent, first, second]


def test_a_snapshot_never_changes():
    one = request()
    one.logprobs = []
    seen = []
    for token in (8, 9, 10):
        one.output_token_ids.append(token)
        one.logprobs.append(TokenLogprobs(token, -1.0))
        output = RequestOutput(one)
        seen.append((output, copy.deepcopy(output), output.output_token_ids, output.new_token_ids, output.text))
    one.finish("length")
    last = RequestOutput(one)
    for number, (output, twin, tokens, new, text) in enumerate(seen, 1):
        assert output == twin == pickle.loads(pickle.dumps(output))
        assert output.output_token_ids == tokens == (8, 9, 10)[:number] and output.new_token_ids == new
        assert output.text == text == twin.text and len(output.logprobs) == number
        assert output.finish_reason is None and not output.finished
    assert last.finished and last.new_token_ids == () and last.output_token_ids == (8, 9, 10)
    assert last != seen[-1][0]


def test_a_deep_copy_shares_nothing_that_lives():
    one = request()
    one.output_token_ids.append(8)
    twin = copy.deepcopy(RequestOutput(one))
    one.output_token_ids[0] = 99
    assert twin.output_token_ids == (8,) and twin.text == "8"


def test_a_snapshot_refuses_changes():
    output = RequestOutput(request())
    with pytest.raises(AttributeError, match="immutable, 'finish_reason'"):
        output.finish_reason = "eos"
    with pytest.raises(AttributeError):
        del output.finish_reason
    with pytest.raises(AttributeError):
        output.output_token_ids = ()
    with pytest.raises(TypeError):
        output.output_token_ids[0] = 1


def test_a_snapshot_that_does_not_count_leaves_new_tokens_for_the_next():
    one = request()
    one.output_token_ids.append(8)
    assert RequestOutput(one, counts=False).new_token_ids == (8,)
    assert RequestOutput(one).new_token_ids == (8,)
    assert RequestOutput(one).new_token_ids == ()


def test_timings():
    one = request()
    assert RequestOutput(one).timings.queued is None
    one.arrival, one.started, one.first_token, one.last_token = 1.0, 1.5, 2.0, 4.0
    one.output_token_ids.extend([1, 2, 3])
    timings = RequestOutput(one).timings
    assert (timings.queued, timings.time_to_first_token, timings.time_per_token) == (0.5, 1.0, 1.0)
    one.finish("length")
    assert timings.finished is None and RequestOutput(one).timings.finished == one.finished


def test_finishing():
    one, error = request(), RuntimeError("no")
    one.finish("error", error)
    assert one.is_finished and one.status is RequestStatus.FINISHED
    output = RequestOutput(one)
    assert (output.finish_reason, output.error) == ("error", error)
    assert "finish_reason='error'" in repr(output) and "RequestOutput(request_id='r'" in repr(output)
