"""Convolutional networks, heads and samplers."""

import math
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch_import.by_hand import Factory, Made, registered

VISION: dict[str, Factory] = {}
style = registered(VISION)


def images(channels: int = 3, size: int = 8, rows: int = 2) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, channels, size, size)).astype(np.float32)


class BasicBlock(nn.Module):
    """CIFAR ResNet with option A: a lambda that pads channels."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or cin != cout:
            self.shortcut = LambdaLayer(
                lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, cout // 4, cout // 4), "constant", 0)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class LambdaLayer(nn.Module):
    def __init__(self, lambd: object) -> None:
        super().__init__()
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return self.lambd(x)


class ResNetCifar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 8, 2))
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(self.stem(x))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


@style
def resnet_option_a() -> Made:
    return ResNetCifar(), images()


class UNet(nn.Module):
    """milesial's: bilinear upsampling, padding by the difference of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down = self.double(3, 4), nn.Sequential(nn.MaxPool2d(2), self.double(4, 8))
        self.up, self.conv = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), self.double(12, 4)
        self.outc = nn.Conv2d(4, 2, 1)

    @staticmethod
    def double(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.up(self.down(x1))
        dy, dx = x1.size(2) - x2.size(2), x1.size(3) - x2.size(3)
        x2 = F.pad(x2, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


@style
def unet_bilinear() -> Made:
    return UNet(), images(size=9)


class DenseLayer(nn.Module):
    def __init__(self, cin: int, growth: int = 3) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(cin), nn.Conv2d(cin, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    """Features in a growing list, layers by add_module."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.add_module(f"denselayer{i + 1}", DenseLayer(3 + 3 * i))
        self.classifier = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.named_children():
            if isinstance(layer, DenseLayer):
                features.append(layer(features))
        return self.classifier(F.adaptive_avg_pool2d(torch.cat(features, 1), (1, 1)).flatten(1))


@style
def densenet() -> Made:
    return DenseNet(), images()


class MobileBlock(nn.Module):
    """Inverted residual, squeeze and excitation with hard sigmoid, DropPath with a rate of 0."""

    def __init__(self, c: int = 4, expand: int = 2) -> None:
        super().__init__()
        h = c * expand
        act = nn.Hardswish(inplace=True)
        self.conv = nn.Sequential(nn.Conv2d(c, h, 1), nn.BatchNorm2d(h), act, nn.Conv2d(h, h, 3, 1, 1, groups=h), act)
        self.se, self.out = nn.Sequential(nn.Conv2d(h, 2, 1), nn.ReLU(), nn.Conv2d(2, h, 1)), nn.Conv2d(h, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = y * F.hardsigmoid(self.se(y.mean((2, 3), keepdim=True)))
        return x + drop_path(self.out(y), 0.0, self.training)


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    mask = keep + torch.rand((x.shape[0], *(1,) * (x.ndim - 1)), dtype=x.dtype, device=x.device)
    return x.div(keep) * mask.floor_()


@style
def mobilenet_v3() -> Made:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), MobileBlock(), MobileBlock()), images()


class ShuffleUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            OrderedDict(pw=nn.Conv2d(4, 4, 1), bn=nn.BatchNorm2d(4), dw=nn.Conv2d(4, 4, 3, padding=1, groups=4))
        )

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch(x2)), dim=1)
        n, c, h, w = out.size()
        return out.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)


@style
def shufflenet() -> Made:
    return nn.Sequential(ShuffleUnit(), ShuffleUnit()), images(8)


class CBAM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.spatial = (
            nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4)),
            nn.Conv2d(2, 1, 7, padding=3),
        )

    def forward(self, x: Tensor) -> Tensor:
        total = None
        for kind in ("avg", "max", "lse"):
            if kind == "avg":
                pooled = F.avg_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3)))
            elif kind == "max":
                pooled = F.max_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3)))
            else:
                flat = x.view(x.size(0), x.size(1), -1)
                s, _ = torch.max(flat, dim=2, keepdim=True)
                pooled = s + (flat - s).exp().sum(dim=2, keepdim=True).log()
            raw = self.mlp(pooled.view(x.size(0), -1))
            total = raw if total is None else total + raw
        x = x * torch.sigmoid(total).unsqueeze(2).unsqueeze(3).expand_as(x)
        compressed = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        return x * torch.sigmoid(self.spatial(compressed))


@style
def cbam() -> Made:
    return CBAM(), images(4)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim)) if dim else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x).permute(0, 2, 3, 1)))))
        if self.gamma is not None:
            y = self.gamma * y
        return x + y.permute(0, 3, 1, 2)


@style
def convnext() -> Made:
    return nn.Sequential(ConvNeXtBlock(), ConvNeXtBlock()), images(4)


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.token = nn.Sequential(nn.Conv1d(4, 8, 1), nn.GELU(), nn.Conv1d(8, 4, 1))
        self.channel = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token(self.n1(x))
        return x + self.channel(self.n2(x))


class Mixer(nn.Module):
    """Patches by unfold and reshape as einops does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(48, 6), nn.ModuleList([MixerBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 16 * c)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


@style
def mlp_mixer() -> Made:
    return Mixer(), images()


class Swin(nn.Module):
    """Windows by views, shifts by roll, a mask made in __init__ by slices, an index of relative positions."""

    def __init__(self, size: int = 8, window: int = 4, shift: int = 2, dim: int = 4) -> None:
        super().__init__()
        self.window, self.shift, self.qkv = window, shift, nn.Linear(dim, 3 * dim)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 2))
        coords = torch.stack(torch.meshgrid([torch.arange(window)] * 2, indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("index", relative.sum(-1))
        img, cnt = torch.zeros((1, size, size, 1)), 0
        for hs in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
            for ws in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                img[:, hs, ws, :] = cnt
                cnt += 1
        mask = self.partition(img).view(-1, window * window)
        mask = mask.unsqueeze(1) - mask.unsqueeze(2)
        self.register_buffer("mask", mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0))

    def partition(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        return x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, n, n, c)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        n = self.window**2
        shifted = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = self.partition(shifted).view(-1, n, c)
        q, k, v = self.qkv(windows).reshape(-1, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        attn = (q * (c // 2) ** -0.5) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        nw = self.mask.shape[0]
        attn = attn.view(-1, nw, 2, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
        y = (attn.view(-1, 2, n, n).softmax(-1) @ v).transpose(1, 2).reshape(-1, self.window, self.window, c)
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c).permute(0, 1, 3, 2, 4, 5)
        return torch.roll(y.reshape(b, h, w, c), shifts=(self.shift, self.shift), dims=(1, 2))


@style
def swin_window() -> Made:
    return Swin(), images(4)


class ViT(nn.Module):
    """lucidrains': a class token repeated, positions, a Python flag for pooling."""

    def __init__(self, pool: str = "cls") -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.pos, self.pool = nn.Parameter(torch.randn(1, 5, 8)), pool
        self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, img: Tensor) -> Tensor:
        x = self.patch(img).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1)
        x += self.pos[:, : x.shape[1]]
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return self.head(x.mean(dim=1) if self.pool == "mean" else x[:, 0])


@style
def vit_cls() -> Made:
    return ViT(), images()


@style
def vit_mean() -> Made:
    return ViT("mean"), images()


class MAE(nn.Module):
    """Masked autoencoder with the noise given: argsort twice, gather, mask tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec, self.mask_token = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.zeros(1, 1, 6))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        n, length, d = x.shape
        keep = int(length * 0.5)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = torch.gather(x, dim=1, index=shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length])
        mask[:, :keep] = 0
        mask = torch.gather(mask, dim=1, index=restore)
        y = self.enc(kept)
        y = torch.cat([y, self.mask_token.repeat(n, length - keep, 1)], 1)
        y = self.dec(torch.gather(y, 1, restore.unsqueeze(-1).repeat(1, 1, d)))
        return (((y - x) ** 2).mean(-1) * mask).sum() / mask.sum()


@style
def masked_autoencoder() -> Made:
    rng = np.random.default_rng(2)
    return MAE(), {
        "x": rng.standard_normal((2, 6, 6)).astype(np.float32),
        "noise": rng.random((2, 6)).astype(np.float32),
    }


class STN(nn.Module):
    """The tutorial's spatial transformer, initialized to the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, 2), nn.ReLU(True))
        self.fc = nn.Linear(4 * 9, 6)
        self.fc.weight.data.normal_(0, 0.05)
        self.fc.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.fc(self.loc(x).view(-1, 4 * 9)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False)


@style
def spatial_transformer() -> Made:
    return STN(), images()


class FlowWarp(nn.Module):
    """PWC-Net's warp and a correlation volume by shifted products."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        n, _, h, w = a.shape
        flow = self.flow(torch.cat([a, b], 1))
        yy, xx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((xx, yy), 0).to(a.dtype)[None].repeat(n, 1, 1, 1) + flow
        grid = torch.stack((2 * grid[:, 0] / max(w - 1, 1) - 1, 2 * grid[:, 1] / max(h - 1, 1) - 1), -1)
        warped = F.grid_sample(b, grid, align_corners=True)
        padded = F.pad(warped, [1] * 4)
        volume = [(a * padded[:, :, i : i + h, j : j + w]).mean(1, keepdim=True) for i in range(3) for j in range(3)]
        return warped, torch.cat(volume, 1)


@style
def optical_flow_warp() -> Made:
    return FlowWarp(), (images(), images()[::-1].copy())


class SubPixel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2)
        )
        self.mean = torch.tensor([0.4, 0.4, 0.3]).view(1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x - self.mean)
        return y + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False) + self.mean


@style
def super_resolution() -> Made:
    return SubPixel(), images()


class FPN(nn.Module):
    """An OrderedDict of levels, nearest upsampling to the size of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ModuleList([nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.lateral = nn.ModuleDict({f"p{i}": nn.Conv2d(4, 3, 1) for i in range(3)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features: OrderedDict[str, Tensor] = OrderedDict()
        for i, conv in enumerate(self.c):
            x = F.relu(conv(x))
            features[f"c{i}"] = x
        results: OrderedDict[str, Tensor] = OrderedDict()
        last = None
        for i in (2, 1, 0):
            y = self.lateral[f"p{i}"](features[f"c{i}"])
            last = y if last is None else y + F.interpolate(last, size=y.shape[-2:], mode="nearest")
            results[f"p{i}"] = last
        return results


@style
def feature_pyramid() -> Made:
    return FPN(), images()


class YoloHead(nn.Module):
    """Grids made in forward, sigmoid and exponential of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.anchors = nn.Conv2d(3, 2 * 7, 1), [(10.0, 13.0), (16.0, 30.0)]

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        y = self.conv(x).view(b, 2, 7, h, w).permute(0, 1, 3, 4, 2).contiguous()
        gy, gx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        anchors = torch.tensor(self.anchors, dtype=y.dtype)
        boxes = torch.zeros_like(y[..., :4])
        boxes[..., 0] = torch.sigmoid(y[..., 0]) + gx
        boxes[..., 1] = torch.sigmoid(y[..., 1]) + gy
        boxes[..., 2:4] = torch.exp(y[..., 2:4].clamp(max=4)) * anchors.view(1, 2, 1, 1, 2)
        return torch.cat((boxes.view(b, -1, 4) * 8, torch.sigmoid(y[..., 4:]).view(b, -1, 3)), -1)


@style
def yolo_head() -> Made:
    return YoloHead(), images()


class DETR(nn.Module):
    """The demo of the paper: row and column embeddings, queries, nn.Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.transformer = nn.Conv2d(3, 8, 4, 4), nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
        self.row, self.col, self.query = (nn.Parameter(torch.rand(5, n)) for n in (4, 4, 8))
        self.cls, self.box = nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.conv(x)
        hh, ww = h.shape[-2:]
        pos = torch.cat(
            [self.col[:ww].unsqueeze(0).repeat(hh, 1, 1), self.row[:hh].unsqueeze(1).repeat(1, ww, 1)], dim=-1
        )
        pos = pos.flatten(0, 1).unsqueeze(1)
        h = self.transformer(
            pos + 0.1 * h.flatten(2).permute(2, 0, 1), self.query.unsqueeze(1).repeat(1, x.shape[0], 1)
        ).transpose(0, 1)
        return {"pred_logits": self.cls(h), "pred_boxes": self.box(h).sigmoid()}


@style
def detr_demo() -> Made:
    return DETR(), images()


class GIoU(nn.Module):
    """Boxes and a generalized IoU loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        cx, cy, w, h = self.head(x).sigmoid().unbind(-1)
        a = torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)
        area = lambda z: (z[..., 2] - z[..., 0]) * (z[..., 3] - z[..., 1])  # noqa: E731
        lt, rb = torch.max(a[:, None, :2], target[:, :2]), torch.min(a[:, None, 2:], target[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(-1)
        union = area(a)[:, None] + area(target) - inter
        lt, rb = torch.min(a[:, None, :2], target[:, :2]), torch.max(a[:, None, 2:], target[:, 2:])
        hull = (rb - lt).clamp(min=0).prod(-1)
        return 1 - torch.diag(inter / union - (hull - union) / hull)


@style
def generalized_iou() -> Made:
    rng = np.random.default_rng(3)
    corner = rng.random((3, 2)) * 0.4
    boxes = np.concatenate([corner, corner + 0.1 + rng.random((3, 2)) * 0.4], 1)
    return GIoU(), {"x": rng.standard_normal((3, 5)).astype(np.float32), "target": boxes.astype(np.float32)}


class StandardizedConv(nn.Conv2d):
    """Big Transfer's: weights standardized at each call; the norm is GroupNorm."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-10)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


@style
def weight_standardization() -> Made:
    return nn.Sequential(StandardizedConv(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()), images()


class DynamicConv(nn.Module):
    """Kernels mixed by attention, applied as a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.att = nn.Parameter(torch.randn(3, 4, 3, 3, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.size()
        mix = F.softmax(self.att(F.adaptive_avg_pool2d(x, 1).flatten(1)) / 30, 1)
        kernels = torch.mm(mix, self.weight.view(3, -1)).view(b * 4, 3, 3, 3)
        return F.conv2d(x.contiguous().view(1, -1, h, w), kernels, padding=1, groups=b).view(b, 4, h, w)


@style
def dynamic_convolution() -> Made:
    return DynamicConv(), images()


class SoftArgmax(nn.Module):
    """Key points: softmax over positions, expected coordinates; Gaussians as targets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        b, k, h, w = y.shape
        p = F.softmax(y.view(b, k, -1) * 2, -1).view(b, k, h, w)
        xs = (p.sum(2) * torch.linspace(-1, 1, w)).sum(-1)
        ys = (p.sum(3) * torch.linspace(-1, 1, h)).sum(-1)
        grid = torch.arange(h, dtype=y.dtype)
        gauss = torch.exp(-((grid - (ys[..., None] + 1) * h / 2) ** 2) / (2 * math.pi))
        return torch.stack([xs, ys], -1), gauss


@style
def soft_argmax() -> Made:
    return SoftArgmax(), images()
