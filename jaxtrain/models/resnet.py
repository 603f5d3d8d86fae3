"""ResNet (He et al. 2015, arXiv:1512.03385), as `transformers.ResNetForImageClassification` computes it.

This is version 1.5: a bottleneck layer downsamples in its 3×3 convolution, not in its first one. Each layer is a unit
of rematerialization; "hidden" names the input of its last convolution.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import CONV, LINEAR, NameTable, TorchParam
from jaxtrain.models.batch_norm import BatchNorm, running_statistics
from jaxtrain.models.files.hf_config import fields_from_hf, labels_from_hf, labels_to_hf, require
from jaxtrain.models.layers.padded_convolution import conv, max_pool
from jaxtrain.passes import block

REDUCTION = 4
"""Ratio of the width of a bottleneck layer to that of its 3×3 convolution."""


@dataclass(frozen=True)
class ResNetConfig:
    """Configuration of a ResNet, with the field names of `transformers.ResNetConfig` and the sizes of ResNet-50.

    `stem_kernel`, `stem_stride` and `stem_pool` do not exist in `transformers`: small images need a small stem, with
    kernel 3, stride 1 and no pooling.
    """

    num_channels: int = 3
    embedding_size: int = 64
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    layer_type: str = "bottleneck"
    downsample_in_first_stage: bool = False
    downsample_in_bottleneck: bool = False
    num_labels: int = 1000
    stem_kernel: int = 7
    stem_stride: int = 2
    stem_pool: bool = True


RESNET_18 = ResNetConfig(hidden_sizes=(64, 128, 256, 512), depths=(2, 2, 2, 2), layer_type="basic")
RESNET_34 = ResNetConfig(hidden_sizes=(64, 128, 256, 512), depths=(3, 4, 6, 3), layer_type="basic")
RESNET_50 = ResNetConfig()


class ResNet(nnx.Module):
    """ResNet classifier, called as `model(images, training)`.

    It maps images [B, H, W, num_channels] to logits [B, num_labels]; `training` makes BatchNorm use the statistics of
    the batch.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedder = ConvNorm(
            config.num_channels, config.embedding_size, kernel=config.stem_kernel, stride=config.stem_stride, rngs=rngs
        )
        self.stages = nnx.List(
            [nnx.List([Layer(config, shape, rngs=rngs) for shape in stage]) for stage in _stages(config)]
        )
        # The initial weights of `torch.nn.Linear`.
        bound = 1 / math.sqrt(config.hidden_sizes[-1])
        uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
        self.classifier = nnx.Linear(
            config.hidden_sizes[-1], config.num_labels, kernel_init=uniform, bias_init=uniform, rngs=rngs
        )

    def __call__(self, images: jax.Array, training: bool = False) -> jax.Array:
        if images.shape[-1] != self.config.num_channels:
            raise UserError(f"images must be [B, H, W, {self.config.num_channels}], got shape {list(images.shape)}")
        x = jax.nn.relu(self.embedder(images, training))
        if self.config.stem_pool:
            x = max_pool(x, kernel=3, stride=2)
        for stage in self.stages:
            for layer in stage:
                x = _block(layer, x, training)
        return self.classifier(x.mean((1, 2)))


@dataclass(frozen=True)
class LayerShape:
    """Input and output channels of a layer, and its stride."""

    channels: int
    features: int
    stride: int

    @property
    def projects(self) -> bool:
        """Whether the shortcut needs a projection."""
        return self.channels != self.features or self.stride != 1


class ConvNorm(nnx.Module):
    """Convolution followed by BatchNorm."""

    def __init__(self, channels: int, features: int, *, kernel: int, stride: int = 1, rngs: nnx.Rngs) -> None:
        self.convolution = conv(channels, features, kernel=kernel, stride=stride, rngs=rngs)
        self.normalization = BatchNorm(features)

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        return self.normalization(self.convolution(x), training)


class Layer(nnx.Module):
    """Residual layer, relu(layers(x) + shortcut(x)): two 3×3 convolutions, or a bottleneck of 1×1, 3×3 and 1×1."""

    def __init__(self, config: ResNetConfig, shape: LayerShape, *, rngs: nnx.Rngs) -> None:
        channels, features, stride = shape.channels, shape.features, shape.stride
        self.shortcut = ConvNorm(channels, features, kernel=1, stride=stride, rngs=rngs) if shape.projects else None
        if config.layer_type == "basic":
            sizes = [(channels, features, 3, stride), (features, features, 3, 1)]
        else:
            narrow, early = features // REDUCTION, config.downsample_in_bottleneck
            sizes = [
                (channels, narrow, 1, stride if early else 1),
                (narrow, narrow, 3, 1 if early else stride),
                (narrow, features, 1, 1),
            ]
        self.layer = nnx.List([ConvNorm(n, m, kernel=kernel, stride=by, rngs=rngs) for n, m, kernel, by in sizes])

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        shortcut = x if self.shortcut is None else self.shortcut(x, training)
        *hidden, last = self.layer
        for layer in hidden:
            x = jax.nn.relu(layer(x, training))
        return jax.nn.relu(last(checkpoint_name(x, "hidden"), training) + shortcut)


