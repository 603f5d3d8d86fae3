"""Autoencoders, flows, adversarial networks, diffusion."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.parametrizations import spectral_norm as new_spectral_norm

from tests.torch_import.by_hand import Factory, Made, registered
from tests.torch_import.by_hand.vision import images

GENERATIVE: dict[str, Factory] = {}
style = registered(GENERATIVE)
ROWS = np.random.default_rng(4).standard_normal((3, 4)).astype(np.float32)


class VAE(nn.Module):
    """PyTorch's example: reparameterized with randn_like, loss of reconstruction and KL."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.fc3, self.fc4 = nn.Linear(2, 6), nn.Linear(6, 4)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        y = torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar)))))
        bce = F.binary_cross_entropy(y, torch.sigmoid(x), reduction="sum")
        return y, bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


@style
def vae() -> Made:
    return VAE().eval(), ROWS


class VectorQuantizer(nn.Module):
    """VQ-VAE: distances, argmin, a straight-through gradient, perplexity."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.codes, self.dec = nn.Linear(4, 3), nn.Embedding(5, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enc(x)
        d = z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * z @ self.codes.weight.t()
        index = torch.argmin(d, dim=1).unsqueeze(1)
        one_hot = torch.zeros(index.shape[0], 5, dtype=z.dtype)
        one_hot.scatter_(1, index, 1)
        q = torch.matmul(one_hot, self.codes.weight)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        q = z + (q - z).detach()
        mean = one_hot.mean(0)
        return self.dec(q), loss, torch.exp(-torch.sum(mean * torch.log(mean + 1e-10)))


@style
def vq_vae() -> Made:
    return VectorQuantizer(), ROWS


class EmaQuantizer(nn.Module):
    """Codes as buffers that move towards the encodings, in training, under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(4, 3)
        self.register_buffer("embed", torch.randn(3, 5))
        self.register_buffer("cluster_size", torch.ones(5))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.enc(x)
        dist = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        one_hot = F.one_hot((-dist).max(1)[1], 5).type(z.dtype)
        q = F.embedding((-dist).argmax(1), self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(0.99).add_(one_hot.sum(0), alpha=0.01)
            self.embed_avg.data.mul_(0.99).add_((z.transpose(0, 1) @ one_hot).detach(), alpha=0.01)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + 5e-5) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
        return z + (q - z).detach()


@style
def ema_quantizer() -> Made:
    return EmaQuantizer(), ROWS


class RealNVP(nn.Module):
    """Masks as frozen parameters, networks made by lambdas."""

    def __init__(self) -> None:
        super().__init__()
        nets = lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 4), nn.Tanh())  # noqa: E731
        nett = lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 4))  # noqa: E731
        self.mask = nn.Parameter(torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]] * 2), requires_grad=False)
        self.t = nn.ModuleList([nett() for _ in range(4)])
        self.s = nn.ModuleList([nets() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s, t = self.s[i](z_) * (1 - self.mask[i]), self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det -= s.sum(dim=1)
        return -0.5 * (z**2 + math.log(2 * math.pi)).sum(1) + log_det


@style
def real_nvp() -> Made:
    return RealNVP(), ROWS


class InvertibleConv(nn.Module):
    """Glow's LU-decomposed convolution, with slogdet's parts from the decomposition."""

    def __init__(self, c: int = 3) -> None:
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(c, c))
        p, lower, upper = torch.linalg.lu(q)
        self.register_buffer("p", p)
        self.register_buffer("sign", torch.sign(torch.diag(upper)))
        self.register_buffer("l_mask", torch.tril(torch.ones(c, c), -1))
        self.lower, self.log_s = nn.Parameter(lower), nn.Parameter(torch.log(torch.abs(torch.diag(upper))))
        self.upper = nn.Parameter(torch.triu(upper, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lower = self.lower * self.l_mask + torch.eye(3, dtype=x.dtype)
        upper = self.upper * self.l_mask.t() + torch.diag(self.sign * torch.exp(self.log_s))
        w = self.p @ lower @ upper
        return F.conv2d(x, w.view(3, 3, 1, 1)), torch.sum(self.log_s) * x.shape[2] * x.shape[3]


@style
def glow_convolution() -> Made:
    return InvertibleConv(), images(size=4)


class MaskedLinear(nn.Linear):
    """MADE's: a mask as a buffer, multiplied at each call."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


@style
def made() -> Made:
    m1 = (torch.arange(6)[:, None] % 3 >= torch.arange(4)[None]).float()
    m2 = (torch.arange(4)[:, None] > torch.arange(6)[None] % 3).float()
    return nn.Sequential(MaskedLinear(m1), nn.ReLU(), MaskedLinear(m2)), ROWS


class DCGAN(nn.Module):
    """Generator and discriminator in one module, spectral norm of the old kind, weights_init by apply."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.ConvTranspose2d(4, 4, 4, 1, 0, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
        self.g.append(nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False)).append(nn.Tanh())
        self.d = nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True))
        self.d.append(spectral_norm(nn.Conv2d(4, 1, 4, 1, 0)))
        self.apply(lambda m: nn.init.normal_(m.weight, 0, 0.02) if isinstance(m, nn.ConvTranspose2d) else None)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.g(z[:, :, None, None])
        return fake, F.softplus(-self.d(fake)).mean()


