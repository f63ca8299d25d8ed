"""The metric of `evaluate`: `evaluate.load(hf_paged_eval.METRIC_PATH)`."""
