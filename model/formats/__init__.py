"""What stands on disk for other software: Hugging Face directories, adapters, GGUF, cards; files of strangers, read."""