@style
def dcgan_old_spectral_norm() -> Made:
    return DCGAN(), ROWS


@style
def new_spectral_norm_and_orthogonal() -> Made:
    return nn.Sequential(new_spectral_norm(nn.Linear(4, 5)), nn.ReLU(), orthogonal(nn.Linear(5, 5))), ROWS


class ModulatedConv(nn.Module):
    """StyleGAN2's, with equalized learning rates, demodulation and a noise that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mod = nn.Parameter(torch.randn(1, 4, 3, 3, 3)), nn.Linear(4, 3)
        self.scale, self.strength = 1 / math.sqrt(27), nn.Parameter(torch.zeros([]))
        self.register_buffer("noise", torch.randn(1, 1, 8, 8))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weight = self.scale * self.weight * self.mod(style).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(b, 4, 1, 1, 1)
        y = F.conv2d(x.view(1, b * c, h, w), weight.view(b * 4, c, 3, 3), padding=1, groups=b).view(b, 4, h, w)
        return F.leaky_relu(y + self.strength * self.noise, 0.2) * math.sqrt(2)


@style
def stylegan_modulation() -> Made:
    return ModulatedConv(), {"x": images(rows=3), "style": ROWS}


class AdaIN(nn.Module):
    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        def stats(x: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
            n, c = x.size()[:2]
            var = x.view(n, c, -1).var(dim=2) + eps
            return x.view(n, c, -1).mean(dim=2).view(n, c, 1, 1), var.sqrt().view(n, c, 1, 1)

        (cm, cs), (sm, ss) = stats(content), stats(style)
        return (content - cm.expand(content.size())) / cs * ss + sm


class StyleTransfer(nn.Module):
    """AdaIN and Gram matrices, reflection padding and instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU()
        )
        self.adain = AdaIN()

    def forward(self, content: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        t = self.adain(self.enc(content), s := self.enc(style))
        flat = s.view(s.size(0), 4, -1)
        return t, flat.bmm(flat.transpose(1, 2)) / (4 * flat.size(2))


@style
def style_transfer() -> Made:
    return StyleTransfer(), (images(), images()[::-1].copy())


class Diffusion(nn.Module):
    """DDPM's loss with time and noise given: tables in buffers, gathered by `extract`; a network with embeddings."""

    def __init__(self, steps: int = 10) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
        alphas = torch.cumprod(1.0 - betas, dim=0)
        register = lambda name, value: self.register_buffer(name, value.to(torch.float32))  # noqa: E731
        register("sqrt_alphas", torch.sqrt(alphas))
        register("sqrt_one_minus", torch.sqrt(1.0 - alphas))
        self.time = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4))
        self.c1, self.c2, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1), nn.GroupNorm(2, 4)

    @staticmethod
    def extract(a: Tensor, t: Tensor, shape: torch.Size) -> Tensor:
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    def model(self, x: Tensor, t: Tensor) -> Tensor:
        freqs = torch.exp(-math.log(10000) * torch.arange(3, dtype=torch.float32) / 3)
        args = t[:, None].float() * freqs[None]
        emb = self.time(torch.cat([torch.cos(args), torch.sin(args)], -1).to(x.dtype))
        return self.c2(F.silu(self.norm(self.c1(x)) + emb[:, :, None, None]))

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        a, b = self.extract(self.sqrt_alphas, t, x.shape), self.extract(self.sqrt_one_minus, t, x.shape)
        return F.mse_loss(self.model(a * x + b * noise, t), noise)


@style
def diffusion_loss() -> Made:
    return Diffusion(), {"x": images(size=4), "t": np.array([1, 7]), "noise": images(size=4)[::-1].copy()}


class GumbelVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = F.gumbel_softmax(self.enc(x).view(-1, 2, 3), tau=0.5, hard=True)
        return self.dec(z.flatten(1))


@style
def gumbel_softmax() -> Made:
    return GumbelVAE().eval(), ROWS


class PixelCNN(nn.Conv2d):
    """The mask is applied to weight.data, in place, at each call."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3, padding=1)
        self.register_buffer("mask", torch.zeros_like(self.weight))
        self.mask[:, :, :1] = 1
        self.mask[:, :, 1, :1] = 1

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@style
def pixelcnn_weight_data() -> Made:
    return PixelCNN(), images()


class EnergyModel(nn.Module):
    """Scores by autograd.grad in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        score = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return (score**2).sum(-1)


@style
def score_by_autograd() -> Made:
    return EnergyModel(), ROWS
