"""One training run in each framework, and what both share: dropout masks, optimizers, frozen parameters."""
