"""Train a small recipe and record its messages."""

from jaxtrain.errors import RunFailed
from jaxtrain.observe import Console
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import run_training


class RecordingConsole(Console):
    def __init__(self):
        super().__init__()
        self.messages = []

    def message(self, text):
        self.messages.append(text)


def train(folder, recipe, *, resume=False):
    """Return the messages of a run, and its error, None if it succeeds."""
    console = RecordingConsole()
    try:
        run_training("digits-mlp", recipe, RunFolder(folder), resume=resume, console=console)
    except RunFailed as error:
        return console.messages, str(error)
    return console.messages, None
