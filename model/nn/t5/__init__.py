"""The T5 family: v1.0, v1.1 and Flan, mT5, UMT5."""
