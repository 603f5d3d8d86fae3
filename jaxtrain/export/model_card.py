"""The model card of an exported folder: README.md, with the metadata that the Hugging Face Hub reads."""

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain.models import CONFIG, read_json
from jaxtrain.observe import LogLine, Record, format_count, format_duration, read_record
from jaxtrain.run import Recipe, Task
from jaxtrain.run_folder import RunFolder

_TASKS = {
    "CausalLM": "text-generation",
    "MaskedLM": "fill-mask",
    "SequenceClassification": "text-classification",
    "ImageClassification": "image-classification",
    "Seq2SeqLM": None,
}
"""Tasks of the Hub, by the suffix of the class of `transformers`."""
_METHODS = {"lora": "with low-rank adapters (LoRA)", "dora": "with low-rank adapters (DoRA)"}
_NOT_DATA = ("model", "answers")
# Paths, and settings that change no weight or are another fact.
_LEFT_OUT = {*("model", "data", "validation", "steps"), *("log_every", "eval_every", "save_every", "histograms")}
_OF_ADAPTERS = {"rank", "alpha", "lora_dropout", "targets"}
# Settings that a reader looks for, changed or not.
_SHOWN = {
    *("method", "quantize", "loss", "rank", "alpha", "lora_dropout", "targets", "batch_size", "seq_len", "lr"),
    *("schedule", "weight_decay", "precision", "seed"),
}
_CHAT = (
    'messages = [{"role": "user", "content": "Hello"}]',
    'options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}',
    "inputs = tokenizer.apply_chat_template(messages, **options)",
    'answer = model.generate(**inputs, max_new_tokens=256)[0, inputs["input_ids"].shape[1] :]',
    "print(tokenizer.decode(answer, skip_special_tokens=True))",
)
_TEXT = (
    'inputs = tokenizer("Hello", return_tensors="pt")',
    "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=256)[0]))",
)
_QUANTIZED = """The base model in 4 bits, as in training, needs bitsandbytes and its `from_pretrained` the argument
`quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
bnb_4bit_use_double_quant=True)`."""


def hub_name(folder: Path) -> str:
    """Return the name on the Hub of a folder in its cache, or the name of another folder.

    Example:
      >>> hub_name(Path("/cache/models--org--model/snapshots/0123")), hub_name(Path("models/mine"))
      ('org/model', 'mine')
    """
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+$", folder.absolute().as_posix())
    return f"{found[1]}/{found[2]}" if found else folder.absolute().name


def auto_class(folder: Path) -> str:
    """Return the suffix of the class of `transformers` that loads a folder, such as CausalLM."""
    architecture = (read_json(folder, CONFIG).get("architectures") or [""])[0]
    if architecture.endswith("ForConditionalGeneration"):
        return "Seq2SeqLM"
    return next((suffix for suffix in _TASKS if architecture.endswith(f"For{suffix}")), "CausalLM")


