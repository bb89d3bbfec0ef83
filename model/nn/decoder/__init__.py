"""The decoder-only family: Qwen2 (which Qwen1.5 is too), Qwen3 and Llama."""
