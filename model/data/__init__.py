"""From files of any kind to packed lists of token ids. Numbers and text only: knows no tensors, no model and no run.

readers turns json, jsonl, csv, tsv and parquet into pairs (a new file format goes there); cleaning mends their text.
columns says which columns are a pair; text_files and parquet_rows give the rows of text tables and of parquet files.
tokenizer and tokenizer_file train, load and identify a tokenizer; token_store keeps the ids on disk, memory-mapped;
pair_hashes identifies the pairs in it.
length_histogram says how long the examples are; sampler says which examples form step s and which rank takes which.
packing cuts a rank's examples into micro-batches; buckets are the padded sizes for which a step can be recorded.
"""
