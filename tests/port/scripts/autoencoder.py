"""A variational autoencoder: autocast, a GradScaler, windows of two micro-batches, groups, OneCycleLR, no main()."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(8, 4)
        self.dec = nn.Linear(2, 8)
        self.drop = nn.Dropout(0.1)

    def encode(self, x):
        return self.enc(self.drop(x)).chunk(2, 1)

    def decode(self, z):
        return self.dec(z)


model = VAE()
weights = torch.linspace(0.5, 1.5, 8)
criterion = nn.MSELoss(reduction="none")
groups = [{"params": model.enc.parameters()}, {"params": model.dec.parameters(), "weight_decay": 0.0}]
opt = torch.optim.AdamW(groups, lr=1e-2)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=200)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
loader = DataLoader(TensorDataset(torch.randn(128, 8)), batch_size=8, shuffle=True)
k = 2
for _ in range(20):
    for i, (x,) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mu, logvar = model.encode(x)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            y = model.decode(z)
        rec = (criterion(y.float(), x) * weights).sum(1).mean()
        kl = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        loss = (rec + 0.1 * kl) / k
        scaler.scale(loss).backward()
        if (i + 1) % k == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            sched.step()
