"""The T5 family: v1.0, v1.1 and Flan, mT5, UMT5.

family is its Family record, sizes its configuration; network is the model over packed examples; batch packs the
examples of a micro-batch end to end, or pads them to a bucket for a CUDA graph; decode generates. position_bias is T5's
relative position bias; footprint counts the bytes that each phase of a run needs; warm_up launches each kernel ahead.
huggingface converts parameter names and configuration to and from transformers' T5.
"""
