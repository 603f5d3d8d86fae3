"""`jaxtrain import-torch` and `export`: runs converted between a PyTorch loop and `jaxtrain train`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from jaxtrain.cli import main
from jaxtrain.data import digits
from jaxtrain.data.loader import Loader, epoch_batches
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe
from jaxtrain.runner.recipe_step import schedule

MLP = "--model digits-mlp --hidden 8 --batch-size 16 --clip-norm 0.5 --steps 6"
LOGGING = "--log-every 1 --eval-every 6"


@pytest.fixture(autouse=True)
def on_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # oneDNN corrupts memory in the backward pass of these convolutions on CPUs without AVX-512 (PyTorch 2.13).
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    torch.set_num_threads(threads)


def run(command: str) -> int:
    return main(command.split())


def mlp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, eps=1e-4)


def train(model, optimizer, scheduler, batches):
    for batch in batches:
        optimizer.zero_grad()
        logits = model(torch.from_numpy(batch["image"]))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["label"]).long()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()


def save(path, model, optimizer=None, scheduler=None, **more):
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items() if part is not None} | more, path)


def assert_close(model, path, rtol):
    saved = torch.load(path, weights_only=True)["model"]
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(saved[name], tensor, rtol=rtol, atol=rtol * 0.1)


def test_a_run_imported_and_exported_again_equals_a_pytorch_run(capsys):
    model, optimizer = mlp()
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=10)
    loader = Loader(digits()[0], 16, 0)
    batches = [next(loader) for _ in range(8)]
    train(model, optimizer, scheduler, batches[:3])
    save("half.pt", model, optimizer, scheduler, epoch=0, step=3)
    assert run(f"import-torch half.pt {MLP} --out run") == 0
    printed = capsys.readouterr().out
    assert "imported half.pt into run after 3 updates: {'layers/0/kernel layers/1/kernel': adamw(" in printed
    assert "continue: jaxtrain train digits-mlp --resume --out run\n" in printed
    assert run("train --resume --out run " + LOGGING) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5, 6]
    assert all(line["lr"] == line["lr/0"] == line["lr/1"] for line in lines)
    assert run("export run --out six.pt") == 0
    train(model, optimizer, scheduler, batches[3:6])
    assert_close(model, "six.pt", 1e-4)
    restored, restored_optimizer = mlp()
    restored_scheduler = OneCycleLR(restored_optimizer, 1e-2, total_steps=10)
    saved = torch.load("six.pt", weights_only=True)
    for part, name in ((restored, "model"), (restored_optimizer, "optimizer"), (restored_scheduler, "scheduler")):
        part.load_state_dict(saved[name])
    assert restored_scheduler.state_dict() == scheduler.state_dict()
    for parts in ((model, optimizer, scheduler), (restored, restored_optimizer, restored_scheduler)):
        train(*parts, batches[6:])
    for ours, theirs in zip(restored.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_run_started_in_jaxtrain_continues_in_pytorch():
    flags = "--steps 6 --hidden 8 --batch-size 16 --clip-norm 0.5 --schedule linear --warmup-steps 2 --weight-decay 0.1"
    assert run(f"train digits-mlp --precision fp16 {flags} --out fp16 {LOGGING}") == 0
    assert run("export fp16 --out fp16.pt") == 0
    assert torch.load("fp16.pt", weights_only=True)["scaler"]["_growth_tracker"] == 6
    assert run(f"train digits-mlp {flags} --save-every 3 --out run {LOGGING}") == 0
    Path("run/checkpoints/6").rename("six")
    assert run("export run --out three.pt") == 0
    Path("six").rename("run/checkpoints/6")
    assert run("export run --out six.pt") == 0
    recipe = read_recipe(RunFolder(Path("run")))[1]
    model, optimizer = mlp()
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr
    scheduler = LambdaLR(optimizer, lambda t: float(schedule(recipe)(t)) / recipe.lr)
    saved = torch.load("three.pt", weights_only=True)
    for part, name in ((model, "model"), (optimizer, "optimizer"), (scheduler, "scheduler")):
        part.load_state_dict(saved[name])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    loader = Loader(digits()[0], 16, 0)
    batches = [next(loader) for _ in range(6)]
    train(model, optimizer, scheduler, batches[3:])
    assert_close(model, "six.pt", 1e-3)


GPT = "--model gpt-stdlib --n-layer 2 --n-embd 16 --n-head 2 --seq-len 16 --batch-size 8 --eval-sequences 16"


def gpt():
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def test_a_checkpoint_of_gpt2_from_transformers_is_unchanged_by_import_and_export(text_folder, capsys):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(16)[None]).logits.sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=7).state_dict()
    save("in.pt", model, optimizer, scaler=scaler)
    assert run(f"import-torch in.pt {GPT} --data {text_folder} --out run") == 0
    recipe = read_recipe(RunFolder(Path("run")))[1]
    assert recipe.precision == "fp16"
    assert recipe.loss_scale is not None
    assert "growth_interval=7" in recipe.loss_scale
    assert recipe.clip_norm is None
    assert "mask=None" in recipe.optimizer
    assert run("export run --out out.pt") == 0
    theirs, ours = (torch.load(path, weights_only=True) for path in ("in.pt", "out.pt"))
    assert ours["scaler"] == scaler
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    for number, entries in theirs["optimizer"]["state"].items():
        assert all(torch.equal(x, ours["optimizer"]["state"][number][key]) for key, x in entries.items())
    assert list(ours["model"]) == list(theirs["model"])
    assert all(torch.equal(x, ours["model"][name]) for name, x in theirs["model"].items())
    assert ours["model"]["lm_head.weight"].data_ptr() == ours["model"]["transformer.wte.weight"].data_ptr()
    capsys.readouterr()
    assert run("sample run --length 3") == 0


def test_a_run_starts_from_weights_without_optimizer_state(capsys):
    model, _ = mlp()
    save("weights.pt", model)
    assert run(f"import-torch weights.pt {MLP} --out run") == 0
    assert "after 0 updates: adamw" in capsys.readouterr().out
    assert run("export run --out out.pt") == 0
    assert_close(model, "out.pt", 0)


RESNET = "--model digits-resnet --width 4 --batch-size 16 --clip-norm 0.5 --steps 6"


class ImageClassifier(torch.nn.Module):
    """The recipe's ResNet built from the parts of transformers, for images in the layout of the loader."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
        self.model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **sizes))
        self.model.resnet.embedder.pooler = torch.nn.Identity()
        self.model.resnet.embedder.embedder.convolution = torch.nn.Conv2d(1, 4, 3, padding=1, bias=False)

    def forward(self, images):
        return self.model(images.permute(0, 3, 1, 2)).logits


