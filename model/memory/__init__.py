"""Predicts memory and decides how a step is cut, from plain numbers. Never runs anything; knows no tensors and no run.

estimate is the closed form of the device memory that each phase needs.
plan decides the micro-batch, the loss chunk, checkpointing and recordings: the fastest way that fits.
oom_policy says what follows an out of memory: a smaller plan, and a larger one after a long calm.
"""
