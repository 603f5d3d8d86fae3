"""Models of transformers in local folders.

folder_model     a model with its weights
empty_causal_lm  language models without their weights
packed_rows      how such models take rows of several examples
"""
