"""Physics, operators, differential equations."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch_import.by_hand import Factory, Made, registered

SCIENCE: dict[str, Factory] = {}
style = registered(SCIENCE)
RNG = np.random.default_rng(7)
ROWS = RNG.standard_normal((4, 3)).astype(np.float32)
FIELD = RNG.standard_normal((2, 8, 2)).astype(np.float32)


class SpectralConv1d(nn.Module):
    """FNO's, with complex weights."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.view_as_complex(torch.rand(channels, channels, modes, 2)) / channels**2)

    def forward(self, x: Tensor) -> Tensor:
        ft = torch.fft.rfft(x)
        out = torch.zeros(*x.shape[:2], x.size(-1) // 2 + 1, dtype=ft.dtype)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", ft[:, :, : self.modes], self.weights)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(2, 4), nn.Linear(4, 1)
        self.conv0, self.w0 = SpectralConv1d(), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.p(x).permute(0, 2, 1)
        return self.q(F.gelu(self.conv0(x) + self.w0(x)).permute(0, 2, 1))


@style
def fourier_operator() -> Made:
    return FNO(), FIELD


class S4D(nn.Module):
    """Diagonal states: complex parameters stored as real pairs, a kernel by a Vandermonde product, FFT convolution."""

    def __init__(self, h: int = 2, n: int = 4) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(h) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(h, n, dtype=torch.cfloat)))
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(h, n)))
        self.A_imag, self.D = nn.Parameter(math.pi * torch.arange(n).float().repeat(h, 1)), nn.Parameter(torch.randn(h))

    def forward(self, u: Tensor) -> Tensor:
        u = u.transpose(1, 2)
        length = u.size(-1)
        dt, C = torch.exp(self.log_dt), torch.view_as_complex(self.C)
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dtA = A * dt.unsqueeze(-1)
        K = dtA.unsqueeze(-1) * torch.arange(length)
        C = C * (torch.exp(dtA) - 1.0) / A
        k = 2 * torch.einsum("hn,hnl->hl", C, torch.exp(K)).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)[
            ..., :length
        ]
        return F.gelu(y + u * self.D.unsqueeze(-1)).transpose(1, 2)


@style
def s4d() -> Made:
    return S4D(), FIELD


class DeepONet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Sequential(nn.Linear(1, 6), nn.Tanh())
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, data: tuple[Tensor, Tensor]) -> Tensor:
        u, y = data
        return torch.einsum("bi,ni->bn", self.branch(u), self.trunk(y)) + self.b


@style
def deeponet() -> Made:
    u, y = FIELD[:, :, 0].copy(), RNG.random((5, 1)).astype(np.float32)
    return DeepONet(), {"data": (u, y)}


