"""The commands of train_low_mem.py up to the training loop.

usage holds the commands and their help.
options parses the command line and reports all its problems at once, without importing torch.
option_names maps other trainers' and misspelt option names to those here, of scripts too; help_zh is the Chinese help.
guide_flags reads the command lines of LoRA guides; model_cache finds a model that was downloaded before.
no_model says what to type where no model is.
origin reads the options, checkpoint or weights that a run starts from, adapter its adapter; network makes its network.
same_run compares a checkpoint with the run that would go on from it.
setup makes all that a run needs before its first step: data, tokenizer, model, optimizer, state, plan. tokenising lets
another process tokenise large files.
plan_report is the command plan: what a run would take; length_sample is what it knows of data not yet tokenised.
doctor is the command doctor: what would make a run fail; space is its part about memory and disk.
answering loads a trained model to answer questions in text. server answers them over HTTP: request_body and
openai_api read the requests, decoding_thread decodes them together, connection ends those that stand still,
server_metrics counts.
data_report says what prepared files hold.
"""
