"""State between calls: hidden states and counters in attributes, momentum encoders, queues."""

import copy
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch_import.by_hand import Factory, Made, registered

STATE: dict[str, Factory] = {}
style = registered(STATE)
RNG = np.random.default_rng(9)
ROWS = RNG.standard_normal((4, 3)).astype(np.float32)
VIEWS = (ROWS, ROWS[::-1] * 1.1)
TOKENS = RNG.integers(0, 7, (2, 5))


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))


class TruncatedLSTM(nn.Module):
    """A language model by truncated backpropagation: the state of the last batch, detached as in PyTorch's example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(7, 4), nn.LSTM(4, 6, 2, batch_first=True), nn.Linear(6, 7)
        self.hidden = self.init_hidden(2)

    def init_hidden(self, rows: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, 6), weight.new_zeros(2, rows, 6)

    def repackage(self, h: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return h.detach() if isinstance(h, Tensor) else tuple(self.repackage(v) for v in h)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.repackage(self.hidden)
        output, self.hidden = self.rnn(self.embed(tokens), hidden)
        self.hidden = self.repackage(self.hidden)
        return F.cross_entropy(self.head(output[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@style
def tbptt_lstm() -> Made:
    return TruncatedLSTM(), TOKENS


class TransformerXL(nn.Module):
    """Memories of each layer in a list, the last tokens of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2)])
        self.mems = [torch.zeros(2, 3, 4) for _ in self.layers]

    def update(self, hiddens: list[Tensor]) -> None:
        with torch.no_grad():
            cat = [torch.cat([m, h], dim=1) for m, h in zip(self.mems, hiddens, strict=True)]
            self.mems = [x[:, -3:].detach() for x in cat]

    def forward(self, tokens: Tensor) -> Tensor:
        x, hiddens = self.embed(tokens), []
        for layer, mem in zip(self.layers, self.mems, strict=True):
            hiddens.append(x)
            context = torch.cat([mem, x], dim=1)
            x = x + layer(x, context, context, need_weights=False)[0]
        self.update(hiddens)
        return x


@style
def transformer_xl_memory() -> Made:
    return TransformerXL(), TOKENS


class Spiking(nn.Module):
    """A leaky membrane potential that is kept between calls and reset where it fires."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mem, self.beta = nn.Linear(3, 5), torch.zeros(4, 5), 0.9

    def forward(self, x: Tensor) -> Tensor:
        mem = self.beta * self.mem + self.fc(x)
        spike = torch.sigmoid(10 * (mem - 1.0))
        self.mem = (mem - (spike > 0.5).to(mem.dtype)).detach()
        return spike


@style
def spiking_membrane() -> Made:
    return Spiking(), ROWS


class StreamingConv(nn.Module):
    """A causal convolution over a stream, whose cache has the end of the last chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cache = nn.Conv1d(3, 4, 3), torch.zeros(2, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cache, x], dim=-1)
        self.cache = x[..., -2:].detach()
        return F.gelu(self.conv(x))


@style
def streaming_conv() -> Made:
    return StreamingConv(), RNG.standard_normal((2, 3, 6)).astype(np.float32)


class AnnealedVAE(nn.Module):
    """A weight of the KL term that rises with a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec, self.num_iter = nn.Linear(3, 4), nn.Linear(2, 3), 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.num_iter += 1
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        recon = self.dec(mu)
        kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
        c = min(25.0 / 1e4 * self.num_iter, 25.0)
        return {"loss": F.mse_loss(recon, x) + 4.0 * (kld - c).abs(), "kld": -kld}


@style
def annealed_vae() -> Made:
    return AnnealedVAE(), ROWS


class GumbelTemperature(nn.Module):
    """A temperature that falls exponentially in training, here without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.book, self.step, self.temp = nn.Linear(3, 5), nn.Embedding(5, 3), 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
            self.temp = max(0.5, math.exp(-1e-2 * self.step))
        soft = F.softmax(self.fc(x) / self.temp, dim=-1)
        return soft @ self.book.weight


@style
def gumbel_temperature() -> Made:
    return GumbelTemperature(), ROWS


class VectorQuantizer(nn.Module):
    """A codebook by exponential means in plain attributes, and a commitment cost that is annealed."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(3, 2), nn.Linear(2, 3)
        self.codes, self.counts = torch.randn(6, 2), torch.ones(6)
        self.sums, self.updates = self.codes.clone(), 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enc(x)
        distance = (z**2).sum(1, keepdim=True) - 2 * z @ self.codes.T + (self.codes**2).sum(1)
        onehot = F.one_hot(distance.argmin(1), 6).to(z.dtype)
        quantized = onehot @ self.codes
        if self.training:
            with torch.no_grad():
                self.updates += 1
                self.counts = 0.99 * self.counts + 0.01 * onehot.sum(0)
                self.sums = 0.99 * self.sums + 0.01 * onehot.T @ z
                self.codes = self.sums / self.counts.unsqueeze(1)
        beta = 0.25 * min(1.0, self.updates / 10)
        loss = F.mse_loss(self.dec(z + (quantized - z).detach()), x) + beta * F.mse_loss(z, quantized.detach())
        return loss, onehot.mean(0)


@style
def annealed_vq_vae() -> Made:
    return VectorQuantizer(), ROWS


class ReturnNormalizer(nn.Module):
    """Means of a loss by Adam's correction, with which it is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean, self.square, self.t = nn.Linear(3, 1), 0.0, 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        value = self.net(x).squeeze(-1)
        self.t += 1
        self.mean = 0.9 * self.mean + 0.1 * value.detach().mean()
        self.square = 0.99 * self.square + 0.01 * value.detach().pow(2).mean()
        mean, square = self.mean / (1 - 0.9**self.t), self.square / (1 - 0.99**self.t)
        return (value - mean) / (square.sqrt() + 1e-5)


