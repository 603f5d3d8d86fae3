"""Audio and time series."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import weight_norm as new_weight_norm

from tests.torch_import.by_hand import Factory, Made, registered

SEQUENCES: dict[str, Factory] = {}
style = registered(SEQUENCES)
RNG = np.random.default_rng(6)
WAVE = RNG.standard_normal((2, 32)).astype(np.float32)
SERIES = RNG.standard_normal((2, 8, 3)).astype(np.float32)


class Chomp1d(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    """TCN's, with the old weight norm and its init by weight.data."""

    def __init__(self, norm: object, cin: int, cout: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = norm(nn.Conv1d(cin, cout, 2, padding=dilation, dilation=dilation))
        self.chomp1, self.relu = Chomp1d(dilation), nn.ReLU()
        self.net = nn.Sequential(self.conv1, self.chomp1, self.relu)
        self.downsample = nn.Conv1d(cin, cout, 1) if cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.net(x) + (x if self.downsample is None else self.downsample(x)))


@style
def tcn_old_weight_norm() -> Made:
    blocks = [TemporalBlock(weight_norm, 3 if i == 0 else 4, 4, 2**i) for i in range(2)]
    return nn.Sequential(*blocks), SERIES.transpose(0, 2, 1).copy()


@style
def tcn_new_weight_norm() -> Made:
    blocks = [TemporalBlock(new_weight_norm, 3 if i == 0 else 4, 4, 2**i) for i in range(2)]
    return nn.Sequential(*blocks), SERIES.transpose(0, 2, 1).copy()


