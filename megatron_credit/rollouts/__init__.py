"""Rollouts: vLLM servers that sample, and the weights that reach them. The only importer of vllm."""
