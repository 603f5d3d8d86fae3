"""A run to edit: which of three interleaved spirals does a point lie on?

`jaxtrain train FILE.py::Spirals --help` lists the flags: the fields below and those of jaxtrain.Recipe, such as the
schedule, the precision, checkpoints and the device mesh.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.run import row_weights


@dataclass(frozen=True, kw_only=True)
class Spirals(jt.Recipe):
    """Which of three spirals a point of the plane lies on."""

    # A field is a flag of the command line, and its docstring the help.
    width: int = 64
    """Units of each hidden layer."""
    examples: int = 2000
    """Number of training examples."""
    noise: float = 0.05
    """Standard deviation of a point from its spiral."""
    # Defaults of jaxtrain.Recipe can be replaced.
    steps: int = 600
    batch_size: int = 64
    lr: float = 1e-2

    def task(self):
        """Return the data, the model and the loss."""
        train, validation = spirals(self.examples, self.noise, seed=0), spirals(300, self.noise, seed=1)

        def init():
            """Create the initial params: any pytree of arrays."""
            keys = jax.random.split(jax.random.key(self.seed), 3)
            sizes = [(2, self.width), (self.width, self.width), (self.width, 3)]
            return [
                {"kernel": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
                for key, (n, m) in zip(keys, sizes, strict=True)
            ]

        def model(params, x):
            *hidden, last = params
            for layer in hidden:
                x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
            return x @ last["kernel"] + last["bias"]

        def predict(params, batch, model_state):
            """Return the predictions: `jaxtrain eval` and `export` use them."""
            logits = model(params, batch["point"])
            # The last batch of an evaluation is padded with rows of weight 0.
            return jt.Predictions(logits, batch["label"], row_weights(batch, logits.shape[0]))

        def loss_fn(params, batch, rng):
            """Return the loss, a sum with the weight to divide it by, and metrics. `rng` is for dropout."""
            predictions = predict(params, batch, None)
            return predictions.loss(), {"accuracy": predictions.accuracy()}

        return jt.Task(
            init=init,
            loss_fn=loss_fn,
            train=train,
            validation=validation,
            predict=predict,
            classes=3,
            class_names=("first", "second", "third"),
            input_text=lambda example: "x = {:.2f}, y = {:.2f}".format(*example["point"]),
        )

    # The optimizer is AdamW, or the one of --optimizer. Any optax transformation may replace it:
    #
    # def make_optimizer(self):
    #     return optax.sgd(self.lr, momentum=0.9)


def spirals(count, noise, seed):
    """Return points and the spirals that they lie on, as arrays of equal length.

    A dataset with `__len__` and `__getitem__`, an iterable of examples and a DataLoader of PyTorch will do as well.
    """
    rng = np.random.default_rng(seed)
    label = rng.integers(3, size=count)
    radius = rng.uniform(0.1, 1, count)
    angle = 5 * radius + 2 * np.pi * label / 3
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"point": points + rng.normal(0, noise, (count, 2)), "label": label}