@dataclass(frozen=True)
class ModelCard:
    """The model card of an exported folder.

    Args:
      folder: The folder.
      out: Where the folder will be.
      run: Folder of the run.
      name: Name of the recipe.
      recipe: Its settings.
      task: Its task.
      adapters: Whether the folder holds adapters alone.
    """

    folder: Path
    out: Path
    run: RunFolder
    name: str
    recipe: Recipe
    task: Task
    adapters: bool = False

    def write(self, step: int) -> None:
        """Write README.md, with the figures of the run up to a step."""
        title = f"# {self.out.name}\n\n{self._introduction()}"
        use = f"## Use\n\n{self._code()}"
        sections = [self._metadata(), title, use, self._results(step), self._data(), self._training(step)]
        text = "\n\n".join(section for section in [*sections, self._versions()] if section)
        (self.folder / "README.md").write_text(f"{text}\n", encoding="utf-8")

    @cached_property
    def _record(self) -> Record:
        return read_record(self.run)

    @cached_property
    def _auto_class(self) -> str:
        if not self.adapters:
            return auto_class(self.folder)
        is_classifier = read_json(self.folder, "adapter_config.json").get("task_type") == "SEQ_CLS"
        return "SequenceClassification" if is_classifier else "CausalLM"

    def _setting(self, name: str) -> Any:
        return getattr(self.recipe, name, None)

    def _metadata(self) -> str:
        """Return the YAML front matter. Its values are JSON, which YAML contains."""
        base, tags = self.task.pretrained, ["jaxtrain"]
        if base is not None:
            loss = str(self._setting("loss"))
            tags += [str(self._setting("method")), "sft" if loss == "supervised" else loss]
        entries: dict[str, Any] = {"library_name": "peft" if self.adapters else "transformers", "tags": tags}
        if _TASKS[self._auto_class] is not None:
            entries["pipeline_tag"] = _TASKS[self._auto_class]
        if base is not None:
            relation = "adapter" if self.adapters else "finetune"
            entries |= {"base_model": hub_name(base), "base_model_relation": relation}
        lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()]
        return "\n".join(["---", *lines, "---"])

    def _introduction(self) -> str:
        base, quantize = self.task.pretrained, self._setting("quantize") or "none"
        if base is None:
            return f"A model of the recipe `{self.name}` of jaxtrain."
        how = _METHODS.get(str(self._setting("method")), "with all weights trained")
        text = f"`{hub_name(base)}`, fine-tuned {how} by jaxtrain on `{Path(str(self._setting('data'))).name}`."
        if quantize != "none":
            what = "The adapters were trained on" if self.adapters else "The weights are those of"
            merged = "" if self.adapters else ", dequantized, with the adapters merged"
            text += f" {what} the base model in {quantize.upper()}{merged}."
        return f"{text}\n\nThe license follows from those of the base model and of the data: add it to the metadata."

    def _code(self) -> str:
        auto, base = f"AutoModelFor{self._auto_class}", self.task.pretrained
        has_tokenizer = (self.folder / "tokenizer.json").exists() and self._auto_class == "CausalLM"
        lines = [f"from transformers import {auto}{', AutoTokenizer' if has_tokenizer else ''}", ""]
        if self.adapters and base is not None:
            where = hub_name(base) if "/" in hub_name(base) else str(base.absolute())
            lines = ["from peft import PeftModel", *lines, f'base = {auto}.from_pretrained("{where}")']
            lines.append(f'model = PeftModel.from_pretrained(base, "{self.out.name}")')
        else:
            lines.append(f'model = {auto}.from_pretrained("{self.out.name}")')
        if has_tokenizer:
            is_chat = self.task.reply is not None and _has_template(self.folder)
            lines += [f'tokenizer = AutoTokenizer.from_pretrained("{self.out.name}")', *(_CHAT if is_chat else _TEXT)]
        code = "\n".join(["```python", *lines, "```"])
        if self.adapters and self._setting("quantize") == "nf4":
            code += f"\n\n{_QUANTIZED}"
        return code

    def _results(self, step: int) -> str:
        """Return a table of the evaluations before the training and at the step, or the last one before it."""
        lines = [line for line in self._record.metrics if line.evaluation and line.step <= step]
        if not lines:
            return ""
        shown = lines[:1] if len(lines) == 1 else [lines[0], lines[-1]]
        heads = ["before" if line.step == 0 else f"after {line.step:,} updates" for line in shown]
        rows = [[_metric_name(name), *(_figure(line, name) for line in shown)] for name in shown[-1].evaluation]
        return f"## Results\n\nOn held-out examples:\n\n{_table(['metric', *heads], rows)}"

    def _data(self) -> str:
        rows = [f"- {name}: {text}" for name, text in self.task.description.items() if name not in _NOT_DATA]
        return "\n".join(["## Data", "", *rows]) if rows else ""

    def _training(self, step: int) -> str:
        record, facts = self._record, {"updates": f"{step:,}"}
        point = [point for point in record.clock if point.step <= step][-1]
        if point.seconds:
            facts[f"{self.task.unit} processed"] = format_count(point.units)
            facts["time"] = f"{format_duration(point.seconds)}, without compilation and evaluation"
        if devices := record.config.get("devices"):
            facts["hardware"] = f"{len(devices)} × {devices[0]}"
        usual = vars(type(self.recipe)())
        hidden = _LEFT_OUT | (_OF_ADAPTERS if self._setting("method") == "full" else set())
        for name, value in record.config["settings"].items():
            if value is not None and name not in hidden and (name in _SHOWN or value != usual.get(name)):
                facts[name.replace("_", " ")] = f"`{value}`".replace("|", r"\|")
        return f"## Training\n\n{_table(['', ''], [*facts.items()])}"

    def _versions(self) -> str:
        versions = dict(self._record.config.get("versions", {}))
        for package in ("transformers", "peft"):
            if importlib.util.find_spec(package) is not None:
                versions[package] = importlib.metadata.version(package)
        return "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in versions.items())


def _has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (config.exists() and "chat_template" in config.read_text())


def _metric_name(name: str) -> str:
    return {"loss": "loss (nats)", "rouge_l": "ROUGE-L"}.get(name, name.replace("_", " "))


def _figure(line: LogLine, name: str) -> str:
    value = line.evaluation.get(name)
    return "" if value is None else f"{value:.4f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
