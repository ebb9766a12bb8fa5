"""What every kind of draft gives: models, heads, first layers and lookup, and llama.cpp with the same."""