def test_running_statistics_are_converted_in_both_directions():
    classifier = ImageClassifier()
    # Without eps, a bias before a BatchNorm, whose gradient is only rounding error, would change by lr per step.
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2, eps=1e-4)
    scheduler = LambdaLR(optimizer, lambda t: 1 - t / 10)
    loader = Loader(digits()[0], 16, 0)
    batches = [next(loader) for _ in range(6)]
    train(classifier, optimizer, scheduler, batches[:3])
    save("three.pt", classifier.model, optimizer, scheduler)
    decay = "wsd(lr=0.01, warmup_steps=0, stable_steps=0, decay_steps=10)"
    assert main([*f"import-torch three.pt {RESNET} --out run --schedule".split(), decay]) == 0
    assert run("export run --out same.pt") == 0
    saved, same = (torch.load(path, weights_only=True)["model"] for path in ("three.pt", "same.pt"))
    assert list(saved) == list(same)
    for name, tensor in saved.items():
        assert torch.equal(same[name], tensor)
        assert same[name].dtype == tensor.dtype
    assert run("train --resume --out run " + LOGGING) == 0
    assert run("export run --out six.pt") == 0
    train(classifier, optimizer, scheduler, batches[3:])
    assert_close(classifier.model, "six.pt", 1e-3)
    counts = [x for name, x in classifier.model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(count == 6 for count in counts)


def test_exported_running_statistics_give_the_evaluation_loss_in_pytorch():
    assert run(f"train digits-resnet --width 4 --batch-size 16 --steps 3 --out run {LOGGING}") == 0
    assert run("export run --out three.pt") == 0
    saved = torch.load("three.pt", weights_only=True)["model"]
    classifier = ImageClassifier()
    classifier.model.load_state_dict(saved)
    recipe = read_recipe(RunFolder(Path("run")))[1]
    task = recipe.task()
    evaluated = 0.0
    classifier.eval()
    with torch.no_grad():
        for batch in epoch_batches(task.validation, 16):
            logits = classifier(torch.from_numpy(batch["image"]))
            losses = torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(batch["label"]).long(), reduction="none"
            )
            evaluated += float(losses @ torch.from_numpy(batch["weight"]))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval_loss"] == pytest.approx(evaluated / len(task.validation), rel=1e-5)


