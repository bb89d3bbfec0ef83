"""From a command line to action: what each command of train_low_mem.py does before its own loop.

options reads the command line and refuses it with all its problems at once, without loading torch;
option_names knows what others call them. origin says what a run goes on from or begins with.
setup makes all that a run needs before its first step: data, tokenizer, model, optimizer, state and plan.
plan_report is the command plan, what a run would take; doctor is the command doctor, what would make it fail.
"""
