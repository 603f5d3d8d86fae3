"""Features by name, recommenders, sets, graphs."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch_import.by_hand import Factory, Made, registered

TABULAR: dict[str, Factory] = {}
style = registered(TABULAR)
RNG = np.random.default_rng(5)
ROWS = RNG.standard_normal((4, 3)).astype(np.float32)
FEATURES = {"user": np.array([1, 4, 2, 0]), "item": np.array([3, 3, 0, 1]), "genre": np.array([2, 0, 1, 1])}


class ByName(nn.Module):
    """Embeddings in a ModuleDict, joined in the order of the batch's dict, which is not the alphabet's."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {"user": nn.Embedding(5, 2), "item": nn.Embedding(4, 3), "genre": nn.Embedding(3, 1)}
        )
        self.head = nn.Linear(6, 2)

    def forward(self, **features: Tensor) -> Tensor:
        return self.head(torch.cat([self.tables[name](x) for name, x in features.items()], dim=-1))


@style
def features_by_keyword() -> Made:
    return ByName(), FEATURES


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(9, 2)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.net(torch.cat(list(features.values()), dim=1))


@style
def dict_values_concatenated() -> Made:
    features = OrderedDict(zeta=ROWS, alpha=2 * ROWS + 1, mid=ROWS**2)
    return Stacked(), {"features": dict(features)}


class DLRM(nn.Module):
    """EmbeddingBags with offsets, interactions of the lower triangle by index lists."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(6, 3, mode="sum") for _ in range(2)])
        self.bottom, self.top = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(6, 1)

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        parts = [x] + [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        t = torch.cat(parts, dim=1).view(x.shape[0], -1, 3)
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        li = torch.tensor([i for i in range(3) for j in range(i)])
        lj = torch.tensor([j for i in range(3) for j in range(i)])
        return torch.sigmoid(self.top(torch.cat([x, z[:, li, lj]], dim=1)))


@style
def dlrm() -> Made:
    ids = [RNG.integers(0, 6, 8), RNG.integers(0, 6, 8)]
    return DLRM(), (ROWS, [np.array([0, 2, 4, 6]), np.array([0, 1, 4, 5])], ids)


class DeepFM(nn.Module):
    """One table with offsets of fields, the square of sums less the sum of squares."""

    def __init__(self, dims: tuple[int, ...] = (5, 4, 3)) -> None:
        super().__init__()
        self.embedding, self.linear, self.bias = (
            nn.Embedding(sum(dims), 3),
            nn.Embedding(sum(dims), 1),
            nn.Parameter(torch.zeros(1)),
        )
        self.offsets = np.array((0, *np.cumsum(dims)[:-1]), dtype=np.int64)
        self.mlp = nn.Sequential(nn.Linear(9, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        e = self.embedding(x)
        fm = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        y = self.linear(x).sum(1) + self.bias + fm + self.mlp(e.view(-1, 9))
        return torch.sigmoid(y.squeeze(1))


@style
def deepfm() -> Made:
    return DeepFM(), np.stack(list(FEATURES.values()), 1)


class HashEmbedding(nn.Module):
    """Ids hashed in 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return sum(self.table((ids + 1) * prime % 7) for prime in (1000003, 2654435761))


@style
def hashed_ids() -> Made:
    return HashEmbedding(), np.array([[12, 99999], [123456, 7]])


class TimeFeatures(nn.Module):
    """Hours and weekdays of timestamps in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.hour, self.day = nn.Embedding(24, 2), nn.Embedding(7, 2)

    def forward(self, seconds: Tensor) -> Tensor:
        ms = seconds * 1000
        hour = torch.div(ms, 3_600_000, rounding_mode="floor") % 24
        return torch.cat([self.hour(hour), self.day(ms // 86_400_000 % 7)], -1)


@style
def timestamps() -> Made:
    return TimeFeatures(), np.array([1_700_000_000, 1_600_000_000])


class FTTransformer(nn.Module):
    """Numbers become tokens by a weight and a bias of each feature; ReGLU; the class token is last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.cls = (nn.Parameter(torch.randn(*s)) for s in ((3, 4), (3, 4), (4,)))
        self.attn, self.ff, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = self.weight[None] * x[..., None] + self.bias[None]
        t = torch.cat([t, self.cls.expand(len(x), 1, -1)], dim=1)
        t = t + self.attn(t, t, t)[0]
        a, b = self.ff(t).chunk(2, dim=-1)
        return self.out((t + a * F.relu(b))[:, -1])


