"""What a run leaves on disk and shows on screen. Knows the steps' results, and decides nothing about them.

run_dir says whether a run may start in a directory. train_state is where a run stands;
checkpoint saves it atomically with weights and optimizer, and loads them exactly;
checkpointer saves it from a snapshot in host memory while training goes on.
journal appends to metrics.jsonl; run_log says what is written down of each step; console shows progress;
log opens the log file; plots draws.
"""