BAD = {
    "import-torch": "a checkpoint is required",
    "import-torch good.pt": "--model is required",
    "import-torch good.pt --model digits-mpl": "no recipe 'digits-mpl', did you mean 'digits-mlp'",
    "import-torch nowhere.pt --model digits-mlp": "nowhere.pt is not a file",
    "import-torch good.pt --model digits-mlp": "mis-shaped 1.weight: (8, 64) for layers/0/kernel (64, 512)",
    "import-torch good.pt --model digits-mlp --hidden 8 --optimizer sgd(momentum=0.9)": "without arguments, got 'sgd(",
    "import-torch good.pt --model digits-mlp --hidden 8 --schedule ramp": "schedule 'ramp' is unknown",
    "import-torch bad.pt --model digits-mlp --hidden 8": "1.weight contains inf or NaN",
    "import-torch good.pt --model digits-mlp --hidden 8 --out a_file": "a_file is a file",
    "import-torch good.pt --model digits-mlp --hidden 8 --fp8-exclude layers/1/*": "has no effect in fp32",
    "export": "the following arguments are required: DIR; see jaxtrain export --help",
    "export nowhere": "nowhere holds no run",
    "train digits-mlp --optimizer sdg": "function 'sdg' is unknown",
    "train digits-mlp --optimizer adamw(speed=3)": "adamw has no argument speed",
    "train digits-mlp --optimizer adamw(b2=print(x=1))": "function 'print' is unknown",
    "train digits-mlp --optimizer adamw(": "is not an expression",
    "train digits-mlp --schedule step_lr(lr=0.1)": "step_lr needs step_size",
    "train digits-mlp --precision fp8 --fp8-exclude layers/0/*,": "has an empty pattern",
    "train digits-mlp --loss-scale huge": "function 'huge' is unknown",
}


@pytest.mark.parametrize("command", BAD, ids=lambda c: c.replace(" ", "_"))
def test_bad_input_is_a_one_line_error_with_exit_status_2_and_writes_nothing(command, capsys):
    model, optimizer = mlp()
    save("good.pt", model, optimizer)
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    save("bad.pt", model)
    Path("a_file").touch()
    before = sorted(Path().rglob("*"))
    assert run(command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert BAD[command] in err
    assert sorted(Path().rglob("*")) == before


def test_nothing_is_overwritten(capsys):
    model, _ = mlp()
    save("weights.pt", model)
    assert run(f"import-torch weights.pt {MLP} --out run") == 0
    for command in (f"import-torch weights.pt {MLP} --out run", "export run --out weights.pt"):
        assert run(command) == 2
        assert "choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["import-torch", "export"])
def test_help_names_every_flag(command, capsys):
    with pytest.raises(SystemExit):
        run(f"{command} --help")
    out = capsys.readouterr().out
    flags = {"import-torch": ("--updates", "--out", "--n-layer", "--schedule"), "export": ("--format", "--out")}
    assert all(flag in out for flag in flags[command])
