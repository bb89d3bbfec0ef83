"""The decoder-only family of Qwen: Qwen2, which Qwen1.5 is too, and Qwen3.

family is its Family record; sizes is its configuration; network is the model over packed sequences, with the rotary
positions of rotary; batch packs the sequences of a micro-batch end to end; decode generates; footprint counts the bytes
that each phase of a run needs. huggingface converts names and configuration to and from transformers' Qwen.
"""