@style
def ft_transformer() -> Made:
    return FTTransformer(), ROWS


class GhostBN(nn.Module):
    """TabNet's: batch norm over chunks, gated linear units, sparsemax, an entropy loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc, self.att = nn.BatchNorm1d(3, momentum=0.01), nn.Linear(3, 6), nn.Linear(3, 3)

    @staticmethod
    def sparsemax(x: Tensor) -> Tensor:
        z, _ = torch.sort(x, dim=-1, descending=True)
        rng = torch.arange(1, x.size(-1) + 1, dtype=x.dtype)
        k = ((1 + rng * z) > z.cumsum(-1)).sum(-1, keepdim=True)
        tau = (z.cumsum(-1).gather(-1, k - 1) - 1) / k
        return torch.clamp(x - tau, min=0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([self.bn(part) for part in x.chunk(int(np.ceil(x.shape[0] / 2)), 0)], dim=0)
        mask = self.sparsemax(self.att(y))
        h = F.glu(self.fc(mask * x), dim=-1)
        return h, (-mask * torch.log(mask + 1e-15)).sum(1).mean()


@style
def tabnet() -> Made:
    return GhostBN(), ROWS


class DeepSets(nn.Module):
    """A masked mean and maximum of sets, by boolean masks."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(3, 5), nn.ELU()), nn.Linear(10, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.phi(x)
        mean = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        most = h.masked_fill(~mask.bool()[..., None], float("-inf")).max(dim=1).values
        return self.rho(torch.cat([mean, most], -1))


@style
def deep_sets() -> Made:
    return DeepSets(), {
        "x": RNG.standard_normal((2, 3, 3)).astype(np.float32),
        "mask": np.array([[1, 1, 1], [1, 1, 0]]),
    }


class PointNet(nn.Module):
    """T-Net: a predicted transform plus the identity, a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.fc, self.c2 = nn.Conv1d(3, 6, 1), nn.Linear(6, 9), nn.Conv1d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        y = torch.max(F.relu(self.c1(x)), 2, keepdim=True)[0].view(-1, 6)
        iden = torch.from_numpy(np.eye(3).flatten().astype(np.float32)).view(1, 9).repeat(b, 1)
        trans = (self.fc(y) + iden).view(-1, 3, 3)
        return torch.max(self.c2(torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)), 2)[0]


@style
def pointnet() -> Made:
    return PointNet(), RNG.standard_normal((2, 3, 5)).astype(np.float32)


class BallQuery(nn.Module):
    """DGCNN: k nearest neighbours by topk, flat indices, features of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        b, c, n = x.shape
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        xx = torch.sum(x**2, dim=1, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=2, dim=-1)[1]
        idx = (idx + torch.arange(0, b).view(-1, 1, 1) * n).view(-1)
        xt = x.transpose(2, 1).contiguous()
        feature = xt.view(b * n, -1)[idx, :].view(b, n, 2, c)
        xt = xt.view(b, n, 1, c).repeat(1, 1, 2, 1)
        return self.conv(torch.cat((feature - xt, xt), dim=3).permute(0, 3, 1, 2)).max(dim=-1)[0]


@style
def dgcnn() -> Made:
    return BallQuery(), RNG.standard_normal((2, 3, 5)).astype(np.float32)


