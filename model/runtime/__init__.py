"""What every process needs: files, signals, ranks, devices. Independent of configuration, data, model and run.

atomic_io writes files and directories that are whole or absent; json_stream reads JSON of any size.
environment says what to type where packages are missing; cgroup reads the limits of memory and processors.
launch refuses launches that cannot work, launcher reads the command that started this process, cuda_start starts CUDA
beside the import of torch, module_process starts a module as a process of its own.
distributed is the only user of torch.distributed: start, agree, vote, sum. nccl_check tries NCCL before a run uses it.
watchdog handles the signals that ask for a stop and ends every rank when one dies or hangs; peers detects which.
device_memory measures and limits the memory of a device, recorder records its work, and
fault_injection makes a named site fail, for tests.
terminal makes untrusted text safe to print, and tells whether this program has the terminal; activity is what a
process does now; laps are the parts of its start and their seconds.
"""
