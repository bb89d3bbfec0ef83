"""What every process needs: files, signals, ranks, devices. Independent of configuration, data, model and run."""
