"""What a run leaves on disk and shows on screen. Reads the results of steps and makes no training decision.

run_dir decides whether a run may start in a directory. train_state holds the position of a run;
checkpoint saves it atomically with the weights and the optimizer state, and loads them exactly;
checkpointer saves from a snapshot in host memory while training goes on, and exports models; export
does so with what the model's card says of the run.
journal appends to metrics.jsonl and reads it; durations says from it where the time went;
curves thins it to what can be drawn;
run_log chooses what is written about each step; best_model evaluates and keeps the best model;
summary has the first and last words, from the texts in words; tool_words has those of scripts,
check_words those of doctor and plan;
console formats log lines and shows progress; log opens the log file;
plots draws the curves of runs; drawing does so, and trackers sends the journal's numbers elsewhere, in own processes.

live shows the screen while a run trains: status is what each rank says of itself, terminal_log takes what is printed
meanwhile, and watch is the screen's own process. It keeps figures from the journal and asks sensors of the driver; view
says in messages' languages what screen draws.
"""
