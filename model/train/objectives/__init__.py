"""What a step is for: one module for each objective. An objective is frozen and knows neither runs nor ranks."""
