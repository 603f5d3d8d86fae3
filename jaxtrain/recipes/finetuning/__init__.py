"""What the recipe of fine-tuning is made of.

settings          the settings of the command
decoder           what fine-tuning needs of a decoder: zoo_decoder and imported_decoder have it, opened_decoder chooses
model             what is trained of it: all weights, or adapters beside frozen ones
example_rows      the examples as rows
losses            the losses of texts and preferences
heads             a reward model or a classifier: head_losses
held_out_answers  answers during training; answers generates them, answer_scores scores them
"""