def _block(layer: Layer, x: jax.Array, training: bool) -> jax.Array:
    """Apply `layer(x, training)` as a unit of rematerialization and update its running statistics."""
    split: tuple[Any, ...] = nnx.split(layer, nnx.Param, nnx.BatchStat)
    graphdef, params, statistics = split

    def apply(params: Any, statistics: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        layer = nnx.merge(graphdef, params, statistics)
        return layer(x, training), nnx.state(layer, nnx.BatchStat)

    x, statistics = block(apply)(params, statistics, x)
    nnx.update(layer, statistics)
    return x


def _stages(config: ResNetConfig) -> Iterator[list[LayerShape]]:
    """Yield the layers of every stage; all stages but, by default, the first downsample the image."""
    channels = config.embedding_size
    for i, (features, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
        stride = 2 if i > 0 or config.downsample_in_first_stage else 1
        yield [LayerShape(channels, features, stride), *[LayerShape(features, features, 1)] * (depth - 1)]
        channels = features


SHARDING = {
    ".*/convolution/kernel": P(None, None, None, "fsdp"),
    "classifier/kernel": P("fsdp", None),
    ".*/(bias|scale)": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`)."""


def torch_names(config: ResNetConfig) -> NameTable:
    """Return the names in `transformers.ResNetForImageClassification`."""
    table = {}
    for ours, theirs in _conv_norms(config):
        table[f"{ours}/convolution/kernel"] = TorchParam(f"{theirs}.convolution.weight", CONV)
        table[f"{ours}/normalization/scale"] = TorchParam(f"{theirs}.normalization.weight")
        table[f"{ours}/normalization/bias"] = TorchParam(f"{theirs}.normalization.bias")
    table["classifier/kernel"] = TorchParam("classifier.1.weight", LINEAR)
    table["classifier/bias"] = TorchParam("classifier.1.bias")
    return NameTable(table)


def torch_buffers(config: ResNetConfig) -> NameTable:
    """Return the names of the running statistics in the same model."""
    layers = {f"{ours}/normalization": f"{theirs}.normalization" for ours, theirs in _conv_norms(config)}
    return running_statistics(layers)


def _conv_norms(config: ResNetConfig) -> Iterator[tuple[str, str]]:
    """Yield the path and PyTorch's module of every `ConvNorm`, in PyTorch's order."""
    yield "embedder", "resnet.embedder.embedder"
    for s, stage in enumerate(_stages(config)):
        for i, shape in enumerate(stage):
            ours, theirs = f"stages/{s}/{i}", f"resnet.encoder.stages.{s}.layers.{i}"
            if shape.projects:
                yield f"{ours}/shortcut", f"{theirs}.shortcut"
            for j in range(2 if config.layer_type == "basic" else 3):
                yield f"{ours}/layer/{j}", f"{theirs}.layer.{j}"


def from_hf(config: Mapping[str, Any]) -> ResNetConfig:
    """Return the `ResNetConfig` of a Hugging Face config.json.

    Raises:
      UserError: A setting that changes the result is not supported.
    """
    require(config, model_type="resnet", hidden_act="relu", quantization_config=None)
    if config.get("layer_type", "bottleneck") not in ("basic", "bottleneck"):
        raise UserError(f"layer_type {config['layer_type']!r} is not supported: choose basic or bottleneck")
    return ResNetConfig(**(fields_from_hf(config, ResNetConfig) | {"num_labels": labels_from_hf(config)}))


def to_hf(config: ResNetConfig) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Raises:
      UserError: The stem is not the standard one, which a config.json cannot express.

    Example:
      >>> from_hf(to_hf(RESNET_18)) == RESNET_18
      True
    """
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "num_labels"}
    for name, standard in {"stem_kernel": 7, "stem_stride": 2, "stem_pool": True}.items():
        if values.pop(name) != standard:
            raise UserError(f"{name} {getattr(config, name)!r} does not exist in a config.json: only {standard!r} does")
    values |= {"hidden_sizes": list(config.hidden_sizes), "depths": list(config.depths), "hidden_act": "relu"}
    return {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        **values,
        **labels_to_hf(config.num_labels),
    }
