"""Predicts memory and decides how a step is cut. Works on plain numbers: knows no tensors and no run."""