class PINN(nn.Module):
    """The residual of Burgers' equation by autograd.grad, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.nu = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x.requires_grad_(True)
        t.requires_grad_(True)
        u = self.net(torch.cat([x, t], dim=1))
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u_t + u * u_x - self.nu * u_xx


@style
def pinn_burgers() -> Made:
    return PINN(), {"x": RNG.random((4, 1)).astype(np.float32), "t": RNG.random((4, 1)).astype(np.float32)}


class Forces(nn.Module):
    """SchNet-like energies: distances, Gaussians, a cosine cutoff; forces are gradients by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.filter, self.out = nn.Embedding(5, 4), nn.Linear(6, 4), nn.Linear(4, 1)
        self.register_buffer("centers", torch.linspace(0, 3, 6))

    def energy(self, z: Tensor, pos: Tensor) -> Tensor:
        diff = pos[:, None] - pos[None]
        eye = torch.eye(len(z), dtype=pos.dtype)
        d = torch.sqrt((diff**2).sum(-1) + eye)
        rbf = torch.exp(-10 * (d[..., None] - self.centers) ** 2)
        cut = 0.5 * (torch.cos(d * math.pi / 3) + 1) * (d < 3) * (1 - eye)
        h = self.embed(z)
        return self.out(F.softplus((self.filter(rbf) * cut[..., None] * h[None]).sum(1)) - math.log(2)).sum()

    def forward(self, z: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.requires_grad_()
        energy = self.energy(z, pos)
        return energy, -torch.autograd.grad(energy, pos, create_graph=self.training)[0]


@style
def molecular_forces() -> Made:
    return Forces(), {"z": np.array([1, 2, 0, 4]), "pos": ROWS}


class EGNN(nn.Module):
    """Equivariant updates: normalized differences, coordinates that move."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(7, 6), nn.SiLU())
        self.coord, self.node = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Tanh()), nn.Linear(9, 3)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        n = h.shape[0]
        row, col = torch.where(~torch.eye(n, dtype=torch.bool))
        diff = x[row] - x[col]
        radial = torch.sum(diff**2, 1).unsqueeze(1)
        diff = diff / (torch.sqrt(radial + 1e-8).detach() + 1)
        m = self.edge(torch.cat([h[row], h[col], radial], dim=1))
        x = x + torch.zeros_like(x).index_add_(0, row, diff * self.coord(m)) / (n - 1)
        return self.node(torch.cat([h, h.new_zeros(n, 6).index_add_(0, row, m)], -1)), x


@style
def egnn() -> Made:
    return EGNN(), {"h": ROWS, "x": ROWS[::-1].copy()}


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 1)])
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.uniform_(-0.1, 0.1)

    def forward(self, coords: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            coords = torch.sin(30 * layer(coords))
        return self.layers[-1](coords)


@style
def siren() -> Made:
    return Siren(), RNG.random((4, 2)).astype(np.float32)


class NeRF(nn.Module):
    """Positional encodings by a list of lambdas with default arguments, volume rendering by cumprod."""

    def __init__(self) -> None:
        super().__init__()
        self.fns = [lambda x: x]
        for freq in (1.0, 2.0):
            for fn in (torch.sin, torch.cos):
                self.fns.append(lambda x, fn=fn, freq=freq: fn(x * freq))
        self.net, self.out = nn.Linear(15, 8), nn.Linear(8, 4)

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        z = torch.linspace(0.5, 2.0, 5)
        points = origins[:, None] + directions[:, None] * z[:, None]
        raw = self.out(F.relu(self.net(torch.cat([fn(points) for fn in self.fns], -1))))
        dists = torch.cat([z[1:] - z[:-1], torch.tensor([1e10])]) * torch.norm(directions[:, None], dim=-1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        through = torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        return torch.sum((alpha * through)[..., None] * torch.sigmoid(raw[..., :3]), -2)


@style
def nerf() -> Made:
    return NeRF(), (ROWS, ROWS[::-1] + 0.1)


class NeuralODE(nn.Module):
    """Fixed steps of Runge and Kutta, with time as a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def f(self, t: float, y: Tensor) -> Tensor:
        return self.net(torch.cat([torch.full_like(y[:, :1], t), y], 1))

    def forward(self, y: Tensor) -> Tensor:
        h = 0.25
        for i in range(4):
            t = i * h
            k1 = self.f(t, y)
            k2 = self.f(t + h / 2, y + h / 2 * k1)
            k3 = self.f(t + h / 2, y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.f(t + h, y + h * k3))
        return y


@style
def neural_ode_rk4() -> Made:
    return NeuralODE(), ROWS


class DEQ(nn.Module):
    """A fixed point found without gradient, one more application with it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            self.w.weight.mul_(0.2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(6):
                z = torch.tanh(self.w(z) + self.u(x))
        return torch.tanh(self.w(z) + self.u(x))


@style
def deep_equilibrium() -> Made:
    return DEQ(), ROWS


class UntilConverged(DEQ):
    """The same until the residual is small: a loop by values."""

    def forward(self, x: Tensor) -> Tensor:
        z, err = torch.zeros_like(x), 1.0
        with torch.no_grad():
            while err > 1e-4:
                new = torch.tanh(self.w(z) + self.u(x))
                err = (new - z).norm()
                z = new
        return torch.tanh(self.w(z) + self.u(x))


@style
def until_converged() -> Made:
    return UntilConverged(), ROWS


class Hamiltonian(nn.Module):
    """Time derivatives by the gradient of a scalar, through torch.func.grad."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        dh = torch.func.vmap(torch.func.grad(lambda row: self.h(row).squeeze()))(x)
        q, p = dh.chunk(2, -1)
        return torch.cat([p, -q], -1)


@style
def hamiltonian_func_grad() -> Made:
    return Hamiltonian(), RNG.standard_normal((3, 4)).astype(np.float32)


class Geodesy(nn.Module):
    """Large coordinates in float64 inside a float32 network."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = (x.double() * 1e-3 + 6_378_137.0) - 6_378_137.0
        return self.fc(y.to(x.dtype))


@style
def float64_island() -> Made:
    return Geodesy(), ROWS


class GaussianProcess(nn.Module):
    """A marginal likelihood by Cholesky and triangular solves."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((1,), -1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        k = torch.exp(-0.5 * torch.cdist(x, x) ** 2 / self.log_scale.exp() ** 2)
        k = k + torch.eye(len(x), dtype=x.dtype) * self.log_noise.exp()
        chol = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y.unsqueeze(-1), chol)
        return 0.5 * (y * alpha.squeeze(-1)).sum() + chol.diagonal().log().sum()


@style
def gaussian_process() -> Made:
    return GaussianProcess(), (ROWS, ROWS[:, 0].copy())


class Kabsch(nn.Module):
    """Superposition by an SVD with a sign, through its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.move = nn.Linear(3, 3)

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        p = self.move(p)
        p, q = p - p.mean(0), q - q.mean(0)
        u, _, vt = torch.linalg.svd(p.t() @ q)
        sign = torch.sign(torch.det(u @ vt))
        d = torch.diag(torch.stack([torch.ones_like(sign), torch.ones_like(sign), sign]))
        return ((p @ (u @ d @ vt) - q) ** 2).sum()


@style
def kabsch() -> Made:
    return Kabsch(), (ROWS, RNG.standard_normal((4, 3)).astype(np.float32))