class GCN(nn.Module):
    """Edges [2, E], degrees by scatter_add, self loops."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)

    def propagate(self, x: Tensor, edges: Tensor) -> Tensor:
        n = x.size(0)
        loops = torch.arange(n).repeat(2, 1)
        row, col = torch.cat([edges, loops], dim=1)
        degree = torch.zeros(n, dtype=x.dtype).scatter_add_(0, row, torch.ones_like(row, dtype=x.dtype))
        norm = degree.pow(-0.5)
        norm = norm[row] * norm[col]
        return torch.zeros_like(x).index_add_(0, col, norm.unsqueeze(-1) * x[row])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.propagate(self.l1(x), edges))
        return F.log_softmax(self.propagate(self.l2(x), edges), dim=1)


@style
def gcn() -> Made:
    return GCN(), {"x": ROWS, "edges": np.array([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])}


class GAT(nn.Module):
    """Attention over edges: scatter_reduce of maxima, a softmax by destinations."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Linear(3, 4, bias=False), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.w(x)
        src, dst = edges[0], edges[1]
        e = F.leaky_relu((torch.cat([h[src], h[dst]], 1) * self.a).sum(1), 0.2)
        most = torch.full((x.size(0),), float("-inf"), dtype=e.dtype).scatter_reduce(0, dst, e, reduce="amax")
        p = torch.exp(e - most[dst])
        total = torch.zeros(x.size(0), dtype=e.dtype).scatter_add(0, dst, p)
        return torch.zeros_like(h).index_add(0, dst, h[src] * (p / total[dst])[:, None])


@style
def gat() -> Made:
    return GAT(), {"x": ROWS, "edges": np.array([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])}


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor
    graph: Tensor


class MPNN(nn.Module):
    """A NamedTuple in the batch, GRU updates, means by graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = nn.Linear(6, 3), nn.GRUCell(3, 3), nn.Linear(3, 1)

    def forward(self, g: Graph) -> Tensor:
        h = g.nodes
        for _ in range(2):
            m = torch.relu(self.message(torch.cat([h[g.edges[0]], h[g.edges[1]]], -1)))
            h = self.update(torch.zeros_like(h).index_add_(0, g.edges[1], m), h)
        total = h.new_zeros(2, 3).index_add_(0, g.graph, h)
        count = torch.bincount(g.graph, minlength=2).clamp(min=1).unsqueeze(1)
        return self.out(total / count)


@style
def mpnn_named_tuple() -> Made:
    return MPNN(), (Graph(ROWS, np.array([[0, 1, 2], [1, 0, 3]]), np.array([0, 0, 1, 1])),)


class SASRec(nn.Module):
    """Positions times a mask, a NumPy array made in forward, negative samples."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.pos = nn.Embedding(8, 4, padding_idx=0), nn.Embedding(5, 4)
        self.attn, self.norm = nn.MultiheadAttention(4, 1), nn.LayerNorm(4, eps=1e-8)

    def forward(self, seqs: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        x = self.item(seqs) * 4**0.5
        places = np.tile(np.arange(seqs.shape[1]), [seqs.shape[0], 1])
        x = x + self.pos(torch.as_tensor(places))
        padding = seqs == 0
        x = (x * ~padding.unsqueeze(-1)).transpose(0, 1)
        mask = ~torch.tril(torch.ones((x.shape[0],) * 2, dtype=torch.bool))
        x = self.norm(x + self.attn(x, x, x, attn_mask=mask)[0]).transpose(0, 1) * ~padding.unsqueeze(-1)
        return (x * self.item(positive)).sum(-1), (x * self.item(negative)).sum(-1)


@style
def sasrec() -> Made:
    ids = RNG.integers(1, 8, (2, 4))
    return SASRec(), {"seqs": ids * np.array([[0, 1, 1, 1], [1, 1, 1, 1]]), "positive": ids, "negative": 8 - ids}


class MMoE(nn.Module):
    """A list of experts, a gate for each task, a dict of results in the order of the tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)])
        self.gates = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
        self.towers = nn.ModuleDict({"watch": nn.Linear(4, 1), "buy": nn.Linear(4, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        experts = torch.stack([F.relu(e(x)) for e in self.experts])
        weights = [torch.softmax(x @ g, dim=1).t().unsqueeze(2).expand(-1, -1, 4) for g in self.gates]
        mixed = [torch.sum(w * experts, dim=0) for w in weights]
        return {name: tower(h).squeeze(-1) for (name, tower), h in zip(self.towers.items(), mixed, strict=True)}


@style
def multi_gate_experts() -> Made:
    return MMoE(), ROWS
