"""From data files to packed lists of token ids. Uses numbers and text only: no tensors, no model and no run.

readers turns json, jsonl, csv, tsv and parquet into pairs (add a new file format there); cleaning cleans their text.
dialogue gathers what was said before a question; conversation is the format of a question with its context, as ids;
chat_template is that format for transformers; turn_template is a decoder-only network's own, the tokenizer's chat
template, which template_process renders; prepared_pairs writes cleaned pairs to parquet.
columns finds the columns of a pair; text_files and parquet_rows read the rows of csv, tsv and parquet files.
tokenizer_training trains a tokenizer, tokenizer and tokenizer_file load and identify one, and
control_tokens keeps texts from its control tokens;
near_duplicates finds texts that are nearly equal; file_list says which files an option names; store_writer tokenizes
them, token_store keeps the ids on disk, memory-mapped;
row_hashes identifies the rows in it; sequences is what an objective hands to a network.
length_histogram counts the lengths of examples; sampler chooses the examples of a step and divides them among ranks.
packing cuts a rank's examples into micro-batches; buckets are the padded sizes for which a step can be recorded.
"""
