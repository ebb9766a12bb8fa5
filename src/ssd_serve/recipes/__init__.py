"""Recipes: how draft models and the embedded pair are made.

Knows corpora, training and checkpoints in Hugging Face layout; does not know requests, servers or drafting.
"""
