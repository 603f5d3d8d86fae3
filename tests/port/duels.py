"""Training scripts of a generator and a discriminator, whose parts are drawn by a number."""

import random
from pathlib import Path

LOOP = """
import torch
from torch import nn

torch.manual_seed({seed})
G = nn.Sequential(nn.Linear(4, 8), {norm_g}, nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
D = nn.Sequential(nn.Linear(6, 8), {norm_d}, nn.LeakyReLU(0.2), nn.Linear(8, 1))
data = torch.randn({rows}, 6)
criterion = nn.BCEWithLogitsLoss()
optimizer_g = torch.optim.{optimizer}(G.parameters(), lr=1e-2)
optimizer_d = torch.optim.Adam(D.parameters(), lr=1e-2)
label = torch.zeros({label})
{schedulers}
for epoch in range(100):
    for i in range(0, {rows}, 8):
        real = data[i : i + 8]
        noise = torch.randn(len(real), 4)
{body}
    {end}
"""
CLIPS = (
    "",
    "nn.utils.clip_grad_norm_({}.parameters(), 0.05); ",
    "nn.utils.clip_grad_value_({}.parameters(), 0.01); ",
)
RATES = (
    ("", "pass"),
    ("S = torch.optim.lr_scheduler; scheduler_d = S.StepLR(optimizer_d, 2, 0.5)", "scheduler_d.step()"),
    (
        "S = torch.optim.lr_scheduler\n"
        "schedulers = [S.LambdaLR(o, lambda e: 1 / (1 + e)) for o in (optimizer_g, optimizer_d)]",
        "[scheduler.step() for scheduler in schedulers]",
    ),
)
D_TWICE = """
        optimizer_d.zero_grad()
        {one}
        criterion(D(real).flatten(), {label}).backward()
        fake = G(noise)
        {zero}
        loss_d = criterion(D(fake.detach()).flatten(), {label})
        loss_d.backward()
        {clip_d}optimizer_d.step()
"""
D_ONCE = """
        optimizer_d.zero_grad()
        fake = G(noise)
        loss_d = D(fake.detach()).mean() - D(real).mean() + D(real).square().mean()
        loss_d.backward()
        {clip_d}optimizer_d.step()
"""
G_OF_FAKE = """
        optimizer_g.zero_grad()
        {one}
        loss_g = criterion(D(fake).flatten(), {label})
        loss_g.backward()
        {clip_g}optimizer_g.step()
"""
G_ANEW = """
        optimizer_g.zero_grad()
        {one}
        fake = G(noise)
        loss_g = criterion(D(fake).flatten(), {label}) + 0.1 * fake.square().mean()
        loss_g.backward()
        {clip_g}optimizer_g.step()
"""


def duel(folder: Path, number: int) -> Path:
    """Write the script of a number."""
    draw = random.Random(number)
    rows, norms = draw.choice([24, 28]), ["nn.BatchNorm1d(8)", "nn.LayerNorm(8)"]
    in_place = rows == 24 and draw.random() < 0.5
    ones, zeros = "torch.ones(len(real))", "torch.zeros(len(real))"
    labels = {
        "label": "label" if in_place else "target",
        "one": "label.fill_(1.0)" if in_place else f"target = {ones}",
        "zero": "label.fill_(0.0)" if in_place else f"target = {zeros}",
    }
    of_d, of_g = draw.choice([D_TWICE, D_ONCE]), draw.choice([G_OF_FAKE, G_ANEW])
    if of_g is G_ANEW and draw.random() < 0.5:
        body = of_g + of_d
    elif draw.random() < 0.3:  # several updates of the discriminator
        body = of_d + "        if i % 16 == 0:\n" + of_g.replace("\n        ", "\n            ").lstrip("\n")
    else:
        body = of_d + of_g
    of_clips, (schedulers, end) = draw.choices(CLIPS, k=2), draw.choice(RATES)
    path = folder / "train.py"
    path.write_text(
        LOOP.format(
            seed=number,
            norm_g=draw.choice(norms),
            norm_d=draw.choice(norms),
            rows=rows,
            optimizer=draw.choice(["SGD", "Adam", "RMSprop"]),
            label=8,
            body=body.format(**labels, clip_d=of_clips[0].format("D"), clip_g=of_clips[1].format("G")),
            schedulers=schedulers,
            end=end,
        )
    )
    return path


CLAMPS = {
    "data": "[p.data.clamp_(-0.2, 0.2) for p in D.parameters()]",
    "no_grad": "with torch.no_grad(): [p.clip_(min=-0.2, max=0.2) for p in D.parameters()]",
    "set data": "for p in D.parameters(): p.data = p.data.clamp(-0.2, 0.2)",
    "copy": "with torch.no_grad(): [p.copy_(torch.clamp(p, -0.2, 0.2)) for p in D.parameters()]",
    "weights alone": "D[0].weight.data.clamp_(min=-0.2); D[3].weight.detach().clamp_(-0.2, 0.2)",
    "foreach": "params = [p.detach() for p in D.parameters()]\n"
    "        torch._foreach_clamp_min_(params, -0.2); torch._foreach_clamp_max_(params, 0.2)",
}


def clamped(folder: Path, number: int, clamp: str) -> Path:
    """Write a duel whose discriminator is clamped after its updates."""
    path = duel(folder, number)
    text = path.read_text()
    path.write_text(text.replace("optimizer_d.step()", f"optimizer_d.step()\n        {CLAMPS[clamp]}"))
    return path
