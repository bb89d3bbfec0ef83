"""The decoder-only family of Qwen: Qwen2, which Qwen1.5 is too, and Qwen3."""
