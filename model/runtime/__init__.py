"""What a process stands on: files, signals, ranks and devices. Knows no configuration, no data, no model and no run.

atomic_io writes files and directories that are whole or absent; json_stream reads JSON of any size.
distributed is the only door to torch.distributed: start, agree, vote, sum. nccl_check tries NCCL before it is used.
watchdog takes the signals that ask for a stop, and ends every rank when one dies or hangs, as peers finds out.
device_memory tells what a device holds; fault_injection makes a named place fail, for tests.
terminal makes text of strangers safe to print.
"""
