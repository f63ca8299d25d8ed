"""OpenVINO GenAI as a peer process: `python openvino_peer.py '{"model": FOLDER, "dtype": "bfloat16", ...}'`.

Runs under the interpreter of an environment that has openvino-genai. FOLDER holds the model as `optimum-cli export
openvino --task text-generation-with-past` writes it. The pipeline schedules continuously, in chunks, with prefix
caching, and computes and keeps KV in the dtype that is asked for. Its prefix cache cannot be emptied, so a pipeline is
made anew for each run, outside of the measured time.
"""

import json
import sys

from loop import serve

PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def main():
    options = json.loads(sys.argv[1])

    import numpy as np
    import openvino
    import openvino_genai as genai

    precision = PRECISION[options["dtype"]]
    properties = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    scheduling = {
        "cache_size": options["kv_gib"],
        "max_num_seqs": options["max_num_seqs"],
        "max_num_batched_tokens": options["max_num_batched_tokens"],
        "dynamic_split_fuse": True,
        "enable_prefix_caching": True,
    }

    def config(new):
        made = genai.GenerationConfig()
        made.max_new_tokens, made.ignore_eos, made.do_sample = new, True, False
        return made

    class Engine:
        pipeline = None

        def generate(self, requests):
            prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
            results = self.pipeline.generate(prompts, [config(new) for _, new in requests])
            return [result.m_generation_ids[0] for result in results]

        def reset(self):
            self.pipeline = None  # the old one's memory first
            scheduler = genai.SchedulerConfig()
            for name, value in scheduling.items():
                setattr(scheduler, name, value)
            self.pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)
            self.generate([([17 + index for index in range(40)], 4)])  # compiles what it compiles at first use

    version = f"openvino-genai {genai.__version__} openvino {openvino.__version__}"
    serve(Engine(), version, {**scheduling, **properties})


if __name__ == "__main__":
    main()
