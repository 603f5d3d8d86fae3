"""Where and why a case differs: the stage, the first operation, the convention of PyTorch that is not followed."""
