"""Closures, hooks, patches and what else people do to a module."""

import functools
import math
import random
import weakref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.torch_import.by_hand import Factory, Made, registered

TRICKS: dict[str, Factory] = {}
style = registered(TRICKS)
ROWS = np.random.default_rng(9).standard_normal((4, 3)).astype(np.float32)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@style
def lora_by_patched_forward() -> Made:
    model = mlp()
    layer = model[0]
    layer.a, layer.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 4))
    old = layer.forward
    layer.forward = lambda x: old(x) + x @ layer.a @ layer.b
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith((".a", ".b"))
    return model, ROWS


@style
def adapter_by_hook() -> Made:
    model = mlp()
    model.adapter = nn.Linear(4, 4)
    model[0].register_forward_hook(lambda module, args, output: output + model.adapter(output))
    model.forward = functools.partial(run_first, model)
    return model, ROWS


def run_first(model: nn.Sequential, x: Tensor) -> Tensor:
    for layer in list(model)[:3]:
        x = layer(x)
    return x


@style
def input_by_pre_hook() -> Made:
    model = mlp()
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model, ROWS


class Registry(nn.Module):
    """Activations in a dict of lambdas over parts, chosen by a string."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.ops = {"first": lambda x: F.relu(self.a(x)), "second": lambda x: torch.tanh(self.b(x))}
        self.order = ["second", "first"]

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.ops[name](x)
        return x


@style
def registry_of_lambdas() -> Made:
    return Registry(), ROWS


class Child(nn.Module):
    """Reads its parent through a weak reference."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self._parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._parent().weight)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.child = nn.Parameter(torch.randn(3, 3)), Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) + x @ self.weight


@style
def weak_reference_to_the_parent() -> Made:
    return Parent(), ROWS


class PartialAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)
        self.mul = functools.partial(torch.mul, self.scale)
        self.act = functools.partial(F.leaky_relu, negative_slope=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.mul(x)))


@style
def partial_of_a_weight() -> Made:
    return PartialAttribute(), ROWS


class SharedData(nn.Module):
    """Ties by the storage of another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.same = self.w.data

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + x @ self.same.t()


@style
def tied_by_data() -> Made:
    return SharedData(), ROWS


class Tracker(nn.Module):
    """Counts its calls and keeps the last activations for a look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls, self.seen = nn.Linear(3, 2), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        self.last = self.fc(x)
        return self.last


@style
def keeps_activations() -> Made:
    return Tracker(), ROWS


class Annealed(nn.Module):
    """A temperature that every call lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.temperature = nn.Linear(3, 2), 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.9
        return self.fc(x) / self.temperature


@style
def annealed_attribute() -> Made:
    return Annealed(), ROWS


class SeededProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.fc(x @ torch.randn(3, 3))


@style
def seeded_inside() -> Made:
    return SeededProjection(), ROWS


class Mixup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        lam = np.random.beta(1.0, 1.0)
        return self.fc(lam * x + (1 - lam) * x.flip(0))


@style
def mixup_by_numpy() -> Made:
    return Mixup(), ROWS


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.rng, self.python = nn.Linear(3, 2), np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.python.random() < 0.5:
            x = x.flip(1)
        return self.fc(x * float(self.rng.normal(1, 0.1)))


@style
def generators_as_attributes() -> Made:
    return OwnGenerator(), ROWS


class Defensive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        try:
            scale = 1 / float(x.abs().max())
        except Exception:
            scale = 1.0
        return self.fc(x * scale)


@style
def except_around_a_value() -> Made:
    return Defensive(), ROWS


class ExportShim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.fc(x)
        return self.fc(x.clamp(-0.5, 0.5))


@style
def shim_for_export() -> Made:
    return ExportShim(), ROWS


class MCDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5, training=True)


@style
def monte_carlo_dropout() -> Made:
    return MCDropout().eval(), ROWS


class Clamp(torch.autograd.Function):
    """The line of PyTorch's tutorial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        g = g.clone()
        g[x < 0] = 0
        return g


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.neg() * ctx.alpha, None


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class OwnGradients(nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        self.fc, self.head, self.which = nn.Linear(3, 4), nn.Linear(4, 2), which

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.which == "tutorial":
            y = Clamp.apply(y)
        elif self.which == "reversal":
            y = Reverse.apply(y, 0.3)
        else:
            y = Rounded.apply(y, torch.tensor(0.5, dtype=y.dtype))
        return self.head(y)


@style
def tutorial_function() -> Made:
    return OwnGradients("tutorial"), ROWS


@style
def gradient_reversal() -> Made:
    return OwnGradients("reversal"), ROWS


@style
def straight_through_rounding() -> Made:
    return OwnGradients("rounded"), ROWS


class LoraParametrization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.randn(2, 3))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.a @ self.b


