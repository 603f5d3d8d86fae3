"""Image classification with running statistics: a ResNet with BatchNorm."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from flax import nnx

import jaxtrain as jt
from jaxtrain.data import pixels
from jaxtrain.distributed import data_parallel_size, run_mesh_sizes
from jaxtrain.fields import Width, at_least, at_most
from jaxtrain.models import ResNet, ResNetConfig, functional_with_state, resnet, set_batch_norm_groups
from jaxtrain.recipes.image import ImageRecipe, predictions


@dataclass(frozen=True, kw_only=True)
class ResNetRecipe(ImageRecipe):
    """A ResNet with BatchNorm on scikit-learn's 8×8 digits, or on --data FILE.npz or FOLDER_OF_CLASSES."""

    depth: Annotated[int, at_least(1), at_most(100)] = 1
    """Residual blocks, of two convolutions each, in each of the two stages."""
    width: Width = 32
    """Channels of the first stage; the second stage has twice as many."""
    batch_norm: Literal["sync", "device"] = "sync"
    """BatchNorm statistics over all rows of a micro-batch, or per device of a mesh as in PyTorch's DDP."""

    def model(self, shape: tuple[int, ...]) -> ResNet:
        """Return the model of images [H, W, C] of this shape, called as `model(images, training)`."""
        if len(shape) != 3:
            raise jt.UserError(f"images must have height, width and channels, got shape {list(shape)}: use digits-mlp")
        config = ResNetConfig(
            num_channels=shape[2],
            embedding_size=self.width,
            hidden_sizes=(self.width, 2 * self.width),
            depths=(self.depth, self.depth),
            layer_type="basic",
            num_labels=self.classes,
            stem_kernel=3,
            stem_stride=1,
            stem_pool=False,
        )
        groups = data_parallel_size(run_mesh_sizes(self.mesh)) if self.batch_norm == "device" else 1
        return set_batch_norm_groups(ResNet(config, rngs=nnx.Rngs(self.seed)), groups)

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        train, validation = self.images()
        shape = train[0]["image"].shape
        model = nnx.eval_shape(lambda: self.model(shape))
        apply, *_ = functional_with_state(model)

        def predict(params: Any, batch: Any, model_state: Any) -> jt.Predictions:
            return predictions(apply(params, model_state, pixels(batch["image"]), False)[0], batch)

        def loss_fn(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
            # Training, which has a key, normalizes with the statistics of the batch.
            logits, model_state = apply(params, model_state, pixels(batch["image"]), rng is not None)
            predicted = predictions(logits, batch)
            return predicted.loss(), {"accuracy": predicted.accuracy()}, model_state

        return jt.Task(
            init=lambda: jt.Initial(*functional_with_state(self.model(shape))[1:]),
            loss_fn=loss_fn,
            predict=predict,
            sharding=resnet.SHARDING,
            names=resnet.torch_names(model.config),
            buffers=resnet.torch_buffers(model.config),
            **self.common_fields(model, train, validation),
        )
