"""What a step is for: one module for each objective. An objective is frozen and knows neither runs nor ranks.

base says what an objective gives; pairs learns to answer, dialogues does for networks that read whole dialogues;
registry names them.
"""
