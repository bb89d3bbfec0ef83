"""Predicts memory and decides how a step is cut. Works on plain numbers: knows no tensors and no run.

estimate predicts in closed form the device memory of each phase of a run, step_time the time of a step beside
others, duration its seconds on a GPU that is known by its data sheet.
plan chooses the fastest micro-batch, loss chunk, checkpointing and recording that fit.
oom_policy shrinks the plan after an out of memory and restores it after a while without one.
"""