class WaveNet(nn.Module):
    """Gated dilated convolutions, skips in a list, sqrt(0.5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 1)
        self.dil = nn.ModuleList([nn.Conv1d(4, 8, 3, padding=2**i, dilation=2**i) for i in range(2)])
        self.res, self.skip = (nn.ModuleList([nn.Conv1d(4, 4, 1) for _ in range(2)]) for _ in range(2))

    def forward(self, wave: Tensor) -> Tensor:
        x, skips = self.first(wave.unsqueeze(1)), []
        for dil, res, skip in zip(self.dil, self.res, self.skip, strict=True):
            a, b = dil(x).split(4, dim=1)
            z = torch.tanh(a) * torch.sigmoid(b)
            skips.append(skip(z))
            x = (x + res(z)) * math.sqrt(0.5)
        return F.relu(sum(skips))


@style
def wavenet() -> Made:
    return WaveNet(), WAVE


class Spectrogram(nn.Module):
    """STFT with a window in a buffer, mel filters, power to decibels, normalization over time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))
        self.register_buffer("mel", torch.rand(4, 5))
        self.conv = nn.Conv1d(4, 3, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        s = torch.stft(wave, 8, 4, window=self.window, return_complex=True)
        db = 10 * torch.log10(torch.matmul(self.mel, s.abs() ** 2).clamp(min=1e-10))
        db = (db - db.mean(-1, keepdim=True)) / (db.std(-1, keepdim=True) + 1e-5)
        return self.conv(db)


@style
def mel_spectrogram() -> Made:
    return Spectrogram(), WAVE


class SincConv(nn.Module):
    """SincNet's band-pass filters from learned frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.band = nn.Parameter(torch.rand(3, 1) * 0.2 + 0.05), nn.Parameter(torch.rand(3, 1) * 0.1 + 0.05)
        n = torch.linspace(0, 4 - 1, steps=4)
        self.window_ = 0.54 - 0.46 * torch.cos(2 * math.pi * n / 9)
        self.n_ = 2 * math.pi * torch.arange(-4, 0).view(1, -1)

    def forward(self, wave: Tensor) -> Tensor:
        self.n_ = self.n_.to(wave.device)
        low, high = (
            0.01 + torch.abs(self.low),
            torch.clamp(0.02 + torch.abs(self.low) + torch.abs(self.band), 0.02, 0.5),
        )
        ft_low, ft_high = torch.matmul(low, self.n_.to(low.dtype)), torch.matmul(high, self.n_.to(low.dtype))
        left = ((torch.sin(ft_high) - torch.sin(ft_low)) / (self.n_ / 2)) * self.window_
        centre = 2 * (high - low)
        band = torch.cat([left, centre, torch.flip(left, dims=[1])], dim=1) / (2 * (high - low))
        return F.conv1d(wave.unsqueeze(1), band.view(3, 1, 9), padding=4)


@style
def sincnet() -> Made:
    return SincConv(), WAVE


class Snake(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, c, 1))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(shape[0], shape[1], -1)
        x = x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)
        return x.reshape(shape)


class HiFiGAN(nn.Module):
    """Transposed convolutions and multi-receptive-field blocks with removed and kept weight norms."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(nn.ConvTranspose1d(3, 4, 4, 2, 1))
        self.blocks = nn.ModuleList([weight_norm(nn.Conv1d(4, 4, k, padding=k // 2)) for k in (3, 5)])
        self.snake, self.post = Snake(4), nn.Conv1d(4, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x, xs = self.up(F.leaky_relu(x, 0.1)), None
        for block in self.blocks:
            xs = block(self.snake(x)) if xs is None else xs + block(self.snake(x))
        return torch.tanh(self.post(xs / len(self.blocks)))


@style
def hifigan() -> Made:
    return HiFiGAN(), SERIES.transpose(0, 2, 1).copy()


class Conformer(nn.Module):
    """A convolution module: GLU, depthwise, BatchNorm; masks of lengths by comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.p1, self.dw, self.p2 = nn.Conv1d(3, 6, 1), nn.Conv1d(3, 3, 3, padding=1, groups=3), nn.Conv1d(3, 3, 1)
        self.norm, self.bn = nn.LayerNorm(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pad = torch.arange(x.size(1)).expand(len(lengths), x.size(1)) >= lengths.unsqueeze(1)
        y = self.norm(x).transpose(1, 2).masked_fill(pad.unsqueeze(1), 0.0)
        y = self.p2(F.silu(self.bn(self.dw(F.glu(self.p1(y), dim=1)))))
        return x + y.masked_fill(pad.unsqueeze(1), 0.0).transpose(1, 2)


@style
def conformer() -> Made:
    return Conformer(), {"x": SERIES, "lengths": np.array([8, 5])}


class Acoustic(nn.Module):
    """CTC over a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4, bidirectional=True, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor, input_lengths: Tensor, label_lengths: Tensor) -> Tensor:
        logits = self.out(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, labels, input_lengths, label_lengths, blank=0, zero_infinity=True)


@style
def ctc_acoustic_model() -> Made:
    labels = np.array([[1, 2, 2], [4, 3, 1]])
    lengths = {"input_lengths": np.array([8, 7]), "label_lengths": np.array([3, 2])}
    return Acoustic(), {"x": SERIES, "labels": labels, **lengths}


class NBeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList([nn.Sequential(nn.Linear(8, 6), nn.ReLU()) for _ in range(2)])
        self.theta = nn.ModuleList([nn.Linear(6, 4) for _ in range(2)])
        t = torch.arange(0, 12) / 12
        self.basis = torch.stack([t**i for i in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        backcast, forecast = x, torch.zeros(x.shape[0], 4)
        for fc, theta in zip(self.fc, self.theta, strict=True):
            y = theta(fc(backcast)) @ self.basis
            backcast = backcast - y[:, :8]
            forecast = forecast + y[:, 8:]
        return backcast, forecast


@style
def nbeats() -> Made:
    return NBeats(), SERIES[:, :, 0].copy()


class RevIN(nn.Module):
    """Reversible instance norm, whose statistics are attributes between its two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.stdev * self.weight + self.bias
        return (x - self.bias) / (self.weight + 1e-10) * self.stdev + self.mean


class DLinear(nn.Module):
    """Trend by a moving average with repeated ends, inside RevIN."""

    def __init__(self) -> None:
        super().__init__()
        self.revin, self.avg = RevIN(), nn.AvgPool1d(3, stride=1)
        self.seasonal, self.trend = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.revin(x, "norm")
        padded = torch.cat([x[:, :1].repeat(1, 1, 1), x, x[:, -1:].repeat(1, 1, 1)], dim=1)
        trend = self.avg(padded.permute(0, 2, 1)).permute(0, 2, 1)
        y = self.seasonal((x - trend).permute(0, 2, 1)) + self.trend(trend.permute(0, 2, 1))
        return self.revin(y.permute(0, 2, 1), "denorm")


@style
def dlinear_revin() -> Made:
    return DLinear(), SERIES


class Autoformer(nn.Module):
    """Autocorrelation by FFT, topk of mean delays, rolls by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).permute(0, 2, 1) for f in (self.q, self.k, self.v))
        corr = torch.fft.irfft(torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1)), dim=-1)
        weights, delay = torch.topk(corr.mean(1), 2, dim=-1)
        weights = torch.softmax(weights, -1)
        init = torch.arange(v.shape[-1]).expand_as(v)
        doubled, out = v.repeat(1, 1, 2), torch.zeros_like(v)
        for i in range(2):
            pattern = torch.gather(doubled, -1, init + delay[:, i, None, None])
            out = out + pattern * weights[:, i, None, None]
        return out


@style
def autoformer() -> Made:
    return Autoformer(), SERIES


class ProbSparse(nn.Module):
    """Informer's: means by cumsum, an update of the chosen rows by fancy assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-2, -1)
        measure = scores.max(-1)[0] - scores.sum(-1) / k.shape[1]
        top = measure.topk(3, sorted=False)[1]
        rows = torch.arange(x.shape[0])[:, None]
        context = v.cumsum(dim=-2)
        context[rows, top, :] = torch.softmax(scores[rows, top] / 2, -1) @ v
        return context


@style
def informer() -> Made:
    return ProbSparse(), SERIES


class DeepAR(nn.Module):
    """A scale from the data, an LSTM, a negative binomial likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.mu, self.alpha = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        scale = 1 + z.abs().mean(1, keepdim=True)
        h, _ = self.rnn(x)
        mu, alpha = F.softplus(self.mu(h)).squeeze(-1) * scale, F.softplus(self.alpha(h)).squeeze(-1) / scale.sqrt()
        r = 1 / alpha
        ll = torch.lgamma(z + r) - torch.lgamma(z + 1) - torch.lgamma(r)
        ll = ll + r * torch.log(1 / (1 + alpha * mu)) + z * torch.log(alpha * mu / (1 + alpha * mu))
        return -ll.mean()


@style
def deepar() -> Made:
    return DeepAR(), {"x": SERIES, "z": RNG.integers(0, 9, (2, 8)).astype(np.float32)}


class GRUD(nn.Module):
    """Missing values: a mask, decays, a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.decay = nn.GRUCell(6, 4), nn.Linear(3, 4)
        self.register_buffer("x_mean", torch.zeros(3))

    def forward(self, x: Tensor, mask: Tensor, delta: Tensor) -> Tensor:
        h, last = x.new_zeros(x.size(0), 4), self.x_mean.expand(x.size(0), -1)
        for t in range(x.size(1)):
            last = torch.where(mask[:, t] > 0, x[:, t], last)
            h = h * torch.exp(-torch.relu(self.decay(delta[:, t])))
            h = self.cell(torch.cat([last, mask[:, t]], -1), h)
        return h


@style
def gru_d() -> Made:
    mask = (SERIES > 0).astype(np.float32)
    return GRUD(), {"x": SERIES, "mask": mask, "delta": np.abs(SERIES)}
