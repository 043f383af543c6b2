"""Rollouts: vLLM servers that sample, and the weights that reach them. Only this imports vllm."""
