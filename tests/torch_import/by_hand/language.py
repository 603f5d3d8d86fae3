"""Recurrent networks, transformers and their tricks."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch_import.by_hand import Factory, Made, registered

LANGUAGE: dict[str, Factory] = {}
style = registered(LANGUAGE)
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 0], [7, 8, 3, 0, 0]])


class CausalSelfAttention(nn.Module):
    """minGPT's: a buffer of ones below the diagonal, scores filled with -inf."""

    def __init__(self, width: int, heads: int, length: int = 8) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    """minGPT's: the perceptron is a lambda over a ModuleDict."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), CausalSelfAttention(width, heads)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(F.gelu(m.c_fc(x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    def __init__(self, vocab: int = 10, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(8, width),
                "h": nn.ModuleList([Block(width, 2) for _ in range(depth)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@style
def mingpt() -> Made:
    return MinGPT(), {"idx": IDS, "targets": np.roll(IDS, -1, 1)}


@style
def nanogpt_tied() -> Made:
    model = MinGPT()
    model.transformer.wte.weight = model.lm_head.weight
    return model, {"idx": IDS}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x).type_as(x) * self.weight


class LlamaBlock(nn.Module):
    """Meta's llama: rotations as complex numbers, repeated key heads, SwiGLU."""

    def __init__(self, width: int = 8, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.h, self.kv, self.d = heads, kv_heads, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.d, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, 16, bias=False) for _ in range(2))
        self.w2, self.n1, self.n2 = nn.Linear(16, width, bias=False), RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.n1(x)
        q, k = self.wq(y).view(b, t, self.h, self.d), self.wk(y).view(b, t, self.kv, self.d)
        v = self.wv(y).view(b, t, self.kv, self.d)
        q_, k_ = (torch.view_as_complex(z.reshape(*z.shape[:-1], -1, 2)) for z in (q, k))
        freqs = freqs_cis.view(1, t, 1, -1)
        q, k = (torch.view_as_real(z * freqs).flatten(3).type_as(x) for z in (q_, k_))
        k, v = (z[:, :, :, None, :].expand(b, t, self.kv, self.h // self.kv, self.d).flatten(2, 3) for z in (k, v))
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) / math.sqrt(self.d)
        scores = F.softmax(scores + mask, dim=-1)
        x = x + self.wo((scores @ v.transpose(1, 2)).transpose(1, 2).reshape(b, t, -1))
        y = self.n2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class MetaLlama(nn.Module):
    """The table of rotations is an attribute, not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.layers = nn.ModuleList([LlamaBlock(), LlamaBlock()])
        angles = torch.outer(torch.arange(8.0), 1.0 / (10000 ** (torch.arange(0, 2, 2).float() / 2)))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        h = self.tok(tokens)
        mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:t], mask)
        return self.out(h)


@style
def meta_llama() -> Made:
    return MetaLlama(), IDS


class Seq2Seq(nn.Module):
    """The tutorial's: GRU encoder, additive attention, a Python loop with teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(10, 6), nn.GRU(6, 6, batch_first=True)
        self.Wa, self.Ua, self.Va = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.decoder, self.out = nn.GRU(12, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, hidden = self.encoder(self.embed(source))
        token, outputs = torch.zeros(source.size(0), 1, dtype=torch.long), []
        for i in range(target.size(1)):
            scores = self.Va(torch.tanh(self.Wa(hidden.permute(1, 0, 2)) + self.Ua(keys))).squeeze(2).unsqueeze(1)
            context = torch.bmm(F.softmax(scores, dim=-1), keys)
            output, hidden = self.decoder(torch.cat((self.embed(token), context), dim=2), hidden)
            outputs.append(self.out(output))
            token = target[:, i].unsqueeze(1)
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


@style
def seq2seq_attention() -> Made:
    return Seq2Seq(), {"source": IDS, "target": IDS[:, ::-1].copy()}


class BiLSTMCRF(nn.Module):
    """The tutorial's forward algorithm, batched."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(10, 6), nn.LSTM(6, 3, bidirectional=True, batch_first=True)
        self.emit, self.transitions = nn.Linear(6, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        emissions = self.emit(self.lstm(self.embed(words))[0])
        alpha = emissions[:, 0]
        for t in range(1, words.size(1)):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions[None] + emissions[:, t, None, :], dim=1)
        gold = emissions.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        gold = gold + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return (torch.logsumexp(alpha, 1) - gold).mean()


@style
def bilstm_crf() -> Made:
    return BiLSTMCRF(), {"words": IDS, "tags": IDS % 4}


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(6, 4, k, padding=k // 2) for k in (2, 3, 4)])
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).transpose(1, 2)
        pooled = [F.max_pool1d(c := F.relu(conv(y)), c.size(2)).squeeze(2) for conv in self.convs]
        return self.fc(torch.cat(pooled, 1))


@style
def textcnn() -> Made:
    return TextCNN(), IDS


class FastText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(10, 6, mode="mean"), nn.Linear(6, 3)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.fc(self.bag(text, offsets))


@style
def fasttext_bags() -> Made:
    return FastText(), {"text": IDS.reshape(-1), "offsets": np.array([0, 4, 9])}


class RelativeTransformer(nn.Module):
    """T5's buckets of relative positions, computed with integers and logarithms in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.qkv = nn.Embedding(10, 8), nn.Embedding(8, 2), nn.Linear(8, 24)

    @staticmethod
    def bucket(relative: Tensor, buckets: int = 8, most: int = 16) -> Tensor:
        half = buckets // 2
        side = (relative > 0).to(torch.long) * half
        n = torch.abs(relative)
        exact = half // 2
        large = exact + (torch.log(n.float() / exact) / math.log(most / exact) * (half - exact)).to(torch.long)
        large = torch.min(large, torch.full_like(large, half - 1))
        return side + torch.where(n < exact, n, large)

    def forward(self, ids: Tensor) -> Tensor:
        x, t = self.embed(ids), ids.shape[1]
        place = torch.arange(t)
        bias = self.bias(self.bucket(place[None] - place[:, None])).permute(2, 0, 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return torch.softmax(q @ k.mT / 2 + bias, -1) @ v


@style
def t5_relative_bias() -> Made:
    return RelativeTransformer(), IDS


class ALiBi(nn.Module):
    """Slopes by a Python list, biases with cumulative counts of a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("slopes", torch.tensor([2 ** -(8 * (i + 1) / 2) for i in range(2)]), persistent=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = rearranged(self.qkv(x))
        place = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
        alibi = self.slopes[..., None] * place
        scores = q @ k.transpose(-1, -2) / 2 + alibi[:, :, None]
        scores = scores.masked_fill(attention_mask[:, None, None] == 0, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1) @ v


def rearranged(qkv: Tensor) -> tuple[Tensor, ...]:
    b, t, c = qkv.shape
    return qkv.view(b, t, 3, 2, c // 6).permute(2, 0, 3, 1, 4).unbind(0)


@style
def alibi() -> Made:
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    return ALiBi(), {"x": np.ones((2, 4, 8), np.float32), "attention_mask": mask}


class TransformerXL(nn.Module):
    """Relative shift by a pad and a view, a memory that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.r, self.u, self.v = (
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            *(nn.Parameter(torch.randn(2, 4)) for _ in "uv"),
        )

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        cat = torch.cat([memory, x], 1)
        (b, t), m = x.shape[:2], cat.shape[1]
        q, k, v = self.qkv(cat).view(b, m, 3, 2, 4).unbind(2)
        q = q[:, -t:]
        place = torch.arange(m - 1, -1, -1.0)[:, None] / 10 ** torch.arange(0, 4.0)[None]
        r = self.r(torch.cat([place.sin(), place.cos()], -1).to(x.dtype)).view(m, 2, 4)
        ac = torch.einsum("bind,bjnd->bnij", q + self.u, k)
        bd = torch.einsum("bind,jnd->bnij", q + self.v, r)
        padded = F.pad(bd, (1, 0)).view(b, 2, m + 1, t)
        bd = padded[:, :, 1:].reshape(b, 2, t, m)
        mask = torch.ones(t, m, dtype=torch.bool).triu(1 + m - t)
        p = torch.softmax((ac + bd).masked_fill(mask, -1e30) / 2, -1)
        return torch.einsum("bnij,bjnd->bind", p, v).flatten(2), cat[:, -m + t :].detach()


@style
def transformer_xl() -> Made:
    return TransformerXL(), {"x": np.ones((2, 3, 8), np.float32), "memory": np.ones((2, 2, 8), np.float32)}


class RWKV(nn.Module):
    """Time mixing with nn.ZeroPad2d as a shift and a loop over time in log space."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.decay, self.first, self.mix = (nn.Parameter(torch.randn(width)) for _ in range(3))
        self.key, self.value, self.receptance = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        xx = self.shift(x)
        xk = x * torch.sigmoid(self.mix) + xx * (1 - torch.sigmoid(self.mix))
        k, v, r = self.key(xk), self.value(xk), torch.sigmoid(self.receptance(x))
        w, y = -torch.exp(self.decay), torch.empty_like(v)
        aa, bb, pp = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0]), torch.full_like(v[:, 0], -1e38)
        for t in range(x.size(1)):
            p = torch.maximum(pp, self.first + k[:, t])
            e1, e2 = torch.exp(pp - p), torch.exp(self.first + k[:, t] - p)
            y[:, t] = (e1 * aa + e2 * v[:, t]) / (e1 * bb + e2)
            p = torch.maximum(pp + w, k[:, t])
            e1, e2 = torch.exp(pp + w - p), torch.exp(k[:, t] - p)
            aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, p
        return r * y


@style
def rwkv_time_mixing() -> Made:
    return RWKV(), np.ones((2, 4, 6), np.float32)


class SelectiveScan(nn.Module):
    """Mamba's reference: a depthwise convolution, softplus steps, a loop with stacked states."""

    def __init__(self, d: int = 6, n: int = 3) -> None:
        super().__init__()
        self.conv, self.proj, self.dt = (
            nn.Conv1d(d, d, 3, groups=d, padding=2),
            nn.Linear(d, 1 + 2 * n),
            nn.Linear(1, d),
        )
        self.A_log, self.D = nn.Parameter(torch.log(torch.arange(1.0, n + 1).repeat(d, 1))), nn.Parameter(torch.ones(d))
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        u = F.silu(self.conv(x.transpose(1, 2))[..., :t].transpose(1, 2))
        dt, B, C = torch.split(self.proj(u), [1, self.n, self.n], dim=-1)
        delta, A = F.softplus(self.dt(dt)), -torch.exp(self.A_log)
        dA = torch.exp(torch.einsum("btd,dn->btdn", delta, A))
        dBu = torch.einsum("btd,btn,btd->btdn", delta, B, u)
        h, ys = x.new_zeros(b, d, self.n), []
        for i in range(t):
            h = dA[:, i] * h + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i]))
        return torch.stack(ys, 1) + u * self.D