@style
def lora_parametrized() -> Made:
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", LoraParametrization())
    return model, ROWS


@style
def pruned() -> Made:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model, ROWS


class HyperNetwork(nn.Module):
    """Weights of a small network are predicted and used through functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.main = nn.Linear(3, 8), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.hyper(x.mean(0))
        weights = {"weight": flat[:6].view(2, 3), "bias": flat[6:]}
        return torch.func.functional_call(self.main, weights, (x,))


@style
def hypernetwork() -> Made:
    return HyperNetwork(), ROWS


class ManualLayers(nn.Module):
    """Layers found by getattr and names, parameters registered by strings."""

    def __init__(self) -> None:
        super().__init__()
        for i, (a, b) in enumerate(((3, 5), (5, 2))):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(b, a) / math.sqrt(a)))
            setattr(self, f"norm{i}", nn.LayerNorm(b))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = getattr(self, f"norm{i}")(F.linear(x, getattr(self, f"w{i}")))
        return x


@style
def layers_by_name() -> Made:
    return ManualLayers(), ROWS


class EarlyExit(nn.Module):
    """Leaves when confident: control flow by values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.softmax(-1).max() > 0.9:
            return y
        return self.b(torch.relu(y))


@style
def early_exit() -> Made:
    return EarlyExit(), ROWS


class MaskedMean(nn.Module):
    """x[mask].mean(): a boolean mask whose size reaches no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.fc(x)
        return F.mse_loss(y[mask], torch.zeros_like(y[mask])) + y[mask].mean()


@style
def masked_mean() -> Made:
    return MaskedMean(), {"x": ROWS, "mask": np.array([True, False, True, True])}


class Normalized(nn.Module):
    """Divides by a maximum taken as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x / x.abs().max().item())


@style
def item_of_a_maximum() -> Made:
    return Normalized(), ROWS


class MixedModes(nn.Module):
    """A frozen BatchNorm in evaluation mode by an overridden train()."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.frozen, self.fc = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.frozen.running_mean.uniform_(-1, 1)

    def train(self, mode: bool = True) -> "MixedModes":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.frozen(self.bn(x)))


@style
def frozen_batchnorm() -> Made:
    return MixedModes().train(), ROWS


class Quantized(nn.Module):
    """Fake quantization with an observer: running minimum and maximum in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("low", torch.zeros([]))
        self.register_buffer("high", torch.ones([]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.training:
            self.low.copy_(torch.min(self.low, y.detach().min()))
            self.high.copy_(torch.max(self.high, y.detach().max()))
        scale = (self.high - self.low) / 255
        q = torch.clamp(torch.round((y - self.low) / scale), 0, 255) * scale + self.low
        return y + (q - y).detach()


@style
def fake_quantization() -> Made:
    return Quantized(), ROWS


GLOBAL: dict[str, Any] = {}


class UsesGlobals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * GLOBAL["table"])


@style
def global_constant() -> Made:
    GLOBAL["table"] = torch.linspace(0, 1, 3)
    return UsesGlobals(), ROWS


class UsesGlobalLayer(UsesGlobals):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(GLOBAL["layer"](x))


@style
def global_layer() -> Made:
    GLOBAL["layer"] = nn.Linear(3, 3)
    return UsesGlobalLayer(), ROWS


class ListedLayers(nn.Module):
    """Layers in a plain list are no parameters of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.others = nn.Linear(3, 2), [nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.others[0](x))


@style
def layers_in_a_list() -> Made:
    return ListedLayers(), ROWS


class WhereSqrt(nn.Module):
    """Its gradient is NaN in PyTorch where x is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, (x * self.w).abs().sqrt(), torch.zeros_like(x))


@style
def where_of_a_square_root() -> Made:
    x = ROWS.copy()
    x[0, 0] = 0
    return WhereSqrt(), x
