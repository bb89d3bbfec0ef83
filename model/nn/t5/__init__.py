"""The T5 family (v1.0: ReLU, tied embeddings, scaled decoder output).

network computes it over packed examples; batch lays the examples of a micro-batch end to end, without padding.
position_bias is T5's relative position bias; footprint counts the bytes that each phase of a run needs.
huggingface maps parameter names and configuration to and from transformers' T5.
"""
