"""hf_paged_eval: the evaluation room.

Contract: this room measures what paging and smaller KV formats do to a model's text and
speed (perplexity, KL divergence, gates, benchmarks). It sees hf_paged only as a user does:
the public names of `hf_paged` itself, never its submodules, so whatever it reports is what a
user would get. Nothing in hf_paged imports it, except the console script, inside commands.

`bench` measures continuous batching; perplexity and gates come later.
"""

__all__: list[str] = []
