"""Benches: what hf_paged costs and saves, measured through its public names."""