@style
def mamba_reference() -> Made:
    return SelectiveScan(), np.ones((2, 4, 6), np.float32)


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearranged(self.qkv(x))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.cumsum(torch.einsum("bhtd,bhte->bhtde", k, v), dim=2)
        z = 1 / (torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2)) + 1e-6)
        return torch.einsum("bhtd,bhtde,bht->bhte", q, kv, z)


@style
def linear_attention() -> Made:
    return LinearAttention(), np.ones((2, 4, 8), np.float32)


class MixtureLoop(nn.Module):
    """Mixtral's first code: a loop over experts, boolean masks, index_add_."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3, bias=False), nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 6)
        weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, place = torch.where(chosen == i)
            y.index_add_(0, row, expert(flat[row]) * weights[row, place, None])
        return y.view(x.shape)


@style
def mixtral_loop() -> Made:
    return MixtureLoop(), np.ones((2, 4, 6), np.float32)


class SwitchEinsum(nn.Module):
    """Switch's capacity by a cumulative sum, dispatch by einsum, and its auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(6, 3, bias=False), nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        probabilities = F.softmax(self.gate(flat), -1)
        gate, index = probabilities.max(-1)
        one_hot = F.one_hot(index, 3).to(x.dtype)
        place = (torch.cumsum(one_hot, 0) - 1) * one_hot
        kept = one_hot * (place < 3)
        dispatch = kept[:, :, None] * F.one_hot(place.sum(1).long().clamp(max=2), 3).to(x.dtype)[:, None]
        inside = torch.einsum("sec,sm->ecm", dispatch, flat)
        y = torch.einsum("sec,ecm->sm", dispatch * gate[:, None, None], torch.bmm(inside, self.w))
        return y.view_as(x), 3 * (probabilities.mean(0) * one_hot.mean(0)).sum()


