"""What a process stands on: ranks, signals, devices, whole files, injected faults. Knows no model, data or options."""
