"""Self-supervision and reinforcement learning."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from tests.torch_import.by_hand import Factory, Made, registered

LEARNING: dict[str, Factory] = {}
style = registered(LEARNING)
RNG = np.random.default_rng(8)
ROWS = RNG.standard_normal((4, 3)).astype(np.float32)
VIEWS = (ROWS, ROWS[::-1] * 1.1)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))


class SimCLR(nn.Module):
    """NT-Xent: a mask of the diagonal, indexing by booleans of a known count, labels."""

    def __init__(self) -> None:
        super().__init__()
        self.f = encoder()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        features = F.normalize(self.f(torch.cat([a, b])), dim=1)
        labels = torch.cat([torch.arange(len(a)) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        similarity = features @ features.T
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(similarity.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.07
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


@style
def simclr() -> Made:
    return SimCLR(), VIEWS


class BYOL(nn.Module):
    """A target network by deepcopy, updated by an exponential mean inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = encoder(), nn.Linear(4, 4)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def update(self) -> None:
        for o, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
            t.data = t.data * 0.99 + o.data * 0.01

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.training:
            self.update()
        p = self.predictor(self.online(a))
        with torch.no_grad():
            z = self.target(b)
        return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


@style
def byol_update_inside() -> Made:
    return BYOL(), VIEWS


class MoCo(nn.Module):
    """A queue and its pointer in buffers: an enqueue by an int of the pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 4), nn.Linear(3, 4)
        for p in self.k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 8), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        ptr = int(self.ptr)
        self.queue[:, ptr : ptr + len(k)] = k.T
        self.ptr[0] = (ptr + len(k)) % 8
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


@style
def moco_queue() -> Made:
    return MoCo(), VIEWS


class DINO(nn.Module):
    """A center in a buffer, temperatures by a Python list, a loop over pairs of views."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.temp = encoder(), [0.04, 0.07]
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        views = [self.student(x) for x in (a, b)]
        with torch.no_grad():
            teacher = [F.softmax((v.detach() - self.center) / self.temp[0], dim=-1) for v in views]
        total, n = 0, 0
        for i, t in enumerate(teacher):
            for j, s in enumerate(views):
                if i != j:
                    total += torch.sum(-t * F.log_softmax(s / 0.1, dim=-1), dim=-1).mean()
                    n += 1
        self.center = self.center * 0.9 + torch.cat(views).detach().mean(0, keepdim=True) * 0.1
        return total / n


@style
def dino_center() -> Made:
    return DINO(), VIEWS


class Barlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.bn = encoder(), nn.BatchNorm1d(4, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        c = self.bn(self.f(a)).T @ self.bn(self.f(b))
        c.div_(len(a))
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        n, _ = c.shape
        off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum()
        return on + 0.0051 * off


@style
def barlow_twins() -> Made:
    return Barlow(), VIEWS


class VICReg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = encoder()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.f(a), self.f(b)
        std = torch.sqrt(x.var(dim=0) + 0.0001)
        cov = (x - x.mean(0)).T @ (x - x.mean(0)) / (len(x) - 1)
        cov = cov - torch.diag(torch.diag(cov))
        return F.mse_loss(x, y) + torch.mean(F.relu(1 - std)) + cov.pow(2).sum() / 4


@style
def vicreg() -> Made:
    return VICReg(), VIEWS


class CLIP(nn.Module):
    """A logit scale as an exponential, clamped in place without gradient, two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = encoder(), encoder(), nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.image(a), self.text(b)
        x, y = x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True)
        logits = self.scale.exp() * x @ y.t()
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


@style
def clip() -> Made:
    return CLIP(), VIEWS


class ArcFace(nn.Module):
    """A margin by trigonometry, one-hot by scatter_, thresholds as Python floats."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.weight = encoder(), nn.Parameter(torch.randn(5, 4))
        self.cos_m, self.sin_m, self.th, self.mm = (
            math.cos(0.5),
            math.sin(0.5),
            math.cos(math.pi - 0.5),
            math.sin(0.5) * 0.5,
        )

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.f(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(1e-9, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > self.th, phi, cosine - self.mm)
        one_hot = torch.zeros(cosine.size())
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        return ((one_hot * phi) + ((1.0 - one_hot) * cosine)) * 30


@style
def arcface() -> Made:
    return ArcFace(), {"x": ROWS, "label": np.array([0, 4, 2, 1])}


class CenterLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.centers = encoder(), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.f(x)
        b = x.size(0)
        d = torch.pow(x, 2).sum(dim=1, keepdim=True).expand(b, 3) + torch.pow(self.centers, 2).sum(1).expand(b, 3)
        d = torch.addmm(d, x, self.centers.t(), beta=1, alpha=-2)
        mask = labels.unsqueeze(1).expand(b, 3).eq(torch.arange(3).long().expand(b, 3))
        return (d * mask.float()).clamp(min=1e-12, max=1e12).sum() / b


@style
def center_loss() -> Made:
    return CenterLoss(), {"x": ROWS, "labels": np.array([0, 2, 2, 1])}


class HardTriplet(nn.Module):
    """Batch-hard mining: masked maxima and minima of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.f = encoder()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.f(x)
        d = torch.cdist(x, x)
        same = labels[:, None] == labels[None]
        positive = (d * same.float()).max(dim=1)[0]
        negative = (d + d.max(dim=1, keepdim=True)[0] * same.float()).min(dim=1)[0]
        return F.margin_ranking_loss(negative, positive, torch.ones_like(positive), margin=0.3)


@style
def hard_triplets() -> Made:
    return HardTriplet(), {"x": ROWS, "labels": np.array([0, 1, 0, 1])}


class DuelingDQN(nn.Module):
    """A target network as a buffer-free copy, double Q targets, a Huber loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.v, self.a = nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(6, 2)

    def q(self, s: Tensor) -> Tensor:
        h = F.relu(self.body(s))
        a = self.a(h)
        return self.v(h) + a - a.mean(dim=1, keepdim=True)

    def forward(self, s: Tensor, action: Tensor, reward: Tensor, nxt: Tensor, done: Tensor) -> Tensor:
        q = self.q(s).gather(1, action)
        with torch.no_grad():
            best = self.q(nxt).argmax(1, keepdim=True)
            target = reward + 0.99 * self.q(nxt).gather(1, best) * (1 - done)
        return F.smooth_l1_loss(q, target)


@style
def dueling_dqn() -> Made:
    column = {"action": np.array([[0], [1], [1], [0]]), "reward": ROWS[:, :1].copy()}
    return DuelingDQN(), {
        "s": ROWS,
        **column,
        "nxt": ROWS[::-1].copy(),
        "done": np.array([[0.0], [1], [0], [0]], np.float32),
    }


class NoisyLinear(nn.Module):
    """Factorized noise in buffers, drawn anew in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.sigma = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.full((2, 3), 0.1))
        self.register_buffer("eps", torch.zeros(2, 3))

    def reset_noise(self) -> None:
        f = lambda n: (x := torch.randn(n)).sign().mul_(x.abs().sqrt_())  # noqa: E731
        self.eps.copy_(f(2).ger(f(3)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.reset_noise()
            return F.linear(x, self.mu + self.sigma * self.eps)
        return F.linear(x, self.mu)


@style
def noisy_linear() -> Made:
    return NoisyLinear().eval(), ROWS


class PPO(nn.Module):
    """torch.distributions in forward: ratios, clipping, entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic, self.log_std = nn.Linear(3, 2), nn.Linear(3, 1), nn.Parameter(torch.zeros(2))

    def forward(self, s: Tensor, a: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        dist = Normal(self.actor(s), self.log_std.exp().expand(len(s), 2))
        ratio = torch.exp(dist.log_prob(a).sum(-1) - old)
        clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2) * advantage
        value = 0.5 * (advantage - self.critic(s).squeeze(-1)).pow(2).mean()
        return -torch.min(ratio * advantage, clipped).mean() + value - 0.01 * dist.entropy().mean()


@style
def ppo() -> Made:
    return PPO(), {"s": ROWS, "a": ROWS[:, :2].copy(), "old": ROWS[:, 0] - 3, "advantage": ROWS[:, 1].copy()}


class CategoricalActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(3, 4)

    def forward(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        dist = Categorical(logits=self.actor(s))
        return dist.log_prob(a), dist.entropy()


@style
def categorical_actor() -> Made:
    return CategoricalActor(), {"s": ROWS, "a": np.array([0, 3, 1, 2])}


class SAC(nn.Module):
    """A squashed Gaussian: rsample, log_prob with the correction."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(s).chunk(2, dim=-1)
        dist = Normal(mean, torch.clamp(log_std, -20, 2).exp())
        u = dist.rsample() if self.training else mean
        a = torch.tanh(u)
        return a, (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1)


@style
def sac_actor() -> Made:
    return SAC().eval(), ROWS


class TanhPolicy(nn.Module):
    """TransformedDistribution with a cached transform, Independent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, s: Tensor, a: Tensor) -> Tensor:
        base = Independent(Normal(self.net(s), torch.ones(2)), 1)
        return TransformedDistribution(base, [TanhTransform(cache_size=1)]).log_prob(torch.tanh(a))


@style
def tanh_policy() -> Made:
    return TanhPolicy(), {"s": ROWS, "a": ROWS[:, :2].copy()}


class ScaledGradient(nn.Module):
    """MuZero's: a hook of a tensor halves a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.dynamics, self.reward = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, s: Tensor) -> Tensor:
        rewards = []
        for _ in range(3):
            s = torch.tanh(self.dynamics(s))
            rewards.append(self.reward(s))
            if s.requires_grad:
                s.register_hook(lambda g: g * 0.5)
        return torch.cat(rewards, 1)


@style
def muzero_hooked_gradient() -> Made:
    return ScaledGradient(), ROWS


class GAE(nn.Module):
    """Advantages by a loop backwards, written into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(3, 1)

    def forward(self, s: Tensor, rewards: Tensor, dones: Tensor) -> Tensor:
        values = self.critic(s).squeeze(-1)
        advantages, last = torch.zeros_like(rewards), 0
        for t in reversed(range(len(rewards))):
            after = values[t + 1] if t + 1 < len(rewards) else 0.0
            delta = rewards[t] + 0.99 * after * (1.0 - dones[t]) - values[t]
            advantages[t] = last = delta + 0.95 * 0.99 * (1.0 - dones[t]) * last
        return advantages


@style
def advantages() -> Made:
    return GAE(), {"s": ROWS, "rewards": ROWS[:, 0].copy(), "dones": np.array([0.0, 1, 0, 0], np.float32)}


class DecisionTransformer(nn.Module):
    """Three kinds of tokens, interleaved by stack and reshape, split again."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.s, self.a, self.t = nn.Linear(1, 4), nn.Linear(3, 4), nn.Embedding(3, 4), nn.Embedding(6, 4)
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 3)

    def forward(self, rtg: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor) -> Tensor:
        b, n = states.shape[:2]
        time = self.t(timesteps)
        tokens = (self.r(rtg) + time, self.s(states) + time, self.a(actions) + time)
        x = torch.stack(tokens, dim=1).permute(0, 2, 1, 3).reshape(b, 3 * n, 4)
        mask = nn.Transformer.generate_square_subsequent_mask(3 * n)
        x = self.layer(x, src_mask=mask, is_causal=True).reshape(b, n, 3, 4).permute(0, 2, 1, 3)
        return self.head(x[:, 1])


@style
def decision_transformer() -> Made:
    states = RNG.standard_normal((2, 4, 3)).astype(np.float32)
    ids = {"actions": RNG.integers(0, 3, (2, 4)), "timesteps": np.tile(np.arange(4), (2, 1))}
    return DecisionTransformer(), {"rtg": states[..., :1].copy(), "states": states, **ids}