@style
def return_normalizer() -> Made:
    return ReturnNormalizer(), ROWS


class MoCo(nn.Module):
    """The reference implementation: a momentum encoder, a queue in a buffer, and its pointer."""

    def __init__(self, dim: int = 4, size: int = 8, m: float = 0.999) -> None:
        super().__init__()
        self.K, self.m, self.T = size, m, 0.07
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T
        ptr = (ptr + batch_size) % self.K
        self.queue_ptr[0] = ptr

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


@style
def moco_reference() -> Made:
    return MoCo(), VIEWS


class BYOLInPlace(nn.Module):
    """A target that has not been frozen, but is used under no_grad alone, updated in place by a scheduled rate."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = encoder(), nn.Linear(4, 4)
        self.target = copy.deepcopy(self.online)
        self.step, self.steps = 0, 20

    @torch.no_grad()
    def move(self) -> None:
        tau = 1 - (1 - 0.99) * (math.cos(math.pi * self.step / self.steps) + 1) / 2
        for o, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
            t.mul_(tau).add_((1 - tau) * o)
        self.step += 1

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        p = F.normalize(self.predictor(self.online(a)), dim=-1)
        with torch.no_grad():
            z = F.normalize(self.target(b), dim=-1)
        if self.training:
            self.move()
        return (2 - 2 * (p * z).sum(-1)).mean()


@style
def byol_in_place() -> Made:
    return BYOLInPlace(), VIEWS


class DINOTeacher(nn.Module):
    """A teacher with batch norm by copy_, a center in a buffer, a temperature that warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 4))
        self.it = 0

    @torch.no_grad()
    def update_teacher(self) -> None:
        for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            t.data.mul_(0.996).add_((1 - 0.996) * s.detach().data)
        for s, t in zip(self.student.buffers(), self.teacher.buffers(), strict=True):
            t.copy_(s)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        temp = 0.04 + (0.07 - 0.04) * min(self.it / 10, 1.0)
        student = F.log_softmax(self.student(a) / 0.1, dim=-1)
        with torch.no_grad():
            raw = self.teacher(b)
            teacher = F.softmax((raw - self.center) / temp, dim=-1)
            if self.training:
                self.update_teacher()
                self.center = self.center * 0.9 + raw.mean(0, keepdim=True) * 0.1
                self.it += 1
        return torch.sum(-teacher * student, dim=-1).mean()


@style
def dino_teacher() -> Made:
    return DINOTeacher(), VIEWS


class EMA(nn.Module):
    """A shadow of a module's parameters as those of a second one, by lerp_."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.shadow = model, copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.shadow.parameters(), self.model.parameters(), strict=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = self.shadow(x)
            return out
        with torch.no_grad():
            for s, p in self.pairs():
                s.lerp_(p, 0.1)
            target = self.shadow(x)
        return F.mse_loss(self.model(x), target) + self.model(x).pow(2).mean()


@style
def mean_teacher() -> Made:
    return EMA(encoder()), ROWS


@style
def ema_in_evaluation() -> Made:
    return EMA(encoder()).eval(), ROWS


class CrossBatchMemory(nn.Module):
    """Features and labels of earlier batches; the pointer is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.feats = encoder(), torch.zeros(12, 4)
        self.targets, self.ptr, self.size = torch.zeros(12, dtype=torch.long), 0, 12

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = F.normalize(self.net(x), dim=1)
        q = len(y)
        self.feats[self.ptr : self.ptr + q] = f.detach()
        self.targets[self.ptr : self.ptr + q] = y
        self.ptr = (self.ptr + q) % self.size
        sim = f @ self.feats.T
        same = y[:, None] == self.targets[None]
        return (F.softplus(-sim) * same + F.softplus(sim - 0.5) * ~same).mean()


@style
def cross_batch_memory() -> Made:
    return CrossBatchMemory(), (ROWS, np.array([0, 1, 0, 2]))


class ReadQueue(nn.Module):
    """The last entry of a ring is read, a row is written at a pointer that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("ring", torch.zeros(5, 3))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        i = self.at.item()
        self.ring[i] = y.detach().mean(0)
        last = self.ring[i]
        self.at.fill_((i + 1) % 5)
        return y - last - self.ring.mean(0)


@style
def ring_buffer() -> Made:
    return ReadQueue(), ROWS


class TrainedAndClamped(nn.Module):
    """A weight that the optimizer trains is clamped in forward: refused, as the order of the two matters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.clamp_(-0.5, 0.5)
        out: Tensor = self.fc(x)
        return out


@style
def clamped_weights() -> Made:
    return TrainedAndClamped(), ROWS