@style
def switch_capacity() -> Made:
    return SwitchEinsum(), np.ones((2, 4, 6), np.float32)


class Checkpointed(nn.Module):
    """Lucidrains' pre-norm wrappers around functions, every second block under checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(4)])
        self.fns = nn.ModuleList([nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for i, (norm, fn) in enumerate(zip(self.norms, self.fns, strict=True)):
            block = lambda y, norm=norm, fn=fn: fn(norm(y)) + y  # noqa: E731
            x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
        return x


@style
def checkpointed_lambdas() -> Made:
    return Checkpointed(), np.ones((2, 4, 6), np.float32)


class PaddedEncoder(nn.Module):
    """nn.TransformerEncoder with a padding mask made from ids, pooled by a masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.encoder(self.embed(ids) * math.sqrt(8), src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1).to(x.dtype)
        return (x * keep).sum(1) / keep.sum(1).clamp(min=1)


@style
def padded_encoder() -> Made:
    return PaddedEncoder(), IDS


class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(10, 6), nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(10, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.fc(torch.cat([h[-2], h[-1]], 1))


@style
def packed_lstm() -> Made:
    return PackedLSTM(), {"ids": IDS, "lengths": np.array([5, 4, 3])}


class Pointer(nn.Module):
    """A pointer-generator: the vocabulary's distribution and attention, added by scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.gate = nn.Embedding(10, 6), nn.Linear(6, 10), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        attention = torch.softmax(x @ x.transpose(1, 2), -1)
        p = torch.sigmoid(self.gate(x))
        vocab = p * torch.softmax(self.out(x), -1)
        copied = (1 - p) * attention
        index = ids.unsqueeze(1).expand(-1, ids.size(1), -1)
        return torch.log(vocab.scatter_add(2, index, copied) + 1e-12)


@style
def pointer_generator() -> Made:
    return Pointer(), IDS


class LastToken(nn.Module):
    """The last token that is not padding, by argmax of a mask and fancy indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.score = nn.Embedding(10, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(ids))
        last = (ids != 0).int() * torch.arange(ids.shape[-1])
        return self.score(h[torch.arange(ids.shape[0]), last.argmax(-1)])


@style
def last_token() -> Made:
    return LastToken(), IDS


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chars, self.layers = nn.Embedding(10, 4), nn.ModuleList([nn.Linear(4, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.chars(x).amax(1)
        for layer in self.layers:
            h, t = layer(y).chunk(2, -1)
            t = torch.sigmoid(t - 2)
            y = t * torch.relu(h) + (1 - t) * y
        return y


@style
def highway() -> Made:
    return Highway(), IDS
