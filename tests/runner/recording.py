"""A run of the digits' perceptron, and what it says."""

from jaxtrain.errors import RunFailed
from jaxtrain.observe import Console
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import fit


class RecordingConsole(Console):
    def __init__(self):
        super().__init__()
        self.messages = []

    def message(self, text):
        self.messages.append(text)


def train(folder, recipe, *, resume=False):
    """The messages of the run, and the line that it fails with, None if it does not."""
    console = RecordingConsole()
    try:
        fit("digits-mlp", recipe, RunFolder(folder), resume=resume, console=console)
    except RunFailed as error:
        return console.messages, str(error)
    return console.messages, None
