"""A dense and a sparse server of vLLM under the same load: time to first token, time between tokens, throughput."""
