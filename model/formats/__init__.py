"""What stands on disk for other software: Hugging Face directories, adapters, cards; files of strangers, read."""
