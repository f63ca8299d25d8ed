"""ContinuousBatcher: a queue of requests through one model.

Contract: requests join and leave the running batch between any two steps; each gets the text that plain `generate`
gives it alone. All methods may be called from any thread. After anything, an exception or an interrupt included, every
block is free or belongs to a request that goes on.
"""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

from transformers import GenerationConfig

from .batcher_core import MAX_KEPT, BatcherCore
from .calls import Call, raise_step_error, submit_async
from .config import PagedCacheConfig, SchedulerConfig
from .driving import Background
from .prefix_cache import BlockEvent
from .request import Request
from .request_output import InvalidatedPrefix, RequestOutput
from .stats import BatcherStats


class ContinuousBatcher(BatcherCore):
    """Generates for many requests at once, each with its own settings.

    Args:
        model: a decoder-only model of transformers.
        tokenizer: for texts and chats as prompts, `RequestOutput.text` and stop strings.
        cache_config: PagedCacheConfig, a dict of its fields, or None.
        scheduler_config: SchedulerConfig, a dict of its fields, or None.
        generation_config: of requests that bring none; a GenerationConfig, a dict of its fields, or None for the
            model's own.
        compile: run steps that only decode through torch.compile. The model is compiled here, which takes a minute
            or more, and tried; True for the default backend, or the name of another one. Steps with prompts are not
            compiled.
        on_event: called as `on_event(kind, request_id)` with kind "added", "preempted" or "finished", and as
            `on_event(kind, BlockEvent)` with kind "block_stored", "block_evicted" or "block_invalidated". What it
            raises is logged.
    Raises:
        PackingError: the model cannot compute several sequences in one packed forward, and why;
            `model.generate(..., cache_implementation="paged")` serves it. With `compile`, also: its decoding step
            cannot be traced whole, has hooks or adapters, or gives other logits when compiled.
        RuntimeError: the backend of torch.compile fails, for example without a C++ compiler; or too little memory.
        ValueError: a setting is wrong.
    """

    def __init__(
        self,
        model,
        *,
        tokenizer=None,
        cache_config: PagedCacheConfig | Mapping | None = None,
        scheduler_config: SchedulerConfig | Mapping | None = None,
        generation_config: GenerationConfig | Mapping | None = None,
        compile: bool | str = False,
        on_event: Callable[[str, str | BlockEvent], None] | None = None,
    ) -> None:
        super().__init__(model, tokenizer, cache_config, scheduler_config, generation_config, on_event, compile)

    # One request at a time

    def add_request(
        self,
        prompt_token_ids,
        *,
        generation_config: GenerationConfig | Mapping | None = None,
        request_id: str | None = None,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        streamer=None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_name: str | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        on_prompt_logits: Callable | None = None,
    ) -> str:
        """Queue a request; it takes part from the next step on.

        Args:
            prompt_token_ids: a list or tensor of token ids; with a tokenizer also a text or a chat.
            generation_config: of this request; fields that it leaves open are the model's.
            request_id: a name that no unfinished request has; None for a new one.
            logits_processor, stopping_criteria: further ones, called with this request's own history `[1, tokens]`.
            streamer: gets the prompt and then each token, as from `generate`.
            priority: the lower number is served first (policy "priority").
            cache_salt: requests with different salts never share blocks.
            adapter_name: the PEFT adapter that this request is computed with, "__base__" for none; None for whatever is
                active on the model at each step.
            seed: of this request's sampling; None draws from the global generator. Sample i of
                `num_return_sequences` has `seed + i`.
            logprobs: report each token's log-probability and those of this many most likely ones.
            prompt_logprobs: the same for the tokens of the prompt.
            on_prompt_logits: called as `on_prompt_logits(chunk_start, logits)` with the model's `[tokens, vocab]`
                logits, once for each position of the prompt, chunk by chunk. The whole prompt is computed.
        Returns:
            The request id; that of all samples, where `num_return_sequences` asks for several.
        Raises:
            ValueError: an argument is wrong, or the request can never fit into the blocks that there are.
            NotImplementedError: it asks for what is not supported, by name.
        """
        self.check_usable()
        if request_id is None:
            request_id = self.intake.new_id()
        elif not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        requests = self.intake.requests(
            prompt_token_ids,
            request_id=request_id,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            priority=priority,
            cache_salt=cache_salt,
            adapter_name=adapter_name,
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            on_prompt_logits=on_prompt_logits,
        )
        self.enqueue([requests])
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            A snapshot of each request that advanced (a chunk of a prompt included) or ended, also of those that steps
            of other threads advanced since the last call. Empty only when nothing is unfinished.
        """
        with self._lock:
            advanced = {**self._unreported, **{request.key: request for request in self._advance()}}
            self._unreported.clear()
            outputs = [RequestOutput(request, counts=request.owner is None) for request in advanced.values()]
            self._engine.times.end_outputs()
        self.drivers.tell()
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request and all its samples, wherever they are, and give their blocks back.

        Returns:
            Whether it was still unfinished.
        """
        with self._lock:
            live = [request for request in self._requests.get(request_id, ()) if not request.is_finished]
            if live and self._stepping:
                self._to_abort += live
            elif live:
                self._take_arrivals()
                self._finish(live, "abort")
        self.drivers.tell()
        return bool(live)

    def result(self, request_id: str, timeout: float | None = None) -> RequestOutput | list[RequestOutput]:
        """Wait until a request has ended, making steps if nobody else does.

        Returns:
            Its last snapshot, or a list of them where it has several samples.
        Raises:
            ValueError: there is no such request, or some thousand others have ended since.
            TimeoutError: it has not ended after `timeout` seconds.
        """
        requests = self._requests.get(request_id)
        if requests is None:
            raise ValueError(f"unknown request {request_id!r}; results are kept for {MAX_KEPT} requests")
        for request in requests:
            request.awaited = True
        if not self.drivers.run_until(lambda: all(request.is_finished for request in requests), timeout):
            raise TimeoutError(f"request {request_id!r} has not ended after {timeout} seconds")
        raise_step_error(requests)
        outputs = [RequestOutput(request) for request in requests]
        return outputs if len(outputs) > 1 else outputs[0]

    # Many at once

    def generate(
        self, prompts: Iterable, generation_config=None, progress_bar: bool = False, **options
    ) -> list[RequestOutput]:
        """Generate for all prompts; return their last snapshots in the order of the prompts.

        Args:
            prompts: each as `add_request` takes it.
            generation_config: one for all prompts, or a list with one for each.
            progress_bar: show progress, tokens per second and the use of the KV cache on stderr.
            options: further arguments of `add_request`; a list gives each prompt its own.
        Raises:
            ValueError: an argument is wrong, with the number of the prompt; nothing was computed.
        """
        with Call(self, prompts, generation_config, options) as call, call.progress(progress_bar) as show:

            def done() -> bool:
                show()
                return call.is_finished

            self.drivers.run_until(done)
            return call.outputs()

    def stream(self, prompts: Iterable, generation_config=None, **options) -> Iterator[RequestOutput]:
        """Generate for all prompts and yield a snapshot whenever one of them has new tokens or has ended.

        Takes the arguments of `generate`. Leaving the loop early aborts what is unfinished.
        """
        arrived: collections.deque[RequestOutput] = collections.deque()

        def deliver(request: Request) -> None:
            if request.is_finished or len(request.output_token_ids) > request.delivered:
                arrived.append(RequestOutput(request))

        with Call(self, prompts, generation_config, options, deliver) as call:
            while not call.is_finished:
                self.drivers.run_until(lambda: bool(arrived) or call.is_finished)
                while arrived:
                    yield arrived.popleft()
            raise_step_error(call.requests)

    async def agenerate(self, prompts: Iterable, generation_config=None, **options) -> list[RequestOutput]:
        """`generate` for asyncio; a background thread makes the steps, and is started if need be."""
        call, arriving = submit_async(self, prompts, generation_config, options, ends_only=True)
        self.start()
        with call:
            async for _ in arriving:
                pass
            return call.outputs()

    async def astream(self, prompts: Iterable, generation_config=None, **options) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio; a background thread makes the steps, and is started if need be."""
        call, arriving = submit_async(self, prompts, generation_config, options, ends_only=False)
        self.start()
        with call:
            async for output in arriving:
                yield output

    # The background thread

    def start(self) -> None:
        """Have a background thread make the steps, so that requests of many threads run at once.

        Changes nothing while it runs; after a step failed, it begins anew.
        """
        with self._names:
            self._check_open()
            if self._background is None or not self._background.is_running:
                self._background = Background(self)

    def stop(self, timeout: float | None = None) -> None:
        """End the background thread after the step that it makes now.

        Unfinished requests stay, for `step`, `generate`, `result` or the next `start`; those of asyncio calls, which
        cannot make steps, are aborted.
        """
        with self._names:
            background, self._background = self._background, None
        if background is None:
            return
        background.stop(timeout)
        with self._lock:
            for requests in list(self._requests.values()):
                if requests[0].owner is not None and requests[0].owner.needs_thread:
                    self.abort(requests[0].request_id)
        self.drivers.tell()

    # Prefixes that requests share

    def invalidate_prefix(self, token_ids=None, *, block_id: int | None = None, group: int = 0) -> InvalidatedPrefix:
        """Have the beginning of a prompt found no more, and computed anew by whoever comes next.

        Running requests keep the blocks that they hold.

        Args:
            token_ids: tokens, a text or a chat, as prompts are given. All that begins with their first block, or with
                all of them where they are fewer, is dropped, under every `cache_salt` and adapter.
            block_id: instead, one block of the pool; it and what lies behind it are dropped.
            group: the group of layers whose pool `block_id` counts in, where a model has several.
        Returns:
            Blocks that were dropped, and running requests that hold one of them or are computing such a prompt.
        Raises:
            ValueError: neither or both of `token_ids` and `block_id`, or one that cannot be.
        """
        if (token_ids is None) == (block_id is None):
            raise ValueError("invalidate_prefix takes either token_ids or block_id")
        tokens = None if token_ids is None else self.intake.token_ids(token_ids)
        with self._lock:
            self._check_open()
            return self._engine.invalidate(tokens, block_id, group)

    def reset_prefix_cache(self) -> InvalidatedPrefix:
        """Have nothing found any more that was computed so far; see `invalidate_prefix`."""
        with self._lock:
            self._check_open()
            return self._engine.invalidate(None, None, 0)

    # What it does, and its end

    def stats(self) -> BatcherStats:
        """Blocks, requests, times and rates."""
        with self._lock:
            return self._engine.stats()

    def check_integrity(self) -> None:
        """Assert that blocks, tables and requests agree: free and held blocks are all that there are. Slow."""
        with self._lock:
            self._engine.check_integrity()

    def close(self) -> None:
        """Abort what is unfinished, end the background thread, let go of the model and of the memory."""
        self.stop()
        self._close()

    def __enter__(self) -> ContinuousBatcher:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
