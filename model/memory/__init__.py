"""Predicts and decides how a step is cut, from plain numbers; never runs anything."""
